/* A program with kernels, as nvcc compiles it, under LD_PRELOAD of the host runtime: every launch either
 * reaches the launcher or fails by name.
 *   kernel_program plain | launcher */
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <cuda_runtime.h>

namespace {

struct Launch {
  dim3 gridDim, blockDim;
  void **args;
  size_t sharedBytes;
};
struct Launcher {
  void *(*prepare)(const void *func, const Launch *launch);
  void (*run)(void *launch);
  void (*release)(void *launch);
};

int failures;

} // namespace

extern "C" __attribute__((weak)) void trefoilHostSetLauncher(const Launcher *launcher);

#define CHECK(condition)                                                                           \
  if (!(condition)) {                                                                              \
    printf("line %d: %s\n", __LINE__, #condition);                                                 \
    failures++;                                                                                    \
  }

__managed__ int total;
__device__ int counter;

__global__ void addTo(int *p, int n, int what) {
  if (threadIdx.x < n) p[threadIdx.x] += what + counter;
}

template <typename T> __global__ void scale(T *p, T by) {
  p[threadIdx.x] *= by;
}

namespace {

/* What addTo does, on the host. */
struct Run {
  int *p, n, what;
};

void *prepare(const void *func, const Launch *l) {
  if (func != (const void *)addTo) return nullptr;
  CHECK(l->gridDim.x == 2 && l->gridDim.y == 1 && l->blockDim.x == 32 && l->sharedBytes == 64);
  return new Run{*(int **)l->args[0], *(int *)l->args[1], *(int *)l->args[2]};
}

void run(void *data) {
  const Run *r = (const Run *)data;
  for (int i = 0; i < r->n; i++) r->p[i] += r->what;
}

void release(void *data) {
  delete (Run *)data;
}

cudaError_t launch(int *p, int n, int what, cudaStream_t stream) {
  addTo<<<2, 32, 64, stream>>>(p, n, what);
  return cudaGetLastError();
}

bool says(cudaError_t error, const char *word) {
  const char *text = cudaGetErrorString(error);
  if (!strstr(text, word)) printf("'%s' is missing in: %s\n", word, text);
  return strstr(text, word) != nullptr;
}

/* Captures one launch; the number of nodes, -1: the capture failed. */
int nodesOfCapture(int *p, cudaStream_t stream, cudaGraph_t *graph, cudaError_t *launched) {
  size_t nodes = 0;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  *launched = launch(p, 4, 1, stream);
  if (cudaStreamEndCapture(stream, graph) != cudaSuccess) return -1;
  CHECK(cudaGraphGetNodes(*graph, nullptr, &nodes) == cudaSuccess);
  return (int)nodes;
}

void withoutLauncher(int *p, cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cudaError_t error = launch(p, 4, 1, 0);
  CHECK(error == cudaErrorNotSupported && says(error, "addTo(int*, int, int)"));
  scale<float><<<1, 4>>>((float *)p, 2.0f);
  error = cudaGetLastError();
  CHECK(error == cudaErrorNotSupported && says(error, "scale<float>"));
  CHECK(nodesOfCapture(p, stream, &graph, &error) == -1 && error == cudaErrorNotSupported);
}

void withLauncher(int *p, cudaStream_t stream) {
  static const Launcher launcher = {prepare, run, release};
  int values[4] = {1, 2, 3, 4};
  trefoilHostSetLauncher(&launcher);
  CHECK(cudaMemcpy(p, values, sizeof values, cudaMemcpyHostToDevice) == cudaSuccess);
  CHECK(launch(p, 4, 10, 0) == cudaSuccess); /* the legacy stream, or the thread's */
  CHECK(cudaMemcpy(values, p, sizeof values, cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK(values[0] == 11 && values[3] == 14);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaError_t error;
  CHECK(nodesOfCapture(p, stream, &graph, &error) == 1 && error == cudaSuccess);
  CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  for (int i = 0; i < 3; i++) CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(cudaMemcpy(values, p, sizeof values, cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK(values[0] == 14 && values[3] == 17);
  scale<float><<<1, 4>>>((float *)p, 2.0f);
  error = cudaGetLastError();
  CHECK(error == cudaErrorInvalidDeviceFunction && says(error, "scale<float>"));
}

} // namespace

int main(int argc, char **argv) {
  int *p = nullptr;
  cudaStream_t stream = nullptr;
  if (argc != 2 || !trefoilHostSetLauncher) {
    printf("the host runtime is not there\n");
    return 1;
  }
  CHECK(cudaMalloc(&p, 4096) == cudaSuccess && cudaStreamCreate(&stream) == cudaSuccess);
  CHECK(total == 0);
  total = 5;
  CHECK(total == 5);
  (strcmp(argv[1], "launcher") ? withoutLauncher : withLauncher)(p, stream);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  return failures != 0;
}
