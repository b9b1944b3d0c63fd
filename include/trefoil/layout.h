/* Trefoil: the slots of one step: where every routed row lies on its expert's rank. C99 and C++.
 *
 * Computed for all ranks at once, from routing alone, in two visits of each entry at most. A sender
 * looks up slotOf[itself]; a receiver walks slotOf of every source. The object is reused from step
 * to step: memory grows when a step needs more and is never given back before free.
 *
 *     trefoil_layout_t layout = {0};
 *     trefoilLayoutCompute(&layout, &routing, &config);      every step
 *     int64_t slot = layout.slotOf[src][token * K + k];
 *     trefoilLayoutFree(&layout); */
#ifndef TREFOIL_LAYOUT_H
#define TREFOIL_LAYOUT_H

#include "trefoil/shape.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The tables hold R * R entries; more ranks than this are refused. */
#define TREFOIL_LAYOUT_MAX_RANKS 8192

/* Zero is the default of every field after mode. */
typedef struct trefoil_layout_config {
  trefoil_mode_t mode;
  size_t alignment; /* HT expert-major: zones are padded to it; a power of two; 0 and 1 = none */
  int64_t maxRecv;  /* HT: slots a rank may receive; 0 = unbounded. LL ignores it */
  int drop;         /* HT: 1 = DROP, 0 = TRAP: a rank over maxRecv receives nothing */
  int zeroCopyOn;   /* HT expert-major DROP with zero copy ON: only slots >= maxRecv are dropped,
                         not first the tokens whose flat slot is >= maxRecv */
  const uint8_t *active; /* LL: [R, R], active[r*R + s] = r regards s as alive; NULL = all. A row
                            arrives where each of its two ranks regards the other as alive */
} trefoil_layout_config_t;

/* Read-only for the caller; valid until the next compute or free. Expert arrays are indexed by the
 * global expert, e = rank * L + local, and have R * L entries (0 past E). */
typedef struct trefoil_layout {
  trefoil_shape_t shape;
  trefoil_layout_config_t config;
  int numLocalExperts; /* L */

  /* slotOf[src][token * K + k]: slot on the rank of that entry's expert, or -1 (unused entry,
   * dropped, trapped or masked). Rank-major and flat: equal for all entries of one rank. The slot
   * counts rows of the receiver's output tensor: LL expert-major local * R*N + position, LL
   * rank-major src * N + position, HT straight. */
  const int64_t *const *slotOf; /* [R] -> [B_src * K] */

  const int64_t *numSlots;   /* [R] rows the output tensors span: LL L*R*N or R*N; HT what arrives,
                                padding included (DROP: at most maxRecv; TRAP over maxRecv: 0) */
  const int64_t *total;      /* [R] the true number, also over maxRecv: flat tokens, HT expert-major
                                padded slots, LL rows */
  const uint8_t *overflowed; /* [R] HT: total > maxRecv */

  const int64_t *expertCount; /* [R*L] (token, k) entries of the expert, dropped ones included */
  const int64_t
      *expertPadded;         /* [R*L] HT expert-major: rounded up to the alignment; else = count */
  const int64_t *zoneOffset; /* [R*L] first slot of the expert's zone: HT expert-major by padded
                                  counts, LL expert-major local * R*N, else 0 */
  const int64_t
      *expertFilled; /* [R*L] entries that have a slot. HT expert-major: they are the first
                                  of the zone, and rows from there to the zone's end are padding */

  /* What the counters of the C API show. */
  const int64_t *shownCount;  /* [R*L] LL: count; flat: tokens kept; HT expert-major: padded, under
                                 DROP min(padded, maxRecv - shownOffset) */
  const int64_t *shownOffset; /* [R*L] HT expert-major: zoneOffset, under DROP at most maxRecv */

  const int64_t *rowsFrom;  /* [R*R] [dst*R + src] distinct tokens of src that use dst (before DROP
                               and TRAP): LL rank-major's counters */
  const int64_t *firstFrom; /* [R*R] [dst*R + src] first of those: flat slot, summed over sources
                               before src; LL rank-major src * N; else not meaningful */

  void *memory; /* private */
  size_t memoryBytes;
} trefoil_layout_t;

/* Computes the layout of one step. The routing's ranges are checked, its duplicates are not
 * (trefoilRoutingCheck does). On failure *layout stays as it was. Thread-safe on distinct objects. */
TREFOIL_API trefoil_result_t trefoilLayoutCompute(trefoil_layout_t *layout,
                                                  const trefoil_routing_t *routing,
                                                  const trefoil_layout_config_t *config);
/* Gives the memory back and zeroes the object; NULL and a zero object are fine. */
TREFOIL_API void trefoilLayoutFree(trefoil_layout_t *layout);

#ifdef __cplusplus
}
#endif
#endif
