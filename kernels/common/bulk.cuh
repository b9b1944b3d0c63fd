// Bulk copies between global and shared memory (TMA), the barriers in shared memory that count them, and
// release and acquire words. The inline PTX of the high-throughput kernels; needs sm_90.
//
// Memory order: a bulk store is visible to others only after its group has been waited for (bulkDone) and
// a system fence after that; bulkRead only says that the shared memory may be used again. Data that
// another GPU announced by a word may be bulk-loaded after an acquire of the word and a proxyFence.
#ifndef TREFOIL_KERNELS_COMMON_BULK_CUH
#define TREFOIL_KERNELS_COMMON_BULK_CUH

#include "kernels/common/ptx.cuh"

EP_DEV uint32_t sharedAddress(const void *p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

EP_DEV void barrierInit(uint64_t *b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(sharedAddress(b)), "r"(arrivals)
               : "memory");
}
EP_DEV void barrierDrop(uint64_t *b) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(sharedAddress(b)) : "memory");
}
EP_DEV void barrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
EP_DEV void barrierArrive(uint64_t *b, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0],%1;" ::"r"(sharedAddress(b)), "r"(count)
               : "memory");
}
// The one arrival of a barrier that then waits for `bytes` of bulk loads.
EP_DEV void barrierExpect(uint64_t *b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(sharedAddress(b)),
               "r"(bytes)
               : "memory");
}
// Whether the phase of this parity is over. Ambiguous two phases back: the caller must ensure that the phase
// before it is over.
EP_DEV bool barrierTest(uint64_t *b, uint32_t parity) {
  uint32_t ok;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p,[%1],%2;"
               "selp.u32 %0,1,0,p;}"
               : "=r"(ok)
               : "r"(sharedAddress(b)), "r"(parity)
               : "memory");
  return ok;
}
// The same, and may sleep for a moment first.
EP_DEV bool barrierTry(uint64_t *b, uint32_t parity) {
  uint32_t ok;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2;"
               "selp.u32 %0,1,0,p;}"
               : "=r"(ok)
               : "r"(sharedAddress(b)), "r"(parity)
               : "memory");
  return ok;
}

EP_DEV void bulkLoad(uint32_t to, const void *from, int bytes, uint64_t *b) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(sharedAddress(b))
      : "memory");
}
EP_DEV void bulkStore(void *to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
EP_DEV void bulkCommit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int N> EP_DEV void bulkRead() { // all but the last N groups have left shared memory
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N> EP_DEV void bulkDone() { // all but the last N groups are written
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
// Asynchronous copies of 16 bytes into shared memory, past L1, of the proxy of ordinary accesses. The thread
// that asked for a copy sees it once all but the last N groups are there.
EP_DEV void copyAsync(uint32_t to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
}
EP_DEV void copyCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> EP_DEV void copyWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

EP_DEV void proxyFence() { // ordinary and bulk accesses, in both directions
  asm volatile("fence.proxy.async;" ::: "memory");
}

EP_DEV uint32_t loadAcquire(const uint32_t *p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
EP_DEV void storeRelaxed(uint32_t *p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}

// Adds to a word that may be another GPU's; orders nothing.
EP_DEV void addRelaxed(uint32_t *p, uint32_t v) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}

// Counters in shared memory by which the warps of a block publish their progress.
EP_DEV void storeReleaseShared(uint32_t *p, uint32_t v) {
  asm volatile("st.release.cta.shared::cta.u32 [%0],%1;" ::"r"(sharedAddress(p)), "r"(v)
               : "memory");
}
EP_DEV uint32_t loadAcquireShared(const uint32_t *p) {
  uint32_t v;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0,[%1];"
               : "=r"(v)
               : "r"(sharedAddress(p))
               : "memory");
  return v;
}

#endif
