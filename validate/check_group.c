/* The batch: what a group and its handles are made with. Groups are small on purpose: a fault shows
 * in a small shape as well as in a large one, and small ones are tried by the thousand. One batch in
 * twenty-four has rows of some thousand bytes. */
#include "validate/check_case.h"

#include "plan/preflight.h"

static int divisorOf(ep_rng_t *rng, int n) {
  int d;
  do d = (int)epRange(rng, 1, n);
  while (n % d);
  return d;
}

static trefoil_mode_t pickMode(ep_rng_t *rng, unsigned modes, int highThroughput) {
  int first = highThroughput ? TREFOIL_HT_FLAT : TREFOIL_LL_EXPERT_MAJOR;
  unsigned allowed = (modes >> first) & 3u;
  return (trefoil_mode_t)(first + (allowed == 3 ? (int)epBelow(rng, 2) : allowed == 2));
}

static void makeHandles(ep_check_group_t *g, unsigned modes, ep_rng_t *rng) {
  int K = g->shape.topk;
  int otherK = (int)epRange(rng, 1, K); /* two kinds at most: a case has two routings */
  g->numHandles = (int)epRange(rng, 1, EP_MAX_HANDLES);
  for (int i = 0; i < g->numHandles; i++) {
    ep_check_handle_t *h = &g->handles[i];
    h->mode = pickMode(rng, modes, g->highThroughput);
    h->topk = epOneIn(rng, 3) ? otherK : K;
    h->alignment = epOneIn(rng, 2) ? (size_t)epBelow(rng, 2) : (size_t)1 << epRange(rng, 1, 5);
    h->ownMemory = epOneIn(rng, 3);
    h->shareWith = -1;
    h->initTopk = h->topk;
    if (!g->highThroughput) {
      h->alignment = 0;
      if (g->zeroCopy == NCCL_EP_ZERO_COPY_ON) h->mode = TREFOIL_LL_RANK_MAJOR;
    } else if (!h->ownMemory && g->maxRecv && epOneIn(rng, 4) && (h->topk <= 32 || g->numTopk)) {
      h->initTopk = -1; /* room for top-32, or for the group's bound */
    }
    if (h->mode != TREFOIL_HT_EXPERT_MAJOR) h->alignment = 0;
  }
  /* Backward through a second handle on the same memory. */
  ep_check_handle_t *first = &g->handles[0], *second = &g->handles[1];
  if (g->highThroughput && g->numHandles > 1 && epOneIn(rng, 2)) {
    first->ownMemory = 1;
    first->initTopk = first->topk;
    *second = *first;
    second->shareWith = 0;
  }
}

static void makeLimits(ep_check_group_t *g, ep_rng_t *rng) {
  int R = g->shape.numRanks, K = g->shape.topk, L = trefoilExpertsPerRank(&g->shape);
  int64_t N = g->shape.maxTokens;
  if (!g->highThroughput) return;
  switch (epBelow(rng, 4)) {
  case 0: /* eager */
    g->maxRecv = 0;
    break;
  case 1: /* may overflow */
    g->maxRecv = epRange(rng, N, N * R * (K > 2 ? 2 : 1));
    g->drop = (int)epBelow(rng, 2);
    break;
  default: /* never overflows: every zone is padded to at most 32 more */
    g->maxRecv = N * R * (K < L ? K : L) + 31 * (int64_t)L;
    g->drop = epOneIn(rng, 4);
  }
  g->numTopk = g->maxRecv == 0 || epOneIn(rng, 2) ? K : 0;
}

/* One NVLink domain. What takes threads long is nothing to a GPU: one group in four has many experts and
 * a large top-k, one in four many tokens. */
static void forGpus(ep_check_group_t *g, ep_rng_t *rng) {
  int R = g->shape.numRanks;
  g->gpuSubset = 1;
  g->shape.ranksPerNode = R;
  if (epOneIn(rng, 4)) {
    g->shape.numExperts = (int)epRange(rng, 4 * R, 256);
    g->shape.topk = (int)epRange(rng, 1, g->shape.numExperts < 64 ? g->shape.numExperts : 64);
  } else if (epOneIn(rng, 3)) {
    g->shape.maxTokens = epRange(rng, 12, 256);
  }
}

void epMakeGroup(ep_check_group_t *g, const ep_check_choice_t *choice, uint64_t batch) {
  ep_rng_t rng = epRng(choice->seed, 1, batch);
  unsigned modes = choice->modes ? choice->modes : 15u;
  int minR = choice->minRanks ? choice->minRanks : 1,
      maxR = choice->maxRanks ? choice->maxRanks : EP_CHECK_MOST_RANKS;
  *g = (ep_check_group_t){.seed = choice->seed, .batch = batch};
  /* Two to four ranks is where most faults already show; more cost time in threads. */
  int R = epOneIn(&rng, 4) || minR > 4
              ? (int)epRange(&rng, minR, maxR)
              : (int)epRange(&rng, minR < 2 && maxR >= 2 ? 2 : minR, maxR < 4 ? maxR : 4);
  g->shape.numRanks = R;
  if ((modes & EP_MODE_A2SGD) && (modes == EP_MODE_A2SGD || epOneIn(&rng, 2))) {
    epMakeGradGroup(g, &rng);
    return;
  }
  g->shape.ranksPerNode = epOneIn(&rng, 2) ? R : divisorOf(&rng, R);
  g->highThroughput = (modes & 3u) == 0 || ((modes & 12u) != 0 && epOneIn(&rng, 2));
  g->shape.numExperts = epOneIn(&rng, 8)   ? (int)epRange(&rng, 1, 40)
                        : epOneIn(&rng, 2) ? R * (int)epRange(&rng, 1, 4)
                                           : (int)epRange(&rng, R, 4 * R);
  int maxK = g->shape.numExperts < 16 ? g->shape.numExperts : 16;
  g->shape.topk = (int)epRange(&rng, 1, epOneIn(&rng, 4) || maxK < 8 ? maxK : 8);
  int large = epOneIn(&rng, 24);
  g->shape.maxTokens = large               ? epRange(&rng, 1, 4)
                       : epOneIn(&rng, 24) ? epRange(&rng, 40, 150)
                                           : epRange(&rng, 1, 12);
  g->maxTokenBytes = large ? (size_t)(16 * epRange(&rng, 64, 768))
                           : (size_t)(16 * epRange(&rng, 1, epOneIn(&rng, 6) ? 72 : 12));
  g->enableMask = !g->highThroughput && epOneIn(&rng, 4);
  g->customAlloc = epOneIn(&rng, 4);
  g->partial = !g->highThroughput && epOneIn(&rng, 4);
  g->zeroCopy = (ncclEpZeroCopyMode_t)epBelow(&rng, 3);
  g->orderFree = choice->orderFree;
  if (choice->gpuSubset) forGpus(g, &rng);
  if (choice->ranksPerNode) g->shape.ranksPerNode = epDomainRanks(choice->ranksPerNode, R);
  if (g->zeroCopy == NCCL_EP_ZERO_COPY_ON && !g->highThroughput &&
      (!(modes & (1u << TREFOIL_LL_RANK_MAJOR)) || g->shape.ranksPerNode != R))
    g->zeroCopy = NCCL_EP_ZERO_COPY_AUTO;
  makeLimits(g, &rng);
  g->useWindow = g->zeroCopy == NCCL_EP_ZERO_COPY_ON || epOneIn(&rng, 3);
  g->imageBytes = (size_t)(large ? 32 : 8) << 20;
  makeHandles(g, modes, &rng);
  if (choice->orderFree || choice->profile || choice->cells) epLimitGroup(g, choice, &rng);
}
