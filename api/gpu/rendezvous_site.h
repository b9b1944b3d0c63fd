/* Where the ranks of a communicator meet (plan/barrier_round.h): in memory that they share, if they form one
 * NVLink domain and so are on one machine; else in rank 0's process, over TCP. */
#ifndef TREFOIL_API_GPU_RENDEZVOUS_SITE_H
#define TREFOIL_API_GPU_RENDEZVOUS_SITE_H

#include "api/object.h"
#include "plan/barrier_round.h"

typedef struct ep_site ep_site_t;

typedef struct ep_site_kind {
  const char *where; /* "in ..." */
  /* As plan/barrier_round.h has them, for this rank. */
  void (*callBegin)(ep_site_t *site);
  void (*callFail)(ep_site_t *site, int code, const char *why);
  void (*join)(ep_site_t *site, const void *mine, size_t bytes, void *all, uint64_t timeoutNs,
               ep_round_outcome_t *out);
  int (*processOf)(const ep_site_t *site, int rank);              /* 0: not known here */
  trefoil_result_t (*await)(ep_site_t *site, uint64_t timeoutNs); /* until it can be used */
  void (*allCame)(ep_site_t *site);                               /* no other rank will come */
  void (*close)(ep_site_t *site);                                 /* no rank meets here again */
} ep_site_kind_t;

struct ep_site {
  const ep_site_kind_t *kind;
};

/* One file a communicator in /dev/shm, named after its hash. */
trefoil_result_t epSharedSiteOpen(uint64_t hash, int rank, int numRanks, ep_site_t **out);

/* Collective, but for `await` it waits for no rank: rank 0's address comes by a broadcast of NCCL on a thread
 * of its own, which is the first thing that happens on the communicator. */
trefoil_result_t epNetSiteOpen(ncclComm_t comm, int rank, int numRanks, ep_site_t **out);

#endif
