/* The sort of arrivals against the C library's, for every way it takes: few, many, sorted, equal keys,
 * keys of 64 bits. */
#include "sim/key_sort.h"

#include "test.h"
#include "tests/plan/cases.h"

static int inOrder(const void *a, const void *b) {
  const ep_keyed_t *x = a, *y = b;
  if (x->key != y->key) return x->key < y->key ? -1 : 1;
  return x->id < y->id ? -1 : x->id > y->id; /* ids are places: stable */
}

TEST(as_the_c_library_sorts) {
  enum { MOST = 20000 };
  ep_keyed_t *a = malloc(MOST * sizeof *a), *b = malloc(MOST * sizeof *b);
  ep_keyed_t *scratch = malloc(MOST * sizeof *scratch);
  uint64_t state = 77;
  for (int i = 0; i < 400; i++) {
    int64_t most = i % 4 == 0 ? 60 : i % 4 == 1 ? 3000 : i % 4 == 2 ? 6000 : MOST;
    int64_t n = randomBelow(&state, most);
    int bits = 1 + (int)randomBelow(&state, 64);
    uint64_t base = nextRandom(&state) >> (bits == 64 ? 0 : 1), mask = ~(uint64_t)0 >> (64 - bits);
    if (base > ~mask) base = ~mask;
    for (int64_t k = 0; k < n; k++) {
      uint64_t key = i % 7 == 0 ? (uint64_t)k : base + (nextRandom(&state) & mask);
      a[k] = b[k] = (ep_keyed_t){key, (int32_t)k};
    }
    epSortKeyed(a, scratch, (size_t)n);
    qsort(b, (size_t)n, sizeof *b, inOrder);
    int64_t same = 0;
    while (same < n && a[same].key == b[same].key && a[same].id == b[same].id) same++;
    CHECK(same == n, "round %d: %lld of %lld, keys of %d bits", i, (long long)same, (long long)n,
          bits);
  }
  free(a);
  free(b);
  free(scratch);
}

TEST_MAIN()
