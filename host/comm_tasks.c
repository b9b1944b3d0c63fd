/* Stream-ordered work: a list of tasks (send to a rank, receive from one, reduce over all, copy), run
 * together by one thread without ever blocking in one of them: it goes over the list, moves what can
 * move, and sleeps on its doorbell when nothing can. So any mix of sends and receives in a group finishes,
 * in whatever order the ranks wrote them.
 *
 * A ring carries messages of one ordered pair of ranks, cut into slots; head counts slots written
 * (by the sender: payload, then head with release), tail slots read (by the receiver, then tail). Tasks on
 * one ring go in order: only the first unfinished task of a ring moves. Each slot names its operation and
 * size, so that ranks that disagree fail instead of mixing data.
 *
 * Works of one communicator run in the order of issue, whatever their streams: each takes a ticket when
 * issued (a graph launch issues its works anew) and waits for its turn. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm_internal.h"

typedef struct {
  ep_work_t *work;
  ncclComm_t comm;
  size_t *done;   /* [numTasks] bytes moved */
  char *finished; /* [numTasks] */
  int *sendSeen,
      *recvSeen; /* [numRanks] the last sweep in which an unfinished task used the ring */
  int sweep;
} run_t;

ep_work_t *epWorkNew(ncclComm_t comm, const char *func) {
  ep_work_t *work = calloc(1, sizeof *work);
  if (!work) return NULL;
  atomic_store(&work->refs, 1);
  work->comm = comm;
  work->life = comm->life;
  work->func = func;
  return work;
}

ep_task_t *epWorkAdd(ep_work_t *work) {
  if (work->numTasks == work->maxTasks) {
    int more = work->maxTasks ? work->maxTasks * 2 : 16;
    ep_task_t *grown = realloc(work->tasks, (size_t)more * sizeof *grown);
    if (!grown) return NULL;
    work->tasks = grown;
    work->maxTasks = more;
  }
  ep_task_t *task = &work->tasks[work->numTasks++];
  memset(task, 0, sizeof *task);
  task->inPlaceWith = -1;
  return task;
}

void epWorkRetain(void *work) {
  atomic_fetch_add(&((ep_work_t *)work)->refs, 1);
}

void epWorkRelease(void *shared) {
  ep_work_t *work = shared;
  if (atomic_fetch_sub(&work->refs, 1) != 1) return;
  free(work->tasks);
  free(work);
}

/* ---- Moving ---- */

static size_t blockBytes(size_t bytes, size_t done) {
  return bytes - done < EP_SLOT_BYTES ? bytes - done : EP_SLOT_BYTES;
}

static bool moveSend(run_t *run, int t) {
  ep_task_t *task = &run->work->tasks[t];
  ep_ring_t *ring = epCommShmRing(run->comm->shm, run->comm->rank, task->peer);
  uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed), first = head;
  if (run->sendSeen[task->peer] == run->sweep) return false;
  while (run->done[t] < task->bytes && head - atomic_load(&ring->tail) < EP_NUM_SLOTS) {
    ep_slot_t *slot = &ring->slots[head % EP_NUM_SLOTS];
    slot->bytes = (uint32_t)blockBytes(task->bytes, run->done[t]);
    slot->kind = task->tag;
    slot->total = task->bytes;
    slot->at = run->done[t];
    memcpy(slot->payload, task->src + run->done[t], slot->bytes);
    run->done[t] += slot->bytes;
    atomic_store(&ring->head, ++head);
  }
  run->finished[t] = run->done[t] == task->bytes;
  if (!run->finished[t]) run->sendSeen[task->peer] = run->sweep;
  if (head != first) epCommRing(run->comm, task->peer);
  return head != first;
}

/* The next slot from a rank for a task, NULL if there is none yet; *wrong if it belongs elsewhere. */
static ep_slot_t *nextSlot(run_t *run, int t, int src, bool *wrong) {
  ep_task_t *task = &run->work->tasks[t];
  ep_ring_t *ring = epCommShmRing(run->comm->shm, src, run->comm->rank);
  uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
  if (atomic_load(&ring->head) == tail) return NULL;
  ep_slot_t *slot = &ring->slots[tail % EP_NUM_SLOTS];
  if (slot->kind == task->tag && slot->total == task->bytes && slot->at == run->done[t] &&
      slot->bytes == blockBytes(task->bytes, run->done[t]))
    return slot;
  epSetSentence("%s: rank %d sends %llu bytes by %s where rank %d expects %zu bytes by %s",
                run->work->func, src, (unsigned long long)slot->total, epTagName(slot->kind),
                run->comm->rank, task->bytes, epTagName(task->tag));
  *wrong = true;
  return NULL;
}

static void passSlot(run_t *run, int src) {
  ep_ring_t *ring = epCommShmRing(run->comm->shm, src, run->comm->rank);
  atomic_fetch_add(&ring->tail, 1);
  epCommRing(run->comm, src);
}

static bool moveRecv(run_t *run, int t, bool *wrong) {
  ep_task_t *task = &run->work->tasks[t];
  bool moved = false;
  if (run->recvSeen[task->peer] == run->sweep) return false;
  for (ep_slot_t *slot;
       run->done[t] < task->bytes && (slot = nextSlot(run, t, task->peer, wrong));) {
    memcpy(task->dst + run->done[t], slot->payload, slot->bytes);
    run->done[t] += slot->bytes;
    passSlot(run, task->peer);
    moved = true;
  }
  run->finished[t] = run->done[t] == task->bytes;
  if (!run->finished[t]) run->recvSeen[task->peer] = run->sweep;
  return moved;
}

/* Whether the block [done, end) may be overwritten: the sends of it have gone out. */
static bool sentUpTo(run_t *run, int t, size_t end) {
  int first = run->work->tasks[t].inPlaceWith;
  for (int s = first; first >= 0 && s < t; s++)
    if (run->done[s] < end) return false;
  return true;
}

static bool moveReduce(run_t *run, int t, bool *wrong) {
  ep_task_t *task = &run->work->tasks[t];
  ncclComm_t comm = run->comm;
  bool moved = false;
  for (int r = 0; r < comm->numRanks; r++)
    if (r != comm->rank && run->recvSeen[r] == run->sweep) return false;
  while (run->done[t] < task->bytes) {
    size_t bytes = blockBytes(task->bytes, run->done[t]);
    bool ready = sentUpTo(run, t, run->done[t] + bytes);
    for (int r = 0; r < comm->numRanks && ready; r++)
      ready = r == comm->rank || nextSlot(run, t, r, wrong);
    if (!ready) break;
    ep_accumulator_t acc;
    for (int r = 0; r < comm->numRanks; r++) {
      const void *term =
          r == comm->rank ? task->src + run->done[t] : nextSlot(run, t, r, wrong)->payload;
      if (r == 0)
        epReduceFirst(&acc, term, bytes, task->type);
      else
        epReduceNext(&acc, term, bytes, task->type, task->op);
    }
    epReduceStore(&acc, task->dst + run->done[t], bytes, task->type, task->op, comm->numRanks);
    for (int r = 0; r < comm->numRanks; r++)
      if (r != comm->rank) passSlot(run, r);
    run->done[t] += bytes;
    moved = true;
  }
  run->finished[t] = run->done[t] == task->bytes;
  for (int r = 0; r < comm->numRanks && !run->finished[t]; r++) run->recvSeen[r] = run->sweep;
  return moved;
}

static bool moveTask(run_t *run, int t, bool *wrong) {
  ep_task_t *task = &run->work->tasks[t];
  switch (task->kind) {
  case EP_TASK_SEND:
    return moveSend(run, t);
  case EP_TASK_RECV:
    return moveRecv(run, t, wrong);
  case EP_TASK_REDUCE:
    return moveReduce(run, t, wrong);
  default:
    if (task->dst != task->src) memmove(task->dst, task->src, task->bytes);
    run->finished[t] = true;
    return true;
  }
}

/* ---- Waiting ---- */

/* Whether a task waits for this rank. */
static bool waitsFor(run_t *run, int t, int r) {
  ep_task_t *task = &run->work->tasks[t];
  bool wrong = false;
  if (run->finished[t]) return false;
  if (task->kind == EP_TASK_REDUCE) return r != run->comm->rank && !nextSlot(run, t, r, &wrong);
  return task->peer == r;
}

/* A rank that some task waits for and that is gone (`gone`) or just is waited for; else -1. */
static int findPeer(run_t *run, bool gone) {
  for (int r = 0; r < run->comm->numRanks; r++)
    for (int t = 0; t < run->work->numTasks; t++)
      if (waitsFor(run, t, r)) {
        if (!gone || !epCommPeerThere(run->comm, r)) return r;
        break;
      }
  return -1;
}

/* One pass over the tasks: 1 something moved, 0 nothing, -1 ranks disagree; *left: unfinished tasks. */
static int sweepOnce(run_t *run, int *left) {
  bool moved = false, wrong = false;
  run->sweep++;
  *left = 0;
  for (int t = 0; t < run->work->numTasks; t++) {
    if (!run->finished[t]) moved |= moveTask(run, t, &wrong);
    if (wrong) return -1;
    *left += !run->finished[t];
  }
  return moved;
}

static ncclResult_t loop(run_t *run) {
  ncclComm_t comm = run->comm;
  const char *func = run->work->func;
  uint64_t last = epMonotonicNs(), timeout = trefoilHostTimeoutNs(), slice = 500000;
  bool sawGone = false;
  for (;;) {
    int left;
    uint32_t seen = epCommDoorbell(comm);
    int moved = sweepOnce(run, &left);
    if (moved < 0) return ncclInvalidUsage;
    if (left == 0) return ncclSuccess;
    if (atomic_load(&comm->aborting))
      return epNcclFail(ncclInvalidUsage, "%s: the communicator was aborted", func);
    if (moved) {
      last = epMonotonicNs();
      slice = 500000;
      sawGone = false;
      continue;
    }
    if (sawGone && findPeer(run, true) >= 0) { /* and what it left behind has been read */
      char why[512];
      snprintf(why, sizeof why, "%s", epSentence());
      return epNcclFail(ncclRemoteError, "%s: %s", func, why);
    }
    if (!sawGone && slice > 500000 && findPeer(run, true) >= 0) {
      sawGone = true;
      continue;
    }
    EP_NCCL_CHECK(epMonotonicNs() - last < timeout, ncclRemoteError,
                  "%s: rank %d did not take part within %.1f s", func, findPeer(run, false),
                  (double)timeout * 1e-9);
    epCommSleep(comm, seen, slice);
    if (slice < 16000000) slice *= 2;
  }
}

ncclResult_t epWorkRun(ep_work_t *work) {
  run_t run = {.work = work, .comm = work->comm};
  size_t tasks = (size_t)work->numTasks + 1, ranks = (size_t)work->comm->numRanks;
  run.done = calloc(tasks, sizeof *run.done);
  run.finished = calloc(tasks, 1);
  run.sendSeen = calloc(ranks, sizeof(int));
  run.recvSeen = calloc(ranks, sizeof(int));
  ncclResult_t result;
  if (run.done && run.finished && run.sendSeen && run.recvSeen)
    result = loop(&run);
  else
    result = epNcclFail(ncclSystemError, "%s: out of memory", work->func);
  free(run.done);
  free(run.finished);
  free(run.sendSeen);
  free(run.recvSeen);
  return result;
}

/* ---- In the order of the communicator and the stream ---- */

static uint64_t prepareWork(ep_stream_op_t *op) {
  ep_work_t *work = op->shared;
  if (atomic_load(&work->comm->magic) != EP_COMM_MAGIC || work->comm->life != work->life)
    return UINT64_MAX;
  return atomic_fetch_add(&work->comm->issued, 1);
}

static void runWork(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket) {
  ep_work_t *work = op->shared;
  ncclComm_t comm = work->comm;
  if (ticket == UINT64_MAX) {
    epStreamSetError(stream, cudaErrorExternalDevice,
                     "a graph ran a collective of a communicator that was destroyed");
    return;
  }
  for (;;) {
    uint32_t turn = atomic_load(&comm->turn);
    if (atomic_load(&comm->served) == ticket) break;
    if (!epSpin(&comm->turn, turn)) epFutexWait(&comm->turn, turn, 100000000u, EP_FUTEX_SHARED);
  }
  ncclResult_t result = epCommUsable(comm, work->func);
  if (result == ncclSuccess) result = epWorkRun(work);
  if (result != ncclSuccess) {
    epStreamSetError(stream, cudaErrorExternalDevice, epSentence());
    epCommSetAsync(comm, result, epSentence());
  }
  atomic_fetch_add(&comm->served, 1);
  atomic_fetch_add(&comm->turn, 1);
  epFutexWake(&comm->turn, EP_FUTEX_SHARED);
}

ncclResult_t epWorkIssue(ep_work_t *work, cudaStream_t stream) {
  ep_stream_op_t *op = epOpNew(cudaGraphNodeTypeHost, runWork);
  const char *func = work->func;
  if (!op) {
    epWorkRelease(work);
    return epNcclFail(ncclSystemError, "%s: out of memory", func);
  }
  op->shared = work;
  op->retain = epWorkRetain;
  op->release = epWorkRelease;
  op->prepare = prepareWork;
  return epEnqueue(stream, op, func) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
