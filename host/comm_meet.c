/* Meetings (plan/meeting.h) of a communicator's ranks, on its board. */
#include "comm_internal.h"

static int isGone(void *comm, int rank) {
  return !epCommPeerThere(comm, rank);
}

static int isAborted(void *comm) {
  return atomic_load(&((ncclComm_t)comm)->aborting);
}

static ep_meeting_t *meetingOf(ncclComm_t comm) {
  if (!comm->meeting.place)
    comm->meeting = (ep_meeting_t){.place = &comm->board->meeting,
                                   .seats = &epCommEntry(comm, 0)->seat,
                                   .stride = sizeof(ep_rank_entry_t),
                                   .rank = comm->rank,
                                   .numRanks = comm->numRanks,
                                   .owner = comm,
                                   .isGone = isGone,
                                   .isAborted = isAborted};
  return &comm->meeting;
}

void trefoilHostCallBegin(ncclComm_t comm) {
  if (epCommGet(comm, "trefoilHostCallBegin") == ncclSuccess) epMeetingCallBegin(meetingOf(comm));
}

void trefoilHostCallFail(ncclComm_t comm, ncclResult_t code, const char *why) {
  if (epCommGet(comm, "trefoilHostCallFail") == ncclSuccess)
    epMeetingCallFail(meetingOf(comm), (int)code, why);
}

static ncclResult_t say(const ep_meeting_outcome_t *o) {
  switch (o->end) {
  case EP_MEETING_HELD:
    return ncclSuccess;
  case EP_MEETING_GONE:
    return ncclRemoteError; /* epCommPeerThere has said why */
  case EP_MEETING_FAILED:
    return epNcclFail((ncclResult_t)o->code, "rank %d has failed: %s", o->rank, o->text);
  case EP_MEETING_LATE:
    return epNcclFail(ncclRemoteError, "rank %s did not come within the timeout", o->text);
  case EP_MEETING_LATE_ELSEWHERE:
    return epNcclFail(ncclRemoteError, "rank %d did not come within another rank's timeout",
                      o->rank);
  case EP_MEETING_LEFT:
    break;
  case EP_MEETING_ABORTED:
    return epNcclFail(ncclInvalidUsage, "the communicator was aborted");
  }
  return epNcclFail(ncclRemoteError, "another rank has stopped waiting for all to come");
}

ncclResult_t trefoilHostMeet(ncclComm_t comm, const void *mine, size_t bytes, void *all,
                             uint64_t timeoutNs) {
  const char *func = "trefoilHostMeet";
  ep_meeting_outcome_t outcome;
  EP_NCCL_TRY(epCommUsable(comm, func));
  EP_NCCL_CHECK(!epInHostFunc(), ncclInvalidUsage, "%s was called from a host function", func);
  EP_NCCL_CHECK(mine && all && bytes <= EP_MEETING_BYTES, ncclInvalidArgument,
                "%s: %zu bytes, at most %d", func, bytes, EP_MEETING_BYTES);
  EP_NCCL_CHECK(epCommEnter(comm), ncclInvalidUsage, "%s: the communicator was aborted", func);
  epMeetingJoin(meetingOf(comm), mine, bytes, all, timeoutNs, &outcome);
  ncclResult_t met = say(&outcome);
  epCommLeave(comm);
  return met;
}
