/* Shared by the files of host/: failures, waiting, memory, streams. The NCCL side is in
 * comm_internal.h.
 *
 * Objects behind handles (streams, events, graphs, communicators, windows) are recycled, never given
 * back to malloc, so a stale handle finds a dead magic instead of freed memory. */
#ifndef TREFOIL_HOST_INTERNAL_H
#define TREFOIL_HOST_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime.h>

#include "plan/clock.h"
#include "plan/doorbell.h"

/* ---- Failures (host_error.c): a sentence per thread, and CUDA's last error ---- */

cudaError_t epCudaFail(cudaError_t code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
#ifdef __clang_analyzer__ /* see plan/error.h */
#define epCudaFail(code, ...) (epCudaFail((code), __VA_ARGS__), (code))
#endif
/* The sentence alone, for callers with their own codes. */
void epSetSentenceV(const char *format, __builtin_va_list args);
void epSetSentence(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *epSentence(void);

#define EP_CUDA_CHECK(cond, code, ...)                                                             \
  do {                                                                                             \
    if (!(cond)) return epCudaFail((code), __VA_ARGS__);                                           \
  } while (0)
#define EP_CUDA_TRY(expr)                                                                          \
  do {                                                                                             \
    cudaError_t epTryError = (expr);                                                               \
    if (epTryError != cudaSuccess) return epTryError;                                              \
  } while (0)

/* ---- Randomness and settings (host_system.c) ---- */

/* Random bits that differ between processes and calls. */
uint64_t epRandom(void);
/* Random bytes that cannot be guessed; false: the system gives none. */
bool epRandomBytes(void *out, size_t bytes);
/* An environment variable as a number, or fallback if unset or not one. */
int64_t epEnvInt(const char *name, int64_t fallback);

/* ---- Memory (host_memory.c): segments of shared memory and the owner of each range ---- */

typedef enum {
  EP_MEM_DEVICE,
  EP_MEM_MANAGED,
  EP_MEM_HOST,       /* cudaMallocHost, cudaHostAlloc */
  EP_MEM_REGISTERED, /* the program's own memory, cudaHostRegister */
  EP_MEM_PEER        /* another process's segment, mapped here */
} ep_mem_kind_t;

typedef struct ep_mem {
  char *base;
  size_t bytes; /* as asked for */
  ep_mem_kind_t kind;
  int device;
  unsigned flags;
  uint64_t segment;     /* id, for other processes; 0 for EP_MEM_REGISTERED */
  size_t segmentOffset; /* of base */
} ep_mem_t;

cudaError_t epMemAlloc(void **ptr, size_t bytes, size_t align, ep_mem_kind_t kind, unsigned flags);
/* Frees a range that starts at ptr; `func` is for the sentence. Wrong kind: an error. */
cudaError_t epMemFree(void *ptr, bool hostSide, const char *func);
/* Notes a range that the allocator did not make (EP_MEM_REGISTERED, EP_MEM_PEER). */
cudaError_t epMemAdd(const ep_mem_t *mem);
bool epMemForget(void *base);
/* The allocation that contains ptr. */
bool epMemFind(const void *ptr, ep_mem_t *out);
/* ptr lies in memory that allocations were cut from, and in none that lives. */
bool epMemIsFree(const void *ptr);
/* Grows with every allocation that is made or freed. */
extern _Atomic uint64_t epMemChanges;
/* A duplicate of the segment's descriptor and its size, or -1. */
int epSegmentFd(uint64_t segment, size_t *bytes);
size_t epMemUsed(int device);
void epMemForked(void);

/* ---- Memory without a file (host_memfd.c) ---- */

/* A descriptor of that many bytes, all zero, sealed against shrinking and growing; -1 and errno. */
int epMemfdNew(const char *name, size_t bytes);
/* Whether a descriptor of somebody else's is such memory and holds so many bytes. */
bool epMemfdHolds(int fd, size_t bytes);

/* ---- Devices (host_device.c) ---- */

int epNumDevices(void);
int epCurrentDevice(void);
#define EP_DEVICE_BYTES ((size_t)80 << 30)

/* ---- Streams (host_stream.c) ---- */

typedef struct ep_stream_op ep_stream_op_t;
typedef struct ep_event_record ep_event_record_t;
typedef struct ep_capture ep_capture_t;

/* Depth slices of height rows of width bytes each. */
typedef struct {
  char *dst;
  const char *src;
  size_t dpitch, spitch, dslice, sslice, width, height, depth;
  enum cudaMemcpyKind kind;
} ep_copy_t;
typedef struct {
  char *dst;
  size_t pitch, slice, width, height, depth;
  int value;
} ep_fill_t;

/* One piece of work. `shared`, if any, is reference counted through retain and release, so that a
 * graph can run the same work many times. prepare is called when the work is issued (directly or by a
 * graph launch) and its result is handed to run. */
struct ep_stream_op {
  ep_stream_op_t *next;
  enum cudaGraphNodeType type;
  void (*run)(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket);
  uint64_t (*prepare)(ep_stream_op_t *op);
  void (*retain)(void *shared);
  void (*release)(void *shared);
  void *shared;
  uint64_t ticket;
  union {
    ep_copy_t copy;
    ep_fill_t fill;
    struct {
      cudaHostFn_t fn;
      cudaStreamCallback_t callback;
      void *data;
    } host;
    struct {
      cudaStream_t stream;
      uint64_t seq;
    } after;
    bool autoFree; /* of a graph's allocation: freed before the next launch allocates it again */
    void *ptr;
  } u;
};

#define EP_STREAM_MAGIC 0x57e4a001u
#define EP_DEAD_MAGIC   0xdeadbeefu

struct CUstream_st {
  _Atomic uint32_t magic;
  int device, priority;
  unsigned flags;
  uint64_t id;
  bool legacy;
  pthread_mutex_t lock; /* queue, running, worker, error */
  ep_stream_op_t *head, **tail;
  bool running;   /* a thread is executing the queue */
  bool hasWorker; /* the worker thread exists */
  bool recycle;   /* destroyed: recycle when drained */
  _Atomic uint64_t submitted, completed;
  _Atomic uint32_t wake, done, waiters; /* futex words: of the worker, of the waiters */
  cudaError_t error; /* of work that failed; the next synchronisation reports it */
  char sentence[512];
  ep_capture_t *capture;
  struct CUgraphNode_st **leaves; /* while capturing: what the next node comes after */
  size_t numLeaves;
  cudaStream_t nextOfDevice, nextFree;
};

/* NULL, cudaStreamLegacy, cudaStreamPerThread or a live stream -> the stream object. */
cudaError_t epStreamResolve(cudaStream_t handle, const char *func, cudaStream_t *out);
/* New work of a type, zeroed otherwise; NULL when out of memory. */
ep_stream_op_t *epOpNew(enum cudaGraphNodeType type,
                        void (*run)(ep_stream_op_t *, cudaStream_t, uint64_t));
void epOpFree(ep_stream_op_t *op);
/* Puts work on a resolved stream, or into its capture. Takes the op, also when it fails. */
cudaError_t epEnqueue(cudaStream_t stream, ep_stream_op_t *op, const char *func);
/* The same, and waits for it (not while capturing); returns the error of the stream's work, if any. */
cudaError_t epEnqueueAndWait(cudaStream_t stream, ep_stream_op_t *op, const char *func);
/* Waits until the stream's first seq pieces of work are done, executing them here if it can. */
void epStreamWaitSeq(cudaStream_t stream, uint64_t seq, bool mayRun);
/* The error of failed work, which is then forgotten. */
cudaError_t epStreamTakeError(cudaStream_t stream);
/* Called by running work. */
void epStreamSetError(cudaStream_t stream, cudaError_t error, const char *sentence);
/* Calls f for every stream of the device, the default ones included. */
void epStreamsForEach(int device, void (*f)(cudaStream_t stream, void *data), void *data);
void epStreamsForked(void);
/* Queued work still runs; then the object is free for the next stream. */
void epStreamRetire(cudaStream_t stream);
/* The device's legacy default stream, NULL: not used yet. */
cudaStream_t epStreamLegacy(int device);
/* Onto the queue. quiet: the caller waits for the stream at once and will run the work itself if no thread
 * does. */
void epStreamPush(cudaStream_t stream, ep_stream_op_t *op, bool quiet);
/* True while a host function of the program runs on this thread. */
bool epInHostFunc(void);
void epRunHost(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket);
void epRunAfter(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket);

/* ---- Copies (host_copy.c): checked and queued; sync: complete when it returns ---- */

cudaError_t epCopy(const ep_copy_t *copy, cudaStream_t stream, bool sync, const char *func);
cudaError_t epFill(const ep_fill_t *fill, cudaStream_t stream, bool sync, const char *func);

/* The names of programs built for the per-thread default stream; host_per_thread.c has the others. */
#pragma GCC visibility push(default)
__typeof__(cudaMemcpy) cudaMemcpy_ptds;
__typeof__(cudaMemcpy2D) cudaMemcpy2D_ptds;
__typeof__(cudaMemcpy3D) cudaMemcpy3D_ptds;
__typeof__(cudaMemcpy3DPeer) cudaMemcpy3DPeer_ptds;
__typeof__(cudaMemset) cudaMemset_ptds;
__typeof__(cudaMemset2D) cudaMemset2D_ptds;
__typeof__(cudaMemset3D) cudaMemset3D_ptds;
__typeof__(cudaMemcpyToSymbol) cudaMemcpyToSymbol_ptds;
__typeof__(cudaMemcpyFromSymbol) cudaMemcpyFromSymbol_ptds;
#pragma GCC visibility pop

/* ---- Events (host_event.c) ---- */

#define EP_EVENT_MAGIC 0x57e4a002u

struct CUevent_st {
  _Atomic uint32_t magic;
  unsigned flags;
  int device;
  pthread_mutex_t lock;
  ep_event_record_t *record;     /* last record; NULL before the first */
  uint64_t captureId;            /* last record was in this capture, or 0 */
  struct CUgraphNode_st **nodes; /* what that record comes after */
  size_t numNodes;
  cudaEvent_t nextFree;
};
cudaError_t epEventGet(cudaEvent_t event, const char *func);

/* ---- Capture and graphs (host_capture.c, host_graph.c) ---- */

#define EP_GRAPH_MAGIC 0x57e4a003u
#define EP_EXEC_MAGIC  0x57e4a004u
#define EP_NODE_MAGIC  0x57e4a005u

struct CUgraphNode_st {
  uint32_t magic;
  size_t idx;
  ep_stream_op_t *op; /* NULL: an empty node */
  struct CUgraphNode_st **deps;
  size_t numDeps;
};
/* References to user objects that a graph, or what was made from it, holds (host_user_object.c). */
typedef struct ep_user_refs {
  struct ep_user_refs *next;
  cudaUserObject_t object;
  uint64_t count;
} ep_user_refs_t;
bool epUserRefsCopy(const ep_user_refs_t *from, ep_user_refs_t **out);
void epUserRefsDrop(ep_user_refs_t *refs);
void epUserObjectsForked(void);

struct CUgraph_st {
  _Atomic uint32_t magic;
  struct CUgraphNode_st **nodes;
  size_t numNodes, maxNodes;
  ep_user_refs_t *objects;
  cudaGraph_t nextFree;
};

/* Appends work to the stream's capture. */
cudaError_t epCaptureAdd(cudaStream_t stream, ep_stream_op_t *op, const char *func);
/* stream joins the capture in which the event was recorded, and comes after it. */
cudaError_t epCaptureJoin(cudaStream_t stream, cudaEvent_t event, const char *func);
cudaError_t epCaptureRecord(cudaStream_t stream, cudaEvent_t event);
/* Marks the stream's capture invalid and fails. */
cudaError_t epCaptureBreak(cudaStream_t stream, cudaError_t code, const char *func);
/* Fails if this call may not be made now because of captures in this thread (or, in global mode,
 * elsewhere): allocations, synchronous copies, device-wide synchronisation. */
cudaError_t epCaptureForbids(const char *func);
/* Fails if work may not go to the legacy stream now. */
cudaError_t epCaptureForbidsLegacy(cudaStream_t legacy, const char *func);
bool epCapturing(cudaStream_t stream);
bool epDeviceCapturing(int device);
void epCaptureForked(void);
cudaGraph_t epGraphNew(void);
struct CUgraphNode_st *epGraphAdd(cudaGraph_t graph, ep_stream_op_t *op,
                                  struct CUgraphNode_st **deps, size_t numDeps);
void epGraphFree(cudaGraph_t graph);
bool epGraphHas(cudaGraph_t graph, const struct CUgraphNode_st *node);
cudaError_t epGraphGet(cudaGraph_t graph, const char *func);

/* ---- Pools (host_pool.c) and memory of graphs (host_graph_memory.c) ---- */

/* The memory is being freed: its pool no longer counts it. */
void epPoolForget(void *ptr);
void epPoolsForked(void);
/* cudaMallocAsync and cudaFreeAsync in a capture: nodes of its graph. */
cudaError_t epGraphMalloc(void **ptr, size_t bytes, cudaStream_t stream);
cudaError_t epGraphFreeNode(void *ptr, cudaStream_t stream);
/* Whether ptr is a graph's memory; if so it is given back, or *error says why it cannot be. */
bool epGraphMemFree(void *ptr, cudaError_t *error, const char *func);
void epGraphMemForked(void);

bool epHasLauncher(void); /* host_launch.c */

#endif
