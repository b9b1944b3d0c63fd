/* Groups: between ncclGroupStart and ncclGroupEnd a thread's calls are collected. At the outermost end
 * the control jobs (init, split, windows) run first, together; then one work per communicator is issued,
 * on the stream of its first call. Other streams that were named for the communicator wait for it, and it
 * for them. A call that failed inside the group fails the end too, and then nothing is issued. */
#include <stdlib.h>
#include <string.h>

#include "comm_internal.h"

enum { MAX_STREAMS = 16 };

typedef struct group_work {
  struct group_work *next;
  ncclComm_t comm;
  ep_work_t *work;
  cudaStream_t streams[MAX_STREAMS];
  int numStreams;
} group_work_t;

static _Thread_local int depth;
static _Thread_local group_work_t *works, **worksTail;
static _Thread_local ep_job_t *jobs, **jobsTail;
static _Thread_local ncclResult_t groupResult;
static _Thread_local char groupSentence[512];

bool epInGroup(void) {
  return depth > 0;
}

/* Outside a group: the result itself. Inside: also noted for ncclGroupEnd. */
ncclResult_t epGroupRemember(ncclResult_t result) {
  if (depth > 0 && result != ncclSuccess && groupResult == ncclSuccess) {
    groupResult = result;
    strncpy(groupSentence, epSentence(), sizeof groupSentence - 1);
  }
  return result;
}

ncclResult_t ncclGroupStart(void) {
  if (depth++ == 0) {
    works = NULL;
    worksTail = &works;
    jobs = NULL;
    jobsTail = &jobs;
    groupResult = ncclSuccess;
    memset(groupSentence, 0, sizeof groupSentence);
  }
  return ncclSuccess;
}

static void addJob(ep_job_t *job) {
  *jobsTail = job;
  jobsTail = &job->next;
}

ncclResult_t epJobSubmit(ep_job_t *job) {
  if (!epInGroup()) return epJobsRun(job);
  addJob(job);
  return ncclSuccess;
}

static ncclResult_t addStream(group_work_t *entry, cudaStream_t stream, const char *func) {
  for (int i = 0; i < entry->numStreams; i++)
    if (entry->streams[i] == stream) return ncclSuccess;
  EP_NCCL_CHECK(entry->numStreams < MAX_STREAMS, ncclInvalidUsage,
                "%s: more than %d streams for one communicator in a group", func, MAX_STREAMS);
  entry->streams[entry->numStreams++] = stream;
  return ncclSuccess;
}

ncclResult_t epGroupWork(ncclComm_t comm, cudaStream_t stream, const char *func, ep_work_t **out) {
  if (depth == 0) {
    *out = epWorkNew(comm, func);
    EP_NCCL_CHECK(*out, ncclSystemError, "%s: out of memory", func);
    return ncclSuccess;
  }
  group_work_t *entry = works;
  while (entry && entry->comm != comm) entry = entry->next;
  if (!entry) {
    entry = calloc(1, sizeof *entry);
    if (entry) entry->work = epWorkNew(comm, func);
    if (!entry || !entry->work) {
      free(entry);
      return epNcclFail(ncclSystemError, "%s: out of memory", func);
    }
    entry->comm = comm;
    *worksTail = entry;
    worksTail = &entry->next;
  } else if (strcmp(entry->work->func, func)) {
    entry->work->func = "ncclGroupEnd";
  }
  EP_NCCL_TRY(addStream(entry, stream, func));
  *out = entry->work;
  return ncclSuccess;
}

ncclResult_t epGroupAdded(ep_work_t *work, cudaStream_t stream) {
  return depth > 0 ? ncclSuccess : epWorkIssue(work, stream);
}

/* later waits for what is on earlier now; holds while capturing too. */
static ncclResult_t orderStreams(cudaStream_t earlier, cudaStream_t later) {
  cudaEvent_t event;
  if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess)
    return ncclUnhandledCudaError;
  event->device = earlier->device;
  cudaError_t error = cudaEventRecord(event, earlier);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(later, event, 0);
  (void)cudaEventDestroy(event);
  return error == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

static ncclResult_t issueEntry(group_work_t *entry) {
  ep_work_t *work = entry->work;
  entry->work = NULL;
  for (int i = 1; i < entry->numStreams; i++) {
    ncclResult_t result = orderStreams(entry->streams[i], entry->streams[0]);
    if (result == ncclSuccess) continue;
    epWorkRelease(work);
    return result;
  }
  EP_NCCL_TRY(epWorkIssue(work, entry->streams[0]));
  for (int i = 1; i < entry->numStreams; i++)
    EP_NCCL_TRY(orderStreams(entry->streams[0], entry->streams[i]));
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
  EP_NCCL_CHECK(depth > 0, ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--depth > 0) return ncclSuccess;
  ncclResult_t result = groupResult;
  if (result == ncclSuccess) {
    result = epJobsRun(jobs);
  } else { /* the jobs that were collected fail, which the other ranks then see */
    for (ep_job_t *job = jobs; job; job = job->next) {
      job->result = result;
      memcpy(job->sentence, groupSentence, sizeof job->sentence);
    }
    (void)epJobsRun(jobs);
    epSetSentence("%s", groupSentence);
  }
  while (works) {
    group_work_t *entry = works;
    works = entry->next;
    if (result == ncclSuccess)
      result = issueEntry(entry);
    else
      epWorkRelease(entry->work);
    free(entry);
  }
  return result;
}
