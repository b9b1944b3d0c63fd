/* Random routings for the tests of plan/: small, uneven, with -1 entries, empty ranks, experts that
 * the ranks do not divide, ranks without experts, one and many nodes. */
#ifndef TREFOIL_TESTS_PLAN_CASES_H
#define TREFOIL_TESTS_PLAN_CASES_H

#include "trefoil/shape.h"

#include <stdint.h>
#include <stdlib.h>

typedef struct random_case {
  trefoil_routing_t routing;
  int64_t *numTokens;
  int32_t **idx;
} random_case_t;

static inline uint64_t nextRandom(uint64_t *state) {
  uint64_t x = *state += 0x9e3779b97f4a7c15u; /* splitmix64 */
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}
static inline int64_t randomBelow(uint64_t *state, int64_t n) {
  return (int64_t)(nextRandom(state) % (uint64_t)n);
}

static inline void fillRow(const trefoil_shape_t *s, int32_t *row, int percentUnused,
                           uint64_t *state) {
  for (int k = 0; k < s->topk; k++) {
    row[k] = -1;
    if (k >= s->numExperts || randomBelow(state, 100) < percentUnused) continue;
    int fresh = 0;
    while (!fresh) {
      row[k] = (int32_t)randomBelow(state, s->numExperts);
      fresh = 1;
      for (int j = 0; j < k; j++) fresh &= row[j] != row[k];
    }
  }
}

static inline void randomCaseOf(random_case_t *c, const trefoil_shape_t *shape, uint64_t *state) {
  int percentUnused = (int)randomBelow(state, 2) * (int)randomBelow(state, 60);
  c->routing.shape = *shape;
  c->numTokens = calloc((size_t)shape->numRanks, sizeof *c->numTokens);
  c->idx = calloc((size_t)shape->numRanks, sizeof *c->idx);
  for (int r = 0; r < shape->numRanks; r++) {
    int kind = (int)randomBelow(state, 4); /* empty, full, anything */
    int64_t n = kind == 0   ? 0
                : kind == 1 ? shape->maxTokens
                            : randomBelow(state, shape->maxTokens + 1);
    c->numTokens[r] = n;
    c->idx[r] = n ? malloc((size_t)(n * shape->topk) * sizeof(int32_t)) : NULL;
    for (int64_t t = 0; t < n; t++)
      fillRow(shape, c->idx[r] + t * shape->topk, percentUnused, state);
  }
  c->routing.numTokens = c->numTokens;
  c->routing.topkIdx = (const int32_t *const *)c->idx;
}

static inline void randomCase(random_case_t *c, uint64_t *state) {
  trefoil_shape_t s;
  int nodes = 1 + (int)randomBelow(state, 4);
  s.ranksPerNode = 1 + (int)randomBelow(state, 4);
  s.numRanks = nodes * s.ranksPerNode;
  s.numExperts = 1 + (int)randomBelow(state, 40);
  s.topk = 1 + (int)randomBelow(state, 8);
  s.maxTokens = 1 + randomBelow(state, 20);
  randomCaseOf(c, &s, state);
}

static inline void freeCase(random_case_t *c) {
  for (int r = 0; r < c->routing.shape.numRanks; r++) free(c->idx[r]);
  free(c->idx);
  free(c->numTokens);
}

#endif
