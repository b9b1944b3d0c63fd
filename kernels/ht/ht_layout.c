/* High throughput: where things lie in exchange, control and handle memory. Pure, no CUDA. */
#include "kernels/ht/ht.h"

#include "plan/error.h"

#include <string.h>

static size_t roundUp(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

static int numLocal(const ep_ht_config_t *c) {
  return (c->numExperts + c->numRanks - 1) / c->numRanks;
}

static trefoil_result_t checkConfig(const ep_ht_config_t *c) {
  EP_CHECK(c->numRanks >= 1 && c->numRanks <= EP_HT_MAX_RANKS, TREFOIL_INVALID_ARGUMENT,
           "high throughput on GPUs takes 1 to %d ranks, not %d", EP_HT_MAX_RANKS, c->numRanks);
  EP_CHECK(c->maxTopk >= 1 && c->maxTopk <= EP_HT_MAX_TOPK, TREFOIL_INVALID_ARGUMENT,
           "high throughput on GPUs takes a top-k of 1 to %d, not %d", EP_HT_MAX_TOPK, c->maxTopk);
  EP_CHECK(c->maxTokens >= 1 && c->maxTokens <= EP_HT_MAX_TOKENS, TREFOIL_INVALID_ARGUMENT,
           "high throughput on GPUs takes 1 to %d tokens a rank, not %lld", EP_HT_MAX_TOKENS,
           (long long)c->maxTokens);
  EP_CHECK(c->numExperts >= 1 && numLocal(c) <= 4096, TREFOIL_INVALID_ARGUMENT,
           "high throughput on GPUs takes 1 to 4096 experts a rank, not %d on %d ranks",
           c->numExperts, c->numRanks);
  EP_CHECK(c->maxTokenBytes >= 16 && c->maxTokenBytes % 16 == 0 && c->maxTokenBytes < (1u << 26),
           TREFOIL_INVALID_ARGUMENT,
           "max_token_bytes is %zu, high throughput on GPUs takes a multiple of 16 below 2^26",
           c->maxTokenBytes);
  EP_CHECK((int64_t)c->numRanks * c->maxTokens * c->maxTopk < INT32_MAX, TREFOIL_INVALID_ARGUMENT,
           "%d ranks x %lld tokens x top-%d are 2^31 slots or more", c->numRanks,
           (long long)c->maxTokens, c->maxTopk);
  EP_CHECK(c->fifoSlots >= 0 && (c->fifoSlots & (c->fifoSlots - 1)) == 0 &&
               c->fifoSlots <= (1 << 20),
           TREFOIL_INVALID_ARGUMENT, "FIFOs of %d chunks: must be a power of two", c->fifoSlots);
  return TREFOIL_OK;
}

/* FIFOs hold 512 chunks, or as many as a rank has tokens if those are fewer; and up to half of its chunks
 * as far as all FIFOs together stay within FIFOS_BYTES: then senders seldom wait for receivers
 * (docs/kernels_ht.md). */
#define FIFOS_BYTES ((size_t)240 << 20)
#define LEAST_SLOTS 64
static int fifoSlotsOf(const ep_ht_config_t *c, const ep_ht_layout_t *at, int kind) {
  if (c->fifoSlots) return c->fifoSlots;
  if (c->windows && kind == 0) return LEAST_SLOTS;
  int64_t slots = LEAST_SLOTS, half = c->maxTokens * at->rowChunks / 2;
  while (slots < 512 && slots < c->maxTokens) slots *= 2;
  size_t slotOfAll = 2 * (size_t)c->numRanks * at->fifoSlotStride;
  while (slots < (1 << 20) && slots < half && slotOfAll * (size_t)slots * 2 <= FIFOS_BYTES) {
    slots *= 2;
  }
  return (int)slots;
}

static void layOutPush(const ep_ht_config_t *c, ep_ht_layout_t *at, size_t next) {
  size_t R = (size_t)c->numRanks, N = (size_t)c->maxTokens;
  at->remoteRowWords = (int)((N + 1) / 2);
  at->weightWords = (c->maxTopk + 1) / 2;
  for (int kind = 0; kind < 2; kind++) {
    at->announces[kind] = next;
    at->dones[kind] = next + roundUp(R * 64, 512);
    next = at->dones[kind] + roundUp(R * 4, 512);
  }
  at->remoteRows = next;
  next += roundUp(R * (size_t)at->remoteRowWords * 16, 512);
  at->weights = next;
  next += roundUp(R * N * (size_t)at->weightWords * 16, 512);
  at->arrivals = next;
  next += roundUp(R * N * (size_t)at->rowChunks * 4, 512);
  at->gradients = next;
  next += roundUp(R * N * (size_t)at->weightWords * 16, 512);
  at->input = c->inputs ? next : 0;
  at->bytes = next + (c->inputs ? roundUp(N * c->maxTokenBytes, 512) : 0);
}

trefoil_result_t epHtLayout(const ep_ht_config_t *c, ep_ht_layout_t *out) {
  EP_CHECK(c && out, TREFOIL_INVALID_ARGUMENT, "config or out is NULL");
  EP_TRY(checkConfig(c));
  size_t R = (size_t)c->numRanks, N = (size_t)c->maxTokens, K = (size_t)c->maxTopk;
  ep_ht_layout_t at = {0};
  at.idVectors = (int)((K + (c->numExperts < 0xffff ? 3 : 1)) / (c->numExperts < 0xffff ? 4 : 2));
  at.fifoSlotBytes = c->maxTokenBytes < EP_HT_CHUNK_BYTES ? c->maxTokenBytes : EP_HT_CHUNK_BYTES;
  at.fifoSlotStride = roundUp(roundUp(at.fifoSlotBytes, 16) + 4 * K, 128);
  at.rowChunks = (int)((c->maxTokenBytes + at.fifoSlotBytes - 1) / at.fifoSlotBytes);
  size_t next = 0;
  at.header = next;
  next += roundUp(2 * R * 16, 512);
  at.routing = next;
  next += roundUp(2 * R * N * (size_t)at.idVectors * 16, 512);
  for (int kind = 0; kind < 2; kind++) {
    at.fifoSlots[kind] = fifoSlotsOf(c, &at, kind);
    size_t words = roundUp(R * (size_t)at.fifoSlots[kind] * 4, 512);
    at.flags[kind] = next;
    at.credits[kind] = next + words;
    next += 2 * words;
  }
  for (int kind = 0; kind < 2; kind++) {
    at.fifos[kind] = next;
    next += roundUp(R * (size_t)at.fifoSlots[kind] * at.fifoSlotStride, 512);
  }
  layOutPush(c, &at, next);
  *out = at;
  return TREFOIL_OK;
}

size_t epHtHandleBytes(const ep_ht_config_t *c, int numTopk) {
  size_t N = (size_t)c->maxTokens, R = (size_t)c->numRanks, K = (size_t)numTopk;
  size_t W = R < K ? R : K, L = (size_t)numLocal(c);
  return roundUp(sizeof(ep_ht_head_t), 256) + roundUp(N * W * 8, 256) + roundUp(N * K * 4, 256) +
         2 * roundUp(R * N * 4, 256) + roundUp(R * N * K * 4, 256) + roundUp(L * 8, 256) +
         roundUp((L + 1) * 4, 256);
}

/* Counts of each tile of 256 tokens, a row of zeros to pad with, rows kept of each expert. */
size_t epHtScratchBytes(const ep_ht_config_t *c) {
  size_t L = (size_t)numLocal(c), R = (size_t)c->numRanks;
  size_t tiles = R * (((size_t)c->maxTokens + 255) / 256);
  return EP_HT_CHUNK_BYTES + roundUp(L * 4, 256) + roundUp((L + 1 + R) * tiles * 4, 256);
}

void epHtControlInit(void *bytes) {
  memset(bytes, 0, EP_HT_CONTROL_BYTES);
}
