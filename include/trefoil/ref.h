/* Trefoil: the reference, the exact meaning of dispatch and combine (docs/spec.md). C99 and C++.
 *
 * Computes straight from routing, one rank at a time, without a plan and without threads, as
 * plainly as can be. Every function is pure: it reads its arguments and writes its outputs. */
#ifndef TREFOIL_REF_H
#define TREFOIL_REF_H

#include "trefoil/shape.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum trefoil_quant {
  TREFOIL_QUANT_NONE = 0,   /* rows of f32, f16 or bf16 */
  TREFOIL_QUANT_CALLER = 1, /* bytes and the caller's scale bytes travel side by side */
  TREFOIL_QUANT_E4M3 = 2,   /* LL dispatch: bf16 in, E4M3 and one f32 scale per 128 out */
  TREFOIL_QUANT_NVFP4 = 3   /* LL combine: each row rounded to E2M1 per 16 on its way */
} trefoil_quant_t;

/* Everything but the payload. Zero is the default of every field after dtype. A field that the mode
 * does not have (alignment outside HT expert-major, maxRecv in LL, ...) is ignored. */
typedef struct trefoil_case {
  trefoil_routing_t routing;
  trefoil_mode_t mode;
  int64_t width;         /* elements of a token row: H, or H/2 for TREFOIL_FP4X2 */
  trefoil_dtype_t dtype; /* of the token rows given to dispatch, or of the rows to combine */
  trefoil_quant_t quant;
  int roundScales;    /* TREFOIL_QUANT_E4M3: scales are powers of two */
  size_t scaleBytes;  /* TREFOIL_QUANT_CALLER: bytes of one row of scales, >= 1 */
  int backward;       /* HT: gradients, cached routing */
  size_t alignment;   /* HT expert-major: zones padded to it; 0 and 1 = none; power of two */
  int globalIds;      /* ids in outputs: 0 local, 1 global */
  int64_t maxRecv;    /* HT: slots a rank may receive; 0 = unbounded */
  int drop;           /* HT: 1 = DROP; 0 = TRAP, a rank over maxRecv receives nothing */
  int zeroCopyOn;     /* HT expert-major DROP: 1 = only slots >= maxRecv are dropped, not also all
                            copies of tokens past the first maxRecv */
  int combinePartial; /* LL expert-major: partial sums at the experts' rank. NVFP4 ignores it: a
                            row's scale belongs to the row, so rows travel one by one */
  int rails; /* LL: dispatch across nodes by rails, as HT's; the same results, other traffic. Without
                masks */
  const uint8_t *active; /* LL: [R, R], active[r*R + s] = r regards s as alive; NULL = all. Rows
                            travel between two ranks if each regards the other as alive */
  const uint8_t *activeCombine; /* LL: the masks of the combine, if they changed since dispatch;
                                   NULL = active. A row counts if it travelled both ways */
} trefoil_case_t;

/* TREFOIL_INVALID_ARGUMENT: shape or routing (trefoilRoutingCheck), mode, width < 1, a dtype that
 * quant does not take (NONE: f32, f16, bf16; CALLER also e4m3, e5m2, fp4x2; E4M3 and NVFP4: bf16),
 * E4M3 or NVFP4 outside LL, E4M3 width not a multiple of 128, NVFP4 width not a multiple of 16,
 * backward in LL, masks in HT, an alignment that is no power of two, sizes over 2^62. */
TREFOIL_API trefoil_result_t trefoilCaseCheck(const trefoil_case_t *c);

/* What a slot holds. */
typedef struct trefoil_slot {
  int src;       /* source rank, or -1: padding or unused */
  int64_t token; /* token of the source; -1: padding or unused */
  int k;         /* k of the expert (expert-major), else -1 */
  int expert;    /* local expert of the zone (expert-major, padding too), else -1 */
} trefoil_slot_t;

/* Slots that the output tensors of `rank` span: LL L*R*N or R*N; HT the slots that arrive
 * (padding included; DROP: at most maxRecv; TRAP over maxRecv: 0). -1 on bad arguments. */
TREFOIL_API int64_t trefoilRefNumSlots(const trefoil_case_t *c, int rank);
/* Fills slots[0, trefoilRefNumSlots). */
TREFOIL_API trefoil_result_t trefoilRefSlots(const trefoil_case_t *c, int rank,
                                             trefoil_slot_t *slots);

/* Counters of `rank`, any pointer may be NULL: expertCounters [L], expertOffsets [L] (HT
 * expert-major), total [1] (HT: true number, also over maxRecv), srcRankCounters [R] (LL
 * rank-major). A counter that the mode does not have is left untouched. DROP clamps the experts'
 * counters and offsets to what was kept; TRAP reports the true numbers. */
typedef struct trefoil_counters {
  int64_t *expertCounters, *expertOffsets, *total, *srcRankCounters;
} trefoil_counters_t;
TREFOIL_API trefoil_result_t trefoilRefCounters(const trefoil_case_t *c, int rank,
                                                const trefoil_counters_t *out);

/* One rank's part in a dispatch: what it sends. */
typedef struct trefoil_source {
  const void *tokens;       /* [B_r, width] */
  const void *scales;       /* [B_r, scaleBytes] or NULL */
  const float *topkWeights; /* [B_r, K], forward HT and LL rank-major; else NULL */
} trefoil_source_t;

/* One rank's received tensors; the caller provides all of the mode's, NULL is left out. Bytes
 * that the meaning leaves untouched are not written (the caller poisons them to see). */
typedef struct trefoil_received {
  void *tokens;       /* [slots, width] */
  void *scales;       /* [slots, scaleBytes], or f32 [slots, width/128] for QUANT_E4M3 */
  float *topkWeights; /* LL rank-major [R, N, K], HT flat [rows, K], HT expert-major [rows] */
  void *topkIdx;      /* LL rank-major int32 [R, N, K], HT flat int64 [rows, K] */
  int64_t topkRows;   /* HT: rows of the two topk tensors, >= the slots that arrive; rows past
                           them, up to maxRecv if that is set, get weight 0 and id -1 */
} trefoil_received_t;

/* sources [R]: a rank that sends `rank` nothing may be all NULL. */
TREFOIL_API trefoil_result_t trefoilRefDispatch(const trefoil_case_t *c, int rank,
                                                const trefoil_source_t *sources,
                                                const trefoil_received_t *out);

/* What one rank gives to a combine: rows in its dispatch output's slots. */
typedef struct trefoil_expert_rows {
  const void *tokens;       /* [slots, width] */
  const float *topkWeights; /* HT backward: flat [slots, K], expert-major [slots]; else NULL */
  const float *scales;      /* QUANT_NVFP4: [slots] */
} trefoil_expert_rows_t;

/* Combines for source `rank`: experts [R], all NULL where a rank has nothing for it; weights [B, K]
 * (LL expert-major only); tokens [B, width] out; topkWeights [B, K] out (HT backward only, NULL is
 * left out). quant: NONE or NVFP4. */
TREFOIL_API trefoil_result_t trefoilRefCombine(const trefoil_case_t *c, int rank,
                                               const trefoil_expert_rows_t *experts,
                                               const float *weights, void *tokens,
                                               float *topkWeights);

/* Rows per (src, dst) by counting in the routing: rows[src * R + dst], [R * R], all phases summed,
 * rows that stay on a rank included; what the plan must add up to. Masks and maxRecv play no part.
 * combine: 0 dispatch, 1 combine. */
TREFOIL_API trefoil_result_t trefoilRefTraffic(const trefoil_case_t *c, int combine, int64_t *rows);

#ifdef __cplusplus
}
#endif
#endif
