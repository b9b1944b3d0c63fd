/* Who is of a launch and who is not: proofs, and the count of those who are foreign. The keyed hash is
 * SipHash-2-4 (Aumasson and Bernstein, 2012). */
#include "validate/launch_rendezvous.h"

#include "plan/error.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

static uint64_t turn(uint64_t x, int bits) {
  return x << bits | x >> (64 - bits);
}

static void sipRounds(uint64_t v[4], int n) {
  while (n-- > 0) {
    v[0] += v[1], v[1] = turn(v[1], 13) ^ v[0], v[0] = turn(v[0], 32);
    v[2] += v[3], v[3] = turn(v[3], 16) ^ v[2];
    v[0] += v[3], v[3] = turn(v[3], 21) ^ v[0];
    v[2] += v[1], v[1] = turn(v[1], 17) ^ v[2], v[2] = turn(v[2], 32);
  }
}

static uint64_t sipHash(const uint64_t key[2], const void *data, size_t bytes) {
  uint64_t v[4] = {key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du,
                   key[0] ^ 0x6c7967656e657261u, key[1] ^ 0x7465646279746573u};
  const uint8_t *at = data;
  for (size_t done = 0; done <= bytes; done += 8) { /* the last word holds the length, too */
    size_t n = bytes - done < 8 ? bytes - done : 8;
    uint64_t word = n < 8 ? (uint64_t)bytes << 56 : 0;
    for (size_t i = 0; i < n; i++) word |= (uint64_t)at[done + i] << (8 * i);
    v[3] ^= word;
    sipRounds(v, 2);
    v[0] ^= word;
  }
  v[2] ^= 0xff;
  sipRounds(v, 4);
  return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static uint64_t jobHash(const ep_launch_t *l, uint64_t use) {
  const uint64_t key[2] = {0x7472656f66696c00u, use};
  return sipHash(key, l->job, strlen(l->job));
}

uint64_t epLaunchJobHash(const ep_launch_t *l) {
  return jobHash(l, 0);
}

uint64_t epLaunchProof(const ep_launch_t *l, const ep_launch_handshake_t *h, uint64_t cookie,
                       uint32_t verdict, int by) {
  const uint64_t key[2] = {jobHash(l, 1), jobHash(l, 2)};
  const uint64_t words[5] = {h->cookie, cookie, (uint64_t)h->rank << 32 | h->numRanks, verdict,
                             (uint64_t)by};
  return sipHash(key, words, sizeof words);
}

uint64_t epLaunchCookie(void) {
  uint64_t cookie = 0;
  if (getrandom(&cookie, sizeof cookie, GRND_NONBLOCK) != sizeof cookie)
    cookie = (uint64_t)(epNow() * 1e9) ^ (uint64_t)getpid() << 40;
  return cookie;
}

int epLaunchHandshakeSeconds(const ep_launch_t *l) {
  return l->rendezvousSeconds < 5 ? l->rendezvousSeconds : 5;
}

void epLaunchCountForeign(ep_launch_foreign_t *f, const ep_launch_foreign_t *whose) {
  int count = f->count + 1;
  *f = *whose;
  f->count = count;
}

const char *epLaunchForeignText(const ep_launch_foreign_t *f, char *text, size_t bytes) {
  *text = 0;
  if (f->count > 0)
    snprintf(text, bytes, "; %d connection%s not of this launch %s dropped%s", f->count,
             f->count == 1 ? "" : "s", f->count == 1 ? "was" : "were", f->last);
  return text;
}

trefoil_result_t epLaunchTwice(const ep_launch_t *l, const char *what) {
  return epFail(
      TREFOIL_REMOTE_ERROR,
      "rank %d: %s: two launches that cannot be told apart run at once; give each its own "
      "MASTER_PORT",
      l->rank, what);
}
