/* Slots of every routed row, for all ranks at once.
 *
 * One visit of every entry in (src, token, k) order gives each row its position: sources, tokens
 * and k ascend, so positions ascend as the contract asks. Positions count per expert (expert-major)
 * or per rank (rank-major, flat), where the first entry of a token that names a rank takes a new
 * position and the others share it: `stamp[rank]` holds the serial number of the token that took
 * the last one. HT expert-major needs the zones' offsets, known only after the visit, so it adds
 * them in a second one. TRAP takes back the slots of ranks over maxRecv in a visit of its own.
 *
 * The result is built in fresh places of the object's one block; where the block is too small a
 * larger one replaces it before anything is written. Checks come before the first write. */
#include "trefoil/layout.h"

#include <stdlib.h>
#include <string.h>

#include "plan/error.h"

typedef struct work {
  const trefoil_routing_t *routing;
  trefoil_layout_config_t config;
  int R, E, K, L;
  int64_t flatLimit; /* tokens of a higher flat slot are dropped */
  /* all in one block, in this order */
  int64_t **slotOf;
  int64_t *numSlots, *total;
  int64_t *count, *padded, *offset, *filled, *shownCount, *shownOffset;
  int64_t *rowsFrom, *firstFrom;
  int64_t *stamp, *flat, *cursor; /* [R]: see above; the token's flat slot; next flat slot */
  int32_t *rankOf;                /* [E] */
  uint8_t *overflowed;
  int64_t *slots;
} work_t;

/* Hands out the block part by part; with base NULL it only adds up. */
typedef struct carver {
  char *base;
  size_t used;
} carver_t;

static void *carve(carver_t *c, size_t count, size_t size) {
  void *p = c->base ? c->base + c->used : NULL;
  c->used += (count * size + 15) / 16 * 16;
  return p;
}

static size_t carveAll(work_t *w, void *base, int64_t numTokens) {
  carver_t c = {base, 0};
  size_t R = (size_t)w->R, experts = R * (size_t)w->L;
  w->slotOf = carve(&c, R, sizeof *w->slotOf);
  int64_t **perRank[] = {&w->numSlots, &w->total, &w->stamp, &w->flat, &w->cursor};
  for (size_t i = 0; i < sizeof perRank / sizeof *perRank; i++) {
    *perRank[i] = carve(&c, R, sizeof(int64_t));
  }
  int64_t **perExpert[] = {&w->count,  &w->padded,     &w->offset,
                           &w->filled, &w->shownCount, &w->shownOffset};
  for (size_t i = 0; i < sizeof perExpert / sizeof *perExpert; i++) {
    *perExpert[i] = carve(&c, experts, sizeof(int64_t));
  }
  w->rowsFrom = carve(&c, R * R, sizeof(int64_t));
  w->firstFrom = carve(&c, R * R, sizeof(int64_t));
  w->rankOf = carve(&c, (size_t)w->E, sizeof(int32_t));
  w->overflowed = carve(&c, R, 1);
  /* everything above starts at zero, the slots are all written */
  if (base) memset(base, 0, c.used);
  w->slots = carve(&c, (size_t)numTokens * (size_t)w->K, sizeof(int64_t));
  return c.used;
}

static int isHt(trefoil_mode_t mode) {
  return mode == TREFOIL_HT_FLAT || mode == TREFOIL_HT_EXPERT_MAJOR;
}

static int64_t zoneSlots(const work_t *w) {
  return w->R * w->routing->shape.maxTokens;
}

static int arrives(const work_t *w, int src, int dst) {
  const uint8_t *active = w->config.active;
  size_t R = (size_t)w->R;
  return active[(size_t)dst * R + (size_t)src] && active[(size_t)src * R + (size_t)dst];
}

static inline int64_t place(work_t *w, trefoil_mode_t mode, int src, int32_t e, int64_t serial) {
  int dst = w->rankOf[e];
  if (w->config.active && !arrives(w, src, dst)) return -1;
  if (w->stamp[dst] != serial) {
    w->stamp[dst] = serial;
    w->flat[dst] = w->cursor[dst]++;
    w->rowsFrom[(size_t)dst * (size_t)w->R + (size_t)src]++;
  }
  int64_t position = w->count[e]++;
  if (w->flat[dst] >= w->flatLimit) return -1;
  w->filled[e]++;
  switch (mode) {
  case TREFOIL_LL_EXPERT_MAJOR:
    return w->offset[e] + position;
  case TREFOIL_LL_RANK_MAJOR:
    return src * w->routing->shape.maxTokens +
           w->rowsFrom[(size_t)dst * (size_t)w->R + (size_t)src] - 1;
  case TREFOIL_HT_FLAT:
    return w->flat[dst];
  default:
    return position;
  }
}

/* Inlined once per mode, so that the switch in place() leaves the loop. */
__attribute__((always_inline)) static inline void placeAll(work_t *w, trefoil_mode_t mode) {
  int64_t serial = 0;
  for (int src = 0; src < w->R; src++) {
    const int32_t *row = w->routing->topkIdx[src];
    int64_t *out = w->slotOf[src];
    for (int64_t t = 0; t < w->routing->numTokens[src]; t++, row += w->K, out += w->K) {
      serial++;
      for (int k = 0; k < w->K; k++) out[k] = row[k] < 0 ? -1 : place(w, mode, src, row[k], serial);
    }
  }
}

static void placeByMode(work_t *w) {
  switch (w->config.mode) {
  case TREFOIL_LL_EXPERT_MAJOR:
    placeAll(w, TREFOIL_LL_EXPERT_MAJOR);
    break;
  case TREFOIL_LL_RANK_MAJOR:
    placeAll(w, TREFOIL_LL_RANK_MAJOR);
    break;
  case TREFOIL_HT_FLAT:
    placeAll(w, TREFOIL_HT_FLAT);
    break;
  case TREFOIL_HT_EXPERT_MAJOR:
    placeAll(w, TREFOIL_HT_EXPERT_MAJOR);
    break;
  }
}

/* Zones of HT expert-major, and what counts as a rank's total. */
static void sumZones(work_t *w, int rank) {
  int64_t base = 0, align = w->config.alignment > 1 ? (int64_t)w->config.alignment : 1;
  for (int e = rank * w->L; e < (rank + 1) * w->L; e++) {
    w->offset[e] = base;
    w->padded[e] = (w->count[e] + align - 1) / align * align;
    base += w->padded[e];
  }
  w->total[rank] = base;
}

static void addOffsets(work_t *w, int64_t maxRecv) {
  for (int src = 0; src < w->R; src++) {
    const int32_t *row = w->routing->topkIdx[src];
    int64_t *out = w->slotOf[src], n = w->routing->numTokens[src] * w->K;
    for (int64_t i = 0; i < n; i++) {
      if (out[i] < 0) continue;
      out[i] += w->offset[row[i]];
      if (out[i] >= maxRecv) {
        out[i] = -1;
        w->filled[row[i]]--;
      }
    }
  }
}

/* TRAP: a rank over maxRecv receives nothing. */
static void takeBack(work_t *w) {
  for (int src = 0; src < w->R; src++) {
    const int32_t *row = w->routing->topkIdx[src];
    int64_t *out = w->slotOf[src], n = w->routing->numTokens[src] * w->K;
    for (int64_t i = 0; i < n; i++) {
      if (row[i] >= 0 && w->overflowed[w->rankOf[row[i]]]) out[i] = -1;
    }
  }
  for (int rank = 0; rank < w->R; rank++) {
    if (!w->overflowed[rank]) continue;
    w->numSlots[rank] = 0;
    memset(w->filled + rank * w->L, 0, (size_t)w->L * sizeof *w->filled);
  }
}

static void finishHt(work_t *w) {
  int64_t maxRecv = w->config.maxRecv ? w->config.maxRecv : INT64_MAX;
  int expertMajor = w->config.mode == TREFOIL_HT_EXPERT_MAJOR, numOver = 0;
  for (int rank = 0; rank < w->R; rank++) {
    w->total[rank] = w->cursor[rank];
    if (expertMajor) sumZones(w, rank);
    w->overflowed[rank] = w->total[rank] > maxRecv;
    numOver += w->overflowed[rank];
    w->numSlots[rank] = w->overflowed[rank] ? maxRecv : w->total[rank];
  }
  if (expertMajor) addOffsets(w, w->config.drop ? maxRecv : INT64_MAX);
  for (int e = 0; e < w->R * w->L; e++) {
    w->shownOffset[e] = w->offset[e];
    w->shownCount[e] = expertMajor ? w->padded[e] : w->filled[e];
    if (!expertMajor || !w->config.drop) continue;
    if (w->shownOffset[e] > maxRecv) w->shownOffset[e] = maxRecv;
    int64_t room = maxRecv - w->shownOffset[e];
    if (w->shownCount[e] > room) w->shownCount[e] = room;
  }
  if (numOver > 0 && !w->config.drop) takeBack(w);
}

static void finishLl(work_t *w) {
  int expertMajor = w->config.mode == TREFOIL_LL_EXPERT_MAJOR;
  for (int rank = 0; rank < w->R; rank++) {
    w->numSlots[rank] = zoneSlots(w) * (expertMajor ? w->L : 1);
    w->total[rank] = w->cursor[rank];
    if (!expertMajor) continue;
    w->total[rank] = 0;
    for (int e = rank * w->L; e < (rank + 1) * w->L; e++) w->total[rank] += w->count[e];
  }
  memcpy(w->shownCount, w->count, (size_t)w->R * (size_t)w->L * sizeof *w->count);
}

static void sumSources(work_t *w) {
  for (int dst = 0; dst < w->R; dst++) {
    int64_t sum = 0;
    for (int src = 0; src < w->R; src++) {
      size_t i = (size_t)dst * (size_t)w->R + (size_t)src;
      int rankMajor = w->config.mode == TREFOIL_LL_RANK_MAJOR;
      w->firstFrom[i] = rankMajor ? src * w->routing->shape.maxTokens : sum;
      sum += w->rowsFrom[i];
    }
  }
}

static void computeAll(work_t *w) {
  for (int e = 0; e < w->E; e++) w->rankOf[e] = e / w->L;
  if (w->config.mode == TREFOIL_LL_EXPERT_MAJOR) {
    for (int e = 0; e < w->R * w->L; e++) w->offset[e] = e % w->L * zoneSlots(w);
  }
  int64_t *next = w->slots;
  for (int src = 0; src < w->R; src++) {
    w->slotOf[src] = next;
    next += w->routing->numTokens[src] * w->K;
  }
  placeByMode(w);
  if (w->config.mode != TREFOIL_HT_EXPERT_MAJOR) {
    memcpy(w->padded, w->count, (size_t)w->R * (size_t)w->L * sizeof *w->count);
  }
  if (isHt(w->config.mode)) {
    finishHt(w);
  } else {
    finishLl(w);
  }
  sumSources(w);
}

static void show(trefoil_layout_t *layout, const work_t *w) {
  layout->shape = w->routing->shape;
  layout->config = w->config;
  layout->numLocalExperts = w->L;
  layout->slotOf = (const int64_t *const *)w->slotOf;
  layout->numSlots = w->numSlots;
  layout->total = w->total;
  layout->overflowed = w->overflowed;
  layout->expertCount = w->count;
  layout->expertPadded = w->padded;
  layout->zoneOffset = w->offset;
  layout->expertFilled = w->filled;
  layout->shownCount = w->shownCount;
  layout->shownOffset = w->shownOffset;
  layout->rowsFrom = w->rowsFrom;
  layout->firstFrom = w->firstFrom;
}

static trefoil_result_t checkConfig(const trefoil_layout_config_t *c) {
  EP_CHECK((unsigned)c->mode < TREFOIL_NUM_MODES, TREFOIL_INVALID_ARGUMENT,
           "mode %d is not one of the %d modes", (int)c->mode, TREFOIL_NUM_MODES);
  size_t a = c->alignment;
  EP_CHECK((a & (a - 1)) == 0 && a <= (size_t)1 << 40, TREFOIL_INVALID_ARGUMENT,
           "alignment %zu: must be 0 or a power of two up to 2^40", a);
  EP_CHECK(c->maxRecv >= 0, TREFOIL_INVALID_ARGUMENT,
           "maxRecv %lld: must be positive, or 0 for unbounded", (long long)c->maxRecv);
  return TREFOIL_OK;
}

static trefoil_result_t checkRank(const trefoil_routing_t *r, int rank) {
  int64_t tokens = r->numTokens[rank];
  EP_CHECK(tokens >= 0 && tokens <= r->shape.maxTokens, TREFOIL_INVALID_ARGUMENT,
           "rank %d has %lld tokens: must be in [0, %lld]", rank, (long long)tokens,
           (long long)r->shape.maxTokens);
  EP_CHECK(tokens == 0 || r->topkIdx[rank], TREFOIL_INVALID_ARGUMENT,
           "rank %d has %lld tokens but its topk_idx is NULL", rank, (long long)tokens);
  const int32_t *idx = r->topkIdx[rank];
  for (int64_t i = 0; i < tokens * r->shape.topk; i++) {
    EP_CHECK(idx[i] >= -1 && idx[i] < r->shape.numExperts, TREFOIL_INVALID_ARGUMENT,
             "rank %d, token %lld, k = %d: expert %d is outside [0, %d) and not -1", rank,
             (long long)(i / r->shape.topk), (int)(i % r->shape.topk), idx[i], r->shape.numExperts);
  }
  return TREFOIL_OK;
}

static trefoil_result_t checkRouting(const trefoil_routing_t *r, int64_t *numTokens) {
  EP_TRY(trefoilShapeCheck(&r->shape));
  EP_CHECK(r->shape.numRanks <= TREFOIL_LAYOUT_MAX_RANKS, TREFOIL_INVALID_ARGUMENT,
           "%d ranks: a layout takes at most %d", r->shape.numRanks, TREFOIL_LAYOUT_MAX_RANKS);
  EP_CHECK(r->numTokens && r->topkIdx, TREFOIL_INVALID_ARGUMENT, "the routing's %s is NULL",
           r->numTokens ? "topkIdx" : "numTokens");
  for (int rank = 0; rank < r->shape.numRanks; rank++) {
    EP_TRY(checkRank(r, rank));
    *numTokens += r->numTokens[rank];
  }
  return TREFOIL_OK;
}

trefoil_result_t trefoilLayoutCompute(trefoil_layout_t *layout, const trefoil_routing_t *routing,
                                      const trefoil_layout_config_t *config) {
  EP_CHECK(layout && routing && config, TREFOIL_INVALID_ARGUMENT, "the %s is NULL",
           !layout    ? "layout"
           : !routing ? "routing"
                      : "configuration");
  EP_TRY(checkConfig(config));
  int64_t numTokens = 0;
  EP_TRY(checkRouting(routing, &numTokens));
  work_t w = {.routing = routing, .config = *config};
  w.R = routing->shape.numRanks;
  w.E = routing->shape.numExperts;
  w.K = routing->shape.topk;
  w.L = trefoilExpertsPerRank(&routing->shape);
  if (isHt(config->mode)) w.config.active = NULL;
  int limited = isHt(config->mode) && config->drop && config->maxRecv > 0 &&
                (config->mode == TREFOIL_HT_FLAT || !config->zeroCopyOn);
  w.flatLimit = limited ? config->maxRecv : INT64_MAX;
  size_t bytes = carveAll(&w, NULL, numTokens);
  if (bytes > layout->memoryBytes) {
    void *memory = malloc(bytes);
    EP_CHECK(memory, TREFOIL_SYSTEM_ERROR, "out of memory: %zu bytes for a layout", bytes);
    free(layout->memory);
    layout->memory = memory;
    layout->memoryBytes = bytes;
  }
  carveAll(&w, layout->memory, numTokens);
  computeAll(&w);
  show(layout, &w);
  return TREFOIL_OK;
}

void trefoilLayoutFree(trefoil_layout_t *layout) {
  if (!layout) return;
  free(layout->memory);
  memset(layout, 0, sizeof *layout);
}
