#include "net_cuda.h"

#include <dlfcn.h>
#include <stdlib.h>

#include "net_settings.h"

/* CUDA's driver interface as far as it is used, by its documented values. */
typedef struct {
  int type, device, access;
} access_t; /* CUmemAccessDesc */
enum {
  NON_BLOCKING = 1,
  NO_TIMING = 2,
  PORTABLE_MAPPED = 3,
  POSIX_DESCRIPTOR = 1,
  DEVICE = 1,
  READ_WRITE = 3
};
enum { EVENTS = 64 };

#define FUNCTIONS(X)                                                                               \
  X(cuCtxGetCurrent, (void **))                                                                    \
  X(cuCtxSetCurrent, (void *))                                                                     \
  X(cuCtxGetDevice, (int *))                                                                       \
  X(cuCtxGetStreamPriorityRange, (int *, int *))                                                   \
  X(cuStreamCreateWithPriority, (void **, unsigned, int))                                          \
  X(cuStreamDestroy_v2, (void *))                                                                  \
  X(cuStreamSynchronize, (void *))                                                                 \
  X(cuStreamWriteValue64_v2, (void *, uint64_t, uint64_t, unsigned))                               \
  X(cuMemcpyAsync, (uint64_t, uint64_t, size_t, void *))                                           \
  X(cuThreadExchangeStreamCaptureMode, (int *))                                                    \
  X(cuEventCreate, (void **, unsigned))                                                            \
  X(cuEventRecord, (void *, void *))                                                               \
  X(cuEventQuery, (void *))                                                                        \
  X(cuEventDestroy_v2, (void *))                                                                   \
  X(cuMemHostAlloc, (void **, size_t, unsigned))                                                   \
  X(cuMemFreeHost, (void *))                                                                       \
  X(cuMemGetAddressRange_v2, (uint64_t *, size_t *, uint64_t))                                     \
  X(cuMemRetainAllocationHandle, (uint64_t *, void *))                                             \
  X(cuMemExportToShareableHandle, (void *, uint64_t, int, unsigned long long))                     \
  X(cuMemImportFromShareableHandle, (uint64_t *, void *, int))                                     \
  X(cuMemRelease, (uint64_t))                                                                      \
  X(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, unsigned long long))               \
  X(cuMemAddressFree, (uint64_t, size_t))                                                          \
  X(cuMemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long))                            \
  X(cuMemUnmap, (uint64_t, size_t))                                                                \
  X(cuMemSetAccess, (uint64_t, size_t, const access_t *, size_t))

typedef struct {
  void *stream;
  uint32_t issued, finished; /* copies */
  void *events[EVENTS];      /* of copy i at i modulo EVENTS, or of a later one; NULL at first */
} stream_t;

struct ep_net_cuda {
  void *library, *context;
  int device, numStreams;
  stream_t *streams;
#define X(name, arguments) int(*name) arguments;
  FUNCTIONS(X)
#undef X
};

static int failed(int code, const char *name, char *why) {
  return epNetFail(why, "the CUDA driver's %s returned %d", name, code);
}
/* Calls a function of the driver. */
#define CALL(name, ...)                                                                            \
  do {                                                                                             \
    int code_ = cuda->name(__VA_ARGS__);                                                           \
    if (code_) return failed(code_, #name, why);                                                   \
  } while (0)

static int load(ep_net_cuda_t *cuda, char *why) {
  cuda->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!cuda->library) return epNetFail(why, "the CUDA driver cannot be loaded: %s", dlerror());
#define X(name, arguments)                                                                         \
  *(void **)&cuda->name = dlsym(cuda->library, #name);                                             \
  if (!cuda->name) return epNetFail(why, "the CUDA driver lacks %s: it is too old", #name);
  FUNCTIONS(X)
#undef X
  return 0;
}

static int makeStreams(ep_net_cuda_t *cuda, int numStreams, char *why) {
  int least, greatest;
  cuda->streams = calloc((size_t)numStreams, sizeof *cuda->streams);
  if (!cuda->streams) return epNetFail(why, "no memory for streams of the network");
  CALL(cuCtxGetStreamPriorityRange, &least, &greatest);
  for (; cuda->numStreams < numStreams; cuda->numStreams++)
    CALL(cuStreamCreateWithPriority, &cuda->streams[cuda->numStreams].stream, NON_BLOCKING,
         greatest);
  return 0;
}

static int start(ep_net_cuda_t *cuda, int numStreams, char *why) {
  if (load(cuda, why)) return -1;
  CALL(cuCtxGetCurrent, &cuda->context);
  if (!cuda->context)
    return epNetFail(why, "memory of a GPU is registered by a thread without a CUDA context");
  CALL(cuCtxGetDevice, &cuda->device);
  return makeStreams(cuda, numStreams, why);
}

int epNetCudaOpen(int numStreams, ep_net_cuda_t **out, char *why) {
  ep_net_cuda_t *cuda = calloc(1, sizeof *cuda);
  if (!cuda) return epNetFail(why, "no memory for streams of the network");
  if (!start(cuda, numStreams, why)) {
    *out = cuda;
    return 0;
  }
  epNetCudaClose(cuda);
  return -1;
}

static void closeStream(ep_net_cuda_t *cuda, stream_t *s) {
  cuda->cuStreamSynchronize(s->stream);
  for (int i = 0; i < EVENTS; i++)
    if (s->events[i]) cuda->cuEventDestroy_v2(s->events[i]);
  cuda->cuStreamDestroy_v2(s->stream);
}

void epNetCudaClose(ep_net_cuda_t *cuda) {
  if (!cuda) return;
  for (int i = 0; i < cuda->numStreams; i++) {
    closeStream(cuda, &cuda->streams[i]);
  }
  if (cuda->library) dlclose(cuda->library);
  free(cuda->streams);
  free(cuda);
}

int epNetCudaEnter(ep_net_cuda_t *cuda, char *why) {
  void *current = NULL;
  CALL(cuCtxGetCurrent, &current);
  if (current != cuda->context) CALL(cuCtxSetCurrent, cuda->context);
  return 0;
}

int epNetCudaExchangeMode(ep_net_cuda_t *cuda, int *mode, char *why) {
  CALL(cuThreadExchangeStreamCaptureMode, mode);
  return 0;
}

/* ---- Copies ---- */

/* An event, which the next copy does not wait for, as it does for a number written behind a copy. */
int epNetCudaCopy(ep_net_cuda_t *cuda, int stream, uint64_t to, uint64_t from, size_t bytes,
                  uint32_t *ticket, char *why) {
  stream_t *s = &cuda->streams[stream];
  void **event = &s->events[(s->issued + 1) % EVENTS];
  if (!*event) CALL(cuEventCreate, event, NO_TIMING);
  CALL(cuMemcpyAsync, to, from, bytes, s->stream);
  CALL(cuEventRecord, *event, s->stream);
  *ticket = ++s->issued;
  return 0;
}

bool epNetCudaFinished(ep_net_cuda_t *cuda, int stream, uint32_t ticket) {
  stream_t *s = &cuda->streams[stream];
  while ((int32_t)(s->finished - ticket) < 0 &&
         !cuda->cuEventQuery(s->events[(s->finished + 1) % EVENTS]))
    s->finished++;
  return (int32_t)(s->finished - ticket) >= 0;
}

int epNetCudaWrite(ep_net_cuda_t *cuda, int stream, uint64_t at, uint64_t value, char *why) {
  CALL(cuStreamWriteValue64_v2, cuda->streams[stream].stream, at, value, 0);
  return 0;
}

int epNetCudaPinned(ep_net_cuda_t *cuda, size_t bytes, void **out, char *why) {
  CALL(cuMemHostAlloc, out, bytes, PORTABLE_MAPPED);
  return 0;
}

void epNetCudaUnpin(ep_net_cuda_t *cuda, void *memory) {
  cuda->cuMemFreeHost(memory);
}

/* ---- Memory of other processes ---- */

int epNetCudaExport(ep_net_cuda_t *cuda, uint64_t address, ep_net_share_t *out, char *why) {
  uint64_t base, handle;
  size_t span;
  *out = (ep_net_share_t){.descriptor = -1};
  if (cuda->cuMemGetAddressRange_v2(&base, &span, address))
    return 0; /* pinned memory of the host */
  *out = (ep_net_share_t){-1, span, address - base};
  if (cuda->cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)base)) return 0;
  if (cuda->cuMemExportToShareableHandle(&out->descriptor, handle, POSIX_DESCRIPTOR, 0))
    out->descriptor = -1; /* made without the wish to share it */
  CALL(cuMemRelease, handle);
  return 0;
}

static int map(ep_net_cuda_t *cuda, uint64_t base, uint64_t span, uint64_t handle, char *why) {
  const access_t all = {DEVICE, cuda->device, READ_WRITE};
  CALL(cuMemMap, base, span, 0, handle, 0);
  int code = cuda->cuMemSetAccess(base, span, &all, 1);
  if (!code) return 0;
  cuda->cuMemUnmap(base, span);
  return failed(code, "cuMemSetAccess (are the GPUs peers?)", why);
}

static int reserveAndMap(ep_net_cuda_t *cuda, uint64_t span, uint64_t handle, uint64_t *base,
                         char *why) {
  CALL(cuMemAddressReserve, base, span, 0, 0, 0);
  if (!map(cuda, *base, span, handle, why)) return 0;
  cuda->cuMemAddressFree(*base, span);
  return -1;
}

int epNetCudaImport(ep_net_cuda_t *cuda, const ep_net_share_t *share, uint64_t *base, char *why) {
  uint64_t handle;
  void *descriptor = (void *)(intptr_t)share->descriptor;
  CALL(cuMemImportFromShareableHandle, &handle, descriptor, POSIX_DESCRIPTOR);
  int result = reserveAndMap(cuda, share->span, handle, base, why);
  cuda->cuMemRelease(handle);
  return result;
}

void epNetCudaUnmap(ep_net_cuda_t *cuda, uint64_t base, uint64_t span) {
  cuda->cuMemUnmap(base, span);
  cuda->cuMemAddressFree(base, span);
}
