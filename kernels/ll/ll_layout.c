/* Low latency: where things lie in exchange, control and handle memory. Pure, no CUDA.
 *
 * Regions begin at multiples of 512 bytes. The regions that hold words (16 bytes, flag last) and those
 * that hold packets (128 bytes, flag last) never overlap, whatever the operations use, so payload is
 * never looked at where a flag is expected. */
#include "kernels/ll/ll.h"

#include "plan/error.h"

#include <string.h>

static size_t roundUp(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

/* A row of `bytes` as packets of 124 bytes and a flag (kernels/ll/packet.cuh). */
static size_t packetBytes(size_t bytes) {
  return (bytes + 123) / 124 * 128;
}

static int numLocal(const ep_ll_config_t *c) {
  return (c->numExperts + c->numRanks - 1) / c->numRanks;
}

static trefoil_result_t checkConfig(const ep_ll_config_t *c) {
  EP_CHECK(c->numRanks >= 1 && (c->numRanks <= EP_LL_MAX_RANKS || c->anyRanks),
           TREFOIL_INVALID_ARGUMENT, "low latency on GPUs takes 1 to %d ranks, not %d",
           EP_LL_MAX_RANKS, c->numRanks);
  EP_CHECK(c->maxTopk >= 1 && c->maxTopk <= EP_LL_MAX_TOPK, TREFOIL_INVALID_ARGUMENT,
           "low latency on GPUs takes a top-k of 1 to %d, not %d", EP_LL_MAX_TOPK, c->maxTopk);
  EP_CHECK(c->maxTokens >= 1 && c->maxTokens <= EP_LL_MAX_TOKENS, TREFOIL_INVALID_ARGUMENT,
           "low latency on GPUs takes 1 to %d tokens a rank, not %lld", EP_LL_MAX_TOKENS,
           (long long)c->maxTokens);
  EP_CHECK(c->numExperts >= 1 && numLocal(c) < 0xffff, TREFOIL_INVALID_ARGUMENT,
           "low latency on GPUs takes 1 to 65534 experts a rank, not %d on %d ranks", c->numExperts,
           c->numRanks);
  EP_CHECK(c->maxTokenBytes >= 16 && c->maxTokenBytes % 16 == 0 && c->maxTokenBytes < (1u << 26),
           TREFOIL_INVALID_ARGUMENT,
           "max_token_bytes is %zu, low latency on GPUs takes a multiple of 16 below 2^26",
           c->maxTokenBytes);
  EP_CHECK((int64_t)numLocal(c) * c->numRanks * c->maxTokens < INT32_MAX, TREFOIL_INVALID_ARGUMENT,
           "%d local experts x %d ranks x %lld tokens are 2^31 slots or more", numLocal(c),
           c->numRanks, (long long)c->maxTokens);
  return TREFOIL_OK;
}

trefoil_result_t epLlLayout(const ep_ll_config_t *c, ep_ll_layout_t *out) {
  EP_CHECK(c && out, TREFOIL_INVALID_ARGUMENT, "config or out is NULL");
  EP_TRY(checkConfig(c));
  size_t R = (size_t)c->numRanks, N = (size_t)c->maxTokens, K = (size_t)c->maxTopk;
  size_t idVectors = (4 + K * (numLocal(c) < 0xff ? 1 : 2) + 11) / 12;
  ep_ll_layout_t at = {0};
  at.announce = 0;
  at.free[0] = at.announce + 2 * R * 16;
  at.free[1] = at.free[0] + 2 * R * 16;
  at.wait = at.free[1] + 2 * R * 16;
  at.routing = roundUp(at.wait + 3 * 16, 512);
  at.weights = at.routing + 2 * roundUp(R * N * idVectors * 16, 512);
  at.rows[0] = at.weights + (c->partial ? 2 * roundUp(R * N * ((K + 2) / 3) * 16, 512) : 0);
  at.rowStride[0] = packetBytes(c->maxTokenBytes + roundUp(4 * K, 16));
  at.rowStride[1] =
      roundUp(packetBytes(c->maxTokenBytes), 512); /* whole steps (combine_packet.cuh) */
  at.half[0] = roundUp(R * N * at.rowStride[0], 512);
  at.half[1] = roundUp(N * K * at.rowStride[1], 512);
  at.rows[1] = at.rows[0] + 2 * at.half[0];
  at.bytes = at.rows[1] + 2 * at.half[1];
  *out = at;
  return TREFOIL_OK;
}

size_t epLlHandleBytes(const ep_ll_config_t *c, int numTopk) {
  /* head, return list, row of each received entry (kernels/ll/slots.cuh) */
  return 64 + (size_t)c->numRanks * (size_t)c->maxTokens * (size_t)numTopk * (8 + 4);
}
