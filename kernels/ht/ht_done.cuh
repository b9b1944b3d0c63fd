// When a zero-copy operation is over with a peer: pushing dispatches and pulling combines count blocks.
//
// A rank has a word for each peer (`dones` of dispatch, `reads` of combine). Each block of the peer's launch
// that no longer uses this rank's memory adds its part of EP_BLOCKS_DONE there; the sum does not depend on
// the number of blocks. Nothing is reset: a rank looks the count up when it announces the operation, before
// any peer can add to it, and its last block waits until it has grown by EP_BLOCKS_DONE.
#ifndef TREFOIL_KERNELS_HT_DONE_CUH
#define TREFOIL_KERNELS_HT_DONE_CUH

#include "kernels/common/bulk.cuh"
#include "kernels/common/protocol.h"
#include "kernels/ht/ht_control.cuh"

// The count of blocks of rank `by` at rank `at`. counts: offset of `dones` or `reads`.
EP_DEV uint32_t *doneAt(const ep_ht_group_t &g, size_t counts, int at, int by) {
  return (uint32_t *)(g.peers[at] + counts) + by;
}

EP_DEV unsigned doneBefore(const ep_ht_group_t &g, size_t counts, int by) {
  return loadAcquire(doneAt(g, counts, g.rank, by));
}

// One thread of every block, after a barrier of the block: the block no longer uses the memory of rank r.
EP_DEV void addDone(const ep_ht_group_t &g, size_t counts, int r) {
  __threadfence_system();
  addRelaxed(doneAt(g, counts, r, g.rank), (uint32_t)epBlockTick(blockIdx.x, gridDim.x));
}

// One thread of the last block: until rank r no longer uses this rank's memory; false: gave up.
EP_DEV bool waitDone(const ep_ht_group_t &g, size_t counts, int r, unsigned before, unsigned kind,
                     ep_wait_phase_t phase) {
  Spin spin;
  for (;;) {
    const unsigned n = loadAcquire(doneAt(g, counts, g.rank, r)) - before;
    if (n == EP_BLOCKS_DONE) return true;
    if (!htKeepWaiting(g, Awaited{kind, phase, r, n, -1}, EP_BLOCKS_DONE, spin)) return false;
  }
}

#endif
