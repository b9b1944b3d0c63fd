/* The rules of a configuration, in the order in which a caller can mend them. A rule names the
 * field, the value found, what is legal, and the nearest legal value; 0 where no single value of
 * that field would help. */
#include "plan/preflight.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define LAYOUT_EXPERT_MAJOR 1u
#define LAYOUT_RANK_MAJOR   2u
#define LAYOUT_FLAT         3u
#define OVERFLOW_DROP       2u
#define ZERO_COPY_ON        2u

__attribute__((format(printf, 5, 6))) static int refuse(ep_verdict_t *out, trefoil_result_t code,
                                                        const char *limit,
                                                        unsigned long long nearest,
                                                        const char *format, ...) {
  out->code = code;
  out->nearest = nearest;
  snprintf(out->limit, sizeof out->limit, "%s", limit);
  va_list args;
  va_start(args, format);
  vsnprintf(out->reason, sizeof out->reason, format, args);
  va_end(args);
  return 0;
}

static int inRange(ep_verdict_t *out, const char *field, unsigned long long value,
                   unsigned long long least, unsigned long long most) {
  if (value >= least && value <= most) return 1;
  return refuse(out, TREFOIL_INVALID_ARGUMENT, field, value < least ? least : most,
                "%s is %llu; must be %llu to %llu", field, value, least, most);
}

int epDomainRanks(int ranksPerNode, int numRanks) {
  return numRanks ? epDomainRanks(numRanks, ranksPerNode % numRanks) : ranksPerNode;
}

static int checkTopology(int numRanks, int ranksPerNode, ep_verdict_t *out) {
  if (numRanks < 1 || numRanks > EP_MAX_RANKS) {
    return refuse(out, TREFOIL_INVALID_ARGUMENT, "num_ranks", numRanks < 1 ? 1 : EP_MAX_RANKS,
                  "num_ranks is %d; must be 1 to %d", numRanks, EP_MAX_RANKS);
  }
  if (ranksPerNode >= 1 && ranksPerNode <= numRanks && numRanks % ranksPerNode == 0) return 1;
  int nearest = ranksPerNode < 1 ? 1 : ranksPerNode > numRanks ? numRanks : ranksPerNode;
  while (numRanks % nearest) nearest--;
  if (ranksPerNode < 1 || ranksPerNode > numRanks)
    return refuse(out, TREFOIL_INVALID_ARGUMENT, "ranks_per_node", (unsigned long long)nearest,
                  "ranks_per_node is %d; must divide the %d ranks evenly", ranksPerNode, numRanks);
  return refuse(out, TREFOIL_INVALID_ARGUMENT, "ranks_per_node", (unsigned long long)nearest,
                "ranks_per_node is %d; must divide the %d ranks evenly: NCCL makes uneven nodes "
                "NVLink domains of the greatest common divisor, here %d",
                ranksPerNode, numRanks, epDomainRanks(ranksPerNode, numRanks));
}

static int checkHtLimits(const ep_group_limits_t *g, ep_verdict_t *out) {
  if (g->maxTokenBytes % 16) {
    unsigned long long nearest = (g->maxTokenBytes + 15ull) / 16 * 16;
    if (nearest > EP_MAX_TOKEN_BYTES) nearest = EP_MAX_TOKEN_BYTES;
    return refuse(out, TREFOIL_INVALID_ARGUMENT, "max_token_bytes", nearest,
                  "max_token_bytes is %u; high throughput takes multiples of 16", g->maxTokenBytes);
  }
  if (g->maxRecv && g->maxRecv < g->maxTokens) {
    return refuse(out, TREFOIL_INVALID_ARGUMENT, "max_recv_tokens_per_rank", g->maxTokens,
                  "max_recv_tokens_per_rank is %u; must be 0 (eager sizing) or at least "
                  "max_dispatch_tokens_per_rank (%u)",
                  g->maxRecv, g->maxTokens);
  }
  if (!g->maxRecv && g->overflowPolicy == OVERFLOW_DROP) {
    return refuse(out, TREFOIL_INVALID_ARGUMENT, "max_recv_tokens_per_rank", g->maxTokens,
                  "overflow_policy is DROP but max_recv_tokens_per_rank is 0 (eager sizing), which "
                  "never overflows; give a bound of at least %u, or another policy",
                  g->maxTokens);
  }
  return inRange(out, "num_topk", g->numTopk, 0, EP_MAX_TOPK);
}

/* What the kernels take (kernels/ll/ll.h, kernels/ht/ht.h). */
static int checkGpuLimits(const ep_group_limits_t *g, int numRanks, ep_verdict_t *out) {
  if (!inRange(out, "num_ranks", (unsigned)numRanks, 1, EP_LL_GPU_MAX_RANKS)) return 0;
  unsigned mostTokens = EP_LL_GPU_MAX_TOKENS;
  if (g->maxTokens > mostTokens && g->algorithm == 1 && g->maxRecv && g->maxRecv < mostTokens) {
    mostTokens = g->maxRecv; /* the nearest legal value, with this max_recv */
  }
  if (!inRange(out, "max_dispatch_tokens_per_rank", g->maxTokens, 1, mostTokens)) return 0;
  if (!inRange(out, "max_token_bytes", g->maxTokenBytes, 1, EP_LL_GPU_MAX_TOKEN_BYTES)) return 0;
  unsigned long long R = (unsigned)numRanks, L = (g->numExperts + R - 1) / R;
  unsigned long long mostLocal = g->algorithm == 1 ? EP_HT_GPU_MAX_LOCAL : EP_LL_GPU_MAX_LOCAL;
  if (!inRange(out, "num_experts", g->numExperts, 1, mostLocal * R)) return 0;
  if (g->algorithm == 1) {
    return inRange(out, "max_recv_tokens_per_rank", g->maxRecv, 0, INT32_MAX - 1) &&
           checkHtLimits(g, out);
  }
  if (L * R * g->maxTokens <= INT32_MAX) return 1;
  return refuse(out, TREFOIL_INVALID_ARGUMENT, "max_dispatch_tokens_per_rank", INT32_MAX / (L * R),
                "%llu local experts x %d ranks x %u tokens are 2^31 slots or more", L, numRanks,
                g->maxTokens);
}

int epCheckGroupLimits(const ep_group_limits_t *g, int numRanks, int ranksPerNode,
                       ep_verdict_t *out) {
  memset(out, 0, sizeof *out);
  if (!checkTopology(numRanks, ranksPerNode, out)) return 0;
  if (!inRange(out, "algorithm", g->algorithm, 0, 1)) return 0;
  if (!inRange(out, "num_experts", g->numExperts, 1, EP_MAX_EXPERTS)) return 0;
  if (!inRange(out, "max_dispatch_tokens_per_rank", g->maxTokens, 1, EP_MAX_TOKENS)) return 0;
  if (!inRange(out, "max_token_bytes", g->maxTokenBytes, 1, EP_MAX_TOKEN_BYTES)) return 0;
  if (g->halfAllocator) {
    return refuse(out, TREFOIL_INVALID_USAGE, "alloc", 0,
                  "alloc has only one of alloc_fn and free_fn; give both or none");
  }
  if (!inRange(out, "zero_copy", g->zeroCopy, 0, 2)) return 0;
  if (!inRange(out, "overflow_policy", g->overflowPolicy, 0, 2)) return 0;
  if (g->backend == EP_BACKEND_GPU) return checkGpuLimits(g, numRanks, out);
  return g->algorithm == 0 || checkHtLimits(g, out);
}

static int checkLayout(const ep_group_limits_t *g, const ep_handle_limits_t *h, ep_verdict_t *out) {
  int ht = g->algorithm == 1;
  if (h->layout == LAYOUT_EXPERT_MAJOR) return 1;
  if (h->layout == (ht ? LAYOUT_FLAT : LAYOUT_RANK_MAJOR)) return 1;
  return refuse(out, TREFOIL_INVALID_ARGUMENT, "layout", ht ? LAYOUT_FLAT : LAYOUT_EXPERT_MAJOR,
                "layout is %u; %s takes EXPERT_MAJOR (1) or %s", h->layout,
                ht ? "high throughput" : "low latency", ht ? "FLAT (3)" : "RANK_MAJOR (2)");
}

/* On GPUs slots, padding included, are counted in 31 bits: at most R N K that are used, and less than the
 * alignment for each local expert. */
static int checkPadding(const ep_group_limits_t *g, const ep_handle_limits_t *h, int numRanks,
                        ep_verdict_t *out) {
  unsigned long long R = (unsigned)numRanks, L = (g->numExperts + R - 1) / R, most = 1ull << 30;
  unsigned long long used = R * g->maxTokens * (unsigned)epTopkBound(g, h->topk);
  while (most > 1 && used + L * (most - 1) > INT32_MAX) most /= 2;
  if (h->alignment <= most) return 1;
  return refuse(out, TREFOIL_INVALID_ARGUMENT, "dispatch_output_per_expert_alignment", most,
                "dispatch_output_per_expert_alignment is %zu: %llu local experts could have 2^31 "
                "slots or more; must be at most %llu",
                h->alignment, L, most);
}

int epCheckHandleLimits(const ep_group_limits_t *g, const ep_handle_limits_t *h, int numRanks,
                        ep_verdict_t *out) {
  memset(out, 0, sizeof *out);
  if (!checkLayout(g, h, out)) return 0;
  size_t a = h->alignment;
  if ((a & (a - 1)) || a > (size_t)1 << 30) {
    unsigned long long nearest = 1;
    while (nearest < a && nearest < 1ull << 30) nearest *= 2;
    return refuse(out, TREFOIL_INVALID_ARGUMENT, "dispatch_output_per_expert_alignment", nearest,
                  "dispatch_output_per_expert_alignment is %zu; must be 0 or a power of two up to "
                  "2^30",
                  a);
  }
  int ht = g->algorithm == 1;
  if (g->backend == EP_BACKEND_GPU && h->topk > EP_LL_GPU_MAX_TOPK) {
    return inRange(out, "num_topk", (unsigned)h->topk, 1, EP_LL_GPU_MAX_TOPK);
  }
  if (h->topk > EP_MAX_TOPK || (h->topk < 1 && !(ht && h->topk == -1))) {
    return refuse(out, TREFOIL_INVALID_ARGUMENT, "num_topk", h->topk < 1 ? 1 : EP_MAX_TOPK,
                  "num_topk is %d; must be 1 to %d%s", h->topk, EP_MAX_TOPK,
                  ht ? ", or -1 (taken from each topk_idx)" : "");
  }
  if (!ht) return 1;
  if (g->numTopk && h->topk > (int)g->numTopk) {
    return refuse(out, TREFOIL_INVALID_USAGE, "num_topk", g->numTopk,
                  "num_topk is %d; the group was made for num_topk up to %u", h->topk, g->numTopk);
  }
  if (g->backend == EP_BACKEND_GPU && h->layout == LAYOUT_EXPERT_MAJOR &&
      !checkPadding(g, h, numRanks, out)) {
    return 0;
  }
  if (!g->maxRecv && h->layout == LAYOUT_EXPERT_MAJOR && !g->numTopk) {
    int bound = h->topk > 0 ? h->topk : EP_UNNAMED_TOPK;
    return refuse(out, TREFOIL_INVALID_USAGE, "config.num_topk", (unsigned long long)bound,
                  "expert-major with eager sizing (max_recv_tokens_per_rank 0) needs the group's "
                  "num_topk");
  }
  return 1;
}

int epTopkBound(const ep_group_limits_t *g, int topk) {
  if (topk > 0) return topk;
  return g->numTopk ? (int)g->numTopk : EP_UNNAMED_TOPK;
}

trefoil_mode_t epModeOf(unsigned algorithm, unsigned layout) {
  if (algorithm == 0) {
    return layout == LAYOUT_EXPERT_MAJOR ? TREFOIL_LL_EXPERT_MAJOR : TREFOIL_LL_RANK_MAJOR;
  }
  return layout == LAYOUT_EXPERT_MAJOR ? TREFOIL_HT_EXPERT_MAJOR : TREFOIL_HT_FLAT;
}

ep_sizing_config_t epSizingConfig(const ep_group_limits_t *g, const ep_handle_limits_t *h,
                                  int numRanks, int ranksPerNode) {
  return (ep_sizing_config_t){
      .backend = g->backend,
      .mode = epModeOf(g->algorithm, h->layout),
      .shape = {.numRanks = numRanks,
                .ranksPerNode = ranksPerNode,
                .numExperts = (int)g->numExperts,
                .topk = epTopkBound(g, h->topk),
                .maxTokens = g->maxTokens},
      .maxTokenBytes = g->maxTokenBytes,
      .zeroCopyOn = g->zeroCopy == ZERO_COPY_ON,
      .maxSms = (int)g->maxSms,
  };
}

void epPreflight(const ep_group_limits_t *g, const ep_handle_limits_t *h, int numRanks,
                 int ranksPerNode, ep_verdict_t *verdict, ep_sizing_t *sizing) {
  memset(sizing, 0, sizeof *sizing);
  if (!epCheckGroupLimits(g, numRanks, ranksPerNode, verdict)) return;
  if (!epCheckHandleLimits(g, h, numRanks, verdict)) return;
  ep_sizing_config_t config = epSizingConfig(g, h, numRanks, ranksPerNode);
  trefoil_result_t code = g->sizing(&config, sizing);
  if (code == TREFOIL_OK) return;
  refuse(verdict, code, "max_dispatch_tokens_per_rank", 0, "%.200s", trefoilLastError());
}
