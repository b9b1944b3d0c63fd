// Are 16-byte words and 128-byte packets ever seen torn? The low-latency wire format needs that they are not.
// One warp a block rewrites packets whose 32 words are all equal, as fast as it can, while others read them.
//   ll_torn [--ranks R] [--gpus] [--rounds n] [--cold]: writers on rank 0's GPU, readers on each rank's GPU
#include "ll_world.cuh"

#include "kernels/common/ptx.cuh"

namespace {

constexpr int PACKETS = 64 * 4;

__global__ void writePackets(char *packets, unsigned rounds) {
  const int lane = threadIdx.x & 31;
  for (unsigned n = 1; n <= rounds; n++) {
    storeSys(packets + blockIdx.x * 512 + lane * 16, make_uint4(n, n, n, n));
  }
}

// Until all packets show the last round: counts words and packets whose parts differ.
__global__ void readPackets(const char *packets, unsigned rounds, unsigned long long *torn) {
  const int lane = threadIdx.x & 31;
  unsigned long long words = 0, rows = 0, seen = 0;
  const uint64_t t0 = clockNs();
  for (unsigned last = 0; last < rounds && clockNs() - t0 < 3000000000ull;) {
    const uint4 v = loadSys(packets + blockIdx.x * 512 + lane * 16);
    words += v.x != v.y || v.x != v.z || v.x != v.w;
    const unsigned flag = __shfl_sync(FULL_WARP, v.w, lane | 7);
    rows += __popc(__ballot_sync(FULL_WARP, v.w != flag)) != 0;
    last = __reduce_min_sync(FULL_WARP, v.w);
    seen++;
  }
  atomicAdd(&torn[0], words);
  if (lane == 0) {
    atomicAdd(&torn[1], rows);
    atomicAdd(&torn[2], seen);
  }
}

// The same where it is hardest: each step of packets is loaded for the first time while it arrives. The
// memory is too large for L2, so that the first load fetches from DRAM, and a word tells the writer when
// to begin.
struct Cold {
  char *packets, *go; // with the reader; with the writer
  unsigned rounds, base;
};

__device__ inline void pauseNs(unsigned ns) {
  const uint64_t t0 = clockNs();
  while (clockNs() - t0 < ns) {
  }
}
__device__ inline unsigned mix(unsigned h) {
  h ^= h >> 16;
  h *= 0x7feb352du;
  h ^= h >> 15;
  h *= 0x846ca68bu;
  return h ^ h >> 16;
}

__global__ void writeCold(Cold c) {
  const int lane = threadIdx.x & 31;
  for (unsigned n = 1; n <= c.rounds; n++) {
    const uint64_t t0 = clockNs();
    while (loadSys(c.go + blockIdx.x * 128).x != c.base + n && clockNs() - t0 < 1000000000ull) {
    }
    pauseNs(mix(n * 977 + blockIdx.x) % 1000);
    __syncwarp();
    const unsigned v = c.base + n;
    storeSys(c.packets + ((size_t)(n - 1) * gridDim.x + blockIdx.x) * 512 + lane * 16,
             make_uint4(v, v, v, v));
  }
}

// torn: steps with a torn packet in the load that saw the flag first; steps of which the first load saw it;
// torn ones of those; steps still torn when loaded again
__global__ void readCold(Cold c, unsigned long long *torn) {
  const int lane = threadIdx.x & 31;
  unsigned long long count[4] = {0, 0, 0, 0};
  for (unsigned n = 1; n <= c.rounds; n++) {
    const unsigned flag = c.base + n;
    const char *packet = c.packets + ((size_t)(n - 1) * gridDim.x + blockIdx.x) * 512 + lane * 16;
    if (lane == 0) storeSys(c.go + blockIdx.x * 128, make_uint4(flag, 0, 0, 0));
    pauseNs(mix(n * 31 + blockIdx.x) % 3500);
    const uint64_t t0 = clockNs();
    for (unsigned polls = 0; clockNs() - t0 < 1000000000ull; polls++) {
      __syncwarp();
      uint4 v = loadSys(packet);
      const bool here = __shfl_sync(FULL_WARP, v.w, lane | 7) == flag;
      const bool isTorn = here && (v.x != flag || v.y != flag || v.z != flag || v.w != flag);
      const bool any = __any_sync(FULL_WARP, isTorn), some = __any_sync(FULL_WARP, here);
      if (any) {
        count[0]++;
        count[2] += polls == 0;
        v = loadSys(packet);
        const bool still = here && (v.x != flag || v.y != flag || v.z != flag || v.w != flag);
        count[3] += __any_sync(FULL_WARP, still);
      }
      if (polls == 0) count[1] += some;
      if (__all_sync(FULL_WARP, here)) break;
    }
  }
  for (int i = 0; i < 4; i++) {
    if (lane == 0) atomicAdd(&torn[i], count[i]);
  }
}

bool runCold(bool gpus) {
  const int blocks = gpus ? 132 : 60;
  const unsigned rounds = 4000;
  World w;
  w.open(2, !gpus, (size_t)blocks * rounds * 512, 1 << 20);
  CU(cudaSetDevice(w.ranks[0].device));
  char *go = w.filled<char>(0, blocks * 128, 0);
  CU(cudaSetDevice(w.ranks[1].device));
  CU(cudaMemset(w.ranks[1].exchange, 0, w.exchangeBytes));
  unsigned long long *torn = w.filled<unsigned long long>(1, 4, 0);
  w.sync();
  for (unsigned pass = 0; pass < 3; pass++) {
    const Cold c = {w.ranks[1].exchange, go, rounds, pass * rounds};
    CU(cudaSetDevice(w.ranks[0].device));
    writeCold<<<blocks, 32, 0, w.ranks[0].stream>>>(c);
    CU(cudaSetDevice(w.ranks[1].device));
    readCold<<<blocks, 32, 0, w.ranks[1].stream>>>(c, torn);
    w.sync();
  }
  const auto n = w.download(1, torn, 4);
  printf("cold packets: %u steps of 4 packets, torn where the flag was seen first %llu; first load "
         "saw "
         "the flag "
         "%llu, torn of those %llu; still torn when loaded again %llu\n",
         3 * rounds * blocks, n[0], n[1], n[2], n[3]);
  return n[0] != 0;
}

} // namespace

int main(int argc, char **argv) {
  int R = 2;
  unsigned rounds = 200000;
  bool gpus = false, cold = false;
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--ranks") && i + 1 < argc)
      R = atoi(argv[++i]);
    else if (!strcmp(argv[i], "--gpus"))
      gpus = true;
    else if (!strcmp(argv[i], "--rounds") && i + 1 < argc)
      rounds = (unsigned)atoi(argv[++i]);
    else if (!strcmp(argv[i], "--cold"))
      cold = true;
  }
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < (gpus ? R : 1)) {
    printf("skipped: %d GPUs here, %d needed\n", devices, gpus ? R : 1);
    return 77;
  }
  if (cold) return runCold(gpus);
  World w;
  w.open(R, !gpus, 1 << 20, 1 << 20);
  // Packets lie with the last rank, as in a dispatch from rank 0; every rank reads them.
  char *packets = w.ranks[R - 1].exchange;
  CU(cudaSetDevice(w.ranks[R - 1].device));
  CU(cudaMemset(packets, 0, PACKETS * 128));
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
    readPackets<<<PACKETS / 4, 32, 0, w.ranks[r].stream>>>(packets, rounds, torn[r]);
  }
  CU(cudaSetDevice(w.ranks[0].device));
  writePackets<<<PACKETS / 4, 32, 0, extra>>>(packets, rounds);
  w.sync();
  unsigned long long bad = 0;
  for (int r = 0; r < R; r++) {
    const auto n = w.download(r, torn[r], 3);
    printf(
        "reader %d: %llu steps of 4 packets read, torn words %llu, steps with torn packets %llu\n",
        r, n[2], n[0], n[1]);
    bad += n[0] + n[1];
  }
  return bad != 0;
}
