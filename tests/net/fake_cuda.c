/* A stand-in for CUDA's driver (libcuda.so.1), as far as net/ uses it. Memory of the "GPU" is a memfd; its
 * addresses cannot be touched by the host, only by copies. A stream is a thread that works late. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define DRIVER __attribute__((visibility("default")))
#define F(name, ...)                                                                               \
  DRIVER int name(__VA_ARGS__);                                                                    \
  DRIVER int name(__VA_ARGS__)
enum { MAX_RANGES = 256, IMPORTED = 100000, ROOM = 4096 };

/* Addresses of the device, and where their bytes are. */
typedef struct {
  char *at, *bytes;
  size_t span;
  int fd, shareable;
} range_t;
static range_t ranges[MAX_RANGES];
static pthread_mutex_t rangesLock = PTHREAD_MUTEX_INITIALIZER;

static range_t *rangeOf(uint64_t address) {
  for (range_t *r = ranges; r < ranges + MAX_RANGES; r++)
    if (r->at && address - (uint64_t)(uintptr_t)r->at < r->span) return r;
  return NULL;
}

static char *bytesAt(uint64_t address) {
  pthread_mutex_lock(&rangesLock);
  range_t *r = rangeOf(address);
  char *found = r ? r->bytes + (address - (uint64_t)(uintptr_t)r->at) : (char *)(uintptr_t)address;
  pthread_mutex_unlock(&rangesLock);
  return found;
}

static int addRange(char *at, size_t span, int fd, int shareable) {
  char *bytes = mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  pthread_mutex_lock(&rangesLock);
  range_t *r = ranges;
  while (r < ranges + MAX_RANGES && r->at) r++;
  if (r < ranges + MAX_RANGES) *r = (range_t){at, bytes, span, fd, shareable};
  pthread_mutex_unlock(&rangesLock);
  return r < ranges + MAX_RANGES && bytes != MAP_FAILED ? 0 : 2;
}

/* For tests: memory of the GPU, and its bytes for the host. */
F(fakeAlloc, size_t span, int shareable, void **device, void **host) {
  int fd = memfd_create("gpu", 0);
  *device = mmap(NULL, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fd < 0 || ftruncate(fd, (off_t)span) || addRange(*device, span, fd, shareable)) return 2;
  *host = bytesAt((uint64_t)(uintptr_t)*device);
  return 0;
}

/* ---- Streams ---- */

typedef struct {
  char *to, *from;
  size_t bytes;
  uint64_t value; /* written if from is NULL */
} work_t;

typedef struct {
  pthread_t thread;
  pthread_mutex_t lock;
  work_t work[ROOM];
  uint64_t posted, done;
  int end;
} stream_t;

static void doWork(const work_t *w) {
  if (w->from)
    memcpy(w->to, w->from, w->bytes);
  else
    __atomic_store_n((uint64_t *)(void *)w->to, w->value, __ATOMIC_RELEASE);
}

static void *serve(void *argument) {
  stream_t *s = argument;
  for (int end = 0; !end;) {
    pthread_mutex_lock(&s->lock);
    int idle = s->posted == s->done;
    work_t next = s->work[s->done % ROOM];
    end = s->end && idle;
    pthread_mutex_unlock(&s->lock);
    nanosleep(&(struct timespec){0, idle ? 50000 : 1000}, NULL);
    if (idle) continue;
    doWork(&next);
    pthread_mutex_lock(&s->lock);
    s->done++;
    pthread_mutex_unlock(&s->lock);
  }
  return NULL;
}

static int post(void *stream, work_t work) {
  stream_t *s = stream;
  pthread_mutex_lock(&s->lock);
  int full = s->posted - s->done == ROOM;
  if (!full) s->work[s->posted++ % ROOM] = work;
  pthread_mutex_unlock(&s->lock);
  return full ? 2 : 0;
}

F(cuStreamCreateWithPriority, void **stream, unsigned flags, int priority) {
  (void)flags, (void)priority;
  stream_t *s = calloc(1, sizeof *s);
  pthread_mutex_init(&s->lock, NULL);
  *stream = s;
  return pthread_create(&s->thread, NULL, serve, s);
}

F(cuStreamSynchronize, void *stream) {
  stream_t *s = stream;
  for (int busy = 1; busy;) {
    pthread_mutex_lock(&s->lock);
    busy = s->posted != s->done;
    pthread_mutex_unlock(&s->lock);
    nanosleep(&(struct timespec){0, 1000}, NULL);
  }
  return 0;
}

F(cuStreamDestroy_v2, void *stream) {
  stream_t *s = stream;
  pthread_mutex_lock(&s->lock);
  s->end = 1;
  pthread_mutex_unlock(&s->lock);
  pthread_join(s->thread, NULL);
  free(s);
  return 0;
}

F(cuMemcpyAsync, uint64_t to, uint64_t from, size_t bytes, void *stream) {
  return post(stream, (work_t){bytesAt(to), bytesAt(from), bytes, 0});
}
F(cuStreamWriteValue64_v2, void *stream, uint64_t at, uint64_t value, unsigned flags) {
  return flags ? 1 : post(stream, (work_t){bytesAt(at), NULL, 8, value});
}

/* ---- Events ---- */

typedef struct {
  stream_t *stream;
  uint64_t posted; /* before it was recorded */
} event_t;

F(cuEventCreate, void **event, unsigned flags) {
  return *event = calloc(1, sizeof(event_t)), flags == 2 ? 0 : 1;
}
F(cuEventRecord, void *event, void *stream) {
  stream_t *s = stream;
  pthread_mutex_lock(&s->lock);
  *(event_t *)event = (event_t){s, s->posted};
  pthread_mutex_unlock(&s->lock);
  return 0;
}
static __thread int captureMode; /* 0: as if another thread captured in the global mode */
F(cuThreadExchangeStreamCaptureMode, int *mode) {
  int before = captureMode;
  captureMode = *mode;
  return *mode = before, 0;
}
F(cuEventQuery, void *event) {
  if (captureMode != 2) return 900;
  const event_t *e = event;
  pthread_mutex_lock(&e->stream->lock);
  int ready = e->stream->done >= e->posted;
  pthread_mutex_unlock(&e->stream->lock);
  return ready ? 0 : 600;
}
F(cuEventDestroy_v2, void *event) {
  return free(event), 0;
}

/* ---- Contexts and memory ---- */

static __thread void *current; /* a progress thread has none */
F(cuCtxSetCurrent, void *context) {
  return current = context, 0;
}
F(cuCtxGetCurrent, void **context) {
  return *context = current, 0;
}
F(cuCtxGetDevice, int *device) {
  return *device = 0, current ? 0 : 201;
}
F(cuCtxGetStreamPriorityRange, int *low, int *high) {
  return *low = 0, *high = -5, 0;
}
F(cuMemHostAlloc, void **out, size_t bytes, unsigned flags) {
  return *out = calloc(1, bytes), flags == 3 && current ? 0 : 1;
}
F(cuMemFreeHost, void *memory) {
  return free(memory), 0;
}
F(cuMemGetAddressRange_v2, uint64_t *base, size_t *span, uint64_t address) {
  range_t *r = rangeOf(address);
  if (!r) return 1;
  *base = (uint64_t)(uintptr_t)r->at;
  *span = r->span;
  return 0;
}
F(cuMemRetainAllocationHandle, uint64_t *handle, void *address) {
  range_t *r = rangeOf((uint64_t)(uintptr_t)address);
  *handle = r ? (uint64_t)(r - ranges) : 0;
  return r ? 0 : 1;
}
F(cuMemExportToShareableHandle, void *out, uint64_t handle, int type, unsigned long long flags) {
  if (type != 1 || flags || !ranges[handle].shareable) return 801;
  int fd = dup(ranges[handle].fd);
  memcpy(out, &fd, sizeof fd);
  return fd < 0;
}
F(cuMemImportFromShareableHandle, uint64_t *handle, void *descriptor, int type) {
  *handle = IMPORTED + (uint64_t)dup((int)(intptr_t)descriptor);
  return type != 1;
}
F(cuMemRelease, uint64_t handle) {
  return handle >= IMPORTED ? close((int)(handle - IMPORTED)) : 0;
}
F(cuMemAddressReserve, uint64_t *at, size_t span, size_t align, uint64_t hint,
  unsigned long long flags) {
  (void)align, (void)hint, (void)flags;
  *at = (uint64_t)(uintptr_t)mmap(NULL, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return 0;
}
F(cuMemAddressFree, uint64_t at, size_t span) {
  return munmap((void *)(uintptr_t)at, span);
}
F(cuMemMap, uint64_t at, size_t span, size_t offset, uint64_t handle, unsigned long long flags) {
  return offset || flags ? 1
                         : addRange((char *)(uintptr_t)at, span, dup((int)(handle - IMPORTED)), 0);
}
F(cuMemUnmap, uint64_t at, size_t span) {
  range_t *r = rangeOf(at);
  if (!r || r->span != span) return 1;
  munmap(r->bytes, span);
  close(r->fd);
  return r->at = NULL, 0;
}
F(cuMemSetAccess, uint64_t at, size_t span, const int *access, size_t count) {
  return rangeOf(at) && span && count == 1 && access[0] == 1 && access[2] == 3 ? 0 : 1;
}
