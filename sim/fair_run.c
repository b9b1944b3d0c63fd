/* A replay as max-min fair flows, in this process: what SimGrid does with the same streams
 * (simgrid_calls.c), for more of them.
 *
 * Streams that cross the same resources are a bundle, of which all flows have one rate; a flow of it ends
 * when the bundle has done that many rows since the flow came. So the state is a number a bundle, and
 * changes only where the bundle's rate does. Where a stream sends its next chunk at once, no rate changes.
 * Times are femtoseconds in doubles. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "plan/error.h"
#include "sim/fair_share.h"
#include "sim/streams.h"

enum { BLOCK = 64, CHECK_EVENTS = 64 };
#define TOGETHER_FS 0.5 /* below what answers show: ends nearer than this are one event */

typedef enum state { IDLE, TIMED, FLOWING } state_t;

/* Of a stream. */
typedef struct flow {
  int32_t bundle; /* -1: nothing limits it */
  int32_t next;   /* of its moves */
  state_t state;
  double began;
  double target; /* rows that its bundle will have done when the flow ends */
} flow_t;

typedef struct wake {
  double time;
  int32_t stream; /* -1: capacities change */
} wake_t;

typedef struct fair {
  const ep_fabric_t *f;
  ep_streams_t streams;
  ep_share_t share;
  flow_t *flows;
  int32_t *firstMember, *members; /* of bundles: heaps by target */
  double *done, *since, *rate;    /* [bundles] rows done up to a time, and the rate from then on */
  double *finish;                 /* [bundles, whole blocks] when the first of its flows ends */
  double *blockFinish;            /* the first of each block */
  int numBlocks;
  wake_t *timers;
  int numTimers;
  int firstResource[TREFOIL_NUM_RESOURCES];
  double now, timeoutS;
  struct timespec begin;
} fair_t;

/* ---- Timers: a heap by time -------------------------------------------------------------------- */

static void addTimer(fair_t *w, double time, int stream) {
  int i = w->numTimers++;
  for (; i > 0 && w->timers[(i - 1) / 2].time > time; i = (i - 1) / 2) {
    w->timers[i] = w->timers[(i - 1) / 2];
  }
  w->timers[i] = (wake_t){time, stream};
}

static int takeTimer(fair_t *w) {
  int stream = w->timers[0].stream, i = 0;
  wake_t last = w->timers[--w->numTimers];
  for (int c = 1; c < w->numTimers; c = 2 * i + 1) {
    if (c + 1 < w->numTimers && w->timers[c + 1].time < w->timers[c].time) c++;
    if (w->timers[c].time >= last.time) break;
    w->timers[i] = w->timers[c];
    i = c;
  }
  w->timers[i] = last;
  return stream;
}

/* ---- Flows of a bundle: a heap by target ------------------------------------------------------- */

static int32_t *membersOf(const fair_t *w, int bundle) {
  return w->members + w->firstMember[bundle];
}

static void addMember(fair_t *w, int bundle, int stream) {
  int32_t *heap = membersOf(w, bundle);
  int i = w->share.weight[bundle];
  for (; i > 0 && w->flows[heap[(i - 1) / 2]].target > w->flows[stream].target; i = (i - 1) / 2) {
    heap[i] = heap[(i - 1) / 2];
  }
  heap[i] = stream;
}

/* Of the bundle's first n: puts one where the top was. */
static void sinkMember(fair_t *w, int bundle, int stream, int n) {
  int32_t *heap = membersOf(w, bundle);
  int i = 0;
  for (int c = 1; c < n; c = 2 * i + 1) {
    if (c + 1 < n && w->flows[heap[c + 1]].target < w->flows[heap[c]].target) c++;
    if (w->flows[heap[c]].target >= w->flows[stream].target) break;
    heap[i] = heap[c];
    i = c;
  }
  heap[i] = stream;
}

/* ---- Progress ---------------------------------------------------------------------------------- */

static double doneBy(const fair_t *w, int bundle) {
  return w->done[bundle] + w->rate[bundle] * (w->now - w->since[bundle]);
}

static void setFinish(fair_t *w, int b) {
  double end = HUGE_VAL;
  if (w->share.weight[b] > 0) {
    double target = w->flows[membersOf(w, b)[0]].target;
    end = w->since[b] + fmax(target - w->done[b], 0) / w->rate[b];
  }
  w->finish[b] = end;
}

static void updateBlock(fair_t *w, int block) {
  const double *f = w->finish + (size_t)block * BLOCK;
  double a = f[0], b = f[1], c = f[2], d = f[3];
  for (int i = 4; i < BLOCK; i += 4) {
    a = f[i] < a ? f[i] : a;
    b = f[i + 1] < b ? f[i + 1] : b;
    c = f[i + 2] < c ? f[i + 2] : c;
    d = f[i + 3] < d ? f[i + 3] : d;
  }
  a = a < b ? a : b;
  c = c < d ? c : d;
  w->blockFinish[block] = a < c ? a : c;
}

static void share(fair_t *w) {
  if (epShareIsCurrent(&w->share)) return;
  epShareSolve(&w->share);
  for (int i = 0; i < w->share.numSolved; i++) {
    int b = w->share.solved[i];
    w->done[b] = doneBy(w, b);
    w->since[b] = w->now;
    w->rate[b] = w->share.rate[b];
    setFinish(w, b);
  }
  for (int i = 0; i < w->numBlocks; i++) updateBlock(w, i);
}

/* ---- Streams ----------------------------------------------------------------------------------- */

static const ep_move_t *oneOf(const fair_t *w, int stream) {
  return &w->streams.replay->moves[w->streams.streams[stream].one];
}
static double latencyOf(const fair_t *w, int stream) {
  return (double)w->f->latency[oneOf(w, stream)->tier];
}

/* When the next transfer of a stream may begin; never, where it is not ready. */
static double nextBegin(const fair_t *w, int stream) {
  const ep_stream_t *s = &w->streams.streams[stream];
  int next = w->flows[stream].next;
  if (next >= s->numReady) return HUGE_VAL;
  double begin = (double)w->f->start[oneOf(w, stream)->src];
  if (s->waits) begin = fmax(begin, w->streams.readyAt[w->streams.moves[s->first + next]]);
  return begin + latencyOf(w, stream);
}

static double rowsOfNext(const fair_t *w, int stream) {
  const ep_move_t *m = epStreamMove(&w->streams, stream, w->flows[stream].next);
  return (double)(epIsOneFlow(m) ? epStreamRows(&w->streams, stream) : m->rows);
}

static void completeNext(fair_t *w, int stream) {
  const ep_stream_t *s = &w->streams.streams[stream];
  flow_t *flow = &w->flows[stream];
  int isAll = epIsOneFlow(epStreamMove(&w->streams, stream, flow->next));
  int end = isAll ? s->numMoves : flow->next + 1;
  ep_fs_t began = (ep_fs_t)llround(flow->began - latencyOf(w, stream));
  while (flow->next < end) {
    int32_t move = w->streams.moves[s->first + flow->next++];
    epStreamsComplete(&w->streams, move, began, (ep_fs_t)llround(w->now), w->now);
  }
}

/* Begins what is ready, or sets a timer; transfers that nothing limits end as they begin. Returns whether a
 * flow has begun. */
static int beginNext(fair_t *w, int stream) {
  flow_t *flow = &w->flows[stream];
  for (;;) {
    double begin = nextBegin(w, stream);
    flow->state = begin == HUGE_VAL ? IDLE : begin > w->now ? TIMED : FLOWING;
    if (flow->state == TIMED) addTimer(w, begin, stream);
    if (flow->state != FLOWING) return 0;
    flow->began = w->now;
    if (flow->bundle >= 0) return 1;
    completeNext(w, stream);
  }
}

static void enter(fair_t *w, int stream) {
  if (!beginNext(w, stream)) return;
  int b = w->flows[stream].bundle;
  w->flows[stream].target = doneBy(w, b) + rowsOfNext(w, stream);
  addMember(w, b, stream);
  epShareSetWeight(&w->share, b, w->share.weight[b] + 1);
}

/* The first flow of a bundle is through: its stream's next takes its place, or it goes. */
static void endFirst(fair_t *w, int bundle) {
  int32_t *heap = membersOf(w, bundle), stream = heap[0];
  int n = w->share.weight[bundle];
  double target = w->flows[stream].target;
  completeNext(w, stream);
  if (beginNext(w, stream)) {
    w->flows[stream].target = target + rowsOfNext(w, stream);
    sinkMember(w, bundle, stream, n);
  } else {
    sinkMember(w, bundle, heap[n - 1], n - 1);
    epShareSetWeight(&w->share, bundle, n - 1);
  }
  setFinish(w, bundle);
}

static void onReady(void *context, int stream) {
  fair_t *w = context;
  if (w->flows[stream].state == IDLE) {
    w->flows[stream].state = TIMED;
    addTimer(w, nextBegin(w, stream), stream);
  }
}

/* ---- Capacities -------------------------------------------------------------------------------- */

static double shiftOf(const ep_fabric_t *f, int kind) {
  int isNear = kind == TREFOIL_RESOURCE_NVLINK_OUT || kind == TREFOIL_RESOURCE_NVLINK_IN;
  return (double)f->latency[isNear ? TREFOIL_TIER_NVLINK : TREFOIL_TIER_NET];
}

/* What flows of others leave of a port at this time. */
static double leftOf(const fair_t *w, int kind, int at) {
  const ep_fabric_t *f = w->f;
  if (f->numParts == 0 || !epIsPort((trefoil_resource_t)kind)) return 1;
  int p = 0;
  while (p + 1 < f->numParts && (double)f->until[p] + shiftOf(f, kind) <= w->now) p++;
  return epLeftOf(f, (trefoil_resource_t)kind, at, p);
}

static void setCapacities(fair_t *w) {
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
    double *capacity = w->share.capacity + w->firstResource[k];
    for (int i = 0; i < w->f->count[k]; i++) {
      if (w->f->row[k][i] > 0) capacity[i] = leftOf(w, k, i) / (double)w->f->row[k][i];
    }
  }
  epShareForget(&w->share);
}

static void addPartTimers(fair_t *w) {
  for (int p = 0; p + 1 < w->f->numParts; p++) {
    double until = (double)w->f->until[p];
    addTimer(w, until + shiftOf(w->f, TREFOIL_RESOURCE_NVLINK_OUT), -1);
    addTimer(w, until + shiftOf(w->f, TREFOIL_RESOURCE_NIC_OUT), -1);
  }
}

/* ---- Bundles ----------------------------------------------------------------------------------- */

typedef struct way {
  int32_t uses[EP_SHARE_USES];
  int32_t stream;
} way_t;

static way_t wayOf(const fair_t *w, int stream) {
  way_t way = {{-1, -1, -1, -1, -1, -1}, stream};
  int n = 0;
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
    int at = epResourceOf(w->f, oneOf(w, stream), (trefoil_resource_t)k);
    if (at >= 0 && w->f->row[k][at] > 0) way.uses[n++] = w->firstResource[k] + at;
  }
  return way;
}

static int compareWays(const void *a, const void *b) {
  const way_t *x = a, *y = b;
  int c = memcmp(x->uses, y->uses, sizeof x->uses);
  return c ? c : (x->stream > y->stream) - (x->stream < y->stream);
}

/* Sorted ways, so that streams of a bundle are together; without a resource they are in none. */
static int countBundles(fair_t *w, const way_t *ways) {
  int n = 0;
  for (int i = 0; i < w->streams.numStreams; i++) {
    int isNew = i == 0 || memcmp(ways[i].uses, ways[i - 1].uses, sizeof ways->uses) != 0;
    if (ways[i].uses[0] >= 0) n += isNew;
    w->flows[ways[i].stream].bundle = ways[i].uses[0] >= 0 ? n - 1 : -1;
  }
  return n;
}

static int allocateBundles(fair_t *w, int numBundles) {
  size_t n = (size_t)numBundles;
  int numResources = 0;
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) numResources += w->f->count[k];
  w->numBlocks = (numBundles + BLOCK - 1) / BLOCK;
  w->firstMember = calloc(n + 2, sizeof *w->firstMember);
  w->members = malloc(((size_t)w->streams.numStreams + 1) * sizeof *w->members);
  w->done = calloc(3 * n + 1, sizeof *w->done);
  w->since = w->done + n;
  w->rate = w->since + n;
  w->finish = malloc(((size_t)w->numBlocks * BLOCK + 1) * sizeof *w->finish);
  w->blockFinish = malloc(((size_t)w->numBlocks + 1) * sizeof *w->blockFinish);
  return w->firstMember && w->members && w->done && w->finish && w->blockFinish &&
         epShareAllocate(&w->share, numResources, numBundles);
}

static void fillBundles(fair_t *w, const way_t *ways) {
  for (int i = 0; i < w->streams.numStreams; i++) {
    int b = w->flows[ways[i].stream].bundle;
    if (b < 0) continue;
    memcpy(w->share.uses + (size_t)b * EP_SHARE_USES, ways[i].uses, sizeof ways->uses);
    w->firstMember[b + 1]++;
  }
  for (int b = 0; b < w->share.numBundles; b++) w->firstMember[b + 1] += w->firstMember[b];
  for (int i = 0; i < w->numBlocks * BLOCK; i++) w->finish[i] = HUGE_VAL;
  for (int i = 0; i < w->numBlocks; i++) w->blockFinish[i] = HUGE_VAL;
  epShareStart(&w->share);
}

static int makeBundles(fair_t *w) {
  size_t n = (size_t)w->streams.numStreams;
  int sum = 0;
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
    w->firstResource[k] = sum;
    sum += w->f->count[k];
  }
  way_t *ways = malloc((n + 1) * sizeof *ways);
  if (!ways) return 0;
  for (size_t i = 0; i < n; i++) ways[i] = wayOf(w, (int)i);
  qsort(ways, n, sizeof *ways, compareWays);
  int isMade = allocateBundles(w, countBundles(w, ways));
  if (isMade) fillBundles(w, ways);
  free(ways);
  return isMade;
}

/* ---- Together ---------------------------------------------------------------------------------- */

static double nextEvent(const fair_t *w) {
  double next = w->numTimers > 0 ? w->timers[0].time : HUGE_VAL;
  for (int i = 0; i < w->numBlocks; i++) next = fmin(next, w->blockFinish[i]);
  return next;
}

static void endFlows(fair_t *w) {
  double until = w->now + TOGETHER_FS;
  for (int i = 0; i < w->numBlocks; i++) {
    if (w->blockFinish[i] > until) continue;
    for (int b = i * BLOCK; b < (i + 1) * BLOCK; b++) {
      while (w->finish[b] <= until) endFirst(w, b);
    }
    updateBlock(w, i);
  }
}

static void beginFlows(fair_t *w) {
  while (w->numTimers > 0 && w->timers[0].time <= w->now) {
    int stream = takeTimer(w);
    if (stream >= 0) {
      enter(w, stream);
    } else {
      setCapacities(w);
    }
  }
}

static int isLate(const fair_t *w) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  double seconds =
      (double)(now.tv_sec - w->begin.tv_sec) + 1e-9 * (double)(now.tv_nsec - w->begin.tv_nsec);
  return seconds > w->timeoutS;
}

static trefoil_result_t run(fair_t *w) {
  for (int64_t n = 1;; n++) {
    double next = nextEvent(w);
    if (next == HUGE_VAL) return TREFOIL_OK;
    EP_CHECK(n % CHECK_EVENTS || !isLate(w), TREFOIL_SYSTEM_ERROR,
             "%d fair flows did not finish within %.6g s: allow more, or use the engine of queues",
             w->streams.numStreams, w->timeoutS);
    w->now = next;
    endFlows(w);
    beginFlows(w);
    share(w);
  }
}

static int prepare(fair_t *w, const ep_replay_t *replay, ep_timing_t *timing) {
  if (!epStreamsBuild(&w->streams, replay, w->f, timing)) return 0;
  size_t n = (size_t)w->streams.numStreams;
  w->flows = calloc(n + 1, sizeof *w->flows);
  w->timers = malloc((n + 2 * (size_t)w->f->numParts + 1) * sizeof *w->timers);
  if (!w->flows || !w->timers || !makeBundles(w)) return 0;
  w->streams.onReady = onReady;
  w->streams.context = w;
  setCapacities(w);
  addPartTimers(w);
  for (size_t i = 0; i < n; i++) {
    if (w->streams.streams[i].waits) continue;
    w->flows[i].state = TIMED;
    addTimer(w, nextBegin(w, (int)i), (int)i);
  }
  return 1;
}

static void freeAll(fair_t *w) {
  void *all[] = {w->flows, w->timers, w->firstMember, w->members,
                 w->done,  w->finish, w->blockFinish};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
  epShareFree(&w->share);
  epStreamsFree(&w->streams);
}

trefoil_result_t epFairRun(const ep_replay_t *replay, const ep_fabric_t *fabric, double timeoutS,
                           ep_timing_t *timing, int64_t *numFlows, int64_t *numUnlike) {
  fair_t w = {.f = fabric, .timeoutS = timeoutS};
  clock_gettime(CLOCK_MONOTONIC, &w.begin);
  trefoil_result_t result = TREFOIL_SYSTEM_ERROR;
  if (prepare(&w, replay, timing)) {
    *numFlows = w.streams.numStreams;
    *numUnlike = w.share.numBundles;
    result = run(&w);
  } else {
    epFail(result, "out of memory for %lld transfers", (long long)replay->numMoves);
  }
  freeAll(&w);
  return result;
}
