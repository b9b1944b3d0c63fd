/* The control exchange: every rank shows one record and reads all others'. Records alternate between
 * two places by parity: a rank shows record n + 2 only after all have shown n + 1, which they do after
 * reading n. One thread can run many jobs on many communicators (a group): it shows all before it takes
 * any, so no job waits for another job of the same thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm_internal.h"

typedef struct {
  int32_t result; /* ncclResult_t of the rank so far */
  char sentence[EP_RECORD_BYTES - EP_SHOWN_BYTES - sizeof(int32_t)];
  _Alignas(16) char data[EP_SHOWN_BYTES];
} record_t;

_Static_assert(sizeof(record_t) == EP_RECORD_BYTES, "a record fills its place");

ep_job_t *epJobNew(ncclComm_t comm, const char *func) {
  ep_job_t *job = calloc(1, sizeof *job);
  if (!job) {
    epNcclFail(ncclSystemError, "%s: out of memory", func);
    return NULL;
  }
  job->comm = comm;
  job->func = func;
  return job;
}

static void failJob(ep_job_t *job, ncclResult_t result) {
  if (job->result != ncclSuccess) return;
  job->result = result;
  snprintf(job->sentence, sizeof job->sentence, "%s", epSentence());
  if (result != ncclRemoteError) return;
  if (job->parent) epCommSetAsync(job->parent, result, job->sentence);
  epCommSetAsync(job->comm, result, job->sentence);
}

static void showRecord(ep_job_t *job) {
  ncclComm_t comm = job->comm;
  ep_rank_entry_t *mine = epCommEntry(comm, comm->rank);
  uint32_t number = ++comm->numExchanges;
  record_t *record = (record_t *)(void *)mine->records[number & 1];
  memset(record, 0, sizeof *record);
  if (job->result == ncclSuccess) {
    ncclResult_t result = job->show(job, record->data);
    if (result != ncclSuccess) failJob(job, result);
  }
  record->result = job->result;
  snprintf(record->sentence, sizeof record->sentence, "%.*s", (int)sizeof record->sentence - 1,
           job->sentence);
  atomic_store(&mine->shown, number);
  epCommRingAll(comm);
}

/* The first rank that has not shown its record, or -1. */
static int firstMissing(ncclComm_t comm) {
  for (int r = 0; r < comm->numRanks; r++)
    if ((int32_t)(atomic_load(&epCommEntry(comm, r)->shown) - comm->numExchanges) < 0) return r;
  return -1;
}

static ncclResult_t waitForAll(ep_job_t *job) {
  ncclComm_t comm = job->comm;
  uint64_t start = epMonotonicNs(), timeout = trefoilHostTimeoutNs(), slice = 1000000;
  for (;;) {
    uint32_t seen = epCommDoorbell(comm);
    int missing = firstMissing(comm);
    if (missing < 0) return ncclSuccess;
    EP_NCCL_CHECK(!atomic_load(&comm->aborting), ncclInvalidUsage,
                  "%s: the communicator was aborted", job->func);
    for (int r = missing; r < comm->numRanks; r++) {
      if (job->members && atomic_load(&epCommEntry(comm, r)->state) == EP_RANK_EXPECTED &&
          !epCommPeerThere(job->parent, job->members[r]) &&
          atomic_load(&epCommEntry(comm, r)->state) == EP_RANK_EXPECTED)
        return epNcclFail(ncclRemoteError, "%s: %s", job->func, epSentence());
      bool late = (int32_t)(atomic_load(&epCommEntry(comm, r)->shown) - comm->numExchanges) < 0;
      if (!late || epCommPeerThere(comm, r)) continue;
      if (firstMissing(comm) < 0) return ncclSuccess; /* it showed its record and then left */
      return epNcclFail(ncclRemoteError, "%s: %s", job->func, epSentence());
    }
    uint64_t waited = epMonotonicNs() - start;
    EP_NCCL_CHECK(waited < timeout, ncclRemoteError, "%s: rank %d did not %s within %.1f s",
                  job->func, missing,
                  atomic_load(&epCommEntry(comm, missing)->state) == EP_RANK_EXPECTED
                      ? "arrive"
                      : "make the same call",
                  (double)timeout * 1e-9);
    epCommSleep(comm, seen, slice);
    if (slice < 16000000) slice *= 2;
  }
}

static void takeRecords(ep_job_t *job) {
  ncclComm_t comm = job->comm;
  bool more = false;
  ncclResult_t result = waitForAll(job);
  const void **all = calloc((unsigned)comm->numRanks, sizeof *all);
  if (result == ncclSuccess && !all) result = epNcclFail(ncclSystemError, "out of memory");
  for (int r = 0; r < comm->numRanks && result == ncclSuccess; r++) {
    const record_t *record =
        (const record_t *)(const void *)epCommEntry(comm, r)->records[comm->numExchanges & 1];
    all[r] = record->data;
    if (record->result == ncclSuccess || job->result != ncclSuccess) continue;
    result = epNcclFail((ncclResult_t)record->result, "%s: rank %d failed: %.*s", job->func, r,
                        (int)sizeof record->sentence, record->sentence);
  }
  if (result != ncclSuccess || job->result != ncclSuccess) {
    if (result != ncclSuccess) failJob(job, result);
    job->over = true; /* every rank has seen a failure, or cannot be reached */
  } else {
    result = job->take(job, all, &more);
    if (result != ncclSuccess) failJob(job, result);
    job->over = !more;
  }
  job->round++;
  free(all);
}

/* A job may free the communicator that it makes; another thread may abort one that exists. */
static void enterAll(ep_job_t *jobs) {
  for (ep_job_t *job = jobs; job; job = job->next) {
    job->entered = epCommEnter(job->comm) ? job->comm : NULL;
    if (job->entered) continue;
    failJob(job, epNcclFail(ncclInvalidUsage, "%s: the communicator was aborted", job->func));
    job->over = true;
  }
}

ncclResult_t epJobsRun(ep_job_t *jobs) {
  ncclResult_t first = ncclSuccess;
  enterAll(jobs);
  char sentence[512] = "";
  for (bool any = true; any;) {
    any = false;
    for (ep_job_t *job = jobs; job; job = job->next) {
      bool busy = job->over; /* an earlier job on this communicator comes first */
      for (ep_job_t *other = jobs; other != job; other = other->next)
        busy |= other->comm == job->comm && !other->over;
      job->shown = !busy;
      if (job->shown) showRecord(job);
      any |= !job->over;
    }
    for (ep_job_t *job = jobs; job; job = job->next)
      if (job->shown) takeRecords(job);
  }
  while (jobs) {
    ep_job_t *job = jobs;
    jobs = job->next;
    if (job->result != ncclSuccess && first == ncclSuccess) {
      first = job->result;
      memcpy(sentence, job->sentence, sizeof sentence);
    }
    job->finish(job, job->result);
    if (job->entered) epCommLeave(job->entered);
    free(job);
  }
  return first == ncclSuccess ? first : epNcclFail(first, "%s", sentence);
}
