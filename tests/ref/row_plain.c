/* The row loops once more, for any machine and without vectors, under other names: what the variants
 * that the loader chooses must equal (test_numerics.c, variants_agree). */
#define EP_ROW_CLONES __attribute__((optimize("no-tree-vectorize")))

#define epSumBegin              plainSumBegin
#define epSumAdd                plainSumAdd
#define epSumAddWeighted        plainSumAddWeighted
#define epSumAddDecoded         plainSumAddDecoded
#define epSumAddDecodedWeighted plainSumAddDecodedWeighted
#define epSumEnd                plainSumEnd
#define epRowQuantiseE4m3       plainRowQuantiseE4m3
#define epRowEncodeNvfp4        plainRowEncodeNvfp4
#define epRowDecodeNvfp4        plainRowDecodeNvfp4

#include "ref/row_quantise.c"
#include "ref/row_sum.c"
