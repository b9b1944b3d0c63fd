/* A replay as max-min fair flows, in this process: what SimGrid does with the same streams
 * (simgrid_calls.c), for more of them.
 *
 * Streams that cross the same resources are a bundle, of which all flows have one rate. All bundles that
 * have their rate from the same full resource have that one, too: a resource counts the rows that such a
 * flow would have done, and the flow ends when the count comes to its target. So an event changes a number
 * a resource, and of bundles those alone that get their rate from another resource. Where a stream sends
 * its next chunk at once, no rate changes. Times are femtoseconds in doubles. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "plan/error.h"
#include "sim/fair_share.h"
#include "sim/streams.h"

enum { CHECK_EVENTS = 64 };
#define TOGETHER_FS 0.5 /* below what answers show: ends nearer than this are one event */

typedef enum state { IDLE, TIMED, FLOWING } state_t;

/* Of a stream. */
typedef struct flow {
  int32_t bundle; /* -1: nothing limits it */
  int32_t next;   /* of its moves */
  state_t state;
  double began;
  double target; /* rows of its bundle when the flow ends */
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
  double *due;                    /* [bundles] count of its resource at which its first flow ends */
  int32_t *heaps, *heapAt;        /* of resources: bundles by due, and where they are */
  int32_t *firstDue, *numDue;
  double *count, *since, *rate; /* [resources] count at a time, and its rate from then on */
  double *finish;               /* [resources] when the first of its flows ends */
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

/* ---- Bundles of a resource: a heap by due ------------------------------------------------------ */

static void putDue(fair_t *w, int32_t *heap, int at, int b) {
  heap[at] = b;
  w->heapAt[b] = at;
}

static void raiseDue(fair_t *w, int32_t *heap, int at, int b) {
  for (; at > 0 && w->due[heap[(at - 1) / 2]] > w->due[b]; at = (at - 1) / 2) {
    putDue(w, heap, at, heap[(at - 1) / 2]);
  }
  putDue(w, heap, at, b);
}

static void sinkDue(fair_t *w, int32_t *heap, int n, int at, int b) {
  for (int c = 2 * at + 1; c < n; c = 2 * at + 1) {
    if (c + 1 < n && w->due[heap[c + 1]] < w->due[heap[c]]) c++;
    if (w->due[heap[c]] >= w->due[b]) break;
    putDue(w, heap, at, heap[c]);
    at = c;
  }
  raiseDue(w, heap, at, b);
}

static void addDue(fair_t *w, int p, int b) {
  raiseDue(w, w->heaps + w->firstDue[p], w->numDue[p]++, b);
}

static void removeDue(fair_t *w, int p, int b) {
  int32_t *heap = w->heaps + w->firstDue[p];
  int last = heap[--w->numDue[p]];
  if (last != b) sinkDue(w, heap, w->numDue[p], w->heapAt[b], last);
}

/* ---- Progress ---------------------------------------------------------------------------------- */

static double countOf(const fair_t *w, int p) {
  return w->count[p] + w->rate[p] * (w->now - w->since[p]);
}

static double firstTarget(const fair_t *w, int bundle) {
  return w->flows[membersOf(w, bundle)[0]].target;
}

/* Rows that each flow of a bundle has done since the first came. */
static double doneBy(const fair_t *w, int bundle) {
  int p = w->share.fixedBy[bundle];
  if (p < 0) return 0;
  return firstTarget(w, bundle) - (w->due[bundle] - countOf(w, p));
}

static void setFinish(fair_t *w, int p) {
  double end = HUGE_VAL;
  if (w->numDue[p] > 0) {
    double rest = w->due[w->heaps[w->firstDue[p]]] - w->count[p];
    end = w->since[p] + fmax(rest, 0) / w->rate[p];
  }
  w->finish[p] = end;
}

/* A bundle gets its rate from another resource. */
static void changeDue(fair_t *w, int b, int before) {
  int p = w->share.fixedBy[b];
  double rest = firstTarget(w, b);
  if (before >= 0) {
    rest = w->due[b] - countOf(w, before);
    removeDue(w, before, b);
    setFinish(w, before);
  }
  w->due[b] = countOf(w, p) + rest;
  addDue(w, p, b);
}

static void share(fair_t *w) {
  const ep_share_t *s = &w->share;
  if (epShareIsCurrent(s)) return;
  epShareSolve(&w->share);
  for (int i = 0; i < s->numChanged; i++) changeDue(w, s->changed[i], s->fixedBefore[i]);
  for (int i = s->firstNew; i < s->numOrder; i++) {
    int p = s->order[i];
    w->count[p] = countOf(w, p);
    w->since[p] = w->now;
    w->rate[p] = s->level[p];
    setFinish(w, p);
  }
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

/* The bundle's first flow may be another one now. */
static void setDue(fair_t *w, int bundle, double done) {
  int p = w->share.fixedBy[bundle];
  if (p < 0) return;
  w->due[bundle] = countOf(w, p) + firstTarget(w, bundle) - done;
  sinkDue(w, w->heaps + w->firstDue[p], w->numDue[p], w->heapAt[bundle], bundle);
  setFinish(w, p);
}

static void enter(fair_t *w, int stream) {
  if (!beginNext(w, stream)) return;
  int b = w->flows[stream].bundle;
  double done = w->share.weight[b] > 0 ? doneBy(w, b) : 0;
  w->flows[stream].target = done + rowsOfNext(w, stream);
  addMember(w, b, stream);
  setDue(w, b, done);
  epShareSetWeight(&w->share, b, w->share.weight[b] + 1);
}

static void removeFirst(fair_t *w, int bundle, double done) {
  int32_t *heap = membersOf(w, bundle);
  int n = w->share.weight[bundle], p = w->share.fixedBy[bundle];
  sinkMember(w, bundle, heap[n - 1], n - 1);
  if (n > 1) {
    setDue(w, bundle, done);
  } else {
    removeDue(w, p, bundle);
    setFinish(w, p);
  }
  epShareSetWeight(&w->share, bundle, n - 1);
}

/* The first flow of a bundle is through: its stream's next takes its place, or it goes. */
static void endFirst(fair_t *w, int bundle) {
  int stream = membersOf(w, bundle)[0];
  double done = w->flows[stream].target;
  completeNext(w, stream);
  if (beginNext(w, stream)) {
    w->flows[stream].target = done + rowsOfNext(w, stream);
    sinkMember(w, bundle, stream, w->share.weight[bundle]);
    setDue(w, bundle, done);
  } else {
    removeFirst(w, bundle, done);
  }
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
  size_t n = (size_t)numBundles, P = 0;
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) P += (size_t)w->f->count[k];
  w->firstMember = calloc(n + 2, sizeof *w->firstMember);
  w->members = malloc(((size_t)w->streams.numStreams + 1) * sizeof *w->members);
  w->due = malloc((n + 1) * sizeof *w->due);
  w->heaps = malloc((n * EP_SHARE_USES + 1) * sizeof *w->heaps);
  w->heapAt = malloc((n + 1) * sizeof *w->heapAt);
  w->numDue = calloc(P + 1, sizeof *w->numDue);
  w->count = calloc(4 * P + 1, sizeof *w->count);
  w->since = w->count + P;
  w->rate = w->since + P;
  w->finish = w->rate + P;
  return w->firstMember && w->members && w->due && w->heaps && w->heapAt && w->numDue && w->count &&
         epShareAllocate(&w->share, (int)P, numBundles);
}

static int crossesPort(const fair_t *w, const ep_move_t *m) {
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
    int at = epResourceOf(w->f, m, (trefoil_resource_t)k);
    if (epIsPort((trefoil_resource_t)k) && at >= 0 && w->f->row[k][at] > 0) return 1;
  }
  return 0;
}

static double rowsPerFs(const fair_t *w, int kind, int at) {
  return w->f->row[kind][at] > 0 ? 1 / (double)w->f->row[kind][at] : HUGE_VAL;
}

/* SMs that could send, or receive, all that a rank's two ports can. */
static void setCovered(fair_t *w) {
  char *isCovered = w->share.isCovered;
  for (int r = 0; r < w->f->numRanks; r++) {
    int port = w->f->portOf[r];
    double out =
        rowsPerFs(w, TREFOIL_RESOURCE_NVLINK_OUT, r) + rowsPerFs(w, TREFOIL_RESOURCE_NIC_OUT, port);
    double in =
        rowsPerFs(w, TREFOIL_RESOURCE_NVLINK_IN, r) + rowsPerFs(w, TREFOIL_RESOURCE_NIC_IN, port);
    int send = w->firstResource[TREFOIL_RESOURCE_SEND] + r;
    int receive = w->firstResource[TREFOIL_RESOURCE_RECEIVE] + r;
    isCovered[send] = out <= rowsPerFs(w, TREFOIL_RESOURCE_SEND, r);
    isCovered[receive] = in <= rowsPerFs(w, TREFOIL_RESOURCE_RECEIVE, r);
  }
}

static int fillBundles(fair_t *w, const way_t *ways) {
  for (int i = 0; i < w->streams.numStreams; i++) {
    int b = w->flows[ways[i].stream].bundle;
    if (b < 0) continue;
    memcpy(w->share.uses + (size_t)b * EP_SHARE_USES, ways[i].uses, sizeof ways->uses);
    w->share.isBare[b] = (char)!crossesPort(w, oneOf(w, ways[i].stream));
    w->firstMember[b + 1]++;
  }
  for (int b = 0; b < w->share.numBundles; b++) w->firstMember[b + 1] += w->firstMember[b];
  for (int p = 0; p < w->share.numResources; p++) w->finish[p] = HUGE_VAL;
  setCovered(w);
  int isStarted = epShareStart(&w->share);
  w->firstDue = w->share.first;
  return isStarted;
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
  int isMade = allocateBundles(w, countBundles(w, ways)) && fillBundles(w, ways);
  free(ways);
  return isMade;
}

/* ---- Together ---------------------------------------------------------------------------------- */

static double nextEvent(const fair_t *w) {
  double next = w->numTimers > 0 ? w->timers[0].time : HUGE_VAL;
  for (int p = 0; p < w->share.numResources; p++) {
    next = w->finish[p] < next ? w->finish[p] : next;
  }
  return next;
}

static void endFlows(fair_t *w) {
  double until = w->now + TOGETHER_FS;
  for (int p = 0; p < w->share.numResources; p++) {
    while (w->finish[p] <= until) endFirst(w, w->heaps[w->firstDue[p]]);
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
  void *all[] = {w->flows, w->timers, w->firstMember, w->members, w->due,
                 w->heaps, w->heapAt, w->numDue,      w->count};
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
