/* What differs, in words: rank, tensor, slot, what belongs there and what was found. */
#ifndef TREFOIL_VALIDATE_CHECK_REPORT_H
#define TREFOIL_VALIDATE_CHECK_REPORT_H

#include "validate/check_case.h"

typedef struct ep_check_images {
  uint8_t *const *expected; /* [R] */
  const uint8_t *found;     /* of `rank` */
} ep_check_images_t;

/* Writes the first difference of a rank's image into text; 0 if there is none, else 1 + the region it
 * is in or after: what differs earliest, on whatever rank, is closest to the cause. */
int epDescribeDifference(const ep_check_case_t *c, int round, int rank,
                         const ep_check_images_t *images, char *text, size_t textBytes);

/* "ht-flat, 4 ranks (2 per node), 8 experts, top-2, <= 7 tokens, rows <= 64 bytes, ...". */
void epDescribeGroup(const ep_check_group_t *g, char *text, size_t textBytes);
/* One line an operation. */
void epDescribeScript(const ep_check_case_t *c, char *text, size_t textBytes);

/* An element as people write it: "0xcfee (-7.986e+09)", integers in decimal. Returns text. */
enum { EP_VALUE_TEXT = 64 };
const char *epFormatValue(char text[EP_VALUE_TEXT], trefoil_dtype_t dtype, const void *element);

#endif
