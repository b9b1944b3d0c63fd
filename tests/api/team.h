/* Ranks as threads of this process or as processes, each with a communicator and a stream. A body
 * says what went wrong with teamCheck (the first time counts); the team returns that sentence. */
#ifndef TREFOIL_TESTS_API_TEAM_H
#define TREFOIL_TESTS_API_TEAM_H

#include <cuda_runtime.h>
#include <nccl.h>

#include "nccl_ep.h"

typedef struct team_rank {
  int rank, numRanks, processes;
  ncclUniqueId id;
  ncclComm_t comm;
  cudaStream_t stream;
  void *user;
  char error[400];
  void *pinned[16];
  int numPinned;
  struct team_shared *shared;
} team_rank_t;

typedef void (*team_body_t)(team_rank_t *r);

/* "" or the first error, with its rank. The text is valid until the next team. */
const char *teamThreads(int numRanks, team_body_t body, void *user);
/* Children of fork; `user` is copied. A rank that is killed by a signal counts as an error unless its
 * bit is set in `mayDie`. */
const char *teamProcesses(int numRanks, team_body_t body, void *user, unsigned mayDie);
/* Memory of the program, for tensors: devices reach it until the rank ends, or, with r NULL, for good. */
void teamPin(team_rank_t *r, void *memory, size_t bytes);
/* All ranks of the team, outside of NCCL: a host barrier. */
void teamBarrier(team_rank_t *r);

void teamFail(team_rank_t *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define teamCheck(r, cond, ...)                                                                    \
  do {                                                                                             \
    if (!(cond)) {                                                                                 \
      teamFail((r), __VA_ARGS__);                                                                  \
      return;                                                                                      \
    }                                                                                              \
  } while (0)
/* An ncclEp call that must succeed. */
#define teamOk(r, call)                                                                            \
  teamCheck(r, (call) == ncclSuccess, "line %d: %s: %s", __LINE__, #call, ncclEpGetLastError())

#endif
