/* Memory that a graph allocates: cudaMallocAsync in a capture becomes a node. The address is chosen at the
 * capture and is the graph's as long as the graph, what was instantiated from it, or an allocation that
 * that is not freed is there. A launch that comes to the node allocates the memory; a node of the graph
 * frees it, or the program does, after the launch, with cudaFreeAsync or cudaFree. */
#include <search.h>
#include <stdlib.h>

#include "host_internal.h"

typedef struct {
  void *ptr;
  int refs; /* these under the lock */
  bool allocated;
} block_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *tree; /* of block_t, by ptr */

static int compareBlocks(const void *a, const void *b) {
  const char *x = ((const block_t *)a)->ptr, *y = ((const block_t *)b)->ptr;
  return x < y ? -1 : x > y;
}

/* Under the lock. */
static block_t *findBlock(void *ptr) {
  const block_t key = {ptr, 0, false};
  void *node = tree ? tfind(&key, &tree, compareBlocks) : NULL;
  return node ? *(block_t **)node : NULL;
}

static void retain(void *shared) {
  block_t *block = shared;
  pthread_mutex_lock(&lock);
  block->refs++;
  pthread_mutex_unlock(&lock);
}

static void release(void *shared) {
  block_t *block = shared;
  pthread_mutex_lock(&lock);
  bool last = --block->refs == 0;
  if (last) tdelete(block, &tree, compareBlocks);
  pthread_mutex_unlock(&lock);
  if (!last) return;
  (void)epMemFree(block->ptr, false, "cudaGraphDestroy");
  free(block);
}

static void runAlloc(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)ticket;
  block_t *block = op->shared;
  pthread_mutex_lock(&lock);
  bool twice = block->allocated && !op->u.autoFree;
  if (!block->allocated) block->refs++;
  block->allocated = true;
  pthread_mutex_unlock(&lock);
  if (twice) {
    epSetSentence("cudaGraphLaunch: the graph's memory at %p was not freed since the launch before",
                  block->ptr);
    epStreamSetError(stream, cudaErrorInvalidValue, epSentence());
  }
}

static bool giveBack(block_t *block) {
  pthread_mutex_lock(&lock);
  bool was = block->allocated;
  block->allocated = false;
  pthread_mutex_unlock(&lock);
  if (was) release(block);
  return was;
}

static void runFree(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)ticket;
  block_t *block = op->shared;
  if (giveBack(block)) return;
  epSetSentence("cudaGraphLaunch: the graph's memory at %p was freed before", block->ptr);
  epStreamSetError(stream, cudaErrorInvalidValue, epSentence());
}

cudaError_t epGraphMalloc(void **ptr, size_t bytes, cudaStream_t stream) {
  EP_CUDA_CHECK(bytes, cudaErrorInvalidValue, "cudaMallocAsync: 0 bytes in a capture");
  ep_stream_op_t *op = epOpNew(cudaGraphNodeTypeMemAlloc, runAlloc);
  block_t *block = op ? calloc(1, sizeof *block) : NULL;
  if (!block) free(op);
  EP_CUDA_CHECK(block, cudaErrorMemoryAllocation, "cudaMallocAsync: out of memory");
  int current = epCurrentDevice();
  (void)cudaSetDevice(stream->device);
  cudaError_t error = epMemAlloc(&block->ptr, bytes, 256, EP_MEM_DEVICE, 0);
  (void)cudaSetDevice(current);
  if (error != cudaSuccess) {
    free(op);
    free(block);
    return error;
  }
  void *made = block->ptr;
  block->refs = 1;
  pthread_mutex_lock(&lock);
  bool isKept = tsearch(block, &tree, compareBlocks) != NULL;
  pthread_mutex_unlock(&lock);
  if (!isKept) {
    (void)epMemFree(made, false, "cudaMallocAsync");
    free(op);
    free(block);
    return epCudaFail(cudaErrorMemoryAllocation, "cudaMallocAsync: out of memory");
  }
  op->shared = block;
  op->retain = retain;
  op->release = release;
  EP_CUDA_TRY(epEnqueue(stream, op, "cudaMallocAsync"));
  *ptr = made;
  return cudaSuccess;
}

cudaError_t epGraphFreeNode(void *ptr, cudaStream_t stream) {
  ep_stream_op_t *op = epOpNew(cudaGraphNodeTypeMemFree, runFree);
  EP_CUDA_CHECK(op, cudaErrorMemoryAllocation, "cudaFreeAsync: out of memory");
  pthread_mutex_lock(&lock);
  block_t *block = findBlock(ptr);
  if (block) block->refs++;
  pthread_mutex_unlock(&lock);
  if (!block) {
    free(op);
    return epCudaFail(cudaErrorInvalidValue,
                      "cudaFreeAsync: %p was not allocated in a capture, so a capture cannot free "
                      "it",
                      ptr);
  }
  op->shared = block;
  op->retain = retain;
  op->release = release;
  return epEnqueue(stream, op, "cudaFreeAsync");
}

bool epGraphMemFree(void *ptr, cudaError_t *error, const char *func) {
  pthread_mutex_lock(&lock);
  block_t *block = findBlock(ptr);
  if (block) block->refs++;
  pthread_mutex_unlock(&lock);
  *error = cudaSuccess;
  if (!block) return false;
  if (!giveBack(block))
    *error = epCudaFail(cudaErrorInvalidValue,
                        "%s: %p is a graph's memory, which no launch has allocated", func, ptr);
  release(block); // NOLINT(clang-analyzer-unix.Malloc): counted, this reference is its own
  return true;
}

void epGraphMemForked(void) {
  pthread_mutex_init(&lock, NULL);
  tree = NULL;
}
