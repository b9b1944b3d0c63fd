/* Waiting without burning a core: a short spin, then a futex. The futex of epFutexWait is the shared
 * kind, for threads and processes alike; words of this process alone have the cheaper private kind.
 * All eight ranks of a laptop share two cores, so the spin is a few microseconds and anything longer
 * sleeps. */
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "host_internal.h"
#include "trefoil_host.h"

uint64_t epNowNs(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void epFutexWait(const _Atomic uint32_t *word, uint32_t seen, uint64_t maxNs) {
  struct timespec t = {(time_t)(maxNs / 1000000000u), (long)(maxNs % 1000000000u)};
  int saved = errno;
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
  errno = saved;
}

void epFutexWake(const _Atomic uint32_t *word) {
  int saved = errno;
  syscall(SYS_futex, word, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
  errno = saved;
}

void epThreadWait(const _Atomic uint32_t *word, uint32_t seen, uint64_t maxNs) {
  struct timespec t = {(time_t)(maxNs / 1000000000u), (long)(maxNs % 1000000000u)};
  int saved = errno;
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, &t, NULL, 0);
  errno = saved;
}

void epThreadWake(const _Atomic uint32_t *word) {
  int saved = errno;
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
  errno = saved;
}

/* With one processor nothing changes while this thread spins. */
static int numSpins(void) {
  static _Atomic int num = -1;
  int n = atomic_load_explicit(&num, memory_order_relaxed);
  if (n >= 0) return n;
  cpu_set_t set;
  n = sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) == 1 ? 0 : 60;
  atomic_store(&num, n);
  return n;
}

bool epSpin(const _Atomic uint32_t *word, uint32_t seen) {
  for (int i = numSpins(); i > 0; i--) {
    if (atomic_load_explicit(word, memory_order_acquire) != seen) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  return atomic_load_explicit(word, memory_order_acquire) != seen;
}

uint64_t epRandom(void) {
  static _Atomic uint64_t counter;
  uint64_t bits = 0;
  if (getrandom(&bits, sizeof bits, 0) != (ssize_t)sizeof bits)
    bits = epNowNs() * 0x9e3779b97f4a7c15u ^ (uint64_t)getpid() << 40;
  bits += atomic_fetch_add(&counter, 1);
  return bits ? bits : 1;
}

bool epRandomBytes(void *out, size_t bytes) {
  return getrandom(out, bytes, 0) == (ssize_t)bytes; /* up to 256 come at once, without EINTR */
}

int64_t epEnvInt(const char *name, int64_t fallback) {
  const char *text = getenv(name);
  if (!text || !*text) return fallback;
  char *end;
  errno = 0;
  long long value = strtoll(text, &end, 10);
  return errno || *end ? fallback : value;
}

uint64_t trefoilHostTimeoutNs(void) {
  int64_t ms = epEnvInt("NCCL_EP_TIMEOUT_MS", 0);
  if (ms <= 0) return 100000000000u;
  if (ms > INT64_MAX / 1000000) return INT64_MAX; /* for ever */
  return (uint64_t)ms * 1000000u;
}

void trefoilHostWake(const uint32_t *word) {
  epFutexWake((const _Atomic uint32_t *)word);
}
