/* Bad cases and bad arguments: a code and a sentence, and not a byte written. */
#include "test.h"

#include "ref_example.h"

#include <stdbool.h>

#define BAD(x, word)                                                                               \
  do {                                                                                             \
    CHECK(trefoilCaseCheck(&(x).c) == TREFOIL_INVALID_ARGUMENT, "%s was accepted", word);          \
    CHECK(strstr(trefoilLastError(), word), "\"%s\" does not name %s", trefoilLastError(), word);  \
  } while (0)

TEST(good_cases) {
  for (int mode = 0; mode < TREFOIL_NUM_MODES; mode++) {
    example_t x;
    exampleMake(&x, mode);
    CHECK(trefoilCaseCheck(&x.c) == TREFOIL_OK, "%s", trefoilLastError());
  }
}

TEST(bad_cases) {
  example_t x;
  CHECK(trefoilCaseCheck(NULL) == TREFOIL_INVALID_ARGUMENT, "NULL was accepted");
  exampleMake(&x, 4);
  BAD(x, "mode");
  exampleMake(&x, TREFOIL_HT_FLAT);
  x.c.width = 0;
  BAD(x, "width");
  x.c.width = INT64_MAX / 4;
  BAD(x, "width");
  exampleMake(&x, TREFOIL_HT_FLAT);
  x.c.dtype = TREFOIL_E4M3;
  BAD(x, "dtype");
  x.c.quant = TREFOIL_QUANT_CALLER;
  BAD(x, "scaleBytes");
  x.c.scaleBytes = 1;
  x.c.dtype = TREFOIL_UINT8;
  BAD(x, "dtype");
  x.c.quant = 7;
  BAD(x, "quant");
  exampleMake(&x, TREFOIL_HT_FLAT);
  x.c.quant = TREFOIL_QUANT_E4M3;
  BAD(x, "LL");
  x.c.mode = TREFOIL_LL_RANK_MAJOR;
  BAD(x, "bf16");
  x.c.dtype = TREFOIL_BF16;
  BAD(x, "128");
  x.c.quant = TREFOIL_QUANT_NVFP4;
  BAD(x, "16");
  exampleMake(&x, TREFOIL_LL_RANK_MAJOR);
  x.c.backward = 1;
  BAD(x, "backward");
  const uint8_t masks[4] = {1, 1, 1, 1};
  exampleMake(&x, TREFOIL_HT_FLAT);
  x.c.active = masks;
  BAD(x, "masks");
  x.c.mode = TREFOIL_LL_RANK_MAJOR;
  x.c.rails = 1;
  BAD(x, "rails with masks");
  x.c.rails = 0;
  x.c.mode = TREFOIL_HT_FLAT;
  x.c.active = NULL;
  x.c.maxRecv = -1;
  BAD(x, "maxRecv");
  exampleMake(&x, TREFOIL_HT_EXPERT_MAJOR);
  x.c.alignment = 3;
  BAD(x, "alignment");
  x.c.alignment = (size_t)1 << 63;
  BAD(x, "2^62");
  exampleMake(&x, TREFOIL_HT_FLAT);
  x.numTokens[1] = 3;
  BAD(x, "rank 1");
}

#define REFUSED(call)                                                                              \
  do {                                                                                             \
    CHECK((call) == TREFOIL_INVALID_ARGUMENT, #call " was accepted");                              \
    CHECK(trefoilLastError()[0], "no sentence");                                                   \
    for (size_t i = 0; i < sizeof bytes; i++) CHECK(bytes[i] == 0xEE, #call " wrote byte %zu", i); \
  } while (0)

TEST(bad_arguments) {
  _Alignas(16) static uint8_t bytes[512];
  memset(bytes, 0xEE, sizeof bytes);
  example_t x;
  exampleMake(&x, TREFOIL_HT_FLAT);
  trefoil_counters_t counters = {.total = (int64_t *)bytes};
  REFUSED(trefoilRefCounters(&x.c, 2, &counters));
  REFUSED(trefoilRefCounters(&x.c, -1, &counters));
  REFUSED(trefoilRefCounters(&x.c, 0, NULL));
  REFUSED(trefoilRefSlots(&x.c, 0, NULL));
  REFUSED(trefoilRefSlots(&x.c, 2, (trefoil_slot_t *)bytes));
  CHECK(trefoilRefNumSlots(&x.c, 2) == -1 && trefoilRefNumSlots(NULL, 0) == -1, "no slots");
  REFUSED(trefoilRefTraffic(&x.c, 0, NULL));

  trefoil_received_t out = {.tokens = bytes, .topkWeights = (float *)bytes, .topkRows = 3};
  REFUSED(trefoilRefDispatch(&x.c, 1, NULL, &out));
  REFUSED(trefoilRefDispatch(&x.c, 1, x.sources, NULL));
  REFUSED(trefoilRefDispatch(&x.c, 2, x.sources, &out));
  out.topkRows = 2; /* three rows arrive */
  REFUSED(trefoilRefDispatch(&x.c, 1, x.sources, &out));
  out.topkRows = 3;
  x.sources[1].tokens = NULL; /* the last source to be read */
  REFUSED(trefoilRefDispatch(&x.c, 1, x.sources, &out));
  CHECK(trefoilRefDispatch(&x.c, 0, x.sources, &(trefoil_received_t){0}) == TREFOIL_OK,
        "rank 1 sends rank 0 nothing, so it may be NULL: %s", trefoilLastError());
  exampleMake(&x, TREFOIL_HT_FLAT);
  x.sources[1].topkWeights = NULL;
  REFUSED(trefoilRefDispatch(&x.c, 1, x.sources, &out));
  exampleMake(&x, TREFOIL_HT_FLAT);
  x.c.quant = TREFOIL_QUANT_CALLER;
  x.c.scaleBytes = 1;
  REFUSED(trefoilRefDispatch(&x.c, 1, x.sources, &out));

  exampleMake(&x, TREFOIL_LL_EXPERT_MAJOR);
  trefoil_expert_rows_t experts[2] = {{.tokens = x.tokens}, {.tokens = NULL}};
  const float weights[4] = {1, 1, 1, 1};
  REFUSED(trefoilRefCombine(&x.c, 0, experts, weights, bytes, NULL)); /* rank 1 holds rows */
  experts[1].tokens = x.tokens;
  REFUSED(trefoilRefCombine(&x.c, 0, experts, NULL, bytes, NULL));
  REFUSED(trefoilRefCombine(&x.c, 0, NULL, weights, bytes, NULL));
  REFUSED(trefoilRefCombine(&x.c, 0, experts, weights, NULL, NULL));
  x.c.quant = TREFOIL_QUANT_CALLER;
  x.c.scaleBytes = 1;
  REFUSED(trefoilRefCombine(&x.c, 0, experts, weights, bytes, NULL));
  exampleMake(&x, TREFOIL_HT_FLAT);
  x.c.backward = 1; /* weights wanted back, none given */
  REFUSED(trefoilRefCombine(&x.c, 0, experts, NULL, bytes, (float *)(bytes + 256)));
}

TEST_MAIN()
