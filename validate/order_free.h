/* Level order-free: what it leaves open, for random cases and real shapes alike.
 *
 * Rows: in each zone (a local expert; LL rank-major: a source rank; HT flat: all rows) the library may
 * put the rows into the zone's used slots in any order. Rows are told apart by content, so that what is
 * compared is the set of rows per (expert, source rank): a row too many, a missing one, one twice and one
 * in another zone have no partner. Side data of a row (scales, weights, ids) must have moved with it.
 *
 * Sums: every way of adding the same terms in fp32 with roundings to the wire type on the way stays
 * within |found - expected| <= S * (R + 2) * u, S the sum of the terms' magnitudes, u the type's spacing
 * at 1, R + 2 the roundings that can come one after another: both sides' are in it. S is the
 * reference's own combine, run on magnitudes.
 *
 * Past: what HT's outputs hold past the slots that arrive (up to the tensor's end). NCCL EP's header does
 * not say it; D7 does. */
#ifndef TREFOIL_VALIDATE_ORDER_FREE_H
#define TREFOIL_VALIDATE_ORDER_FREE_H

#include "trefoil/ref.h"

/* Whose rows may lie in another order; either leaves the sums' order and rounding and what is past open. */
enum { EP_OPEN_LL_ROWS = 1, EP_OPEN_HT_ROWS = 2 };

/* Whether rows of a mode may lie in another order. */
int epRowsAreOpen(unsigned open, trefoil_mode_t mode);

/* Whether what is past the slots that arrive may be anything. */
int epPastIsOpen(unsigned open, trefoil_mode_t mode);

/* The used slots of a zone: the end of the zone that starts at slot `first`, and into used[] (room for
 * all slots) and *numUsed the slots in it that hold a row. */
int64_t epZoneEnd(const trefoil_case_t *rc, const trefoil_slot_t *slots, int64_t numSlots,
                  int64_t first, int64_t *used, int64_t *numUsed);

/* Rows of one zone by the reference and as found: row used[i] - first of each. */
typedef struct ep_zone {
  const uint8_t *expected, *found; /* of slot `first` */
  size_t rowBytes;
  int64_t first;
  const int64_t *used;
  int64_t numUsed;
} ep_zone_t;

/* to[slot of the reference] = slot of the library, a permutation of the zone's used slots; *open is set
 * if any row lies elsewhere. Returns -1, or the first slot whose row is nowhere (*other: a slot whose
 * found row is no one's, to be shown); -2: out of memory. */
int64_t epMatchZone(const ep_zone_t *zone, int64_t *to, int *open, int64_t *other);

/* Brings n rows into the library's order: rows[to[i]] = rows[i]. 0: out of memory. */
int epPermuteRows(uint8_t *rows, size_t rowBytes, int64_t n, const int64_t *to);

/* Clears the signs of a tensor's elements. */
void epClearSigns(uint8_t *elements, size_t bytes, trefoil_dtype_t dtype);

typedef struct ep_sums {
  trefoil_dtype_t dtype;
  int numRanks, topk;
  size_t bytes;
  const uint8_t *expected, *magnitudes, *found;
} ep_sums_t;

/* The first element (its number) that is out of its bound, or -1; *open is set if any is not the
 * reference's to the bit. wanted, found and bound say the values of that element. */
int64_t epCompareSums(const ep_sums_t *sums, int *open, double *wanted, double *found,
                      double *bound);

#endif
