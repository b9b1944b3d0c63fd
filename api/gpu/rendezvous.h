/* The rendezvous of a communicator's ranks in collective calls, besides NCCL's own. */
#ifndef TREFOIL_API_GPU_RENDEZVOUS_H
#define TREFOIL_API_GPU_RENDEZVOUS_H

#include "api/object.h"

struct ep_rendezvous;

/* What a rank contributes to a round. */
typedef struct ep_rendezvous_word {
  uint32_t call; /* ep_rendezvous_call_t */
  uint32_t topk;
  uint64_t groupId; /* of the group that it is about, the same on all ranks */
  char gpu[16];     /* its UUID, with CREATE_GROUP */
  uint64_t machine; /* a hash of its name, with CREATE_GROUP */
  uint32_t maxSms;  /* max_num_sms, with CREATE_GROUP */
  uint64_t limitNs; /* of this rank's wait, with DESTROY_GROUP */
  int pending;      /* of this rank's call of NCCL, with DEVICE_READY */
  int undrained;    /* its puts may still be under way, with GROUP_DRAINED */
  union {
    ep_settings_t settings; /* with CREATE_GROUP */
    char why[176];          /* it failed, with DEVICE_READY */
  };
} ep_rendezvous_word_t;

typedef enum ep_rendezvous_call {
  EP_RENDEZVOUS_CREATE_GROUP = 1,
  EP_RENDEZVOUS_GROUP_READY = 2, /* this rank's part of CreateGroup worked */
  EP_RENDEZVOUS_INIT_HANDLE = 3,
  EP_RENDEZVOUS_WINDOW_READY = 4, /* the first window, before the device communicator */
  EP_RENDEZVOUS_HANDLE_READY = 5,
  EP_RENDEZVOUS_DESTROY_GROUP = 6,
  EP_RENDEZVOUS_GROUP_DRAINED = 7, /* with several NVLink domains */
  EP_RENDEZVOUS_GRAD_CREATE = 8,
  EP_RENDEZVOUS_GRAD_READY = 9,
  EP_RENDEZVOUS_GRAD_DESTROY = 10,
  EP_RENDEZVOUS_DEVICE_READY = 11 /* while the device communicator is made */
} ep_rendezvous_call_t;

/* Opens this rank's view of the communicator's rendezvous; several groups share it. With several NVLink
 * domains it waits for the other ranks the first time: TREFOIL_REMOTE_ERROR, and it may be tried again. */
trefoil_result_t epRendezvousOpen(ncclComm_t comm, int rank, int numRanks, int domains,
                                  uint64_t timeoutNs, struct ep_rendezvous **out);
void epRendezvousClose(struct ep_rendezvous *rendezvous);

/* Waits until all ranks have come, then all[R] is what they contributed, in order of rank; or fails, on every
 * rank that came, and then nothing was met: TREFOIL_REMOTE_ERROR naming the rank that did not come within
 * timeoutNs; the sentence of a rank whose call failed before it came. The ranks must all make the same
 * call: TREFOIL_INVALID_USAGE. */
trefoil_result_t epRendezvousWait(struct ep_rendezvous *rendezvous,
                                  const ep_rendezvous_word_t *mine, uint64_t timeoutNs,
                                  ep_rendezvous_word_t *all);

/* Rounds that took place: the same on all ranks between two of them. */
uint64_t epRendezvousRounds(const struct ep_rendezvous *rendezvous);

/* All ranks have come: the rendezvous need not be found any more. */
void epRendezvousAllCame(struct ep_rendezvous *rendezvous);

/* The backend's functions around a collective call. */
void epRendezvousCallBegin(ncclComm_t comm);
void epRendezvousCallFail(ncclComm_t comm, trefoil_result_t code, const char *why);

#endif
