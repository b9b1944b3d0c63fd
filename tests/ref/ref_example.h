/* The worked example of docs/spec.md, and rows that say where they come from.
 *
 * R = 2 ranks, E = 4 experts (L = 2: rank 0 has 0 and 1, rank 1 has 2 and 3), K = 2, N = 2:
 *
 *     rank 0 token 0: experts 2, 0   weights 0.75, 0.25
 *     rank 0 token 1: experts 3, 2   weights 0.5,  0.125
 *     rank 1 token 0: experts -, 2   weights 9,    0.5     (-: unused; its weight must play no part)
 *
 * Every element of a row of tokens is 100 * rank + 10 * token + column + 1 in f32. */
#ifndef TREFOIL_TESTS_REF_EXAMPLE_H
#define TREFOIL_TESTS_REF_EXAMPLE_H

#include "trefoil/ref.h"

#define EXAMPLE_WIDTH 2

typedef struct example {
  trefoil_case_t c;
  int64_t numTokens[2];
  const int32_t *topkIdx[2];
  float tokens[2][2 * EXAMPLE_WIDTH];
  trefoil_source_t sources[2];
} example_t;

static const int32_t exampleIdx0[] = {2, 0, 3, 2}, exampleIdx1[] = {-1, 2};
static const float exampleWeights0[] = {0.75f, 0.25f, 0.5f, 0.125f}, exampleWeights1[] = {9, 0.5f};

static inline float exampleValue(int src, int64_t token, int column) {
  return (float)(100 * src + 10 * token + column + 1);
}

static inline void exampleMake(example_t *x, trefoil_mode_t mode) {
  memset(x, 0, sizeof *x);
  x->numTokens[0] = 2;
  x->numTokens[1] = 1;
  x->topkIdx[0] = exampleIdx0;
  x->topkIdx[1] = exampleIdx1;
  x->c.routing.shape = (trefoil_shape_t){
      .numRanks = 2, .ranksPerNode = 2, .numExperts = 4, .topk = 2, .maxTokens = 2};
  x->c.routing.numTokens = x->numTokens;
  x->c.routing.topkIdx = x->topkIdx;
  x->c.mode = mode;
  x->c.width = EXAMPLE_WIDTH;
  x->c.dtype = TREFOIL_F32;
  for (int src = 0; src < 2; src++) {
    for (int i = 0; i < 2 * EXAMPLE_WIDTH; i++) {
      x->tokens[src][i] = exampleValue(src, i / EXAMPLE_WIDTH, i % EXAMPLE_WIDTH);
    }
    x->sources[src].tokens = x->tokens[src];
  }
  if (mode != TREFOIL_LL_EXPERT_MAJOR) {
    x->sources[0].topkWeights = exampleWeights0;
    x->sources[1].topkWeights = exampleWeights1;
  }
}

#endif
