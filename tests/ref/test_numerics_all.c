/* All 2^32 floats to every format: the floats ascend, and the expected code goes up by one when a float
 * passes the tie above it, which is computed in double. */
#include "test.h"

#include "format_rules.h"

static void checkAll(const format_t *f) {
  uint32_t signBit = 1u << (f->bits - 1), code = 0;
  uint32_t last = f->saturates ? f->numFinite - 1 : f->numFinite;
  double tie = tieAbove(f, 0);
  uint64_t wrong = 0;
  for (uint32_t u = 0; u <= 0x7F800000u; u++) {
    float x = floatOf(u);
    while (code < last && ((double)x > tie || ((double)x == tie && (code & 1)))) {
      tie = tieAbove(f, ++code);
    }
    wrong += narrowOne(f, x) != code;
    wrong += narrowOne(f, floatOf(u | 0x80000000u)) != (code | signBit);
  }
  for (uint32_t u = 0x7F800001u; u <= 0x7FFFFFFFu; u++) {
    wrong += narrowOne(f, floatOf(u)) != f->nan;
    wrong += narrowOne(f, floatOf(u | 0x80000000u)) != f->nan;
  }
  CHECK(wrong == 0, "%s: %llu of 2^32 floats are rounded otherwise", f->name,
        (unsigned long long)wrong);
}

TEST(all_floats_bf16) {
  checkAll(&formats[0]);
}
TEST(all_floats_f16) {
  checkAll(&formats[1]);
}
TEST(all_floats_e4m3) {
  checkAll(&formats[2]);
}
TEST(all_floats_e5m2) {
  checkAll(&formats[3]);
}
TEST(all_floats_e2m1) {
  checkAll(&formats[4]);
}

TEST_MAIN()
