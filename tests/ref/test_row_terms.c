/* epSumTerms against sums of one row at a time: the same bits for every number of rows, groups and
 * weights, over block borders, with NaN payloads, infinities and subnormals in the rows. */
#include "ref/row.h"
#include "tests/test.h"

#include <stdint.h>

enum { MAX_ROWS = 23, MAX_WIDTH = 1030 };

static uint64_t state = 0x9e3779b97f4a7c15u;

static uint64_t randomBits(void) {
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}

static uint8_t rows[MAX_ROWS][MAX_WIDTH * 4 + 64];
static const void *pointers[MAX_ROWS];
static float weights[MAX_ROWS];

/* Half of the elements are any bits at all, the others ordinary numbers that cancel and round. */
static void fillRows(trefoil_dtype_t dtype, int64_t width, int sparse) {
  for (int r = 0; r < MAX_ROWS; r++) {
    uint8_t *row = rows[r] + randomBits() % 16 * 4; /* not aligned to vectors */
    for (int64_t i = 0; i < width; i++) {
      uint64_t bits = randomBits();
      int any = sparse ? bits >> 48 == 0 : bits >> 63;
      uint32_t f32 = (uint32_t)bits, f16 = (uint32_t)bits & 0xffff;
      if (!any) f32 = (f32 & 0x81ffffffu) | 0x3e000000u;
      if (!any) f16 = dtype == TREFOIL_BF16 ? (f16 & 0x81ffu) | 0x3e00u : f16 & 0xbbffu;
      if (dtype == TREFOIL_F32)
        memcpy(row + 4 * i, &f32, 4);
      else
        memcpy(row + 2 * i, &f16, 2);
    }
    pointers[r] = row;
    weights[r] = (float)(int64_t)randomBits() * 0x1p-63f;
  }
}

/* What row_sum.c makes of rows [first, first + n). */
static void oneByOne(const ep_terms_t *t, int first, int n, void *out) {
  static float acc[MAX_WIDTH];
  ep_sum_t sum = {.dtype = t->dtype, .width = t->width, .acc = acc};
  epSumBegin(&sum, out);
  for (int i = first; i < first + n; i++) {
    if (t->weights)
      epSumAddWeighted(&sum, t->rows[i], t->weights[i]);
    else
      epSumAdd(&sum, t->rows[i]);
  }
  epSumEnd(&sum);
}

static void groupByGroup(const ep_terms_t *t, void *out) {
  static float acc[MAX_WIDTH];
  static uint8_t part[MAX_WIDTH * 4];
  ep_sum_t sum = {.dtype = t->dtype, .width = t->width, .acc = acc};
  epSumBegin(&sum, out);
  for (int g = 0, first = 0; g < t->numGroups; first += t->groups[g++]) {
    if (t->groups[g] == 0) continue;
    oneByOne(t, first, t->groups[g], part);
    epSumAdd(&sum, part);
  }
  epSumEnd(&sum);
}

static void compare(const ep_terms_t *t, const char *what) {
  static uint8_t expected[MAX_WIDTH * 4 + 8], found[MAX_WIDTH * 4 + 8];
  memset(expected, 0xa5, sizeof expected);
  memset(found, 0xa5, sizeof found);
  if (t->groups)
    groupByGroup(t, expected);
  else
    oneByOne(t, 0, t->numRows, expected);
  epSumTerms(t, found);
  CHECK(!memcmp(expected, found, sizeof found), "%s: dtype %d, width %lld, %d rows, %d groups%s",
        what, (int)t->dtype, (long long)t->width, t->numRows, t->numGroups,
        t->weights ? ", weighted" : "");
}

static const trefoil_dtype_t dtypes[] = {TREFOIL_F32, TREFOIL_F16, TREFOIL_BF16};
static const int64_t widths[] = {1, 7, 16, 511, 512, 513, 1024, 1030};

TEST(one_level) {
  for (int d = 0; d < 3; d++) {
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
      for (int n = 0; n <= 13; n++) {
        fillRows(dtypes[d], widths[w], n % 2);
        ep_terms_t t = {.dtype = dtypes[d], .width = widths[w], .rows = pointers, .numRows = n};
        compare(&t, "one level");
        t.weights = weights;
        compare(&t, "one level");
      }
    }
  }
}

TEST(groups) {
  for (int round = 0; round < 400; round++) {
    int sizes[9], n = 0, numGroups = (int)(randomBits() % 10);
    for (int g = 0; g < numGroups; g++) {
      sizes[g] = (int)(randomBits() % 6);
      if (n + sizes[g] > MAX_ROWS) sizes[g] = 0;
      n += sizes[g];
    }
    ep_terms_t t = {.dtype = dtypes[round % 3],
                    .width = widths[randomBits() % 8],
                    .rows = pointers,
                    .numRows = n,
                    .groups = sizes,
                    .numGroups = numGroups};
    fillRows(t.dtype, t.width, round % 2);
    if (round % 4 == 3) t.weights = weights;
    compare(&t, "groups");
  }
}

TEST_MAIN()
