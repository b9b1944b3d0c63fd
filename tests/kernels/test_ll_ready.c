/* What is kept of a low-latency operation and given the next one's addresses is, byte for byte, what would be
 * worked out for that one; and anything but an address makes it another operation. Needs no GPU. */
#include <stdint.h>
#include <string.h>

#include "kernels/ll/ll.h"
#include "plan/error.h"
#include "test.h"

static uint64_t state = 11;
static unsigned below(unsigned n) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)(state >> 33) % n;
}

static void *address(void) {
  return (void *)(uintptr_t)(16ull * (1 + below(1u << 30)));
}

static int fillGroup(ep_ll_group_t *g, int topk, int partial) {
  static const int ranks[] = {1, 2, 3, 4, 8, 16};
  int R = ranks[below(6)], N = 1 + (int)below(below(2) ? 8 : 200);
  ep_ll_config_t config = {.numRanks = R,
                           .numExperts = R * (int)(1 + below(40)),
                           .maxTopk = topk,
                           .maxTokens = N,
                           .maxTokenBytes = 15360,
                           .partial = partial};
  memset(g, 0, sizeof *g);
  if (epLlLayout(&config, &g->at) != TREFOIL_OK) return 0;
  for (int r = 0; r < R; r++) g->peers[r] = address();
  g->control = address();
  g->mask = address();
  g->record = address();
  g->timeoutNs = 1000;
  g->rank = (int)below((unsigned)R);
  g->numRanks = R;
  g->numExperts = config.numExperts;
  g->numLocal = config.numExperts / R;
  g->maxTokens = N;
  g->enableMask = (int)below(2);
  g->numSms = 1 + (int)below(132);
  return 1;
}

static ep_ll_handle_t handle(int topk, ep_ll_sum_t sum) {
  return (ep_ll_handle_t){.topkIdx = address(),
                          .memory = address(),
                          .numTopk = topk,
                          .idx64 = (int)below(2),
                          .rankMajor = sum == EP_LL_SUM_RANKS,
                          .sum = sum};
}

static void moveDispatch(ep_ll_dispatch_t *d) {
  d->handle.topkIdx = address();
  d->tokens = address();
  d->scales = address();
  d->weights = address();
  d->outTokens = address();
  d->outScales = address();
  d->outWeights = address();
  d->outIdx = address();
  d->counters = address();
  d->group.stamps = below(2) ? address() : NULL;
}

static int fillDispatch(ep_ll_dispatch_t *d) {
  memset(d, 0, sizeof *d);
  int topk = 1 + (int)below(8);
  if (!fillGroup(&d->group, topk, 0)) return 0;
  d->handle = handle(topk, below(2) ? EP_LL_SUM_RANKS : EP_LL_SUM_EXACT);
  int hidden = 512 * (int)(1 + below(14));
  d->quant = below(3) ? EP_LL_QUANT_NONE : below(2) ? EP_LL_QUANT_E4M3 : EP_LL_QUANT_E4M3_POW2;
  d->tokenBytes = d->quant ? hidden : 2 * hidden;
  d->scaleBytes = d->quant ? hidden / 32 : 16 * (int)below(3);
  d->numTokens = (int)below((unsigned)d->group.maxTokens + 1);
  d->globalIds = (int)below(2);
  d->generic = below(3) == 0;
  moveDispatch(d);
  return 1;
}

static int fillCombine(ep_ll_combine_t *c) {
  static const trefoil_dtype_t dtypes[] = {TREFOIL_F32, TREFOIL_F16, TREFOIL_BF16};
  memset(c, 0, sizeof *c);
  int topk = 1 + (int)below(8);
  ep_ll_sum_t sum = (ep_ll_sum_t)below(3);
  if (!fillGroup(&c->group, topk, sum == EP_LL_SUM_PARTIAL)) return 0;
  c->handle = handle(topk, sum);
  c->tokens = address();
  c->weights = address();
  c->out = address();
  c->dtype = dtypes[below(3)];
  c->numTokens = (int)below((unsigned)c->group.maxTokens + 1);
  c->rowBytes = 16 * (int)(1 + below(960));
  return 1;
}

/* op without what Reuse does not read. */
static void forgetGroup(ep_ll_group_t *g) {
  uint64_t *stamps = g->stamps;
  memset(g, 0xA5, sizeof *g);
  g->stamps = stamps;
}

static int isSame(const ep_ll_ready_t *a, const ep_ll_ready_t *b) {
  return a->kernel == b->kernel && a->blocks == b->blocks && a->warps == b->warps &&
         a->shared == b->shared && a->isFast == b->isFast &&
         !memcmp(a->args, b->args, sizeof a->args);
}

TEST(dispatches_of_the_same_sizes) {
  int numFast = 0, numGeneric = 0;
  for (int i = 0; i < 3000; i++) {
    ep_ll_dispatch_t op, next;
    ep_ll_ready_t kept = {0}, fresh = {0};
    REQUIRE(fillDispatch(&op), "case %d: %s", i, trefoilLastError());
    if (epLlPrepareDispatch(&op, EP_LL_BOTH, &kept) != TREFOIL_OK) continue; /* wants scratch */
    *(kept.isFast ? &numFast : &numGeneric) += 1;
    next = op;
    moveDispatch(&next);
    REQUIRE(epLlPrepareDispatch(&next, EP_LL_BOTH, &fresh) == TREFOIL_OK, "case %d: %s", i,
            trefoilLastError());
    CHECK(!isSame(&kept, &fresh), "case %d: addresses make no difference", i);
    forgetGroup(&next.group);
    REQUIRE(epLlReuseDispatch(&kept, &next) == 1, "case %d: not reused", i);
    REQUIRE(isSame(&kept, &fresh), "case %d: reused, differs from what is worked out anew", i);
  }
  CHECK(numFast > 200 && numGeneric > 200, "%d fast, %d generic", numFast, numGeneric);
}

TEST(combines_of_the_same_sizes) {
  for (int i = 0; i < 3000; i++) {
    ep_ll_combine_t op, next;
    ep_ll_ready_t kept = {0}, fresh = {0};
    REQUIRE(fillCombine(&op), "case %d: %s", i, trefoilLastError());
    REQUIRE(epLlPrepareCombine(&op, EP_LL_BOTH, &kept) == TREFOIL_OK, "case %d: %s", i,
            trefoilLastError());
    next = op;
    next.handle.topkIdx = address();
    next.tokens = address();
    next.weights = address();
    next.out = address();
    next.group.stamps = address();
    REQUIRE(epLlPrepareCombine(&next, EP_LL_BOTH, &fresh) == TREFOIL_OK, "case %d: %s", i,
            trefoilLastError());
    CHECK(!isSame(&kept, &fresh), "case %d: addresses make no difference", i);
    forgetGroup(&next.group);
    REQUIRE(epLlReuseCombine(&kept, &next) == 1, "case %d: not reused", i);
    REQUIRE(isSame(&kept, &fresh), "case %d: reused, differs from what is worked out anew", i);
  }
}

#define REFUSES(change)                                                                            \
  do {                                                                                             \
    next = op;                                                                                     \
    change;                                                                                        \
    ep_ll_ready_t before = kept;                                                                   \
    CHECK(!epLlReuseDispatch(&kept, &next), "reused in spite of " #change);                        \
    CHECK(isSame(&before, &kept), "changed by " #change);                                          \
  } while (0)

TEST(another_dispatch_is_not_reused) {
  ep_ll_ready_t kept = {0};
  ep_ll_dispatch_t op, next;
  do {
    REQUIRE(fillDispatch(&op), "%s", trefoilLastError());
  } while (op.quant || op.numTokens < 1 ||
           epLlPrepareDispatch(&op, EP_LL_BOTH, &kept) != TREFOIL_OK);
  REFUSES(next.numTokens--);
  REFUSES(next.tokenBytes -= 16);
  REFUSES(next.scaleBytes += 16);
  REFUSES(next.quant = EP_LL_QUANT_E4M3);
  REFUSES(next.globalIds ^= 1);
  REFUSES(next.handle.idx64 ^= 1);
  REFUSES(next.scratch = address());
  REFUSES(next.generic ^= 1);
  REFUSES(next.sendWarps = 1);
  REFUSES(next.recvWarps = 1);
  REFUSES(next.tokens = (char *)next.tokens + 4);
  REFUSES(next.outTokens = (char *)next.outTokens + 4);
  ep_ll_ready_t none = {0};
  CHECK(!epLlReuseDispatch(&none, &op), "nothing was kept");
}

#undef REFUSES
#define REFUSES(change)                                                                            \
  do {                                                                                             \
    next = op;                                                                                     \
    change;                                                                                        \
    ep_ll_ready_t before = kept;                                                                   \
    CHECK(!epLlReuseCombine(&kept, &next), "reused in spite of " #change);                         \
    CHECK(isSame(&before, &kept), "changed by " #change);                                          \
  } while (0)

TEST(another_combine_is_not_reused) {
  ep_ll_ready_t kept = {0};
  ep_ll_combine_t op, next;
  do {
    REQUIRE(fillCombine(&op), "%s", trefoilLastError());
  } while (op.numTokens < 1 || op.dtype == TREFOIL_F32);
  REQUIRE(epLlPrepareCombine(&op, EP_LL_BOTH, &kept) == TREFOIL_OK, "%s", trefoilLastError());
  REFUSES(next.numTokens--);
  REFUSES(next.rowBytes += 16);
  REFUSES(next.dtype = TREFOIL_F32);
  REFUSES(next.handle.idx64 ^= 1);
  REFUSES(next.sendWarps = 1);
  REFUSES(next.recvWarps = 1);
  REFUSES(next.tokens = (const char *)next.tokens + 2);
  REFUSES(next.out = (char *)next.out + 2);
  ep_ll_ready_t none = {0};
  CHECK(!epLlReuseCombine(&none, &op), "nothing was kept");
}

TEST_MAIN()
