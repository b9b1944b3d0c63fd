/* Layout of a communicator's shared memory: the ranks' entries, then a ring for each ordered pair. */
#include "comm_internal.h"

static size_t ringsAt(int numRanks) {
  size_t bytes = sizeof(ep_comm_shm_t) + (size_t)numRanks * sizeof(ep_rank_entry_t);
  return (bytes + 4095) & ~(size_t)4095;
}

/* Sparse: pages of rings that are not used do not exist. */
size_t epCommShmBytes(int numRanks) {
  return ringsAt(numRanks) + (size_t)numRanks * (size_t)numRanks * sizeof(ep_ring_t);
}

ep_ring_t *epCommShmRing(ep_comm_shm_t *shm, int src, int dst) {
  char *rings = (char *)shm + ringsAt(shm->numRanks);
  return (ep_ring_t *)(void *)rings + (size_t)src * (size_t)shm->numRanks + (size_t)dst;
}
