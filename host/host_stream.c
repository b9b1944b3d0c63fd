/* Streams: a queue each, executed in order by one thread at a time.
 *
 * Work is pushed on the queue and the stream's worker thread (made with the first work, kept when the
 * stream is recycled) is woken. A thread that waits for the stream runs the queue itself if the worker
 * has not begun: no context switch on the common path enqueue, enqueue, synchronise, and the order is
 * the same. `running` says that some thread executes; `completed` counts finished work and only
 * grows, also when the object is recycled, so a wait for (stream, seq) can outlive the stream.
 *
 * The legacy default stream keeps CUDA's rule: its work waits for everything queued before on the
 * device's blocking streams, and theirs waits for it. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "host_internal.h"

enum { MAX_DEVICES = 64 };

static pthread_mutex_t listLock = PTHREAD_MUTEX_INITIALIZER;
static cudaStream_t deviceStreams[MAX_DEVICES]; /* live ones, default streams included */
static cudaStream_t legacyStreams[MAX_DEVICES];
static cudaStream_t freeStreams;
static _Atomic uint64_t lastId;

static _Thread_local int inHostFunc;
static _Thread_local cudaStream_t perThread[MAX_DEVICES];
static pthread_key_t perThreadKey;
static pthread_once_t perThreadOnce = PTHREAD_ONCE_INIT;

bool epInHostFunc(void) {
  return inHostFunc > 0;
}

/* TREFOIL_HOST_DELAY_US: every piece of work starts that much later, to make missing
 * synchronisation show every time. */
static void delay(void) {
  static _Atomic int64_t delayUs = -1;
  int64_t us = atomic_load_explicit(&delayUs, memory_order_relaxed);
  if (us < 0) {
    us = epEnvInt("TREFOIL_HOST_DELAY_US", 0);
    atomic_store(&delayUs, us > 0 ? us : 0);
  }
  if (us <= 0) return;
  struct timespec t = {us / 1000000, us % 1000000 * 1000};
  nanosleep(&t, NULL);
}

/* ---- Work ---- */

void epRunHost(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)ticket;
  inHostFunc++;
  if (op->u.host.fn)
    op->u.host.fn(op->u.host.data);
  else
    op->u.host.callback(stream, stream->error, op->u.host.data);
  inHostFunc--;
}

void epRunAfter(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)stream, (void)ticket;
  epStreamWaitSeq(op->u.after.stream, op->u.after.seq, false);
}

/* ---- The queue ---- */

/* A destroyed stream that has drained. Until here it stays on its device's list, so that what waits for
 * the device waits for its work too. */
static void recycleStream(cudaStream_t s) {
  pthread_mutex_lock(&listLock);
  cudaStream_t *at = &deviceStreams[s->device];
  while (*at && *at != s) at = &(*at)->nextOfDevice;
  if (*at) *at = s->nextOfDevice;
  s->nextFree = freeStreams;
  freeStreams = s;
  pthread_mutex_unlock(&listLock);
}

static void wakeWorker(cudaStream_t s) {
  if (atomic_fetch_add(&s->wake, 2) & 1)
    epFutexWake(&s->wake, EP_FUTEX_PRIVATE); /* bit 0: the worker sleeps */
}

/* Runs the queue until `until` is done or it is empty. Called with the lock held and `running` set by
 * this thread; returns with the lock held and `running` clear. */
static void execute(cudaStream_t s, uint64_t until) {
  while (s->head && atomic_load(&s->completed) < until) {
    ep_stream_op_t *op = s->head;
    s->head = op->next;
    if (!s->head) s->tail = &s->head;
    pthread_mutex_unlock(&s->lock);
    delay();
    op->run(op, s, op->ticket);
    epOpFree(op);
    atomic_fetch_add(&s->completed, 1);
    if (atomic_load(&s->waiters)) {
      atomic_fetch_add(&s->done, 1);
      epFutexWake(&s->done, EP_FUTEX_PRIVATE);
    }
    pthread_mutex_lock(&s->lock);
  }
  s->running = false;
  if (s->head)
    wakeWorker(s);
  else if (s->recycle) {
    s->recycle = false;
    recycleStream(s);
  }
}

static void *worker(void *arg) {
  cudaStream_t s = arg;
  for (;;) {
    uint32_t seen = atomic_load(&s->wake);
    pthread_mutex_lock(&s->lock);
    bool ran = s->head && !s->running;
    if (ran) {
      s->running = true;
      execute(s, UINT64_MAX);
    }
    pthread_mutex_unlock(&s->lock);
    if (ran || epSpin(&s->wake, seen)) continue;
    if (!atomic_compare_exchange_strong(&s->wake, &seen, seen | 1)) continue;
    while (atomic_load(&s->wake) == (seen | 1))
      epFutexWait(&s->wake, seen | 1, 3600000000000u, EP_FUTEX_PRIVATE);
    atomic_fetch_and(&s->wake, ~1u);
  }
  return NULL;
}

void epStreamPush(cudaStream_t s, ep_stream_op_t *op, bool quiet) {
  op->next = NULL;
  pthread_mutex_lock(&s->lock);
  *s->tail = op;
  s->tail = &op->next;
  atomic_fetch_add(&s->submitted, 1);
  bool idle = !s->running && !quiet;
  if (!s->hasWorker && !quiet) {
    pthread_attr_t attr;
    pthread_t thread;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    s->hasWorker =
        !pthread_create(&thread, &attr, worker, s); /* if not: the thread that waits runs it */
    pthread_attr_destroy(&attr);
  }
  pthread_mutex_unlock(&s->lock);
  if (idle) wakeWorker(s);
}

void epStreamWaitSeq(cudaStream_t s, uint64_t seq, bool mayRun) {
  while (atomic_load(&s->completed) < seq) {
    pthread_mutex_lock(&s->lock);
    if (s->head && !s->running && (mayRun || !s->hasWorker)) {
      s->running = true;
      execute(s, seq);
    }
    pthread_mutex_unlock(&s->lock);
    atomic_fetch_add(&s->waiters, 1);
    uint32_t seen = atomic_load(&s->done);
    if (atomic_load(&s->completed) < seq && !epSpin(&s->done, seen))
      epFutexWait(&s->done, seen, 100000000u, EP_FUTEX_PRIVATE);
    atomic_fetch_sub(&s->waiters, 1);
  }
}

cudaError_t epStreamTakeError(cudaStream_t s) {
  pthread_mutex_lock(&s->lock);
  cudaError_t error = s->error;
  s->error = cudaSuccess;
  char text[sizeof s->sentence];
  memcpy(text, s->sentence, sizeof text);
  pthread_mutex_unlock(&s->lock);
  return error == cudaSuccess ? error : epCudaFail(error, "%s", text);
}

void epStreamSetError(cudaStream_t s, cudaError_t error, const char *sentence) {
  pthread_mutex_lock(&s->lock);
  if (s->error == cudaSuccess) {
    s->error = error;
    strncpy(s->sentence, sentence, sizeof s->sentence - 1);
  }
  pthread_mutex_unlock(&s->lock);
}

/* ---- Finding streams ---- */

static cudaStream_t newStream(int device, unsigned flags, int priority, bool legacy) {
  pthread_mutex_lock(&listLock);
  cudaStream_t s = freeStreams;
  if (s) freeStreams = s->nextFree;
  pthread_mutex_unlock(&listLock);
  if (!s) {
    if (!(s = calloc(1, sizeof *s))) return NULL;
    pthread_mutex_init(&s->lock, NULL);
    s->tail = &s->head;
  }
  pthread_mutex_lock(&s->lock);
  s->device = device;
  s->flags = flags;
  s->priority = priority;
  s->legacy = legacy;
  s->id = atomic_fetch_add(&lastId, 1) + 1;
  s->error = cudaSuccess;
  pthread_mutex_unlock(&s->lock);
  atomic_store(&s->magic, EP_STREAM_MAGIC);
  pthread_mutex_lock(&listLock);
  s->nextOfDevice = deviceStreams[device];
  deviceStreams[device] = s;
  pthread_mutex_unlock(&listLock);
  return s;
}

void epStreamRetire(cudaStream_t s) {
  atomic_store(&s->magic, EP_DEAD_MAGIC);
  pthread_mutex_lock(&s->lock);
  bool idle = !s->head && !s->running;
  s->recycle = !idle;
  pthread_mutex_unlock(&s->lock);
  if (idle) recycleStream(s);
}

cudaStream_t epStreamLegacy(int device) {
  pthread_mutex_lock(&listLock);
  cudaStream_t s = legacyStreams[device];
  pthread_mutex_unlock(&listLock);
  return s;
}

static cudaStream_t legacyStream(int device) {
  cudaStream_t s = epStreamLegacy(device);
  if (s) return s;
  s = newStream(device, cudaStreamDefault, 0, true);
  pthread_mutex_lock(&listLock);
  cudaStream_t first = legacyStreams[device];
  if (!first) legacyStreams[device] = s;
  pthread_mutex_unlock(&listLock);
  if (!first) return s;
  epStreamRetire(s);
  return first;
}

static void retirePerThread(void *unused) {
  (void)unused;
  for (int device = 0; device < MAX_DEVICES; device++)
    if (perThread[device]) epStreamRetire(perThread[device]);
  memset(perThread, 0, sizeof perThread);
}

static void makeKey(void) {
  pthread_key_create(&perThreadKey, retirePerThread);
}

cudaError_t epStreamResolve(cudaStream_t handle, const char *func, cudaStream_t *out) {
  int device = epCurrentDevice();
  if (handle == NULL || handle == cudaStreamLegacy) {
    handle = legacyStream(device);
  } else if (handle == cudaStreamPerThread) {
    pthread_once(&perThreadOnce, makeKey);
    if (!perThread[device]) {
      perThread[device] = newStream(device, cudaStreamDefault, 0, false);
      pthread_setspecific(perThreadKey, perThread);
    }
    handle = perThread[device];
  } else {
    EP_CUDA_CHECK(((uintptr_t)handle & 7) == 0 && atomic_load(&handle->magic) == EP_STREAM_MAGIC,
                  cudaErrorInvalidResourceHandle, "%s: %p is not a live stream", func,
                  (void *)handle);
  }
  EP_CUDA_CHECK(handle, cudaErrorMemoryAllocation, "%s: no memory for a default stream", func);
  *out = handle;
  return cudaSuccess;
}

void epStreamsForEach(int device, void (*f)(cudaStream_t stream, void *data), void *data) {
  size_t count = 0, i = 0;
  pthread_mutex_lock(&listLock);
  for (cudaStream_t s = deviceStreams[device]; s; s = s->nextOfDevice) count++;
  cudaStream_t *all = malloc((count + 1) * sizeof *all);
  for (cudaStream_t s = deviceStreams[device]; s && all; s = s->nextOfDevice) all[i++] = s;
  pthread_mutex_unlock(&listLock);
  while (i > 0) f(all[--i], data);
  free(all);
}

/* ---- Making and ending streams ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *pStream, unsigned int flags, int priority) {
  EP_CUDA_CHECK(pStream && !(flags & ~1u), cudaErrorInvalidValue,
                "cudaStreamCreateWithPriority: flags 0x%x", flags);
  int clamped = priority > 0 ? 0 : priority < -5 ? -5 : priority;
  cudaStream_t s = newStream(epCurrentDevice(), flags, clamped, false);
  EP_CUDA_CHECK(s, cudaErrorMemoryAllocation, "no memory for a stream");
  *pStream = s;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *pStream, unsigned int flags) {
  return cudaStreamCreateWithPriority(pStream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *pStream) {
  return cudaStreamCreateWithPriority(pStream, cudaStreamDefault, 0);
}

/* In the child of a fork: the parent's streams and their threads are not here. */
void epStreamsForked(void) {
  pthread_mutex_init(&listLock, NULL);
  memset(deviceStreams, 0, sizeof deviceStreams);
  memset(legacyStreams, 0, sizeof legacyStreams);
  memset(perThread, 0, sizeof perThread);
  freeStreams = NULL;
  inHostFunc = 0;
}
