/* Names and MACs of what comm_wire.h describes. */
#include <string.h>

#include "comm_wire.h"

socklen_t epSocketName(struct sockaddr_un *name, const char *address) {
  memset(name, 0, sizeof *name);
  name->sun_family = AF_UNIX;
  size_t length = strnlen(address, EP_ADDRESS_BYTES - 1);
  memcpy(name->sun_path + 1, address, length); /* sun_path[0] = 0: abstract */
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
}

void epWireMac(const unsigned char secret[EP_SECRET_BYTES], const ep_challenge_t *challenge,
               const ep_request_t *request, const ep_answer_t *answer,
               unsigned char mac[EP_DIGEST_BYTES]) {
  ep_hmac_t h;
  epHmacBegin(&h, secret, EP_SECRET_BYTES);
  epHmacAdd(&h, answer ? "answer" : "asking", 6);
  epHmacAdd(&h, challenge, sizeof *challenge);
  epHmacAdd(&h, request, offsetof(ep_request_t, mac));
  if (answer) epHmacAdd(&h, answer, offsetof(ep_answer_t, mac));
  epHmacEnd(&h, mac);
}
