/* Arithmetic of the protocols: of both modes, what the blocks of a launch add to a counter (EP_, ep); of low
 * latency, operation numbers, flags, the clock, ack distances (EP_LL_, epLl; docs/kernels.md, States).
 * Pure and without CUDA, so that the kernels and tests/protocol, which explores the protocol state by state
 * with small numbers, run the same lines. `flags` and `period` are EP_LL_FLAGS
 * and EP_LL_CLEAR_PERIOD in the kernels. */
#ifndef TREFOIL_KERNELS_COMMON_PROTOCOL_H
#define TREFOIL_KERNELS_COMMON_PROTOCOL_H

#include <stdint.h>

#ifdef __CUDACC__
#define EP_FN __host__ __device__ static inline
#else
#define EP_FN static inline
#endif

#define EP_KERNEL_MAX_RANKS 64     /* of a group on GPUs */
#define EP_BLOCKS_DONE      65536u /* what the blocks of a launch add up to: the sum of epBlockTick */

#define EP_LL_FLAGS            0xFFFFFFFEull /* even, so that a flag keeps its operation's parity */
#define EP_LL_CLEAR_PERIOD     (1ull << 30)  /* a power of two */
#define EP_LL_MAX_ACK_DISTANCE 2047u         /* what a routing word has room for */
#define EP_LL_ACK_DISTANCE_SHIFT                                                                   \
  21 /* a routing word: the number of tokens below, the ack distance above */
#define EP_LL_COUNT_MASK ((1u << EP_LL_ACK_DISTANCE_SHIFT) - 1)

/* Never 0, repeats after `flags` operations. 2^32 is 2 modulo EP_LL_FLAGS, so there the upper half counts
 * twice, and nothing is divided. */
EP_FN uint32_t epLlFlag(uint64_t e, uint64_t flags) {
  while (e >= flags) {
    e = flags == EP_LL_FLAGS && e >> 32 ? (e >> 32) * 2 + (uint32_t)e : e - flags;
  }
  return (uint32_t)e + 2u;
}

/* Operation e clears its buffer once it is received. */
EP_FN int epLlClears(uint64_t e, uint64_t period) {
  return (e & (period - 1)) < 2;
}

/* What a block adds at its end to a counter that grows by EP_BLOCKS_DONE a launch, whatever the number of
 * blocks: of low latency the clock, of high throughput `dones` and `reads`. */
EP_FN uint64_t epBlockTick(unsigned block, unsigned numBlocks) {
  return block ? 1 : EP_BLOCKS_DONE - (uint64_t)(numBlocks - 1);
}
/* How many operations have been sent by a clock. */
EP_FN uint64_t epLlNumSent(uint64_t clock) {
  return clock >> 16;
}

/* How far operation e is ahead of the last one received out of the other buffer. */
EP_FN uint32_t epLlAckDistance(uint64_t e, uint64_t doneOther) {
  const uint64_t ackDistance = e - doneOther;
  return (uint32_t)(ackDistance < EP_LL_MAX_ACK_DISTANCE ? ackDistance : EP_LL_MAX_ACK_DISTANCE);
}
/* The operation that a peer has received out of the other buffer, by the ack distance in its word of e. */
EP_FN uint64_t epLlAcked(uint64_t e, uint32_t ackDistance) {
  return ackDistance < EP_LL_MAX_ACK_DISTANCE ? e - ackDistance : 0;
}

/* `received` out of the buffer of e leaves it free for e. */
EP_FN int epLlIsFree(uint64_t e, uint64_t received) {
  return received + 2 >= e;
}

#endif
