/* Radix sort from the least digit up, over the digits in which the keys differ; what is sorted
 * already, as queues often are, costs one look. */
#include "sim/key_sort.h"

#include <string.h>

enum { INSERTION = 48, FEW = 4096 };

static void insertionSort(ep_keyed_t *a, size_t n) {
  for (size_t i = 1; i < n; i++) {
    ep_keyed_t x = a[i];
    size_t j = i;
    for (; j > 0 && a[j - 1].key > x.key; j--) a[j] = a[j - 1];
    a[j] = x;
  }
}

static int isSorted(const ep_keyed_t *a, size_t n, uint64_t *least, uint64_t *most) {
  int sorted = 1;
  *least = *most = a[0].key;
  for (size_t i = 1; i < n; i++) {
    sorted &= a[i - 1].key <= a[i].key;
    if (a[i].key < *least) *least = a[i].key;
    if (a[i].key > *most) *most = a[i].key;
  }
  return sorted;
}

/* One digit: counts, then places. */
static void pass(const ep_keyed_t *from, ep_keyed_t *to, size_t n, uint64_t least, int shift,
                 int bits) {
  uint32_t place[1 << 11];
  uint64_t mask = ((uint64_t)1 << bits) - 1;
  memset(place, 0, sizeof *place << bits);
  for (size_t i = 0; i < n; i++) place[(from[i].key - least) >> shift & mask]++;
  uint32_t sum = 0;
  for (uint64_t d = 0; d <= mask; d++) {
    uint32_t count = place[d];
    place[d] = sum;
    sum += count;
  }
  for (size_t i = 0; i < n; i++) to[place[(from[i].key - least) >> shift & mask]++] = from[i];
}

void epSortKeyed(ep_keyed_t *items, ep_keyed_t *scratch, size_t n) {
  if (n < 2) return;
  if (n <= INSERTION) {
    insertionSort(items, n);
    return;
  }
  uint64_t least, most;
  if (isSorted(items, n, &least, &most)) return;
  int bits = n < FEW ? 8 : 11;
  ep_keyed_t *from = items, *to = scratch;
  for (int shift = 0; shift < 64 && (most - least) >> shift; shift += bits) {
    pass(from, to, n, least, shift, bits);
    ep_keyed_t *kept = from;
    from = to;
    to = kept;
  }
  if (from != items) memcpy(items, from, n * sizeof *items);
}
