/* Where a dispatch's exposed data lies in a rank's arena: slot op % S of each buffer. */
#ifndef TREFOIL_API_CPU_CPU_DISPATCH_H
#define TREFOIL_API_CPU_CPU_DISPATCH_H

#include "api/cpu/cpu.h"

typedef struct ep_dispatch_head {
  int64_t numTokens, topk, tokenBytes, scaleBytes;
  int64_t meaning; /* epMeaning */
  int64_t counts;  /* the rank that reads rows counts them for this rank */
  int64_t pad[2];
  uint8_t active[]; /* [R] the source's mask */
} ep_dispatch_head_t;

static inline char *epDispatchSlot(const ep_op_t *op, int r, ep_buffer_id_t id, size_t bytes) {
  return epBufferOf(op, r, id) + op->no % (uint64_t)op->a->sizing.dispatchSlots * bytes;
}
static inline ep_dispatch_head_t *epDispatchHead(const ep_op_t *op, int r) {
  return (ep_dispatch_head_t *)epDispatchSlot(op, r, EP_BUFFER_DISPATCH_HEAD,
                                              op->a->sizing.dispatchHeadBytes);
}
static inline int32_t *epDispatchRouting(const ep_op_t *op, int r) { /* LL */
  return (int32_t *)epDispatchSlot(op, r, EP_BUFFER_ROUTING, op->a->sizing.routingBytes);
}
static inline char *epDispatchRows(const ep_op_t *op, int r) {
  const ep_sizing_t *s = &op->a->sizing;
  return epDispatchSlot(op, r, EP_BUFFER_DISPATCH_ROWS,
                        (size_t)s->config.shape.maxTokens * s->rowStride);
}
static inline float *epDispatchWeights(const ep_op_t *op, int r) {
  return (float *)epDispatchSlot(op, r, EP_BUFFER_DISPATCH_WEIGHTS, op->a->sizing.weightBytes);
}

/* LL: waits for every source, copies its routing, computes the layout. HT: nothing to do. 0: failed. */
int epReceiveRouting(const ep_op_t *op, ep_record_t *r);

#endif
