/* A clock that only goes on. */
#ifndef TREFOIL_PLAN_CLOCK_H
#define TREFOIL_PLAN_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t epMonotonicNs(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* In seconds. */
static inline double epNow(void) {
  return 1e-9 * (double)epMonotonicNs();
}

#endif
