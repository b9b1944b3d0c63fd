/* Random numbers, and settings of the environment. */
#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

#include "host_internal.h"
#include "trefoil_host.h"

uint64_t epRandom(void) {
  static _Atomic uint64_t counter;
  uint64_t bits = 0;
  if (getrandom(&bits, sizeof bits, 0) != (ssize_t)sizeof bits)
    bits = epMonotonicNs() * 0x9e3779b97f4a7c15u ^ (uint64_t)getpid() << 40;
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
