/* Rows matched by content, sums by a bound from their operands (order_free.h). */
#include "validate/order_free.h"

#include "trefoil/numerics.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int epPastIsOpen(unsigned open, trefoil_mode_t mode) {
  return open && mode >= TREFOIL_HT_FLAT;
}

int epRowsAreOpen(unsigned open, trefoil_mode_t mode) {
  return !!(open & (mode < TREFOIL_HT_FLAT ? EP_OPEN_LL_ROWS : EP_OPEN_HT_ROWS));
}

/* ---- Rows ---- */

int64_t epZoneEnd(const trefoil_case_t *rc, const trefoil_slot_t *slots, int64_t numSlots,
                  int64_t first, int64_t *used, int64_t *numUsed) {
  const trefoil_shape_t *s = &rc->routing.shape;
  int64_t end = numSlots;
  if (rc->mode == TREFOIL_LL_EXPERT_MAJOR) {
    end = first + s->numRanks * s->maxTokens;
  } else if (rc->mode == TREFOIL_LL_RANK_MAJOR) {
    end = first + s->maxTokens;
  } else if (rc->mode == TREFOIL_HT_EXPERT_MAJOR) {
    end = first;
    while (end < numSlots && slots[end].expert == slots[first].expert) end++;
  }
  *numUsed = 0;
  for (int64_t i = first; i < end; i++)
    if (slots[i].src >= 0) used[(*numUsed)++] = i;
  return end;
}

typedef struct keyed {
  uint64_t key;
  int64_t slot;
} keyed_t;

static uint64_t hashRow(const uint8_t *row, size_t bytes) {
  uint64_t h = 0x9e3779b97f4a7c15u;
  for (size_t at = 0; at < bytes; at += 8) {
    uint64_t word = 0;
    memcpy(&word, row + at, bytes - at < 8 ? bytes - at : 8);
    h = (h ^ word) * 0xff51afd7ed558ccdu;
    h ^= h >> 32;
  }
  return h;
}

static int byKey(const void *a, const void *b) {
  const keyed_t *x = a, *y = b;
  if (x->key != y->key) return x->key < y->key ? -1 : 1;
  return (x->slot > y->slot) - (x->slot < y->slot);
}

/* The rows that do not lie where the reference has them: both lists sorted by content. */
static int64_t listMoved(const ep_zone_t *z, int64_t *to, keyed_t *wanted, keyed_t *found) {
  int64_t n = 0;
  for (int64_t i = 0; i < z->numUsed; i++) {
    int64_t slot = z->used[i];
    const uint8_t *a = z->expected + (size_t)(slot - z->first) * z->rowBytes;
    const uint8_t *b = z->found + (size_t)(slot - z->first) * z->rowBytes;
    to[slot] = slot;
    if (!memcmp(a, b, z->rowBytes)) continue;
    wanted[n] = (keyed_t){hashRow(a, z->rowBytes), slot};
    found[n++] = (keyed_t){hashRow(b, z->rowBytes), slot};
  }
  qsort(wanted, (size_t)n, sizeof *wanted, byKey);
  qsort(found, (size_t)n, sizeof *found, byKey);
  return n;
}

int64_t epMatchZone(const ep_zone_t *z, int64_t *to, int *open, int64_t *other) {
  keyed_t *lists = malloc(2 * sizeof *lists * (size_t)(z->numUsed + 1));
  if (!lists) return -2;
  keyed_t *wanted = lists, *found = lists + z->numUsed;
  int64_t n = listMoved(z, to, wanted, found), missing = -1, at = 0;
  for (int64_t i = 0; i < n; i++) {
    while (at < n && found[at].key < wanted[i].key) at++;
    int64_t slot = at < n ? found[at].slot : -1;
    if (at < n && found[at].key == wanted[i].key &&
        !memcmp(z->expected + (size_t)(wanted[i].slot - z->first) * z->rowBytes,
                z->found + (size_t)(slot - z->first) * z->rowBytes, z->rowBytes)) {
      to[wanted[i].slot] = slot;
      found[at++].slot = -1; /* taken */
    } else if (missing < 0 || wanted[i].slot < missing) {
      missing = wanted[i].slot;
    }
  }
  *other = -1;
  for (int64_t i = 0; missing >= 0 && i < n; i++)
    if (found[i].slot >= 0 && (*other < 0 || found[i].slot < *other)) *other = found[i].slot;
  *open |= n > 0;
  free(lists);
  return missing;
}

int epPermuteRows(uint8_t *rows, size_t rowBytes, int64_t n, const int64_t *to) {
  size_t numMoved = 0, at = 0;
  for (int64_t i = 0; i < n; i++) numMoved += to[i] != i;
  uint8_t *moved = malloc(numMoved * rowBytes + 1);
  if (!moved) return 0;
  for (int64_t i = 0; i < n; i++)
    if (to[i] != i) memcpy(moved + rowBytes * at++, rows + (size_t)i * rowBytes, rowBytes);
  at = 0;
  for (int64_t i = 0; i < n; i++)
    if (to[i] != i) memcpy(rows + (size_t)to[i] * rowBytes, moved + rowBytes * at++, rowBytes);
  free(moved);
  return 1;
}

/* ---- Sums ---- */

void epClearSigns(uint8_t *elements, size_t bytes, trefoil_dtype_t dtype) {
  size_t b = trefoilDtypeBytes(dtype);
  for (size_t at = b - 1; at < bytes; at += b) elements[at] &= 0x7f; /* little-endian */
}

static double valueAt(const uint8_t *p, trefoil_dtype_t dtype) {
  uint16_t half;
  float f;
  if (dtype == TREFOIL_F32) {
    memcpy(&f, p, 4);
    return (double)f;
  }
  memcpy(&half, p, 2);
  return (double)(dtype == TREFOIL_BF16 ? trefoilBf16ToF32(half) : trefoilF16ToF32(half));
}

int64_t epCompareSums(const ep_sums_t *s, int *open, double *wanted, double *found, double *bound) {
  size_t b = trefoilDtypeBytes(s->dtype);
  double u = s->dtype == TREFOIL_BF16 ? 0x1p-7 : s->dtype == TREFOIL_F16 ? 0x1p-10 : 0x1p-23;
  double least = s->dtype == TREFOIL_F16 ? 0x1p-24 : 0x1p-126; /* spacing of the smallest values */
  /* fp32 rounds after every term, too: no more than ranks and top-k together */
  u *= s->numRanks + 2 + (s->dtype == TREFOIL_F32 ? 2 * s->topk : 0);
  for (size_t at = 0; at < s->bytes; at += b) {
    if (!memcmp(s->expected + at, s->found + at, b)) continue;
    *wanted = valueAt(s->expected + at, s->dtype);
    *found = valueAt(s->found + at, s->dtype);
    *bound = u * valueAt(s->magnitudes + at, s->dtype) + 2 * least;
    *open = 1;
    if (!(fabs(*found - *wanted) <= *bound)) return (int64_t)(at / b);
  }
  return -1;
}
