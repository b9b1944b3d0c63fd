// Kernels for measuring: a barrier across GPUs, plain all-to-all copies, nothing, and a delay. Times are
// %globaltimer's nanoseconds. The barrier counts up in memory that peers store to; a rank whose peer
// does not come within two seconds goes on, this time and ever after.
#include "validate/gpu_tools.h"

extern "C" {
#include "plan/error.h"
}

#include <cuda_runtime.h>

#include <cstdio>

#define TRY_HERE(call)                                                                             \
  do {                                                                                             \
    const cudaError_t rc_ = (call);                                                                \
    if (rc_ != cudaSuccess)                                                                        \
      return epFail(TREFOIL_SYSTEM_ERROR, "%s: %s", #call, cudaGetErrorString(rc_));               \
  } while (0)

namespace {

constexpr size_t PAGE_WORDS = EP_GPU_PAGE_BYTES / 4;
constexpr int LOST_WORD = 512;
constexpr unsigned long long DEADLINE_NS = 2000000000ull;

__device__ inline unsigned long long now() {
  unsigned long long t;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(t));
  return t;
}

__global__ void lockstepKernel(const __grid_constant__ ep_gpu_peers_t p, unsigned pauseNs,
                               unsigned lateNs) {
  const unsigned long long t0 = now();
  while (now() - t0 < pauseNs) {
  }
  const unsigned e = *p.epoch + 1;
  volatile unsigned *lost = p.words[p.rank] + LOST_WORD;
  if (threadIdx.x < (unsigned)p.numRanks && !*lost) {
    *(volatile unsigned *)(p.words[threadIdx.x] + p.rank) = e;
    while ((int)(*(volatile unsigned *)(p.words[p.rank] + threadIdx.x) - e) < 0) {
      if (now() - t0 > DEADLINE_NS) {
        *lost = 1;
        break;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *p.epoch = e;
  const unsigned long long t1 = now();
  while (lateNs > 0 && now() - t1 < lateNs) {
  }
}

// This rank's share in another rank's memory.
__device__ inline uint4 *shareAt(const ep_gpu_peers_t &p, int distance) {
  const int peer = (p.rank + distance) % p.numRanks;
  return (uint4 *)(p.words[peer] + PAGE_WORDS) + p.rank * (EP_GPU_COPY_BYTES / 16);
}

__global__ void copyInTurnKernel(const __grid_constant__ ep_gpu_peers_t p) {
  const size_t n = EP_GPU_COPY_BYTES / 16;
  for (int d = 1; d < p.numRanks; d++) {
    uint4 *to = shareAt(p, d);
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
      to[i] = make_uint4((unsigned)i, d, p.rank, 7);
    }
  }
}

__global__ void copyAtOnceKernel(const __grid_constant__ ep_gpu_peers_t p) {
  const size_t n = EP_GPU_COPY_BYTES / 16;
  const int peers = p.numRanks - 1, d = 1 + blockIdx.x % peers, part = blockIdx.x / peers;
  const int parts = (gridDim.x - blockIdx.x % peers + peers - 1) / peers;
  uint4 *to = shareAt(p, d);
  for (size_t i = part * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)parts * blockDim.x) {
    to[i] = make_uint4((unsigned)i, d, p.rank, 7);
  }
}

__global__ void emptyKernel() {}

__global__ void delayKernel(unsigned long long ns) {
  const unsigned long long t0 = now();
  while (now() - t0 < ns) {
  }
}

} // namespace

extern "C" int epGpuToolsBuilt(void) {
  return 1;
}

extern "C" trefoil_result_t epGpuFacts(int device, ep_gpu_facts_t *out) {
  cudaDeviceProp properties;
  ep_gpu_facts_t f = {};
  TRY_HERE(cudaGetDeviceProperties(&properties, device));
  TRY_HERE(cudaDriverGetVersion(&f.driver));
  TRY_HERE(cudaRuntimeGetVersion(&f.runtime));
  snprintf(f.name, sizeof f.name, "%s", properties.name);
  f.numSms = properties.multiProcessorCount;
  *out = f;
  return TREFOIL_OK;
}

extern "C" trefoil_result_t epGpuTeam(int numRanks, ep_gpu_peers_t *out) {
  ep_gpu_peers_t team[EP_GPU_MAX_RANKS] = {};
  EP_CHECK(numRanks >= 1 && numRanks <= EP_GPU_MAX_RANKS, TREFOIL_INVALID_ARGUMENT,
           "%d ranks: 1 to %d can be measured in one process", numRanks, EP_GPU_MAX_RANKS);
  // one rank copies beside what is measured from one share of its memory to another
  const size_t bytes = EP_GPU_PAGE_BYTES + EP_GPU_COPY_BYTES * (numRanks > 1 ? numRanks : 2);
  for (int r = 0; r < numRanks; r++) {
    ep_gpu_facts_t facts;
    unsigned *words;
    TRY_HERE(cudaSetDevice(r));
    for (int q = 0; q < numRanks; q++) {
      if (q == r) continue;
      const cudaError_t rc = cudaDeviceEnablePeerAccess(q, 0);
      EP_CHECK(rc == cudaSuccess || rc == cudaErrorPeerAccessAlreadyEnabled, TREFOIL_SYSTEM_ERROR,
               "GPU %d cannot store to GPU %d: %s", r, q, cudaGetErrorString(rc));
      cudaGetLastError();
    }
    EP_TRY(epGpuFacts(r, &facts));
    TRY_HERE(cudaMalloc(&words, bytes));
    TRY_HERE(cudaMemset(words, 0, PAGE_WORDS * 4));
    TRY_HERE(cudaMalloc(&team[r].epoch, sizeof *team[r].epoch));
    TRY_HERE(cudaMemset(team[r].epoch, 0, sizeof *team[r].epoch));
    TRY_HERE(cudaDeviceSynchronize());
    team[r].rank = r;
    team[r].numRanks = numRanks;
    team[r].numSms = facts.numSms;
    for (int q = 0; q < numRanks; q++) team[q].words[r] = words;
  }
  for (int r = 0; r < numRanks; r++) out[r] = team[r];
  return TREFOIL_OK;
}

extern "C" void epGpuTeamFree(ep_gpu_peers_t *team) {
  const int numRanks = team[0].numRanks;
  for (int r = 0; r < numRanks; r++) {
    if (cudaSetDevice(r) != cudaSuccess) return;
    cudaFree(team[r].words[r]);
    cudaFree(team[r].epoch);
    team[r] = ep_gpu_peers_t{};
  }
}

extern "C" trefoil_result_t epGpuLockstep(const ep_gpu_peers_t *p, unsigned pauseNs,
                                          unsigned lateNs, void *stream) {
  lockstepKernel<<<1, 32, 0, (cudaStream_t)stream>>>(*p, pauseNs, lateNs);
  TRY_HERE(cudaGetLastError());
  return TREFOIL_OK;
}

extern "C" trefoil_result_t epGpuCopy(const ep_gpu_peers_t *p, int kind, void *stream) {
  EP_CHECK(p->numRanks > 1, TREFOIL_INVALID_ARGUMENT, "one rank has no peer to copy to");
  if (kind == 0)
    copyInTurnKernel<<<p->numSms, 1024, 0, (cudaStream_t)stream>>>(*p);
  else
    copyAtOnceKernel<<<p->numSms, 1024, 0, (cudaStream_t)stream>>>(*p);
  TRY_HERE(cudaGetLastError());
  return TREFOIL_OK;
}

extern "C" trefoil_result_t epGpuEmpty(void *stream) {
  emptyKernel<<<1, 32, 0, (cudaStream_t)stream>>>();
  TRY_HERE(cudaGetLastError());
  return TREFOIL_OK;
}

extern "C" trefoil_result_t epGpuDelay(uint64_t ns, void *stream) {
  delayKernel<<<1, 1, 0, (cudaStream_t)stream>>>(ns);
  TRY_HERE(cudaGetLastError());
  return TREFOIL_OK;
}
