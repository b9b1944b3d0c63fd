/* Barrier rounds (plan/barrier_round.h) of a communicator's ranks, in its shared memory. */
#include "comm_internal.h"

static int isGone(void *comm, int rank) {
  return !epCommPeerThere(comm, rank);
}

static int isAborted(void *comm) {
  return atomic_load(&((ncclComm_t)comm)->aborting);
}

static ep_round_t *roundOf(ncclComm_t comm) {
  if (!comm->round.shared)
    comm->round = (ep_round_t){.shared = &comm->shm->round,
                               .entries = &epCommEntry(comm, 0)->round,
                               .stride = sizeof(ep_rank_entry_t),
                               .rank = comm->rank,
                               .numRanks = comm->numRanks,
                               .owner = comm,
                               .isGone = isGone,
                               .isAborted = isAborted};
  return &comm->round;
}

void trefoilHostCallBegin(ncclComm_t comm) {
  if (epCommGet(comm, "trefoilHostCallBegin") == ncclSuccess) epRoundCallBegin(roundOf(comm));
}

void trefoilHostCallFail(ncclComm_t comm, ncclResult_t code, const char *why) {
  if (epCommGet(comm, "trefoilHostCallFail") == ncclSuccess)
    epRoundCallFail(roundOf(comm), (int)code, why);
}

static ncclResult_t resultOf(const ep_round_outcome_t *o) {
  switch (o->end) {
  case EP_ROUND_COMPLETE:
    return ncclSuccess;
  case EP_ROUND_GONE:
    return ncclRemoteError; /* epCommPeerThere has said why */
  case EP_ROUND_FAILED:
    return epNcclFail((ncclResult_t)o->code, "rank %d has failed: %s", o->rank, o->text);
  case EP_ROUND_LATE:
    return epNcclFail(ncclRemoteError, "rank %s did not come within the timeout", o->text);
  case EP_ROUND_LATE_ELSEWHERE:
    return epNcclFail(ncclRemoteError, "rank %d did not come within another rank's timeout",
                      o->rank);
  case EP_ROUND_LEFT:
    break;
  case EP_ROUND_ABORTED:
    return epNcclFail(ncclInvalidUsage, "the communicator was aborted");
  }
  return epNcclFail(ncclRemoteError, "another rank has stopped waiting for all to come");
}

ncclResult_t trefoilHostBarrierRound(ncclComm_t comm, const void *mine, size_t bytes, void *all,
                                     uint64_t timeoutNs) {
  const char *func = "trefoilHostBarrierRound";
  ep_round_outcome_t outcome;
  EP_NCCL_TRY(epCommUsable(comm, func));
  EP_NCCL_CHECK(!epInHostFunc(), ncclInvalidUsage, "%s was called from a host function", func);
  EP_NCCL_CHECK(mine && all && bytes <= EP_ROUND_BYTES, ncclInvalidArgument,
                "%s: %zu bytes, at most %d", func, bytes, EP_ROUND_BYTES);
  EP_NCCL_CHECK(epCommEnter(comm), ncclInvalidUsage, "%s: the communicator was aborted", func);
  epRoundJoin(roundOf(comm), mine, bytes, all, timeoutNs, &outcome);
  ncclResult_t met = resultOf(&outcome);
  epCommLeave(comm);
  return met;
}
