/* SHA-256 and HMAC, as the standards have them (docs/dependencies.md: why not a library's). */
#include "host_hmac.h"

#include <string.h>

static const uint32_t roundKeys[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int by) {
  return x >> by | x << (32 - by);
}

static void expand(const unsigned char block[64], uint32_t w[64]) {
  for (int i = 0; i < 16; i++)
    w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
           (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
  for (int i = 16; i < 64; i++) {
    uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] +
           (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
  }
}

static void compress(uint32_t state[8], const unsigned char block[64]) {
  uint32_t w[64], s[8];
  expand(block, w);
  memcpy(s, state, sizeof s);
  for (int i = 0; i < 64; i++) {
    uint32_t e = s[4], a = s[0];
    uint32_t one = s[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) +
                   ((e & s[5]) ^ (~e & s[6])) + roundKeys[i] + w[i];
    uint32_t two =
        (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
    memmove(s + 1, s, 7 * sizeof *s);
    s[4] += one;
    s[0] = one + two;
  }
  for (int i = 0; i < 8; i++) state[i] += s[i];
}

void epSha256Begin(ep_sha256_t *h) {
  static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  memset(h, 0, sizeof *h);
  memcpy(h->state, start, sizeof start);
}

void epSha256Add(ep_sha256_t *h, const void *data, size_t bytes) {
  const unsigned char *at = data;
  while (bytes) {
    size_t filled = (size_t)(h->bytes & 63), take = 64 - filled < bytes ? 64 - filled : bytes;
    memcpy(h->block + filled, at, take);
    h->bytes += take;
    at += take;
    bytes -= take;
    if ((h->bytes & 63) == 0) compress(h->state, h->block);
  }
}

void epSha256End(ep_sha256_t *h, unsigned char digest[EP_DIGEST_BYTES]) {
  static const unsigned char padding[64] = {0x80};
  unsigned char length[8];
  uint64_t bits = h->bytes * 8;
  for (int i = 0; i < 8; i++) length[i] = (unsigned char)(bits >> (56 - 8 * i));
  size_t filled = (size_t)(h->bytes & 63);
  epSha256Add(h, padding, filled < 56 ? 56 - filled : 120 - filled);
  epSha256Add(h, length, sizeof length);
  for (int i = 0; i < EP_DIGEST_BYTES; i++)
    digest[i] = (unsigned char)(h->state[i / 4] >> (24 - 8 * (i % 4)));
}

void epHmacBegin(ep_hmac_t *h, const void *key, size_t keyBytes) {
  unsigned char inner[64] = {0}, outer[64];
  memcpy(inner, key, keyBytes < sizeof inner ? keyBytes : sizeof inner);
  for (int i = 0; i < 64; i++) {
    outer[i] = inner[i] ^ 0x5c;
    inner[i] ^= 0x36;
  }
  epSha256Begin(&h->inner);
  epSha256Add(&h->inner, inner, sizeof inner);
  epSha256Begin(&h->outer);
  epSha256Add(&h->outer, outer, sizeof outer);
}

void epHmacAdd(ep_hmac_t *h, const void *data, size_t bytes) {
  epSha256Add(&h->inner, data, bytes);
}

void epHmacEnd(ep_hmac_t *h, unsigned char mac[EP_DIGEST_BYTES]) {
  epSha256End(&h->inner, mac);
  epSha256Add(&h->outer, mac, EP_DIGEST_BYTES);
  epSha256End(&h->outer, mac);
}

bool epSameBytes(const void *a, const void *b, size_t bytes) {
  const volatile unsigned char *x = a, *y = b;
  unsigned char differs = 0;
  for (size_t i = 0; i < bytes; i++) differs |= (unsigned char)(x[i] ^ y[i]);
  return differs == 0;
}
