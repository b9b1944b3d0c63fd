/* SHA-256 (FIPS 180-4) and HMAC (RFC 2104) over it: how processes prove to each other that they know a
 * secret without sending it. */
#ifndef TREFOIL_HOST_HMAC_H
#define TREFOIL_HOST_HMAC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { EP_DIGEST_BYTES = 32 };

typedef struct {
  uint32_t state[8];
  uint64_t bytes; /* so far */
  unsigned char block[64];
} ep_sha256_t;

void epSha256Begin(ep_sha256_t *h);
void epSha256Add(ep_sha256_t *h, const void *data, size_t bytes);
void epSha256End(ep_sha256_t *h, unsigned char digest[EP_DIGEST_BYTES]);

typedef struct {
  ep_sha256_t inner, outer;
} ep_hmac_t;

/* Keys of at most 64 bytes. */
void epHmacBegin(ep_hmac_t *h, const void *key, size_t keyBytes);
void epHmacAdd(ep_hmac_t *h, const void *data, size_t bytes);
void epHmacEnd(ep_hmac_t *h, unsigned char mac[EP_DIGEST_BYTES]);

/* In a time that does not depend on where they differ. */
bool epSameBytes(const void *a, const void *b, size_t bytes);

#endif
