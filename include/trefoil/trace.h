/* Trefoil: routing traces: the routing of many steps, recorded or generated. C99 and C++.
 *
 * One file format for all legs: an .npz that NumPy writes and reads, with
 *   topk_idx      [T, K] int16 or int32 (int8, int64 and unsigned are converted): expert or -1
 *   offsets       [steps, R + 1] int64: tokens of rank r in step s are rows [offsets[s, r],
 *                 offsets[s, r + 1]); a step starts where the one before ended, the first at 0, the
 *                 last ends at T
 *   topk_weights  [T, K] float32, optional (float64 is converted)
 *   trefoil.json  the shape and where the trace comes from (docs/trace.md)
 * Without libzip the file functions exist and fail with a sentence. */
#ifndef TREFOIL_TRACE_H
#define TREFOIL_TRACE_H

#include "trefoil/shape.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Read-only once created. */
typedef struct trefoil_trace {
  trefoil_shape_t shape;
  int numSteps;             /* >= 1 */
  int64_t numTokens;        /* T, of all steps and ranks */
  const int64_t *offsets;   /* [steps, R + 1] */
  const int32_t *topkIdx;   /* [T, K] */
  const float *topkWeights; /* [T, K], finite, or NULL */
  const char *provenance;   /* a JSON object in text: where the trace comes from */
} trefoil_trace_t;

/* Copies and checks contents (numTokens is taken from offsets; provenance NULL = "{}"). Sentences name
 * step, rank, token and k. */
TREFOIL_API trefoil_result_t trefoilTraceCreate(const trefoil_trace_t **trace,
                                                const trefoil_trace_t *contents);
TREFOIL_API void trefoilTraceDestroy(const trefoil_trace_t *trace);

/* The routing of a step; its pointers are the trace's. */
TREFOIL_API trefoil_result_t trefoilTraceRouting(const trefoil_trace_t *trace, int step,
                                                 trefoil_routing_t *routing);
/* The weights [B_r, K] of a rank's tokens in a step; NULL if the trace has none. */
TREFOIL_API const float *trefoilTraceWeights(const trefoil_trace_t *trace, int step, int rank);

/* ---- Generate: (seed, step, rank, token) alone fixes a row ---------------------------------- */

typedef enum trefoil_popularity {
  TREFOIL_POPULARITY_UNIFORM = 0,
  TREFOIL_POPULARITY_ZIPF = 1, /* the i-th expert of a seeded order weighs i^-skew, i from 1 */
  TREFOIL_POPULARITY_HOT_EXPERT = 2, /* expert `hot` weighs skew, the others 1 */
  TREFOIL_POPULARITY_HOT_RANK = 3    /* experts of rank `hot` weigh skew, the others 1 */
} trefoil_popularity_t;

typedef struct trefoil_trace_spec {
  trefoil_shape_t shape; /* maxTokens: tokens of a full rank */
  int numSteps;
  uint64_t seed; /* below 2^63 */
  trefoil_popularity_t popularity;
  double skew;           /* see above; ZIPF: [0, 16], HOT: [0, 1e6]; UNIFORM ignores it */
  int hot;               /* expert or rank */
  double ragged;         /* [0, 1]: a rank has maxTokens * (1 - ragged * u) tokens, u in [0, 1) */
  int numEmptyRanks;     /* ranks without tokens, others in each step; <= R */
  int burstPeriod;       /* 0 = none; else one step in burstPeriod is full, ... */
  double burstLow;       /* ... and the others have burstLow of its tokens, [0, 1] */
  double unusedFraction; /* [0, 1]: entries that are -1 */
  int withWeights;       /* 1: weights too, positive, each row's sum 1 */
  /* Group-limited routing: a row's experts are of at most topkGroups of numGroups groups, each of
   * E / numGroups consecutive experts. numGroups 0: of any. Groups are drawn without replacement by
   * the sums of their experts' weights. */
  int numGroups, topkGroups;
  int64_t numMasked; /* so many of each rank's entries, at random, are -1; no rank may have fewer */
} trefoil_trace_spec_t;

/* Experts of a row are drawn one after the other without replacement by their weights. */
TREFOIL_API trefoil_result_t trefoilTraceGenerate(const trefoil_trace_t **trace,
                                                  const trefoil_trace_spec_t *spec);

/* The same steps with redundant experts: expert e has the copies e, e + E, ... below
 * physicalExperts, and each entry takes one of them at random, each alike (entry and seed alone fix
 * which). The new trace has physicalExperts experts. */
TREFOIL_API trefoil_result_t trefoilTraceCopies(const trefoil_trace_t **trace,
                                                const trefoil_trace_t *from, int physicalExperts,
                                                uint64_t seed);

/* How copies are placed by load (EPLB's policies). Global: each further copy is of the expert with
 * the most load a copy; then copies, the busiest first, go to the rank with the least load that has
 * room, if one is left to one that does not have this expert. Hierarchical, for group-limited
 * routing: first groups of consecutive experts go to nodes, as many to each, the busiest first to the
 * node with the least load; then each node does the same with its own experts and ranks. */
typedef struct trefoil_placement {
  int physicalExperts; /* a multiple of the ranks */
  uint64_t seed;
  int numGroups, numNodes; /* 0 groups: global. Nodes divide the ranks and the groups */
  int isAlike;             /* 1: every expert counts alike; 0: by its entries in all steps */
} trefoil_placement_t;

/* The same with copies placed by load. */
TREFOIL_API trefoil_result_t trefoilTracePlaced(const trefoil_trace_t **trace,
                                                const trefoil_trace_t *from,
                                                const trefoil_placement_t *how);

/* ---- Files ---------------------------------------------------------------------------------- */

/* What a file may leave open. Zero: take it from the file. A value that the file states otherwise
 * is an error. */
typedef struct trefoil_trace_hints {
  int numRanks, ranksPerNode; /* ranksPerNode not stated anywhere: 8, or R if 8 does not divide R */
  int numExperts;             /* needed for arrays of others, which do not state it */
  int64_t tokensPerRank;      /* arrays without offsets: rows are cut into steps of R such blocks;
                                 0 = one step, its rows over the ranks alike */
  int64_t maxTokens;          /* not stated anywhere: the most tokens of a rank in a step */
  const char *array;          /* .npz without offsets: the member to read; NULL = "topk_idx" */
} trefoil_trace_hints_t;

/* Reads a trace, or imports an array: .npz as above, with or without offsets and trefoil.json, or
 * .npy [T, K], [R, B, K] or [steps, R, B, K]. hints may be NULL. Everything malformed is
 * TREFOIL_INVALID_ARGUMENT with a sentence that names the file and the member;
 * TREFOIL_SYSTEM_ERROR where the file cannot be read. */
TREFOIL_API trefoil_result_t trefoilTraceLoad(const trefoil_trace_t **trace, const char *path,
                                              const trefoil_trace_hints_t *hints);
/* Writes the file beside itself first and renames it, so that a failure leaves no half file. */
TREFOIL_API trefoil_result_t trefoilTraceSave(const trefoil_trace_t *trace, const char *path);

/* ---- Describe ------------------------------------------------------------------------------- */

typedef struct trefoil_trace_stats {
  int64_t numTokens, numEntries; /* tokens; entries that are not -1 */
  int64_t emptyRanks;            /* (step, rank) without tokens */
  int64_t minTokens, maxTokens;  /* of a rank in a step */
  double giniExperts;            /* of entries per expert: 0 all alike, towards 1 one has all */
  double maxOverMeanExperts;
  int hottestExpert;
  double giniRanks; /* of rows per rank, a row being a (token, rank) */
  double maxOverMeanRanks;
  int hottestRank;
  double worstMaxOverMeanRanks;          /* of single steps */
  int worstStep;                         /* which one */
  double ranksPerToken, nodesPerToken;   /* distinct, over tokens with any entry */
  int64_t rowsSelf, rowsNvlink, rowsNet; /* (token, rank) by tier, straight */
  int64_t rowsNetOnce;                   /* (token, other node): what HT sends over the net */
} trefoil_trace_stats_t;

/* step < 0: all steps summed. */
TREFOIL_API trefoil_result_t trefoilTraceDescribe(const trefoil_trace_t *trace, int step,
                                                  trefoil_trace_stats_t *stats);

#ifdef __cplusplus
}
#endif
#endif
