/* Payloads are random bits (finite or not), outputs poisoned, expectations computed by libtrefoil's
 * reference for this rank from everybody's inputs. */
#include "step.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

static uint64_t draw(uint64_t *state) {
  return *state = mix(*state);
}

static int isHt(const step_case_t *c) {
  return c->mode == TREFOIL_HT_FLAT || c->mode == TREFOIL_HT_EXPERT_MAJOR;
}

static void *make(size_t count, size_t size) {
  void *p = calloc(count + 1, size);
  if (!p) abort();
  return p;
}

static void makeRouting(step_data_t *d, int r) {
  const step_case_t *c = d->c;
  uint64_t s = mix(c->seed * 1000 + (uint64_t)r);
  int64_t B = d->numTokens[r] = (int64_t)(draw(&s) % (uint64_t)(c->maxTokens + 1));
  int K = c->topk;
  d->idx[r] = make((size_t)(B * K), sizeof(int32_t));
  d->weights[r] = make((size_t)(B * K), sizeof(float));
  for (int64_t i = 0; i < B * K; i++) {
    int32_t *row = d->idx[r] + i / K * K;
    int k = (int)(i % K), tries = 0, again = 1;
    while (again && tries++ < 50) {
      row[k] = (int32_t)(draw(&s) % (uint64_t)c->numExperts);
      again = 0;
      for (int j = 0; j < k; j++) again |= row[j] == row[k];
    }
    if (again || draw(&s) % 8 == 0) row[k] = -1;
    d->weights[r][i] = (float)(int64_t)(draw(&s) % 2000 - 1000) / 512.0f;
  }
}

/* bf16 of moderate size; now and then any bits, NaN and infinity included, where only copied. */
static uint16_t drawBf16(uint64_t *s, int anyBits) {
  uint64_t x = draw(s);
  if (anyBits && x % 16 == 0) return (uint16_t)(x >> 20);
  return (uint16_t)((x >> 8 & 0x807F) | (118 + x % 16) << 7);
}

static void makeRows(step_data_t *d, int r) {
  const step_case_t *c = d->c;
  uint64_t s = mix(c->seed * 7919 + (uint64_t)r + 5);
  size_t n = (size_t)(d->numTokens[r] * c->width);
  d->tokens[r] = make(n, 2);
  for (size_t i = 0; i < n; i++) d->tokens[r][i] = drawBf16(&s, c->quant != TREFOIL_QUANT_E4M3);
  if (c->quant != TREFOIL_QUANT_CALLER) return;
  d->scales[r] = aligned_alloc(64, (size_t)(d->numTokens[r] + 1) * 64);
  uint16_t *aligned = aligned_alloc(64, (n * 2 + 127) / 64 * 64);
  memcpy(aligned, d->tokens[r], n * 2);
  free(d->tokens[r]);
  d->tokens[r] = aligned;
  for (int64_t i = 0; i < d->numTokens[r] * 32; i++) d->scales[r][i] = (uint8_t)draw(&s);
}

static void makeExpertRows(step_data_t *d, int r) {
  const step_case_t *c = d->c;
  uint64_t s = mix(c->seed * 104729 + (uint64_t)r + 11);
  int64_t slots = trefoilRefNumSlots(&d->ref, r);
  if (slots < 0) abort();
  if (isHt(c) && c->maxRecv > slots) slots = c->maxRecv;
  size_t n = (size_t)(slots * c->width);
  d->expertRows[r] = make(n, 2);
  for (size_t i = 0; i < n; i++) d->expertRows[r][i] = drawBf16(&s, 0);
  d->slotWeights[r] = make((size_t)(slots * c->topk), sizeof(float));
  d->slotScales[r] = make((size_t)slots, sizeof(float));
  for (int64_t i = 0; i < slots * c->topk; i++) d->slotWeights[r][i] = (float)(draw(&s) % 999);
  for (int64_t i = 0; i < slots; i++) d->slotScales[r][i] = 1.0f + (float)(draw(&s) % 64);
}

static size_t outBytes(const step_case_t *c) {
  return c->quant == TREFOIL_QUANT_E4M3 ? (size_t)c->width : (size_t)c->width * 2;
}

static size_t outScaleBytes(const step_case_t *c) {
  return c->quant == TREFOIL_QUANT_CALLER ? 32
         : c->quant == TREFOIL_QUANT_E4M3 ? (size_t)c->width / 128 * 4
                                          : 0;
}

static int64_t topkRows(const step_data_t *d) {
  return d->slots;
}

static size_t weightCount(const step_data_t *d) {
  return (size_t)topkRows(d) * (d->c->mode == TREFOIL_HT_EXPERT_MAJOR ? 1 : (size_t)d->c->topk);
}

static void *poisoned(size_t bytes) {
  void *p = aligned_alloc(64, (bytes + 127) / 64 * 64);
  if (!p) abort();
  memset(p, 0xA5, bytes);
  return p;
}

static void makeOutputs(step_data_t *d) {
  const step_case_t *c = d->c;
  size_t slots = (size_t)d->slots, B = (size_t)d->numTokens[d->me];
  d->outTokens = poisoned(slots * outBytes(c));
  d->wantTokens = poisoned(slots * outBytes(c));
  d->outScales = poisoned(slots * outScaleBytes(c));
  d->wantScales = poisoned(slots * outScaleBytes(c));
  d->outWeights = poisoned(weightCount(d) * 4);
  d->wantWeights = poisoned(weightCount(d) * 4);
  d->outIdx = poisoned(weightCount(d) * 8);
  d->wantIdx = poisoned(weightCount(d) * 8);
  d->counters = poisoned((size_t)d->L * 8);
  d->wantCounters = poisoned((size_t)d->L * 8);
  d->offsets = poisoned((size_t)d->L * 8);
  d->wantOffsets = poisoned((size_t)d->L * 8);
  d->total = poisoned(8);
  d->wantTotal = poisoned(8);
  d->counters32 = poisoned((size_t)d->L * 4);
  d->sources32 = poisoned((size_t)d->R * 4);
  d->wantSources = poisoned((size_t)d->R * 8);
  d->combined = poisoned(B * (size_t)c->width * 2);
  d->wantCombined = poisoned(B * (size_t)c->width * 2);
  d->combinedWeights = poisoned(B * (size_t)c->topk * 4);
  d->wantCombinedWeights = poisoned(B * (size_t)c->topk * 4);
}

void stepExpect(step_data_t *d) {
  const step_case_t *c = d->c;
  trefoil_source_t *sources = make((size_t)d->R, sizeof *sources);
  trefoil_expert_rows_t *experts = make((size_t)d->R, sizeof *experts);
  for (int r = 0; r < d->R; r++) {
    sources[r] = (trefoil_source_t){d->tokens[r], d->scales[r], d->weights[r]};
    experts[r] = (trefoil_expert_rows_t){d->expertRows[r], d->slotWeights[r], d->slotScales[r]};
  }
  trefoil_received_t out = {d->wantTokens, outScaleBytes(c) ? d->wantScales : NULL, d->wantWeights,
                            d->wantIdx, topkRows(d)};
  trefoil_counters_t counters = {d->wantCounters, d->wantOffsets, d->wantTotal, d->wantSources};
  trefoil_case_t back = d->ref;
  back.quant = c->combineQuant;
  if (trefoilRefDispatch(&d->ref, d->me, sources, &out) != TREFOIL_OK ||
      trefoilRefCounters(&d->ref, d->me, &counters) != TREFOIL_OK ||
      trefoilRefCombine(&back, d->me, experts, d->weights[d->me], d->wantCombined,
                        c->backward ? d->wantCombinedWeights : NULL) != TREFOIL_OK) {
    fprintf(stderr, "reference: %s\n", trefoilLastError());
    abort();
  }
  free(sources);
  free(experts);
}

step_data_t *stepMake(const step_case_t *c, int me, int R, int ranksPerNode) {
  step_data_t *d = make(1, sizeof *d);
  d->c = c;
  d->R = R;
  d->me = me;
  d->numTokens = make((size_t)R, 8);
  void ***tables[] = {(void ***)&d->idx,       (void ***)&d->tokens,     (void ***)&d->scales,
                      (void ***)&d->weights,   (void ***)&d->expertRows, (void ***)&d->slotWeights,
                      (void ***)&d->slotScales};
  for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) *tables[i] = make((size_t)R, 8);
  for (int r = 0; r < R; r++) makeRouting(d, r);
  for (int r = 0; r < R; r++) makeRows(d, r);
  d->ref = (trefoil_case_t){.mode = c->mode,
                            .width = c->width,
                            .dtype = TREFOIL_BF16,
                            .quant = c->quant,
                            .roundScales = c->roundScales,
                            .scaleBytes = 32,
                            .backward = c->backward,
                            .alignment = c->alignment,
                            .globalIds = c->globalIds,
                            .maxRecv = c->maxRecv,
                            .drop = c->drop,
                            .combinePartial = c->partial};
  d->ref.routing = (trefoil_routing_t){{R, ranksPerNode, c->numExperts, c->topk, c->maxTokens},
                                       d->numTokens,
                                       (const int32_t *const *)d->idx};
  d->L = trefoilExpertsPerRank(&d->ref.routing.shape);
  d->rows = d->slots = trefoilRefNumSlots(&d->ref, me);
  if (isHt(c) && c->maxRecv) d->slots = c->maxRecv;
  for (int r = 0; r < R; r++) makeExpertRows(d, r);
  int64_t B = d->numTokens[me];
  d->wide = make((size_t)(B * c->topk), 8);
  for (int64_t i = 0; i < B * c->topk; i++) d->wide[i] = d->idx[me][i];
  makeOutputs(d);
  stepExpect(d);
  return d;
}

void stepPoison(step_data_t *d) {
  const step_case_t *c = d->c;
  memset(d->outTokens, 0xA5, (size_t)d->slots * outBytes(c));
  memset(d->outScales, 0xA5, (size_t)d->slots * outScaleBytes(c));
  memset(d->outWeights, 0xA5, weightCount(d) * 4);
  memset(d->outIdx, 0xA5, weightCount(d) * 8);
  memset(d->combined, 0xA5, (size_t)(d->numTokens[d->me] * c->width) * 2);
  memset(d->combinedWeights, 0xA5, (size_t)(d->numTokens[d->me] * c->topk) * 4);
}

void stepPoisonWanted(step_data_t *d) {
  const step_case_t *c = d->c;
  memset(d->wantTokens, 0xA5, (size_t)d->slots * outBytes(c));
  memset(d->wantScales, 0xA5, (size_t)d->slots * outScaleBytes(c));
  memset(d->wantWeights, 0xA5, weightCount(d) * 4);
  memset(d->wantIdx, 0xA5, weightCount(d) * 8);
  memset(d->wantCombined, 0xA5, (size_t)(d->numTokens[d->me] * c->width) * 2);
}

void stepFree(step_data_t *d) {
  void **tables[] = {(void **)d->idx,       (void **)d->tokens,     (void **)d->scales,
                     (void **)d->weights,   (void **)d->expertRows, (void **)d->slotWeights,
                     (void **)d->slotScales};
  for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
    for (int r = 0; r < d->R; r++) free(tables[i][r]);
    free(tables[i]);
  }
  void *plain[] = {d->numTokens,
                   d->wide,
                   d->outTokens,
                   d->wantTokens,
                   d->outScales,
                   d->wantScales,
                   d->outWeights,
                   d->wantWeights,
                   d->outIdx,
                   d->wantIdx,
                   d->counters,
                   d->wantCounters,
                   d->offsets,
                   d->wantOffsets,
                   d->total,
                   d->wantTotal,
                   d->counters32,
                   d->sources32,
                   d->wantSources,
                   d->combined,
                   d->wantCombined,
                   d->combinedWeights,
                   d->wantCombinedWeights};
  for (size_t i = 0; i < sizeof plain / sizeof *plain; i++) free(plain[i]);
  free(d);
}
