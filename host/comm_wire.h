/* What goes over a server's socket. All packets (SOCK_SEQPACKET):
 *
 *   server -> client   challenge   a nonce
 *   client -> server   request    what is wanted, a nonce, and a MAC over challenge and request
 *   server -> client   answer     the result, and a MAC over all three; with a descriptor
 *
 * The MACs are keyed with the server's secret, so each side knows that the other has it, and no other
 * process hears it. A server without the right request answers "refused", without a MAC. */
#ifndef TREFOIL_HOST_COMM_WIRE_H
#define TREFOIL_HOST_COMM_WIRE_H

#include <sys/socket.h>
#include <sys/un.h>

#include "comm_internal.h"
#include "host_hmac.h"

#define EP_CHALLENGE_MAGIC 0x32657265666f6c69ull

enum { EP_NONCE_BYTES = 16 };

typedef enum { EP_ASK_BOARD = 1, EP_ASK_SEGMENT = 2, EP_ASK_WATCH = 3 } ep_ask_t;

typedef struct {
  uint64_t magic;
  unsigned char nonce[EP_NONCE_BYTES];
} ep_challenge_t;

typedef struct {
  uint32_t what; /* ep_ask_t */
  int32_t numRanks;
  uint64_t uid, id;
  unsigned char nonce[EP_NONCE_BYTES];
  unsigned char mac[EP_DIGEST_BYTES];
} ep_request_t;

typedef struct {
  int32_t result;  /* ncclResult_t */
  int32_t refused; /* 1: nothing else is true */
  uint64_t bytes;
  char sentence[200];
  unsigned char mac[EP_DIGEST_BYTES];
} ep_answer_t;

socklen_t epSocketName(struct sockaddr_un *name, const char *address);
/* The MAC of a request (answer NULL) or of an answer. */
void epWireMac(const unsigned char secret[EP_SECRET_BYTES], const ep_challenge_t *challenge,
               const ep_request_t *request, const ep_answer_t *answer,
               unsigned char mac[EP_DIGEST_BYTES]);
/* What a request is answered with, by this process: the descriptor, or -1. */
int epServerTake(const ep_request_t *request, ep_answer_t *answer);

#endif
