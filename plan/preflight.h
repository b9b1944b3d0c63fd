/* Preflight: may this configuration run, if not why and what would be legal, and what does it ask
 * for. Pure. The group's and handle's own checks are these checks, so a configuration that passes
 * here is never refused later, and sentences are the same. */
#ifndef TREFOIL_PLAN_PREFLIGHT_H
#define TREFOIL_PLAN_PREFLIGHT_H

#include "plan/sizing.h"

/* The group configuration without its ABI. */
typedef struct ep_group_limits {
  ep_backend_kind_t backend;
  ep_sizing_fn_t sizing; /* the backend's column of the table */
  unsigned algorithm;    /* 0 LL, 1 HT */
  unsigned numExperts, maxTokens, maxRecv, maxTokenBytes;
  int halfAllocator; /* one of the two functions only */
  unsigned enableMask, zeroCopy, overflowPolicy, numTopk;
  unsigned maxSms; /* 0: the library's choice */
} ep_group_limits_t;

typedef struct ep_handle_limits {
  unsigned layout; /* ncclEpLayout_t's values */
  size_t alignment;
  int topk; /* as given: HT also -1 */
} ep_handle_limits_t;

typedef struct ep_verdict {
  trefoil_result_t code; /* TREFOIL_OK: supported */
  char reason[256];
  char limit[64];
  unsigned long long nearest; /* nearest legal value of that field; 0: none helps alone */
} ep_verdict_t;

/* Group rules; then handle rules, on a group that passed. 1 = legal. */
int epCheckGroupLimits(const ep_group_limits_t *g, int numRanks, int ranksPerNode,
                       ep_verdict_t *out);
int epCheckHandleLimits(const ep_group_limits_t *g, const ep_handle_limits_t *h, int numRanks,
                        ep_verdict_t *out);

/* Ranks of an NVLink domain where nodes have ranksPerNode of numRanks ranks: NCCL gives all domains one
 * size. */
int epDomainRanks(int ranksPerNode, int numRanks);

/* Bound on K for which buffers of such a handle are made; the mode of a legal layout. */
int epTopkBound(const ep_group_limits_t *g, int topk);
trefoil_mode_t epModeOf(unsigned algorithm, unsigned layout);

/* The sizing table's input for a legal group and handle. */
ep_sizing_config_t epSizingConfig(const ep_group_limits_t *g, const ep_handle_limits_t *h,
                                  int numRanks, int ranksPerNode);

/* All of it: rules and bytes. */
void epPreflight(const ep_group_limits_t *g, const ep_handle_limits_t *h, int numRanks,
                 int ranksPerNode, ep_verdict_t *verdict, ep_sizing_t *sizing);

#endif
