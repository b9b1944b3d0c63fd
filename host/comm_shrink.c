/* ncclCommShrink: a communicator of the ranks that are not excluded, in their old order. Only they call, and
 * the others may be gone, so nothing is exchanged in the old shared memory: each works out the same key for
 * the new one, from the old key, who is excluded and how many shrinks came before, and asks the process of
 * the lowest rank that stays for it. */
#include <stdlib.h>

#include "comm_internal.h"

static uint64_t mix(uint64_t key, uint64_t value) {
  key ^= value + 0x9e3779b97f4a7c15u + (key << 6) + (key >> 2);
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9u;
  key = (key ^ (key >> 27)) * 0x94d049bb133111ebu;
  return key ^ (key >> 31);
}

typedef struct {
  int numRanks, newRank, leader;
  uint64_t key;
} shrunk_t;

static ncclResult_t whoStays(ncclComm_t comm, const int *list, int count, const char *func,
                             shrunk_t *out) {
  bool excluded[EP_MAX_RANKS] = {false};
  for (int i = 0; i < count; i++) {
    EP_NCCL_CHECK(list[i] >= 0 && list[i] < comm->numRanks, ncclInvalidArgument,
                  "%s: rank %d is not in [0, %d)", func, list[i], comm->numRanks);
    excluded[list[i]] = true;
  }
  EP_NCCL_CHECK(!excluded[comm->rank], ncclInvalidArgument,
                "%s: rank %d calls and is excluded; only ranks that stay call", func, comm->rank);
  *out = (shrunk_t){0, 0, -1, mix(comm->shm->key, ++comm->numShrinks)};
  for (int r = 0; r < comm->numRanks; r++) {
    out->key = mix(out->key, excluded[r]);
    if (excluded[r]) continue;
    if (out->leader < 0) out->leader = r;
    if (r == comm->rank) out->newRank = out->numRanks;
    out->numRanks++;
  }
  return ncclSuccess;
}

/* Ends the communicator's work, here and where others wait for this rank; it can only be destroyed. */
static ncclResult_t endWork(ncclComm_t comm, const char *func) {
  atomic_store(&comm->aborting, true);
  atomic_store(&epCommEntry(comm, comm->rank)->state, EP_RANK_ABORTED);
  epCommRingAll(comm);
  return epCommDrain(comm, func);
}

static ncclResult_t shrink(ncclComm_t comm, const int *list, int count, int flags,
                           ncclComm_t *newcomm, const ncclConfig_t *config) {
  const char *func = "ncclCommShrink";
  shrunk_t to;
  ncclComm_t made;
  EP_NCCL_TRY(flags & NCCL_SHRINK_ABORT ? epCommGet(comm, func) : epCommUsable(comm, func));
  EP_NCCL_CHECK(newcomm && list && count > 0, ncclInvalidArgument,
                "%s: newcomm is NULL, or no rank is excluded", func);
  EP_NCCL_CHECK(!(flags & ~NCCL_SHRINK_ABORT), ncclInvalidArgument, "%s: flags 0x%x", func,
                (unsigned)flags);
  EP_NCCL_TRY(epConfigCheck(config, func));
  EP_NCCL_TRY(whoStays(comm, list, count, func, &to));
  if (flags & NCCL_SHRINK_ABORT) EP_NCCL_TRY(endWork(comm, func));
  int current = epCurrentDevice();
  (void)cudaSetDevice(comm->device);
  ncclResult_t result = epCommNew(&epCommEntry(comm, to.leader)->process, to.key, to.numRanks,
                                  to.newRank, func, &made);
  (void)cudaSetDevice(current);
  if (result != ncclSuccess && epCommPeerLeft(comm, to.leader))
    return epNcclFail(ncclRemoteError, "%s: %s", func, epSentence());
  return result == ncclSuccess ? epInitJob(made, func, newcomm) : result;
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount,
                            ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags) {
  return epGroupRemember(
      shrink(comm, excludeRanksList, excludeRanksCount, shrinkFlags, newcomm, config));
}
