/* Counter-based random numbers: a stream is fixed by its key, so that (seed, case) fixes everything
 * a case is made of, and any part can be made again without the rest. */
#ifndef TREFOIL_VALIDATE_RNG_H
#define TREFOIL_VALIDATE_RNG_H

#include <stdint.h>

typedef struct ep_rng {
  uint64_t state;
} ep_rng_t;

static inline uint64_t epMix(uint64_t x) { /* splitmix64's finaliser */
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
static inline ep_rng_t epRng(uint64_t a, uint64_t b, uint64_t c) {
  ep_rng_t r = {epMix(a + 0x9e3779b97f4a7c15u * epMix(b + 0x9e3779b97f4a7c15u * epMix(c + 1)))};
  return r;
}
static inline uint64_t epRand(ep_rng_t *r) {
  return epMix(r->state += 0x9e3779b97f4a7c15u);
}
/* Uniform in [0, n), n >= 1. */
static inline int64_t epBelow(ep_rng_t *r, int64_t n) {
  return (int64_t)(((unsigned __int128)epRand(r) * (uint64_t)n) >> 64);
}
/* Uniform in [lo, hi]. */
static inline int64_t epRange(ep_rng_t *r, int64_t lo, int64_t hi) {
  return lo + epBelow(r, hi - lo + 1);
}
/* True once in n. */
static inline int epOneIn(ep_rng_t *r, int n) {
  return epBelow(r, n) == 0;
}

#endif
