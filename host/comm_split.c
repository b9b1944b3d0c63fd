/* ncclCommSplit: ranks of one colour become a communicator, ordered by key, then by old rank. Round 0 shows
 * colour, key and a key for shared memory; every rank then knows its new communicator, whose memory is the
 * one of its lowest old rank, and joins it. The new ranks then meet there. */
#include <stdlib.h>
#include <string.h>

#include "comm_internal.h"

typedef struct {
  int32_t color, key;
  uint64_t shmKey;
  ep_process_t process;
} split_record_t;

static ncclResult_t showSplit(ep_job_t *job, void *data) {
  if (job->round > 0) return epInitShow(job, data);
  split_record_t record = {job->u.split.color, job->u.split.key, job->u.split.shmKey,
                           job->comm->self};
  memcpy(data, &record, sizeof record);
  return ncclSuccess;
}

/* Where a rank comes among those of its colour: by key, then by rank. */
static int newRankOf(const void *const *all, int numRanks, int rank) {
  split_record_t mine, record;
  int before = 0;
  memcpy(&mine, all[rank], sizeof mine);
  for (int r = 0; r < numRanks; r++) {
    memcpy(&record, all[r], sizeof record);
    before += record.color == mine.color &&
              (record.key < mine.key || (record.key == mine.key && r < rank));
  }
  return before;
}

static ncclResult_t takeSplit(ep_job_t *job, const void *const *all, bool *more) {
  if (job->round > 0) return epInitTake(job, all, more);
  ncclComm_t comm = job->comm;
  split_record_t mine, record, leader;
  bool found = false;
  int leaderRank = 0;
  *more = false;
  memcpy(&mine, all[comm->rank], sizeof mine);
  job->parent = comm;
  job->members = calloc((unsigned)comm->numRanks, sizeof *job->members);
  EP_NCCL_CHECK(job->members, ncclSystemError, "%s: out of memory", job->func);
  for (int r = 0; r < comm->numRanks; r++) {
    memcpy(&record, all[r], sizeof record);
    if (record.color != mine.color) continue;
    if (!found) {
      leader = record;
      leaderRank = r;
    }
    found = true;
    job->members[newRankOf(all, comm->numRanks, r)] = r;
    job->u.split.newRanks++;
  }
  if (mine.color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  job->u.split.newRank = newRankOf(all, comm->numRanks, comm->rank);
  int current = epCurrentDevice();
  (void)cudaSetDevice(comm->device);
  ncclResult_t result = epCommNew(&leader.process, leader.shmKey, job->u.split.newRanks,
                                  job->u.split.newRank, job->func, &job->u.split.made);
  (void)cudaSetDevice(current);
  if (result != ncclSuccess && epCommPeerLeft(comm, leaderRank))
    return epNcclFail(ncclRemoteError, "%s: %s", job->func, epSentence());
  if (result == ncclSuccess) job->comm = job->u.split.made; /* the second round is in its memory */
  *more = result == ncclSuccess;
  return result;
}

static void finishSplit(ep_job_t *job, ncclResult_t result) {
  ncclComm_t made = job->u.split.made;
  free(job->members);
  if (result != ncclSuccess) {
    if (made) epCommFree(made, EP_RANK_FAILED);
    return;
  }
  if (made) atomic_store(&made->magic, EP_COMM_MAGIC);
  *job->u.split.out = made;
}

static ncclResult_t split(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                          const ncclConfig_t *config) {
  const char *func = "ncclCommSplit";
  EP_NCCL_TRY(epCommUsable(comm, func));
  EP_NCCL_CHECK(newcomm, ncclInvalidArgument, "%s: newcomm is NULL", func);
  EP_NCCL_CHECK(color >= 0 || color == NCCL_SPLIT_NOCOLOR, ncclInvalidArgument,
                "%s: color %d is neither >= 0 nor NCCL_SPLIT_NOCOLOR", func, color);
  EP_NCCL_TRY(epConfigCheck(config, func));
  ep_job_t *job = epJobNew(comm, func);
  if (!job) return ncclSystemError;
  job->show = showSplit;
  job->take = takeSplit;
  job->finish = finishSplit;
  job->u.split.out = newcomm;
  job->u.split.color = color;
  job->u.split.key = key;
  job->u.split.shmKey = epRandom();
  return epJobSubmit(job);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                           ncclConfig_t *config) {
  return epGroupRemember(split(comm, color, key, newcomm, config));
}
