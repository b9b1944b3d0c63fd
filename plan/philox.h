/* Philox4x32-10, the counter-based generator of Salmon et al. (SC'11): a bijection of 128 bits under
 * a 64-bit key, so that any draw is found from its position alone, without a state. */
#ifndef TREFOIL_PLAN_PHILOX_H
#define TREFOIL_PLAN_PHILOX_H

#include <stdint.h>

typedef struct ep_philox {
  uint32_t word[4];
} ep_philox_t;

static inline ep_philox_t epPhilox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2,
                                   uint32_t c3) {
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
    uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)p1;
    c3 = (uint32_t)p0;
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  ep_philox_t out = {{c0, c1, c2, c3}};
  return out;
}

#endif
