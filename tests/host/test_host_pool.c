/* Memory pools, and memory that a graph allocates. */
#include <stdbool.h>

#include <cuda_runtime.h>

#include "test.h"
#include "trefoil_host.h"

#define OK(call)       REQUIRE((call) == cudaSuccess, "%s: %s", #call, trefoilHostLastError())
#define IS(call, code) CHECK((call) == (code), "%s: %s", #call, trefoilHostLastError())

static uint64_t attribute(cudaMemPool_t pool, enum cudaMemPoolAttr attr) {
  uint64_t value = 77;
  IS(cudaMemPoolGetAttribute(pool, attr, &value), cudaSuccess);
  return value;
}

static cudaError_t makePool(cudaMemPool_t *pool, int device, size_t maxSize) {
  struct cudaMemPoolProps props;
  memset(&props, 0, sizeof props);
  props.allocType = cudaMemAllocationTypePinned;
  props.location.type = cudaMemLocationTypeDevice;
  props.location.id = device;
  props.maxSize = maxSize;
  return cudaMemPoolCreate(pool, &props);
}

TEST(a_pool_counts_what_it_allocates) {
  cudaMemPool_t pool, other;
  cudaStream_t s;
  char *a, *b, *c;
  OK(cudaStreamCreate(&s));
  OK(makePool(&pool, 2, 4096));
  OK(cudaMallocFromPoolAsync((void **)&a, 1000, pool, s));
  OK(cudaMallocFromPoolAsync((void **)&b, 500, pool, s));
  struct cudaPointerAttributes attributes;
  OK(cudaPointerGetAttributes(&attributes, a));
  CHECK(attributes.device == 2, "memory of device %d", attributes.device);
  CHECK(attribute(pool, cudaMemPoolAttrUsedMemCurrent) == 1500, "two allocations");
  IS(cudaMallocFromPoolAsync((void **)&c, 4000, pool, s), cudaErrorMemoryAllocation);
  CHECK(attribute(pool, cudaMemPoolAttrUsedMemCurrent) == 1500, "a refused allocation counts not");
  OK(cudaFreeAsync(a, s));
  OK(cudaStreamSynchronize(s));
  CHECK(attribute(pool, cudaMemPoolAttrUsedMemCurrent) == 500, "one is left");
  CHECK(attribute(pool, cudaMemPoolAttrUsedMemHigh) == 1500, "the most");
  uint64_t zero = 0, threshold = UINT64_MAX, one = 1;
  OK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &zero));
  CHECK(attribute(pool, cudaMemPoolAttrUsedMemHigh) == 500, "the most since it was set back");
  IS(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &one), cudaErrorInvalidValue);
  IS(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &zero), cudaErrorInvalidValue);
  OK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
  CHECK(attribute(pool, cudaMemPoolAttrReleaseThreshold) == threshold, "it is kept");
  int no = 0, reuse = 7;
  OK(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowOpportunistic, &no));
  OK(cudaMemPoolGetAttribute(pool, cudaMemPoolReuseAllowOpportunistic, &reuse));
  CHECK(reuse == 0, "%d", reuse);
  OK(cudaMemPoolTrimTo(pool, 0));
  OK(cudaMemPoolDestroy(pool)); /* b is still there */
  IS(cudaMemPoolTrimTo(pool, 0), cudaErrorInvalidValue);
  IS(cudaMallocFromPoolAsync((void **)&a, 10, pool, s), cudaErrorInvalidValue);
  OK(cudaMemset(b, 1, 500));
  OK(cudaDeviceSynchronize()); /* freeing waits for the work of device 2 alone */
  OK(makePool(&other, 1, 0));
  CHECK(other != pool, "a pool with memory is not used again");
  OK(cudaFree(b));
  OK(cudaMemPoolDestroy(other));
  OK(cudaStreamDestroy(s));
}

TEST(a_device_has_a_pool_of_its_own_and_one_it_uses) {
  cudaMemPool_t own, current, pool;
  cudaStream_t s;
  char *a;
  OK(cudaStreamCreate(&s));
  OK(cudaDeviceGetDefaultMemPool(&own, 0));
  OK(cudaDeviceGetMemPool(&current, 0));
  CHECK(own == current, "the default pool is used at first");
  IS(cudaMemPoolDestroy(own), cudaErrorInvalidValue);
  uint64_t before = attribute(own, cudaMemPoolAttrUsedMemCurrent);
  OK(makePool(&pool, 0, 0));
  IS(cudaDeviceSetMemPool(1, pool), cudaErrorInvalidValue);
  OK(cudaDeviceSetMemPool(0, pool));
  OK(cudaMallocAsync((void **)&a, 100, s));
  CHECK(attribute(pool, cudaMemPoolAttrUsedMemCurrent) == 100, "not from the chosen pool");
  CHECK(attribute(own, cudaMemPoolAttrUsedMemCurrent) == before, "from the default pool");
  OK(cudaFreeAsync(a, s));
  OK(cudaStreamSynchronize(s));
  OK(cudaMemPoolDestroy(pool));
  OK(cudaDeviceGetMemPool(&current, 0));
  CHECK(own == current, "the default pool is used again");
  IS(cudaDeviceGetMemPool(&current, 99), cudaErrorInvalidDevice);
  OK(cudaStreamDestroy(s));
}

TEST(pools_that_cannot_be_are_refused) {
  cudaMemPool_t pool;
  struct cudaMemPoolProps props;
  memset(&props, 0, sizeof props);
  IS(cudaMemPoolCreate(&pool, &props), cudaErrorNotSupported);
  props.allocType = cudaMemAllocationTypePinned;
  props.location.type = cudaMemLocationTypeDevice;
  props.handleTypes = cudaMemHandleTypePosixFileDescriptor;
  IS(cudaMemPoolCreate(&pool, &props), cudaErrorNotSupported);
  props.handleTypes = cudaMemHandleTypeNone;
  props.location.id = 64;
  IS(cudaMemPoolCreate(&pool, &props), cudaErrorInvalidDevice);
  props.location.id = 0;
  OK(cudaMemPoolCreate(&pool, &props));
  struct cudaMemAccessDesc access = {{cudaMemLocationTypeDevice, 0}, cudaMemAccessFlagsProtNone};
  IS(cudaMemPoolSetAccess(pool, &access, 1), cudaErrorInvalidDevice);
  access.location.id = 3;
  OK(cudaMemPoolSetAccess(pool, &access, 1));
  enum cudaMemAccessFlags flags;
  OK(cudaMemPoolGetAccess(&flags, pool, &access.location));
  CHECK(flags == cudaMemAccessFlagsProtReadWrite, "memory is everywhere");
  OK(cudaMemPoolDestroy(pool));
}

/* A graph that allocates, fills, copies to `out`, and frees if it is told to. */
static void capture(cudaStream_t s, char *out, char **inside, bool frees, cudaGraph_t *graph) {
  OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  OK(cudaMallocAsync((void **)inside, 1000, s));
  OK(cudaMemsetAsync(*inside, 0x5a, 1000, s));
  OK(cudaMemcpyAsync(out, *inside, 1000, cudaMemcpyDefault, s));
  if (frees) OK(cudaFreeAsync(*inside, s));
  OK(cudaStreamEndCapture(s, graph));
}

TEST(a_graph_allocates_and_frees) {
  cudaStream_t s;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  char *out, *inside = NULL;
  size_t before, after, total;
  OK(cudaStreamCreate(&s));
  OK(cudaMalloc((void **)&out, 1000));
  OK(cudaMemGetInfo(&before, &total));
  capture(s, out, &inside, true, &graph);
  enum cudaGraphNodeType type;
  cudaGraphNode_t nodes[4];
  size_t count = 4;
  OK(cudaGraphGetNodes(graph, nodes, &count));
  OK(cudaGraphNodeGetType(nodes[0], &type));
  CHECK(count == 4 && type == cudaGraphNodeTypeMemAlloc, "%zu nodes, type %d", count, (int)type);
  OK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; i++) {
    char byte = 0;
    OK(cudaMemset(out, 0, 1000));
    OK(cudaGraphLaunch(exec, s));
    OK(cudaStreamSynchronize(s));
    OK(cudaMemcpy(&byte, out + 999, 1, cudaMemcpyDefault));
    CHECK(byte == 0x5a, "launch %d: 0x%x", i, byte);
  }
  IS(cudaFreeAsync(inside, s), cudaSuccess); /* queued; the graph has freed it already */
  IS(cudaStreamSynchronize(s), cudaErrorIllegalAddress);
  OK(cudaGraphDestroy(graph));
  OK(cudaGraphExecDestroy(exec));
  OK(cudaMemGetInfo(&after, &total));
  CHECK(before == after, "%zu bytes are not given back", before - after);
  OK(cudaFree(out));
  OK(cudaStreamDestroy(s));
}

TEST(a_program_frees_what_a_graph_allocated) {
  cudaStream_t s;
  cudaGraph_t graph;
  cudaGraphExec_t exec, lenient;
  char *out, *inside = NULL, *outside;
  OK(cudaStreamCreate(&s));
  OK(cudaMalloc((void **)&out, 1000));
  capture(s, out, &inside, false, &graph);
  OK(cudaGraphInstantiate(&exec, graph, 0));
  IS(cudaFree(inside), cudaErrorInvalidValue); /* not allocated yet */
  for (int i = 0; i < 2; i++) {
    OK(cudaGraphLaunch(exec, s));
    OK(cudaMemsetAsync(inside, 1, 1000, s));
    OK(cudaFreeAsync(inside, s));
    OK(cudaStreamSynchronize(s));
  }
  OK(cudaGraphLaunch(exec, s));
  OK(cudaStreamSynchronize(s));
  OK(cudaGraphLaunch(exec, s)); /* allocated twice */
  IS(cudaStreamSynchronize(s), cudaErrorInvalidValue);
  CHECK(strstr(trefoilHostLastError(), "was not freed"), "%s", trefoilHostLastError());
  OK(cudaGraphInstantiate(&lenient, graph, cudaGraphInstantiateFlagAutoFreeOnLaunch));
  OK(cudaGraphLaunch(lenient, s));
  OK(cudaStreamSynchronize(s));
  OK(cudaGraphDestroy(graph));
  OK(cudaGraphExecDestroy(exec));
  OK(cudaGraphExecDestroy(lenient));
  OK(cudaMemset(inside, 2, 1000)); /* outlives the graph until it is freed */
  OK(cudaFree(inside));
  IS(cudaFree(inside), cudaErrorInvalidValue);
  OK(cudaMallocAsync((void **)&outside, 100, s));
  OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
  IS(cudaFreeAsync(outside, s), cudaErrorInvalidValue);
  OK(cudaStreamEndCapture(s, &graph));
  OK(cudaGraphDestroy(graph));
  OK(cudaFreeAsync(outside, s));
  OK(cudaFree(out));
  OK(cudaStreamDestroy(s));
}

TEST_MAIN()
