/* The batch within a profile, or with rows and sums open: what was drawn freely is brought inside. A
 * feature that is not allowed is taken out, a forced one put in. */
#include "validate/check_case.h"

int epUses(const ep_check_group_t *g, ep_rng_t *rng, ep_feature_t feature, int oneIn) {
  if (g->limited && !(g->allowed & EP_BIT(feature))) return 0;
  if (g->limited && (g->forced & EP_BIT(feature))) return 1;
  return epOneIn(rng, oneIn);
}

/* Order-free without a profile: all but what is ours alone. */
#define OURS_ALONE (EP_BIT(EP_F_PARTIAL) | EP_BIT(EP_F_UNEVEN_EXPERTS))

static trefoil_mode_t limitModes(ep_check_group_t *g, const ep_check_choice_t *choice,
                                 const ep_check_cell_t *cell, ep_rng_t *rng) {
  const ep_profile_t *p = choice->profile;
  unsigned modes = (choice->modes ? choice->modes : 15u) & (p ? p->modes : 15u);
  trefoil_mode_t mode = cell ? cell->mode : (trefoil_mode_t)epBelow(rng, TREFOIL_NUM_MODES);
  while (!cell && modes && !(modes >> mode & 1))
    mode = (trefoil_mode_t)(((int)mode + 1) % TREFOIL_NUM_MODES);
  g->allowed = cell ? cell->allowed
               : p  ? epProfileFeatures(p, mode)
                    : EP_ALL_FEATURES & ~OURS_ALONE;
  g->forced = cell ? cell->forced : 0;
  g->highThroughput = mode >= TREFOIL_HT_FLAT;
  return mode;
}

static void limitRanks(ep_check_group_t *g, const ep_check_choice_t *choice, ep_rng_t *rng) {
  const ep_profile_t *p = choice->profile;
  int fitting[EP_PROFILE_LIST], n = 0;
  for (int i = 0; p && i < p->numRanks; i++)
    if (p->ranks[i] >= choice->minRanks &&
        p->ranks[i] <= (choice->maxRanks ? choice->maxRanks : EP_CHECK_MOST_RANKS))
      fitting[n++] = p->ranks[i];
  /* Two where two will do: more cost time. */
  if (n) g->shape.numRanks = fitting[epOneIn(rng, 4) ? (int)epBelow(rng, n) : 0];
  g->shape.ranksPerNode = g->shape.numRanks;
}

/* One of the profile's shapes; without any, what was drawn, with experts that divide. */
static void limitShape(ep_check_group_t *g, const ep_profile_t *p, ep_rng_t *rng) {
  int R = g->shape.numRanks, ht = g->highThroughput;
  int local = trefoilExpertsPerRank(&g->shape);
  if (p && p->numShapes[ht]) {
    ep_profile_shape_t shape = p->shapes[ht][epBelow(rng, p->numShapes[ht])];
    const ep_profile_shape_t *other = &p->other[ht];
    if (other->hidden && epUses(g, rng, EP_F_OTHER_HIDDEN, 8)) shape.hidden = other->hidden;
    if (other->topk && epUses(g, rng, EP_F_OTHER_TOPK, 8)) shape.topk = other->topk;
    if (other->tokens && epUses(g, rng, EP_F_OTHER_TOKENS, 8)) shape.tokens = other->tokens;
    if (other->localExperts && epUses(g, rng, EP_F_OTHER_EXPERTS, 8))
      shape.localExperts = other->localExperts;
    g->hidden = shape.hidden;
    g->shape.topk = shape.topk;
    g->shape.maxTokens = shape.tokens;
    local = shape.localExperts;
    while (local * R < g->shape.topk) local *= 2;
    /* f32 rows are twice as long; elsewhere rows fill what the group allows, unless told otherwise */
    int wide = (g->forced & EP_BIT(EP_F_F32)) ||
               ((g->allowed & EP_BIT(EP_F_SHORT_ROWS)) && epUses(g, rng, EP_F_F32, 4));
    for (int i = 0; i < p->numShapes[ht]; i++)
      if (p->shapes[ht][i].hidden < g->hidden) g->shortHidden = p->shapes[ht][i].hidden;
    if (!wide) g->allowed &= ~EP_BIT(EP_F_F32);
    if (g->forced & EP_BIT(EP_F_SHORT_ROWS)) wide = 1;
    g->maxTokenBytes = (size_t)(wide ? 4 : 2) * (size_t)g->hidden;
  } else {
    if (g->forced & EP_BIT(EP_F_OTHER_TOPK)) {
      local = (int)epRange(rng, 16, 32);
      g->shape.topk = (int)epRange(rng, 10, 16);
    }
    /* full ranks fill large tensors */
    while ((size_t)(local * R * g->shape.maxTokens) * g->maxTokenBytes > 1 << 20 &&
           g->shape.maxTokens > 1)
      g->shape.maxTokens /= 2;
  }
  g->shape.numExperts = R * local;
  if (R > 1 && local > 1 && epUses(g, rng, EP_F_UNEVEN_EXPERTS, 4)) g->shape.numExperts--;
  if (g->shape.topk > g->shape.numExperts) g->shape.topk = g->shape.numExperts;
  if (g->maxTokenBytes < 1056 &&
      (g->forced & (EP_BIT(EP_F_E4M3) | EP_BIT(EP_F_ROUND_SCALES) | EP_BIT(EP_F_CALLER_SCALES))))
    g->maxTokenBytes = 1056;
}

static void limitReceives(ep_check_group_t *g, ep_rng_t *rng) {
  int64_t R = g->shape.numRanks, K = g->shape.topk, L = trefoilExpertsPerRank(&g->shape);
  int64_t N = g->shape.maxTokens;
  g->maxRecv = g->numTopk = g->drop = 0;
  if (!g->highThroughput) return;
  int padded = !!(g->allowed & EP_BIT(EP_F_ALIGNMENT));
  g->maxRecv = N * R * (K < L ? K : L) + (padded ? 31 * L : 0);
  if (epUses(g, rng, EP_F_EAGER, 4)) {
    g->maxRecv = 0;
  } else if (epUses(g, rng, EP_F_DROP, 4)) {
    g->maxRecv = N;
    g->drop = 1;
  } else if (epUses(g, rng, EP_F_TRAP, 8)) {
    g->maxRecv = N;
  }
  g->numTopk = g->maxRecv == 0 ? (int)K : 0;
}

static void limitHandles(ep_check_group_t *g, trefoil_mode_t mode, ep_rng_t *rng) {
  ep_check_handle_t *h = g->handles;
  g->numHandles = epUses(g, rng, EP_F_HANDLES, 4) ? EP_MAX_HANDLES : 1;
  int own = epUses(g, rng, EP_F_OWN_MEMORY, 4), aligned = epUses(g, rng, EP_F_ALIGNMENT, 2);
  for (int i = 0; i < EP_MAX_HANDLES; i++)
    h[i] = (ep_check_handle_t){
        .mode = mode,
        .topk = g->shape.topk,
        .initTopk = g->shape.topk,
        .alignment =
            mode == TREFOIL_HT_EXPERT_MAJOR && aligned ? (size_t)1 << epRange(rng, 1, 5) : 0,
        .ownMemory = own,
        .shareWith = -1,
    };
  if (!g->highThroughput || !epUses(g, rng, EP_F_SHARED_MEMORY, 4)) return;
  h[0].ownMemory = 1;
  h[1] = h[0];
  h[1].shareWith = 0;
  if (g->numHandles < 2) g->numHandles = 2;
}

void epLimitGroup(ep_check_group_t *g, const ep_check_choice_t *choice, ep_rng_t *rng) {
  const ep_check_cell_t *cell =
      choice->cells ? &choice->cells[g->batch % (uint64_t)choice->numCells] : NULL;
  g->limited = 1;
  g->warmUp = choice->profile && choice->profile->firstCallNs > 0;
  trefoil_mode_t mode = limitModes(g, choice, cell, rng);
  limitRanks(g, choice, rng);
  limitShape(g, choice->profile, rng);
  limitReceives(g, rng);
  limitHandles(g, mode, rng);
  g->enableMask = !g->highThroughput && epUses(g, rng, EP_F_MASK, 4);
  g->partial = mode == TREFOIL_LL_EXPERT_MAJOR && epUses(g, rng, EP_F_PARTIAL, 4);
  g->customAlloc = epUses(g, rng, EP_F_ALLOCATOR, 4);
  g->zeroCopy = mode != TREFOIL_LL_EXPERT_MAJOR && epUses(g, rng, EP_F_ZERO_COPY, 6)
                    ? NCCL_EP_ZERO_COPY_ON
                    : NCCL_EP_ZERO_COPY_AUTO;
  g->useWindow = g->zeroCopy == NCCL_EP_ZERO_COPY_ON || epUses(g, rng, EP_F_WINDOW, 3);
  /* room for one operation there and back, and for a second one where rows are small */
  size_t rows =
      (size_t)(g->highThroughput
                   ? g->shape.numRanks * g->shape.maxTokens * (g->shape.topk + 1)
                   : trefoilExpertsPerRank(&g->shape) * g->shape.numRanks * g->shape.maxTokens);
  size_t least = 4 * rows * (g->maxTokenBytes + 512) + ((size_t)4 << 20);
  if (g->imageBytes < least) g->imageBytes = least;
}
