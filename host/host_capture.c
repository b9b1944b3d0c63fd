/* Stream capture: between Begin and End, work issued on the stream, and on streams that join it through
 * an event, becomes nodes of a graph instead of running.
 *
 * A capturing stream keeps its leaves: the nodes the next one comes after. An event recorded there keeps
 * a copy of them, and a stream that waits for the event adds them to its own. A capture is broken by
 * what CUDA forbids meanwhile; EndCapture then fails and gives no graph. One lock covers it all; the
 * count of captures lets everything else pass without taking it. */
#include <stdlib.h>
#include <string.h>

#include "host_internal.h"

struct ep_capture {
  uint64_t id;
  cudaGraph_t graph;
  enum cudaStreamCaptureMode mode;
  pthread_t thread;
  cudaStream_t origin;
  bool broken;
  cudaStream_t *streams;
  size_t numStreams;
  ep_capture_t *next;
};

typedef struct CUgraphNode_st node_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ep_capture_t *captures;
static _Atomic int numCaptures;
static uint64_t lastId;
static _Thread_local enum cudaStreamCaptureMode threadMode = cudaStreamCaptureModeGlobal;

bool epCapturing(cudaStream_t stream) {
  if (!atomic_load_explicit(&numCaptures, memory_order_acquire)) return false;
  pthread_mutex_lock(&lock);
  bool capturing = stream->capture != NULL;
  pthread_mutex_unlock(&lock);
  return capturing;
}

bool epDeviceCapturing(int device) {
  if (!atomic_load(&numCaptures)) return false;
  pthread_mutex_lock(&lock);
  bool any = false;
  for (ep_capture_t *c = captures; c; c = c->next)
    for (size_t i = 0; i < c->numStreams; i++) any |= c->streams[i]->device == device;
  pthread_mutex_unlock(&lock);
  return any;
}

cudaError_t epCaptureForbids(const char *func) {
  if (!atomic_load_explicit(&numCaptures, memory_order_acquire)) return cudaSuccess;
  if (threadMode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool forbidden = false;
  pthread_mutex_lock(&lock);
  for (ep_capture_t *c = captures; c; c = c->next) {
    bool mine = pthread_equal(c->thread, pthread_self());
    if (mine
            ? c->mode != cudaStreamCaptureModeRelaxed
            : c->mode == cudaStreamCaptureModeGlobal && threadMode == cudaStreamCaptureModeGlobal) {
      forbidden = true;
      c->broken = true;
    }
  }
  pthread_mutex_unlock(&lock);
  EP_CUDA_CHECK(
      !forbidden, cudaErrorStreamCaptureUnsupported,
      "%s is not allowed while a stream captures (unless in relaxed mode); the capture is "
      "broken",
      func);
  return cudaSuccess;
}

cudaError_t epCaptureForbidsLegacy(cudaStream_t legacy, const char *func) {
  if (!atomic_load_explicit(&numCaptures, memory_order_acquire)) return cudaSuccess;
  bool forbidden = false;
  pthread_mutex_lock(&lock);
  for (ep_capture_t *c = captures; c; c = c->next)
    for (size_t i = 0; i < c->numStreams; i++)
      if (c->streams[i]->device == legacy->device &&
          !(c->streams[i]->flags & cudaStreamNonBlocking)) {
        forbidden = true;
        c->broken = true;
      }
  pthread_mutex_unlock(&lock);
  EP_CUDA_CHECK(
      !forbidden, cudaErrorStreamCaptureImplicit,
      "%s: the legacy default stream would wait for a stream that captures; the capture is "
      "broken",
      func);
  return cudaSuccess;
}

cudaError_t epCaptureBreak(cudaStream_t stream, cudaError_t code, const char *func) {
  pthread_mutex_lock(&lock);
  if (stream->capture) stream->capture->broken = true;
  pthread_mutex_unlock(&lock);
  return epCudaFail(code, "%s is not allowed on a stream that captures; the capture is broken",
                    func);
}

/* leaves |= nodes. False when out of memory. */
static bool addLeaves(cudaStream_t s, node_t **nodes, size_t count) {
  node_t **grown = realloc(s->leaves, (s->numLeaves + count + 1) * sizeof *grown);
  if (!grown) return false;
  s->leaves = grown;
  for (size_t i = 0; i < count; i++) {
    bool there = false;
    for (size_t j = 0; j < s->numLeaves; j++) there |= grown[j] == nodes[i];
    if (!there) grown[s->numLeaves++] = nodes[i];
  }
  return true;
}

static bool addStream(ep_capture_t *c, cudaStream_t s) {
  cudaStream_t *grown = realloc(c->streams, (c->numStreams + 1) * sizeof *grown);
  if (!grown) return false;
  c->streams = grown;
  grown[c->numStreams++] = s;
  s->capture = c;
  s->numLeaves = 0;
  return true;
}

cudaError_t epCaptureAdd(cudaStream_t stream, ep_stream_op_t *op, const char *func) {
  cudaError_t error = cudaSuccess;
  pthread_mutex_lock(&lock);
  ep_capture_t *c = stream->capture;
  node_t *node = NULL;
  if (!c || c->broken) {
    error = cudaErrorStreamCaptureInvalidated;
  } else if (!(node = epGraphAdd(c->graph, op, stream->leaves, stream->numLeaves))) {
    error = cudaErrorMemoryAllocation;
  } else {
    stream->numLeaves = 0;
    if (!addLeaves(stream, &node, 1)) c->broken = true;
  }
  pthread_mutex_unlock(&lock);
  if (error == cudaSuccess) return error;
  epOpFree(op);
  return epCudaFail(error, "%s: %s", func,
                    error == cudaErrorMemoryAllocation ? "out of memory"
                                                       : "an earlier call broke this capture");
}

cudaError_t epCaptureRecord(cudaStream_t stream, cudaEvent_t event) {
  pthread_mutex_lock(&lock);
  ep_capture_t *c = stream->capture;
  size_t count = stream->numLeaves;
  node_t **nodes = malloc((count + 1) * sizeof *nodes);
  bool good = c && !c->broken && nodes;
  if (good) {
    if (count) memcpy(nodes, stream->leaves, count * sizeof *nodes);
    pthread_mutex_lock(&event->lock);
    free(event->nodes);
    event->nodes = nodes;
    event->numNodes = count;
    event->captureId = c->id;
    pthread_mutex_unlock(&event->lock);
  } else {
    free(nodes);
  }
  pthread_mutex_unlock(&lock);
  EP_CUDA_CHECK(good, cudaErrorStreamCaptureInvalidated,
                "cudaEventRecord: an earlier call broke this capture");
  return cudaSuccess;
}

cudaError_t epCaptureJoin(cudaStream_t stream, cudaEvent_t event, const char *func) {
  cudaError_t error = cudaSuccess;
  pthread_mutex_lock(&lock);
  ep_capture_t *c = captures;
  while (c && c->id != event->captureId) c = c->next;
  if (!c) {
    error = cudaErrorCapturedEvent;
  } else if (stream->capture && stream->capture != c) {
    error = cudaErrorStreamCaptureMerge;
    c->broken = stream->capture->broken = true;
  } else if (stream->legacy) {
    error = cudaErrorStreamCaptureImplicit;
    c->broken = true;
  } else if (c->broken) {
    error = cudaErrorStreamCaptureInvalidated;
  } else if ((!stream->capture && !addStream(c, stream)) ||
             !addLeaves(stream, event->nodes, event->numNodes)) {
    error = cudaErrorMemoryAllocation;
  }
  pthread_mutex_unlock(&lock);
  if (error == cudaSuccess) return error;
  return epCudaFail(error, "%s: the event belongs to %s", func,
                    error == cudaErrorCapturedEvent        ? "a capture that has ended"
                    : error == cudaErrorStreamCaptureMerge ? "another capture"
                    : error == cudaErrorStreamCaptureImplicit
                        ? "a capture, which the legacy default stream cannot join"
                        : "a capture that cannot be joined");
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  cudaStream_t s;
  EP_CUDA_TRY(epStreamResolve(stream, "cudaStreamBeginCapture", &s));
  EP_CUDA_CHECK((unsigned)mode <= 2, cudaErrorInvalidValue, "cudaStreamBeginCapture: mode %d",
                (int)mode);
  EP_CUDA_CHECK(!s->legacy, cudaErrorStreamCaptureUnsupported,
                "cudaStreamBeginCapture: the legacy default stream cannot be captured");
  EP_CUDA_CHECK(!epCapturing(s), cudaErrorIllegalState,
                "cudaStreamBeginCapture: the stream is capturing already");
  ep_capture_t *c = calloc(1, sizeof *c);
  cudaGraph_t graph = c ? epGraphNew() : NULL;
  pthread_mutex_lock(&lock);
  bool good = graph && addStream(c, s);
  if (good) {
    c->id = ++lastId;
    c->graph = graph;
    c->mode = mode;
    c->thread = pthread_self();
    c->origin = s;
    c->next = captures;
    captures = c;
    atomic_fetch_add(&numCaptures, 1);
  }
  pthread_mutex_unlock(&lock);
  if (!good) {
    if (graph) epGraphFree(graph);
    free(c);
  }
  EP_CUDA_CHECK(good, cudaErrorMemoryAllocation, "cudaStreamBeginCapture: out of memory");
  return cudaSuccess;
}

/* Every node of the joined streams must come before the origin's leaves. */
static bool allJoined(ep_capture_t *c) {
  size_t count = c->graph->numNodes;
  bool *before = calloc(count + 1, sizeof *before), all = before != NULL;
  for (size_t i = 0; all && i < c->origin->numLeaves; i++) before[c->origin->leaves[i]->idx] = true;
  for (size_t i = count; all && i-- > 0;)
    for (size_t d = 0; before[i] && d < c->graph->nodes[i]->numDeps; d++)
      before[c->graph->nodes[i]->deps[d]->idx] = true;
  for (size_t i = 0; all && i < c->numStreams; i++)
    for (size_t j = 0; j < c->streams[i]->numLeaves; j++)
      all = all && before[c->streams[i]->leaves[j]->idx];
  free(before);
  return all;
}

static cudaError_t judge(ep_capture_t *c, cudaStream_t s) {
  if (!c) return cudaErrorIllegalState;
  if (c->origin != s) return cudaErrorStreamCaptureUnmatched;
  if (c->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(c->thread, pthread_self()))
    return cudaErrorStreamCaptureWrongThread;
  if (c->broken) return cudaErrorStreamCaptureInvalidated;
  return allJoined(c) ? cudaSuccess : cudaErrorStreamCaptureUnjoined;
}

static void endCapture(ep_capture_t *c) {
  for (size_t i = 0; i < c->numStreams; i++) {
    c->streams[i]->capture = NULL;
    c->streams[i]->numLeaves = 0;
  }
  ep_capture_t **at = &captures;
  while (*at != c) at = &(*at)->next;
  *at = c->next;
  atomic_fetch_sub(&numCaptures, 1);
  free(c->streams);
  free(c);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *pGraph) {
  cudaStream_t s;
  EP_CUDA_TRY(epStreamResolve(stream, "cudaStreamEndCapture", &s));
  EP_CUDA_CHECK(pGraph, cudaErrorInvalidValue, "cudaStreamEndCapture: pGraph is NULL");
  pthread_mutex_lock(&lock);
  ep_capture_t *c = s->capture;
  cudaError_t error = judge(c, s);
  cudaGraph_t graph = c ? c->graph : NULL;
  bool over =
      c && error != cudaErrorStreamCaptureUnmatched && error != cudaErrorStreamCaptureWrongThread;
  if (over) endCapture(c);
  pthread_mutex_unlock(&lock);
  if (error == cudaSuccess) {
    *pGraph = graph;
    return cudaSuccess;
  }
  if (over) {
    epGraphFree(graph);
    *pGraph = NULL;
  }
  return epCudaFail(
      error, "cudaStreamEndCapture: %s",
      error == cudaErrorIllegalState               ? "the stream is not capturing"
      : error == cudaErrorStreamCaptureUnmatched   ? "the capture began on another stream"
      : error == cudaErrorStreamCaptureWrongThread ? "the capture began in another thread"
      : error == cudaErrorStreamCaptureUnjoined ? "a stream that joined has work the first stream "
                                                  "does not wait for"
                                                : "an earlier call broke this capture");
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edgeData, size_t *numDependencies) {
  cudaStream_t s;
  EP_CUDA_CHECK(status, cudaErrorInvalidValue, "cudaStreamGetCaptureInfo: status is NULL");
  EP_CUDA_TRY(epStreamResolve(stream, "cudaStreamGetCaptureInfo", &s));
  if (s->legacy) EP_CUDA_TRY(epCaptureForbidsLegacy(s, "cudaStreamGetCaptureInfo"));
  pthread_mutex_lock(&lock);
  ep_capture_t *c = s->capture;
  *status = !c          ? cudaStreamCaptureStatusNone
            : c->broken ? cudaStreamCaptureStatusInvalidated
                        : cudaStreamCaptureStatusActive;
  bool active = *status == cudaStreamCaptureStatusActive;
  if (id && active) *id = c->id;
  if (graph && active) *graph = c->graph;
  if (dependencies && active) *dependencies = (const cudaGraphNode_t *)s->leaves;
  if (edgeData && active) *edgeData = NULL;
  if (numDependencies && active) *numDependencies = s->numLeaves;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  return cudaStreamGetCaptureInfo(stream, status, NULL, NULL, NULL, NULL, NULL);
}

/* What the stream's next node comes after: these nodes instead, or as well. */
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *dependencies,
                                                const cudaGraphEdgeData *dependencyData,
                                                size_t numDependencies, unsigned int flags) {
  const char *func = "cudaStreamUpdateCaptureDependencies";
  static const cudaGraphEdgeData plain;
  cudaStream_t s;
  EP_CUDA_TRY(epStreamResolve(stream, func, &s));
  EP_CUDA_CHECK(flags <= cudaStreamSetCaptureDependencies && (dependencies || !numDependencies),
                cudaErrorInvalidValue, "%s: flags are %u, or dependencies is NULL", func, flags);
  for (size_t i = 0; dependencyData && i < numDependencies; i++)
    EP_CUDA_CHECK(!memcmp(&dependencyData[i], &plain, sizeof plain), cudaErrorNotSupported,
                  "%s: edge data is not implemented", func);
  /* A copy: they may be the stream's own, as cudaStreamGetCaptureInfo shows them. */
  node_t **nodes = malloc((numDependencies + 1) * sizeof *nodes);
  EP_CUDA_CHECK(nodes, cudaErrorMemoryAllocation, "%s: out of memory", func);
  cudaError_t error = cudaSuccess;
  pthread_mutex_lock(&lock);
  if (numDependencies) memcpy(nodes, dependencies, numDependencies * sizeof *nodes);
  ep_capture_t *c = s->capture;
  if (!c) error = cudaErrorIllegalState;
  if (c && c->broken) error = cudaErrorStreamCaptureInvalidated;
  for (size_t i = 0; error == cudaSuccess && i < numDependencies; i++)
    if (!epGraphHas(c->graph, nodes[i])) error = cudaErrorInvalidValue;
  if (error == cudaSuccess) {
    size_t before = s->numLeaves;
    if (flags == cudaStreamSetCaptureDependencies) s->numLeaves = 0;
    if (!addLeaves(s, nodes, numDependencies)) {
      s->numLeaves = before;
      error = cudaErrorMemoryAllocation;
    }
  }
  pthread_mutex_unlock(&lock);
  free(nodes);
  if (error == cudaSuccess) return error;
  return epCudaFail(error, "%s: %s", func,
                    error == cudaErrorIllegalState ? "the stream is not capturing"
                    : error == cudaErrorStreamCaptureInvalidated
                        ? "an earlier call broke this capture"
                    : error == cudaErrorInvalidValue ? "a node is not of the stream's capture"
                                                     : "out of memory");
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  EP_CUDA_CHECK(mode && (unsigned)*mode <= 2, cudaErrorInvalidValue,
                "cudaThreadExchangeStreamCaptureMode: not a mode");
  enum cudaStreamCaptureMode old = threadMode;
  threadMode = *mode;
  *mode = old;
  return cudaSuccess;
}

void epCaptureForked(void) {
  pthread_mutex_init(&lock, NULL);
  captures = NULL;
  atomic_store(&numCaptures, 0);
}
