/* What a library says it takes, and what a part of the random cases is made of.
 *
 * A feature is what a case may use beyond the plain one: bf16 rows of the full width, every rank with as
 * many tokens as it may have, every entry used, one handle, one operation after another. A profile says
 * which features, modes and shapes a library takes; where it lists shapes, groups are drawn from these
 * alone (libraries that compile a kernel for each shape take seconds for it). Profiles are JSON files
 * (validate/profiles, read by cli/profile_load.c); here they are plain data. */
#ifndef TREFOIL_VALIDATE_PROFILE_H
#define TREFOIL_VALIDATE_PROFILE_H

#include <stdint.h>

#include "trefoil/ref.h"

/* feature, its word in profiles, modes that can have it (bit per trefoil_mode_t), in words. */
#define EP_FEATURES(X)                                                                             \
  X(F16, "f16", 15, "f16 rows")                                                                    \
  X(F32, "f32", 15, "f32 rows")                                                                    \
  X(CALLER_SCALES, "caller_scales", 15, "the caller's fp8 rows and scales")                        \
  X(E4M3, "e4m3", 3, "E4M3 by the dispatch")                                                       \
  X(ROUND_SCALES, "round_scales", 3, "E4M3, scales rounded")                                       \
  X(NVFP4, "nvfp4", 3, "NVFP4 combine")                                                            \
  X(BACKWARD, "backward", 12, "backward")                                                          \
  X(STAGED, "staged", 3, "send_only and Complete")                                                 \
  X(GRAPH, "graph", 15, "captured and replayed")                                                   \
  X(WINDOW, "window", 15, "tensors in windows")                                                    \
  X(ZERO_COPY, "zero_copy_on", 14, "zero_copy ON")                                                 \
  X(MASK, "mask", 3, "masks")                                                                      \
  X(EAGER, "eager", 12, "outputs sized by the counters")                                           \
  X(TRAP, "trap", 12, "overflow: TRAP")                                                            \
  X(DROP, "drop", 12, "overflow: DROP")                                                            \
  X(COUNTERS, "counters", 12, "counters at Update")                                                \
  X(WIDE_COUNTERS, "int64_counters", 12, "int64 counters")                                         \
  X(WIDE_IDS, "int64_ids", 15, "int64 topk_idx")                                                   \
  X(GLOBAL_IDS, "global_ids", 6, "global ids received")                                            \
  X(ALIGNMENT, "alignment", 8, "aligned zones")                                                    \
  X(OWN_MEMORY, "handle_memory", 15, "the caller's handle memory")                                 \
  X(SHARED_MEMORY, "shared_handle_memory", 12, "a second handle on the same memory")               \
  X(ALLOCATOR, "allocator", 15, "the caller's allocator")                                          \
  X(FRESH_HANDLE, "create_handle", 15, "a handle for one case")                                    \
  X(HANDLES, "handles", 15, "several handles")                                                     \
  X(SHORT_ROWS, "short_rows", 15, "rows shorter than max_token_bytes")                             \
  X(RAGGED, "ragged", 15, "ranks with fewer tokens")                                               \
  X(EMPTY_RANKS, "empty_ranks", 15, "ranks without tokens")                                        \
  X(UNUSED, "unused_entries", 15, "unused entries (-1)")                                           \
  X(PARTIAL, "partial", 1, "partial sums in combine")                                              \
  X(OTHER_HIDDEN, "other_hidden", 15, "other hidden sizes")                                        \
  X(OTHER_TOPK, "other_topk", 15, "larger top-k")                                                  \
  X(OTHER_EXPERTS, "other_experts", 15, "other numbers of experts a rank")                         \
  X(UNEVEN_EXPERTS, "uneven_experts", 15, "experts that do not divide")                            \
  X(OTHER_TOKENS, "other_tokens", 15, "other numbers of tokens")

typedef enum ep_feature {
#define EP_FEATURE_NAME(name, word, modes, text) EP_F_##name,
  EP_FEATURES(EP_FEATURE_NAME)
#undef EP_FEATURE_NAME
      EP_NUM_FEATURES
} ep_feature_t;
#define EP_BIT(feature) ((uint64_t)1 << (feature))
#define EP_ALL_FEATURES (EP_BIT(EP_NUM_FEATURES) - 1)

const char *epFeatureWord(int feature);
const char *epFeatureText(int feature);
unsigned epFeatureModes(int feature);

enum { EP_PROFILE_LIST = 16, EP_PROFILE_NAME = 48 };

/* A shape to draw: tokens a rank, local experts of a rank, top-k and hidden elements (bf16). */
typedef struct ep_profile_shape {
  int64_t hidden, tokens;
  int topk, localExperts;
} ep_profile_shape_t;

typedef struct ep_profile {
  char name[EP_PROFILE_NAME];
  unsigned modes;    /* bit per trefoil_mode_t */
  uint64_t features; /* that it takes, in all of its modes but */
  uint64_t without[TREFOIL_NUM_MODES];
  unsigned open; /* EP_OPEN_...: whose rows may lie in another order; 0: none, compared strictly */
  int numRanks;
  int ranks[EP_PROFILE_LIST]; /* numRanks 0: any */
  int numShapes[2];           /* low latency, high throughput; 0: any shape */
  ep_profile_shape_t shapes[2][EP_PROFILE_LIST];
  ep_profile_shape_t other[2]; /* numbers outside of what it takes, for where shapes are listed */
  uint64_t firstCallNs;        /* that a first call of a shape may take longer */
} ep_profile_t;

/* One part of the cases: a batch of 64 numbers, of which the first numCases are drawn. */
typedef struct ep_check_cell {
  trefoil_mode_t mode;
  uint64_t allowed, forced; /* features that a case may have, and has */
  int numCases;
} ep_check_cell_t;

/* What of a profile's features a mode has. */
uint64_t epProfileFeatures(const ep_profile_t *p, trefoil_mode_t mode);

#endif
