// High-throughput Update in one NVLink domain (ht_update.cuh).
#include "kernels/ht/ht_update.cuh"

const void *epHtUpdateKernel() {
  return EP_KERNEL(updateKernel<OneDomain>);
}

size_t epHtUpdateShared(int sets, int numLocal) {
  return (size_t)sets * (HT_TILE_WORDS + 2) * 4 + (numLocal + 1 + HT_TILE_WORDS) * 4 + 16;
}
