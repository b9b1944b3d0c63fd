/* The sizing table. Arithmetic saturates at SIZE_MAX, which is noticed once, at the end. */
#include "plan/sizing.h"

#include <string.h>

#include "plan/error.h"

#define SATURATED SIZE_MAX

static size_t mul(size_t a, size_t b) {
  size_t r;
  return a == SATURATED || b == SATURATED || __builtin_mul_overflow(a, b, &r) ? SATURATED : r;
}

static size_t add(size_t a, size_t b) {
  size_t r;
  return __builtin_add_overflow(a, b, &r) ? SATURATED : r;
}

static size_t align(size_t a, size_t to) {
  return a > SATURATED - to ? SATURATED : (a + to - 1) / to * to;
}

static size_t layoutBytes(const trefoil_shape_t *s) {
  /* trefoil_layout_t's block: R and R*L tables, R*R tables, one slot per entry */
  size_t R = (size_t)s->numRanks, experts = R * (size_t)trefoilExpertsPerRank(s);
  size_t bytes = add(mul(6, align(mul(R, 8), 16)), mul(6, align(mul(experts, 8), 16)));
  bytes = add(bytes, mul(2, align(mul(mul(R, R), 8), 16)));
  bytes = add(bytes, add(align(mul((size_t)s->numExperts, 4), 16), align(R, 16)));
  size_t entries = mul(mul(R, (size_t)s->maxTokens), (size_t)s->topk);
  return add(bytes, align(mul(entries, 8), 16));
}

void epSizingAdd(ep_sizing_t *t, ep_buffer_id_t id, ep_buffer_t buffer) {
  buffer.offset = buffer.memory == EP_MEMORY_SHARED ? t->totals[0][EP_MEMORY_SHARED] : 0;
  buffer.bytes = align(buffer.bytes, buffer.memory == EP_MEMORY_SHARED ? 256 : 1);
  t->buffers[id] = buffer;
  size_t *total = &t->totals[buffer.ofHandle][buffer.memory];
  *total = add(*total, buffer.bytes);
}

static void sizeRings(ep_sizing_t *t, int ht, size_t nodes) {
  const trefoil_shape_t *s = &t->config.shape;
  int L = trefoilExpertsPerRank(s), perToken = L < s->topk ? L : s->topk;
  if (t->config.mode != TREFOIL_LL_EXPERT_MAJOR) perToken = 1;
  t->combineSlots = 2;
  t->chunkTokens = ht && s->maxTokens > EP_HT_CHUNK_TOKENS ? EP_HT_CHUNK_TOKENS : s->maxTokens;
  t->ringRows = t->chunkTokens * perToken;
  t->numRings = s->numRanks + (ht ? (int)nodes - 1 : 0);
  size_t rows = (size_t)t->ringRows;
  t->ringTagBytes = align(mul(rows, 8), 64);
  t->ringWeightBytes = ht ? align(mul(mul(rows, (size_t)s->topk), 4), 64) : 0;
  size_t bytes = add(64, add(t->ringTagBytes, t->ringWeightBytes));
  t->ringSlotBytes = add(bytes, align(mul(rows, t->rowStride), 64));
}

static void sizeGroupWindow(ep_sizing_t *t, int ht, size_t nodes) {
  const trefoil_shape_t *s = &t->config.shape;
  size_t R = (size_t)s->numRanks, N = (size_t)s->maxTokens, S = (size_t)t->dispatchSlots;
  size_t control = add(EP_CONTROL_HEAD_BYTES, mul(256, R));
  epSizingAdd(t, EP_BUFFER_CONTROL,
              (ep_buffer_t){"control", "1024 + 256 R", EP_MEMORY_SHARED, 0, control, 0});
  epSizingAdd(t, EP_BUFFER_ROUTING,
              (ep_buffer_t){"routing", "(LL 3, HT 1) * 4 N K", EP_MEMORY_SHARED, 0,
                            mul(ht ? 1 : 3, t->routingBytes), 0});
  epSizingAdd(t, EP_BUFFER_DISPATCH_HEAD,
              (ep_buffer_t){"dispatch head", "S * (64 + R)", EP_MEMORY_SHARED, 0,
                            mul(S, t->dispatchHeadBytes), 0});
  epSizingAdd(t, EP_BUFFER_DISPATCH_ROWS,
              (ep_buffer_t){"dispatch rows", "S * N * stride", EP_MEMORY_SHARED, 0,
                            mul(S, mul(N, t->rowStride)), 0});
  int weights = t->config.mode != TREFOIL_LL_EXPERT_MAJOR;
  epSizingAdd(t, EP_BUFFER_DISPATCH_WEIGHTS,
              (ep_buffer_t){"dispatch weights", "S * 4 N K, not LL expert-major", EP_MEMORY_SHARED,
                            0, weights ? mul(S, t->weightBytes) : 0, 0});
  epSizingAdd(t, EP_BUFFER_FORWARD_ROWS,
              (ep_buffer_t){"forward rows", "HT: (M - 1) * N * stride", EP_MEMORY_SHARED, 0,
                            ht ? mul(nodes - 1, mul(N, t->rowStride)) : 0, 0});
  epSizingAdd(t, EP_BUFFER_COMBINE_WEIGHTS,
              (ep_buffer_t){"combine weights", "LL expert-major: S * 4 N K", EP_MEMORY_SHARED, 0,
                            weights ? 0 : mul(2, t->weightBytes), 0});
  epSizingAdd(t, EP_BUFFER_COMBINE_RINGS,
              (ep_buffer_t){"combine rings",
                            "(R + HT: M - 1) * S * C * rows per token * (stride + 8 + "
                            "HT: 4 K)",
                            EP_MEMORY_SHARED, 0, mul((size_t)t->numRings, mul(2, t->ringSlotBytes)),
                            0});
}

static void sizeRest(ep_sizing_t *t, int ht) {
  const trefoil_shape_t *s = &t->config.shape;
  size_t R = (size_t)s->numRanks;
  epSizingAdd(t, EP_BUFFER_SCRATCH,
              (ep_buffer_t){"scratch", "8 * stride", EP_MEMORY_DEVICE, 0, mul(8, t->rowStride), 0});
  epSizingAdd(t, EP_BUFFER_GROUP_OBJECT,
              (ep_buffer_t){"group object", "fixed", EP_MEMORY_HOST, 0, EP_GROUP_OBJECT_BYTES, 0});
  epSizingAdd(t, EP_BUFFER_PEER_TABLES,
              (ep_buffer_t){"peer tables", "256 R", EP_MEMORY_HOST, 0, mul(256, R), 0});
  size_t mem = add(256, align(mul(R, 8), 16));
  mem = add(mem, align(ht ? 0 : mul(R, R), 16));
  mem = add(mem, mul(R, t->routingBytes));
  epSizingAdd(t, EP_BUFFER_HANDLE_MEM,
              (ep_buffer_t){"handle memory", "256 + 8 R + LL: R R + R * 4 N K", EP_MEMORY_DEVICE, 1,
                            mem, 0});
  epSizingAdd(
      t, EP_BUFFER_HANDLE_OBJECT,
      (ep_buffer_t){"handle object", "fixed", EP_MEMORY_HOST, 1, EP_HANDLE_OBJECT_BYTES, 0});
  epSizingAdd(t, EP_BUFFER_LAYOUT,
              (ep_buffer_t){"layout", "8 R + 48 R + 48 R L + 16 R R + 4 E + R + 8 R N K",
                            EP_MEMORY_HOST, 1, add(align(mul(R, 8), 16), layoutBytes(s)), 0});
}

trefoil_result_t epSizingCheck(const ep_sizing_t *t) {
  const trefoil_shape_t *s = &t->config.shape;
  for (int i = 0; i < 6; i++) {
    EP_CHECK(t->totals[i / 3][i % 3] < (size_t)1 << 62, TREFOIL_INVALID_ARGUMENT,
             "%d ranks of %lld tokens of %zu bytes, top-%d: the buffers would exceed 2^62 bytes",
             s->numRanks, (long long)s->maxTokens, t->config.maxTokenBytes, s->topk);
  }
  return TREFOIL_OK;
}

trefoil_result_t epSizing(const ep_sizing_config_t *config, ep_sizing_t *out) {
  EP_TRY(trefoilShapeCheck(&config->shape));
  const trefoil_shape_t *s = &config->shape;
  int ht = config->mode == TREFOIL_HT_FLAT || config->mode == TREFOIL_HT_EXPERT_MAJOR;
  size_t nodes = (size_t)(s->numRanks / s->ranksPerNode);
  ep_sizing_t t;
  memset(&t, 0, sizeof t);
  t.config = *config;
  t.rowStride = align(config->maxTokenBytes, 16);
  t.dispatchSlots = ht ? 1 : 2;
  t.dispatchHeadBytes = align(64 + (size_t)s->numRanks, 64);
  t.routingBytes = align(mul(mul((size_t)s->maxTokens, (size_t)s->topk), 4), 64);
  t.weightBytes = t.routingBytes;
  sizeRings(&t, ht, nodes);
  sizeGroupWindow(&t, ht, nodes);
  sizeRest(&t, ht);
  EP_TRY(epSizingCheck(&t));
  *out = t;
  return TREFOIL_OK;
}
