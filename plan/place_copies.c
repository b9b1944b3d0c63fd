/* Copies of experts by load. The global policy is the hierarchical one with one node and one group:
 * groups go to nodes, each node copies its own experts, and packs the copies to its ranks. */
#include "plan/place_copies.h"

#include <stdlib.h>
#include <string.h>

#include "plan/error.h"

/* An expert's share of the load: what one copy has. */
typedef struct share {
  double load;
  int expert, copies, node;
} share_t;

/* Something that is packed into bins, and a bin: a node or a rank. */
typedef struct bin {
  double load;
  int used, last; /* items, and the expert that was placed here last */
} bin_t;

typedef struct group {
  double load;
  int index;
} group_t;

typedef struct packing {
  int experts, physical, ranks, nodes, groups;
  share_t *shares;
  group_t *group;
  bin_t *bins;
} packing_t;

static int busierFirst(const void *a, const void *b) {
  const share_t *x = a, *y = b;
  if (x->node != y->node) return x->node - y->node;
  if (x->load != y->load) return x->load > y->load ? -1 : 1;
  return x->expert - y->expert;
}

static int busierGroupFirst(const void *a, const void *b) {
  const group_t *x = a, *y = b;
  if (x->load != y->load) return x->load > y->load ? -1 : 1;
  return x->index - y->index;
}

static void measure(const trefoil_trace_t *from, int isAlike, share_t *shares) {
  for (int e = 0; e < from->shape.numExperts; e++) shares[e] = (share_t){isAlike, e, 1, 0};
  if (isAlike) return;
  for (int64_t i = 0; i < from->numTokens * from->shape.topk; i++)
    if (from->topkIdx[i] >= 0) shares[from->topkIdx[i]].load += 1;
}

/* The least load with room; without a copy of this expert if one is left. */
static int binFor(const bin_t *bins, int n, int room, int expert) {
  int found = -1;
  for (int b = 0; b < n; b++) {
    if (bins[b].used == room) continue;
    int has = bins[b].last == expert, had = found >= 0 && bins[found].last == expert;
    if (found < 0 || has < had || (has == had && bins[b].load < bins[found].load)) found = b;
  }
  return found;
}

static void emptyBins(bin_t *bins, int n) {
  for (int b = 0; b < n; b++) bins[b] = (bin_t){0, 0, -1};
}

/* As many groups to each node, the busiest first to the node with the least load. */
static void packGroups(const packing_t *p) {
  int size = p->experts / p->groups;
  for (int g = 0; g < p->groups; g++) {
    p->group[g] = (group_t){0, g};
    for (int e = g * size; e < (g + 1) * size; e++) p->group[g].load += p->shares[e].load;
  }
  qsort(p->group, (size_t)p->groups, sizeof *p->group, busierGroupFirst);
  emptyBins(p->bins, p->nodes);
  for (int i = 0; i < p->groups; i++) {
    int g = p->group[i].index, node = binFor(p->bins, p->nodes, p->groups / p->nodes, g);
    p->bins[node].used++;
    p->bins[node].load += p->group[i].load;
    for (int e = g * size; e < (g + 1) * size; e++) p->shares[e].node = node;
  }
}

/* Each further copy is of the expert with the most load a copy; turns loads into those of a copy. */
static void replicate(share_t *shares, int experts, int more) {
  for (; more > 0; more--) {
    share_t *most = shares;
    for (int e = 1; e < experts; e++)
      if (shares[e].load > most->load) most = &shares[e];
    most->load *= (double)most->copies / (most->copies + 1);
    most->copies++;
  }
}

/* The copies of one node's experts, the busiest first, to its ranks from firstRank on. */
static void packCopies(const packing_t *p, const share_t *shares, int experts, int firstRank,
                       const ep_copies_t *of) {
  int ranks = p->ranks / p->nodes, room = p->physical / p->ranks;
  emptyBins(p->bins, ranks);
  for (int i = 0; i < experts; i++) {
    int e = shares[i].expert;
    for (int j = 0; j < shares[i].copies; j++) {
      int r = binFor(p->bins, ranks, room, e);
      of->physical[of->first[e] + j] = (firstRank + r) * room + p->bins[r].used++;
      p->bins[r].load += shares[i].load;
      p->bins[r].last = e;
    }
  }
}

static void place(const packing_t *p, const ep_copies_t *of) {
  int experts = p->experts / p->nodes, ranks = p->ranks / p->nodes;
  packGroups(p);
  qsort(p->shares, (size_t)p->experts, sizeof *p->shares, busierFirst);
  for (int n = 0; n < p->nodes; n++)
    replicate(p->shares + n * experts, experts, p->physical / p->nodes - experts);
  for (int i = 0; i < p->experts; i++) of->first[p->shares[i].expert + 1] = p->shares[i].copies;
  of->first[0] = 0;
  for (int e = 0; e < p->experts; e++) of->first[e + 1] += of->first[e];
  qsort(p->shares, (size_t)p->experts, sizeof *p->shares, busierFirst);
  for (int n = 0; n < p->nodes; n++) packCopies(p, p->shares + n * experts, experts, n * ranks, of);
}

static trefoil_result_t check(const packing_t *p) {
  EP_CHECK(p->physical % p->ranks == 0, TREFOIL_INVALID_ARGUMENT,
           "%d physical experts by load: must be a multiple of the %d ranks", p->physical,
           p->ranks);
  EP_CHECK(p->nodes >= 1 && p->ranks % p->nodes == 0, TREFOIL_INVALID_ARGUMENT,
           "copies on %d nodes: must divide the %d ranks", p->nodes, p->ranks);
  EP_CHECK(p->groups >= 1 && p->experts % p->groups == 0, TREFOIL_INVALID_ARGUMENT,
           "%d groups of experts: must divide the %d experts", p->groups, p->experts);
  EP_CHECK(p->groups % p->nodes == 0, TREFOIL_INVALID_ARGUMENT,
           "%d groups of experts on %d nodes: each must take as many", p->groups, p->nodes);
  return TREFOIL_OK;
}

trefoil_result_t epPlaceCopies(const trefoil_trace_t *from, const trefoil_placement_t *how,
                               const ep_copies_t *of) {
  packing_t p = {.experts = from->shape.numExperts,
                 .physical = how->physicalExperts,
                 .ranks = from->shape.numRanks,
                 .nodes = how->numGroups ? how->numNodes : 1,
                 .groups = how->numGroups ? how->numGroups : 1};
  EP_TRY(check(&p));
  p.shares = malloc((size_t)p.experts * sizeof *p.shares);
  p.group = malloc((size_t)p.groups * sizeof *p.group);
  p.bins = malloc((size_t)p.ranks * sizeof *p.bins);
  int isReady = p.shares && p.group && p.bins;
  if (isReady) {
    measure(from, how->isAlike, p.shares);
    place(&p, of);
  }
  free(p.shares);
  free(p.group);
  free(p.bins);
  EP_CHECK(isReady, TREFOIL_SYSTEM_ERROR, "out of memory for the loads of %d experts", p.experts);
  return TREFOIL_OK;
}
