// Are 16-byte words and 128-byte lines ever seen torn? The low-latency wire format needs that they are not.
// One warp a block rewrites lines whose 32 words are all equal, as fast as it can, while others read them.
//   ll_torn [--ranks R] [--gpus] [--rounds n]: writers on rank 0's GPU, readers on each rank's GPU
#include "ll_world.cuh"

#include "kernels/device/ptx.cuh"

namespace {

constexpr int LINES = 64 * 4;

__global__ void writeLines(char *lines, unsigned rounds) {
  const int lane = threadIdx.x & 31;
  for (unsigned n = 1; n <= rounds; n++) {
    storeSys(lines + blockIdx.x * 512 + lane * 16, make_uint4(n, n, n, n));
  }
}

// Until all lines show the last round: counts words and lines whose parts differ.
__global__ void readLines(const char *lines, unsigned rounds, unsigned long long *torn) {
  const int lane = threadIdx.x & 31;
  unsigned long long words = 0, rows = 0, seen = 0;
  const uint64_t t0 = clockNs();
  for (unsigned last = 0; last < rounds && clockNs() - t0 < 3000000000ull;) {
    const uint4 v = loadSys(lines + blockIdx.x * 512 + lane * 16);
    words += v.x != v.y || v.x != v.z || v.x != v.w;
    const unsigned mark = __shfl_sync(FULL_WARP, v.w, lane | 7);
    rows += __popc(__ballot_sync(FULL_WARP, v.w != mark)) != 0;
    last = __reduce_min_sync(FULL_WARP, v.w);
    seen++;
  }
  atomicAdd(&torn[0], words);
  if (lane == 0) {
    atomicAdd(&torn[1], rows);
    atomicAdd(&torn[2], seen);
  }
}

} // namespace

int main(int argc, char **argv) {
  int R = 2;
  unsigned rounds = 200000;
  bool gpus = false;
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--ranks") && i + 1 < argc)
      R = atoi(argv[++i]);
    else if (!strcmp(argv[i], "--gpus"))
      gpus = true;
    else if (!strcmp(argv[i], "--rounds") && i + 1 < argc)
      rounds = (unsigned)atoi(argv[++i]);
  }
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < (gpus ? R : 1)) {
    printf("skipped: %d GPUs here, %d needed\n", devices, gpus ? R : 1);
    return 77;
  }
  World w;
  w.open(R, !gpus, 1 << 20, 1 << 20);
  // Lines lie with the last rank, as in a dispatch from rank 0; every rank reads them.
  char *lines = w.ranks[R - 1].exchange;
  CU(cudaSetDevice(w.ranks[R - 1].device));
  CU(cudaMemset(lines, 0, LINES * 128));
  std::vector<unsigned long long *> torn;
  for (int r = 0; r < R; r++) {
    CU(cudaSetDevice(w.ranks[r].device));
    torn.push_back(w.filled<unsigned long long>(r, 3, 0));
  }
  w.sync();
  cudaStream_t extra;
  CU(cudaSetDevice(w.ranks[0].device));
  CU(cudaStreamCreateWithFlags(&extra, cudaStreamNonBlocking));
  for (int r = 0; r < R; r++) {
    CU(cudaSetDevice(w.ranks[r].device));
    readLines<<<LINES / 4, 32, 0, w.ranks[r].stream>>>(lines, rounds, torn[r]);
  }
  CU(cudaSetDevice(w.ranks[0].device));
  writeLines<<<LINES / 4, 32, 0, extra>>>(lines, rounds);
  w.sync();
  unsigned long long bad = 0;
  for (int r = 0; r < R; r++) {
    const auto n = w.download(r, torn[r], 3);
    printf("reader %d: %llu steps of 4 lines read, torn words %llu, steps with torn lines %llu\n",
           r, n[2], n[0], n[1]);
    bad += n[0] + n[1];
  }
  return bad != 0;
}
