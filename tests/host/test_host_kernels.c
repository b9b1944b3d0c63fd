/* Kernel launches as compiled CUDA programs make them, without a compiler of CUDA: this program calls what
 * nvcc's stubs call, declared here as crt/host_runtime.h declares it. */
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cuda_runtime.h>

#include "test.h"
#include "trefoil_host.h"

typedef struct CUkern_st *kernel_t;
void **__cudaRegisterFatBinary(void *fatCubin);
void __cudaRegisterFatBinaryEnd(void **module);
void __cudaUnregisterFatBinary(void **module);
void __cudaRegisterFunction(void **module, const char *hostFun, char *deviceFun,
                            const char *deviceName, int threadLimit, void *tid, void *bid,
                            dim3 *bDim, dim3 *gDim, int *wSize);
void __cudaRegisterVar(void **module, char *hostVar, char *deviceAddress, const char *deviceName,
                       int ext, size_t size, int constant, int global);
void __cudaRegisterManagedVar(void **module, void **hostVar, char *deviceAddress,
                              const char *deviceName, int ext, size_t size, int constant,
                              int global);
char __cudaInitModule(void **module);
unsigned __cudaPushCallConfiguration(dim3 gridDim, dim3 blockDim, size_t sharedMem,
                                     cudaStream_t stream);
cudaError_t __cudaPopCallConfiguration(dim3 *gridDim, dim3 *blockDim, size_t *sharedMem,
                                       void *stream);
cudaError_t __cudaGetKernel(kernel_t *kernel, const void *hostFun);
cudaError_t __cudaLaunchKernel(kernel_t kernel, dim3 gridDim, dim3 blockDim, void **args,
                               size_t sharedMem, cudaStream_t stream);
cudaError_t __cudaLaunchKernel_ptsz(kernel_t kernel, dim3 gridDim, dim3 blockDim, void **args,
                                    size_t sharedMem, cudaStream_t stream);
cudaError_t cudaLaunchKernel_ptsz(const void *func, dim3 gridDim, dim3 blockDim, void **args,
                                  size_t sharedMem, cudaStream_t stream);
cudaError_t cudaMemcpyAsync_ptsz(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind,
                                 cudaStream_t stream);
cudaError_t cudaMemcpy_ptds(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind);
cudaError_t cudaStreamSynchronize_ptsz(cudaStream_t stream);
cudaError_t cudaStreamGetId_ptsz(cudaStream_t stream, unsigned long long *id);

#define OK(call) REQUIRE((call) == cudaSuccess, "%s: %s", #call, trefoilHostLastError())

/* `__global__ void addTo(int *p, int what)`: the program's function pops what <<<>>> pushed. `variant`:
 * which compiler and default stream. */
static enum { NVCC13, NVCC13_PER_THREAD, NVCC12, NVCC12_PER_THREAD } variant;
static int shadow; /* a __device__ variable's */
static int *managed;
static void **module;

static void addTo(int *p, int what) {
  void *args[] = {&p, &what};
  kernel_t kernel = NULL;
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
  __cudaGetKernel(&kernel, (const void *)addTo);
  if (__cudaPopCallConfiguration(&grid, &block, &shared, &stream) != cudaSuccess) return;
  if (variant == NVCC13) __cudaLaunchKernel(kernel, grid, block, args, shared, stream);
  if (variant == NVCC13_PER_THREAD)
    __cudaLaunchKernel_ptsz(kernel, grid, block, args, shared, stream);
  if (variant == NVCC12) cudaLaunchKernel((const void *)addTo, grid, block, args, shared, stream);
  if (variant == NVCC12_PER_THREAD)
    cudaLaunchKernel_ptsz((const void *)addTo, grid, block, args, shared, stream);
}

/* addTo<<<3, 64, 16, stream>>>(p, what) */
static cudaError_t launch(int *p, int what, cudaStream_t stream) {
  if (!__cudaPushCallConfiguration((dim3){3, 1, 1}, (dim3){64, 1, 1}, 16, stream)) addTo(p, what);
  return cudaGetLastError();
}

/* What nvcc runs before main. */
static void registerModule(void) {
  static int image;
  module = __cudaRegisterFatBinary(&image);
  __cudaRegisterFunction(module, (const char *)addTo, NULL, "_Z5addToPii", -1, NULL, NULL, NULL,
                         NULL, NULL);
  __cudaRegisterVar(module, (char *)&shadow, (char *)"shadow", "shadow", 0, sizeof shadow, 0, 0);
  __cudaRegisterManagedVar(module, (void **)&managed, (char *)"managed", "managed", 0,
                           sizeof *managed, 0, 0);
  __cudaRegisterFatBinaryEnd(module);
}

typedef struct run {
  int *p, what;
} run_t;
static trefoil_host_launch_t seen;
static int released;

static void *prepare(const void *func, const trefoil_host_launch_t *at) {
  run_t *r = func == (const void *)addTo ? malloc(sizeof *r) : NULL;
  if (r) *r = (run_t){*(int **)at->args[0], *(int *)at->args[1]};
  seen = *at;
  return r;
}

static void run(void *launch) {
  const run_t *r = launch;
  *r->p += r->what;
}

static void release(void *launch) {
  released++;
  free(launch);
}

static const trefoil_host_launcher_t launcher = {prepare, run, release};

TEST(without_a_launcher_a_launch_fails_by_name) {
  int *p;
  size_t nodes = 0;
  cudaStream_t stream;
  cudaGraph_t graph = NULL;
  registerModule();
  OK(cudaMalloc((void **)&p, sizeof *p));
  OK(cudaStreamCreate(&stream));
  for (variant = NVCC13; variant <= NVCC12_PER_THREAD; variant++) {
    cudaGetLastError();
    cudaError_t error = launch(p, 1, NULL);
    CHECK(error == cudaErrorNotSupported, "variant %d: %d", (int)variant, (int)error);
    CHECK(strstr(trefoilHostLastError(), "addTo"), "%s", trefoilHostLastError());
    CHECK(strstr(cudaGetErrorString(error), "addTo"), "%s", cudaGetErrorString(error));
    CHECK(launch(p, 1, (cudaStream_t)p) != cudaSuccess, "a stream that is none");
  }
  variant = NVCC13;
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK(launch(p, 1, stream) == cudaErrorNotSupported, "launched");
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated,
        "a graph without the kernel: %p, %zu nodes", (void *)graph, nodes);
  addTo(p, 1);
  CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration, "called without <<<>>>");
  OK(cudaStreamDestroy(stream));
  OK(cudaFree(p));
}

TEST(a_launch_reaches_the_launcher) {
  int *p, value = 0;
  cudaStream_t stream;
  OK(cudaMalloc((void **)&p, sizeof *p));
  OK(cudaMemset(p, 0, sizeof *p));
  OK(cudaStreamCreate(&stream));
  trefoilHostSetLauncher(&launcher);
  for (variant = NVCC13; variant <= NVCC12_PER_THREAD; variant++) {
    OK(launch(p, 1, stream));
    OK(cudaStreamSynchronize(stream));
    CHECK(seen.gridDim.x == 3 && seen.blockDim.x == 64 && seen.sharedBytes == 16, "%u x %u, %zu",
          seen.gridDim.x, seen.blockDim.x, seen.sharedBytes);
    OK(launch(p, 10, NULL));
    OK(variant & 1 ? cudaStreamSynchronize_ptsz(NULL) : cudaStreamSynchronize(NULL));
  }
  OK(cudaMemcpy(&value, p, sizeof value, cudaMemcpyDeviceToHost));
  CHECK(value == 44, "%d", value);
  CHECK(released == 8, "%d launches released", released);
  OK(cudaStreamDestroy(stream));
  OK(cudaFree(p));
}

TEST(a_block_has_so_much_shared_memory) {
  int *p, what = 1;
  void *args[] = {&p, &what};
  dim3 one = {1, 1, 1};
  const size_t most = 232448 - 512;
  OK(cudaMalloc((void **)&p, sizeof *p));
  OK(cudaMemset(p, 0, sizeof *p));
  trefoilHostSetLauncher(&launcher);
  OK(cudaLaunchKernel((const void *)addTo, one, one, args, most, NULL));
  cudaError_t error = cudaLaunchKernel((const void *)addTo, one, one, args, most + 1, NULL);
  CHECK(error == cudaErrorInvalidValue, "%d", (int)error);
  CHECK(strstr(trefoilHostLastError(), "231937 bytes of dynamic shared memory"), "%s",
        trefoilHostLastError());
  CHECK(cudaGetLastError() == cudaErrorInvalidValue, "the last error is another");
  OK(cudaDeviceSynchronize());
  CHECK(seen.sharedBytes == most, "the launcher was given %zu", seen.sharedBytes);
  OK(cudaFree(p));
}

/* The legacy stream waits for work of other streams; a thread's own does not. */
static void holdUp(void *gate) {
  while (!atomic_load((_Atomic int *)gate)) usleep(100);
}

TEST(stream_0_of_a_per_thread_build_is_the_threads_own) {
  int *p, value = 0;
  static _Atomic int gate;
  unsigned long long legacy, own;
  cudaStream_t other;
  OK(cudaMallocHost((void **)&p, sizeof *p));
  *p = 0;
  OK(cudaStreamGetId(NULL, &legacy));
  OK(cudaStreamGetId_ptsz(NULL, &own));
  CHECK(legacy != own, "both %llu", own);
  OK(cudaStreamCreate(&other));
  OK(cudaLaunchHostFunc(other, holdUp, &gate));
  variant = NVCC13_PER_THREAD;
  OK(launch(p, 7, NULL));
  OK(cudaMemcpyAsync_ptsz(&value, p, sizeof value, cudaMemcpyDefault, NULL));
  OK(cudaStreamSynchronize_ptsz(NULL));
  CHECK(value == 7, "%d", value);
  OK(cudaMemcpy_ptds(&value, p, sizeof value, cudaMemcpyDefault));
  atomic_store(&gate, 1);
  OK(cudaStreamSynchronize(other));
  OK(cudaStreamDestroy(other));
  OK(cudaFreeHost(p));
}

TEST(graphs_keep_launches) {
  int *p, value = 0;
  size_t nodes = 0;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaGraphNode_t node;
  enum cudaGraphNodeType type;
  OK(cudaMalloc((void **)&p, sizeof *p));
  OK(cudaMemset(p, 0, sizeof *p));
  OK(cudaStreamCreate(&stream));
  variant = NVCC13;
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  OK(launch(p, 5, stream));
  OK(cudaStreamEndCapture(stream, &graph));
  OK(cudaGraphGetNodes(graph, NULL, &nodes));
  REQUIRE(nodes == 1, "%zu nodes", nodes);
  OK(cudaGraphGetNodes(graph, &node, &nodes));
  OK(cudaGraphNodeGetType(node, &type));
  CHECK(type == cudaGraphNodeTypeKernel, "type %d", (int)type);
  OK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 4; i++) OK(cudaGraphLaunch(exec, stream));
  OK(cudaMemcpyAsync(&value, p, sizeof value, cudaMemcpyDeviceToHost, stream));
  OK(cudaStreamSynchronize(stream));
  CHECK(value == 20, "%d", value);
  OK(cudaGraphExecDestroy(exec));
  OK(cudaGraphDestroy(graph));
  OK(cudaStreamDestroy(stream));
  OK(cudaFree(p));
}

/* f<<<1, 1>>>(g<<<2, 2>>>() ...): the inner launch comes between the outer one's brackets and its call. */
TEST(configurations_nest) {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
  for (unsigned i = 1; i <= 20; i++)
    REQUIRE(!__cudaPushCallConfiguration((dim3){i, 1, 1}, (dim3){2 * i, 1, 1}, i, NULL), "%u", i);
  for (unsigned i = 20; i >= 1; i--) {
    OK(__cudaPopCallConfiguration(&grid, &block, &shared, &stream));
    CHECK(grid.x == i && block.x == 2 * i && shared == i, "%u: %u", i, grid.x);
  }
  CHECK(__cudaPopCallConfiguration(&grid, &block, &shared, &stream) != cudaSuccess, "one more");
  int refused = 0;
  for (int i = 0; i < 1000 && !refused; i++) {
    refused = __cudaPushCallConfiguration((dim3){1, 1, 1}, (dim3){1, 1, 1}, 0, NULL) != 0;
  }
  CHECK(refused, "configurations without end");
  while (__cudaPopCallConfiguration(&grid, &block, &shared, &stream) == cudaSuccess) {
  }
  cudaGetLastError();
}

TEST(managed_variables_are_managed_memory) {
  struct cudaPointerAttributes a;
  CHECK(__cudaInitModule(module), "no module");
  REQUIRE(managed, "no memory");
  CHECK(*managed == 0, "%d", *managed);
  OK(cudaPointerGetAttributes(&a, managed));
  CHECK(a.type == cudaMemoryTypeManaged, "type %d", (int)a.type);
  *managed = 3;
  pid_t child = fork();
  if (!child) { /* its own copy */
    *managed += 4;
    _exit(*managed == 7 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0 && *managed == 3, "status %d, %d here", status, *managed);
}

TEST(a_module_that_goes_takes_its_names) {
  trefoilHostSetLauncher(NULL);
  __cudaUnregisterFatBinary(module);
  variant = NVCC13;
  cudaError_t error = launch(NULL, 1, NULL);
  CHECK(error == cudaErrorNotSupported, "%d", (int)error);
  CHECK(!strstr(trefoilHostLastError(), "addTo") && strstr(trefoilHostLastError(), "kernel at"),
        "%s", trefoilHostLastError());
  registerModule();
  launch(NULL, 1, NULL);
  CHECK(strstr(trefoilHostLastError(), "addTo"), "%s", trefoilHostLastError());
  __cudaUnregisterFatBinary(module);
  __cudaUnregisterFatBinary(module);
  __cudaUnregisterFatBinary(NULL);
}

TEST_MAIN()
