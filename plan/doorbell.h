/* Waiting in memory that several threads or processes share, without burning a core.
 *
 * Doorbells: a thread that reads the doorbell, looks at what it waits for, and sleeps on the doorbell
 * if that is not there yet. A thread that changes something rings afterwards. If the doorbell was rung
 * since it was read the sleep returns at once, so no ring is lost. A ring costs a system call only if a
 * thread sleeps. */
#ifndef TREFOIL_PLAN_DOORBELL_H
#define TREFOIL_PLAN_DOORBELL_H

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Which threads sleep on a word. Those of this process alone: cheaper. */
typedef enum { EP_FUTEX_SHARED = 0, EP_FUTEX_PRIVATE = FUTEX_PRIVATE_FLAG } ep_futex_scope_t;

/* Sleeps while *word == seen, at most maxNs; may return early. */
static inline void epFutexWait(const _Atomic uint32_t *word, uint32_t seen, uint64_t maxNs,
                               ep_futex_scope_t scope) {
  struct timespec t = {(time_t)(maxNs / 1000000000u), (long)(maxNs % 1000000000u)};
  int saved = errno;
  syscall(SYS_futex, word, FUTEX_WAIT | (int)scope, seen, &t, NULL, 0);
  errno = saved;
}

static inline void epFutexWake(const _Atomic uint32_t *word, ep_futex_scope_t scope) {
  int saved = errno;
  syscall(SYS_futex, word, FUTEX_WAKE | (int)scope, 0x7fffffff, NULL, NULL, 0);
  errno = saved;
}

/* How often to look before sleeping: all ranks of a laptop may share two cores, so it is a few microseconds.
 * With one processor nothing changes while this thread spins. */
static inline int epNumSpins(void) {
  static _Atomic int num = -1;
  int n = atomic_load_explicit(&num, memory_order_relaxed);
  if (n >= 0) return n;
  cpu_set_t set;
  n = sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) == 1 ? 0 : 60;
  atomic_store(&num, n);
  return n;
}

static inline void epSpinPause(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/* Pauses while *word == seen; returns whether it changed. */
static inline int epSpin(const _Atomic uint32_t *word, uint32_t seen) {
  for (int i = epNumSpins(); i > 0; i--) {
    if (atomic_load_explicit(word, memory_order_acquire) != seen) return 1;
    epSpinPause();
  }
  return atomic_load_explicit(word, memory_order_acquire) != seen;
}

/* Of all zeros at first. */
typedef struct ep_doorbell {
  _Atomic uint32_t rings, sleepers;
  _Atomic uint32_t
      wanted; /* 1 + the rank whose ring ends the only sleeper's sleep; 0: any rank's */
} ep_doorbell_t;

static inline uint32_t epDoorbellRead(ep_doorbell_t *d) {
  return atomic_load(&d->rings);
}

/* who: 1 + the rank that rings; 0: wakes all sleepers, whatever they want. */
static inline void epDoorbellRing(ep_doorbell_t *d, uint32_t who, ep_futex_scope_t scope) {
  atomic_fetch_add(&d->rings, 1);
  uint32_t sleepers = atomic_load(&d->sleepers), wanted = atomic_load(&d->wanted);
  if (!sleepers) return;
  if (!who || sleepers > 1 || !wanted || wanted == who) epFutexWake(&d->rings, scope);
}

/* Sleeps until it is rung, at most maxNs. With several sleepers any ring wakes all. */
static inline void epDoorbellSleep(ep_doorbell_t *d, uint32_t seen, uint64_t maxNs, uint32_t wanted,
                                   ep_futex_scope_t scope) {
  atomic_store(&d->wanted, wanted);
  atomic_fetch_add(&d->sleepers, 1);
  epFutexWait(&d->rings, seen, maxNs, scope);
  atomic_fetch_sub(&d->sleepers, 1);
}

#endif
