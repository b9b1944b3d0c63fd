#include "net_engine.h"

#include <stdlib.h>

typedef enum { FREE = 0, QUEUED, MOVING, RAISED, DONE } state_t;

struct ep_net_request {
  state_t state;
  ep_net_op_t op;
  int64_t postedAt, moveAt, dueAt;
  uint64_t ticket;
};

/* Requests first .. next - 1, at their numbers modulo EP_NET_DEPTH; those in between may be free. */
typedef struct {
  uint64_t first, next;
  ep_net_request_t slots[EP_NET_DEPTH];
} queue_t;

struct ep_net_engine {
  ep_net_settings_t settings;
  ep_net_link_t link;
  int rank, numRanks, numContexts;
  queue_t **queues; /* [context][peer], made at the first request */
  int64_t railFree[EP_NET_MAX_RAILS], inFlight;
  uint64_t posted; /* requests of all contexts: the next one's rail */
  int64_t *sent;   /* to each peer */
  bool *gone;
};

/* ---- Start and end ---- */

void epNetEngineDestroy(ep_net_engine_t *e) {
  if (!e) return;
  epNetEngineForget(e, 0, e->numContexts);
  free(e->queues);
  free(e->sent);
  free(e->gone);
  free(e);
}

int epNetEngineCreate(const ep_net_settings_t *settings, ep_net_link_t link, int rank, int numRanks,
                      ep_net_engine_t **out, char *why) {
  if (settings->deadRank >= numRanks)
    return epNetFail(why, "TREFOIL_NET_DEAD_RANK names rank %lld, which is not in [0, %d)",
                     (long long)settings->deadRank, numRanks);
  ep_net_engine_t *e = calloc(1, sizeof *e);
  if (!e) return epNetFail(why, "no memory for the network's engine");
  e->settings = *settings;
  e->link = link;
  e->rank = rank;
  e->numRanks = numRanks;
  e->sent = calloc((size_t)numRanks, sizeof *e->sent);
  e->gone = calloc((size_t)numRanks, sizeof *e->gone);
  if (e->sent && e->gone) {
    *out = e;
    return 0;
  }
  epNetEngineDestroy(e);
  return epNetFail(why, "no memory for the network's engine");
}

static queue_t **queueAt(ep_net_engine_t *e, int context, int peer) {
  return &e->queues[(size_t)context * (size_t)e->numRanks + (size_t)peer];
}

int epNetEngineContexts(ep_net_engine_t *e, int count, int *first, char *why) {
  size_t ranks = (size_t)e->numRanks, old = (size_t)e->numContexts * ranks;
  queue_t **queues = realloc(e->queues, (old + (size_t)count * ranks) * sizeof(queue_t *));
  if (!queues) return epNetFail(why, "no memory for %d contexts of the network", count);
  for (size_t i = 0; i < (size_t)count * ranks; i++) queues[old + i] = NULL;
  e->queues = queues;
  *first = e->numContexts;
  e->numContexts += count;
  return 0;
}

static bool flying(const ep_net_request_t *r) {
  return r->state == MOVING || r->state == RAISED;
}

static void forgetQueue(ep_net_engine_t *e, queue_t **queue) {
  for (int i = 0; *queue && i < EP_NET_DEPTH; i++) e->inFlight -= flying(&(*queue)->slots[i]);
  free(*queue);
  *queue = NULL;
}

void epNetEngineForget(ep_net_engine_t *e, int first, int count) {
  for (int c = first; c < first + count; c++)
    for (int p = 0; p < e->numRanks; p++) forgetQueue(e, queueAt(e, c, p));
}

void epNetEngineGone(ep_net_engine_t *e, int peer) {
  e->gone[peer] = true;
}

/* ---- The times of a message ---- */

typedef struct {
  uint64_t state;
} random_t;

static uint64_t draw(random_t *r) { /* splitmix64 */
  uint64_t z = (r->state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

static bool chance(random_t *r, int64_t perMillion) {
  return (int64_t)(draw(r) % 1000000) < perMillion;
}

static int64_t below(random_t *r, int64_t limit) {
  return limit > 0 ? (int64_t)(draw(r) % (uint64_t)limit) : 0;
}

static random_t randomOf(const ep_net_engine_t *e, int context, int peer, uint64_t number) {
  random_t r = {(uint64_t)e->settings.seed};
  const uint64_t parts[] = {(uint64_t)e->rank, (uint64_t)context, (uint64_t)peer, number};
  for (int i = 0; i < 4; i++) r.state = draw(&r) ^ parts[i];
  return r;
}

/* Bits over Mb/s are us: times 1000 for ns. */
static int64_t wireNs(const ep_net_settings_t *s, int64_t rail, uint64_t bytes) {
  if (!s->mbps) return 0;
  double ns = (double)bytes * 8e3 * (double)s->rails / (double)s->mbps;
  return (int64_t)(rail == s->slowRail ? ns * (double)s->slowFactor : ns);
}

/* Sends over a rail as soon as it is free; when the last byte has left. */
static int64_t overRail(ep_net_engine_t *e, int64_t rail, uint64_t bytes, int64_t now) {
  int64_t *railFree = &e->railFree[rail];
  *railFree = (*railFree > now ? *railFree : now) + wireNs(&e->settings, rail, bytes);
  return *railFree;
}

static void setTimes(ep_net_engine_t *e, ep_net_request_t *r, random_t random, int64_t now) {
  const ep_net_settings_t *s = &e->settings;
  int64_t rail = (int64_t)(e->posted++ % (uint64_t)s->rails);
  r->dueAt = overRail(e, rail, r->op.bytes, now);
  if (rail == s->failingRail && chance(&random, s->failures)) /* lost: again over the next rail */
    r->dueAt = overRail(e, (rail + 1) % s->rails, r->op.bytes, r->dueAt + s->retryNs);
  r->dueAt += s->latencyNs + below(&random, s->jitterNs);
  if (chance(&random, s->reorder)) r->dueAt += below(&random, s->reorderNs);
  r->postedAt = now;
  r->moveAt = now + below(&random, r->dueAt - now); /* sources are read early or late */
}

/* ---- Requests ---- */

static queue_t *queueFor(ep_net_engine_t *e, int context, int peer) {
  queue_t **queue = queueAt(e, context, peer);
  if (!*queue) *queue = calloc(1, sizeof **queue);
  return *queue;
}

static ep_net_request_t *slot(queue_t *q, uint64_t number) {
  return &q->slots[number % EP_NET_DEPTH];
}

int epNetEnginePost(ep_net_engine_t *e, int context, const ep_net_op_t *op, int64_t now,
                    ep_net_request_t **out, char *why) {
  queue_t *q = queueFor(e, context, op->peer);
  if (!q) return epNetFail(why, "no memory for requests to rank %d", op->peer);
  while (q->first != q->next && slot(q, q->first)->state == FREE) q->first++;
  if (q->next - q->first == EP_NET_DEPTH)
    return epNetFail(why, "context %d has %d requests to rank %d, at most %d are possible", context,
                     EP_NET_DEPTH, op->peer, EP_NET_DEPTH);
  ep_net_request_t *r = slot(q, q->next);
  r->op = *op;
  r->state = QUEUED;
  setTimes(e, r, randomOf(e, context, op->peer, q->next), now);
  q->next++;
  *out = r;
  return 0;
}

bool epNetEngineTest(ep_net_request_t *r) {
  if (r->state != DONE) return false;
  r->state = FREE;
  return true;
}

/* ---- Progress ---- */

/* What holds of all earlier requests of the queue. */
typedef struct {
  bool begun, raised, done;
} earlier_t;

static bool dead(const ep_net_engine_t *e, int peer) {
  return e->gone[peer] || (peer == e->settings.deadRank && e->sent[peer] >= e->settings.deadAfter);
}

/* Under a limit requests begin in order: else strong signals in flight could keep out what they wait for. */
static bool mayBegin(const ep_net_engine_t *e, earlier_t earlier) {
  return !e->settings.inFlight || (earlier.begun && e->inFlight < e->settings.inFlight);
}

static int begin(ep_net_engine_t *e, ep_net_request_t *r, int64_t now, char *why) {
  if (now < r->moveAt || dead(e, r->op.peer)) return 0;
  int begun = r->op.bytes ? e->link.move(e->link.self, &r->op, &r->ticket, why) : 1;
  if (begun <= 0) return begun;
  e->inFlight++;
  e->sent[r->op.peer]++;
  r->state = MOVING;
  return 0;
}

static bool inPlace(ep_net_engine_t *e, const ep_net_request_t *r, ep_net_reach_t least) {
  return !r->op.bytes || e->link.reach(e->link.self, &r->op, r->ticket) >= least;
}

static bool mayRaise(ep_net_engine_t *e, const ep_net_request_t *r, earlier_t earlier,
                     int64_t now) {
  if (now < r->dueAt || !inPlace(e, r, EP_NET_ORDERED) || e->gone[r->op.peer]) return false;
  if (r->op.kind == EP_NET_FLUSH) return earlier.done;
  return !r->op.strong || earlier.raised;
}

static int raiseSignal(ep_net_engine_t *e, ep_net_request_t *r, char *why) {
  int raised = r->op.hasSignal ? e->link.raise(e->link.self, &r->op, why) : 1;
  if (raised > 0) r->state = RAISED;
  return raised < 0 ? -1 : 0;
}

static void finish(ep_net_engine_t *e, ep_net_request_t *r) {
  e->inFlight -= flying(r);
  r->state = DONE;
}

static int overdue(const ep_net_engine_t *e, const ep_net_request_t *r, int64_t now, char *why) {
  static const char *const KINDS[] = {"put", "get", "flush"};
  if (now - r->dueAt < e->settings.limitNs) return 0;
  return epNetFail(why, "rank %d: rank %d did not take a %s of %llu bytes within %lld ms", e->rank,
                   r->op.peer, KINDS[r->op.kind], (unsigned long long)r->op.bytes,
                   (long long)(e->settings.limitNs / 1000000));
}

/* A request to a peer that is gone. */
static int abandon(ep_net_engine_t *e, ep_net_request_t *r, char *why) {
  if (e->settings.onDead == EP_NET_DEAD_ERROR)
    return epNetFail(why, "rank %d: rank %d is gone, its connection has ended", e->rank,
                     r->op.peer);
  finish(e, r);
  return 0;
}

/* It cannot arrive any more. What waits for a rank that only seems dead is lost if it may be dropped. */
static bool lost(const ep_net_engine_t *e, const ep_net_request_t *r) {
  if (e->gone[r->op.peer]) return true;
  return r->state == QUEUED && dead(e, r->op.peer) && e->settings.onDead == EP_NET_DEAD_DROP;
}

static int step(ep_net_engine_t *e, ep_net_request_t *r, earlier_t earlier, int64_t now,
                char *why) {
  if (r->state == FREE || r->state == DONE) return 0;
  if (r->state == QUEUED && mayBegin(e, earlier) && begin(e, r, now, why)) return -1;
  if (r->state == MOVING && mayRaise(e, r, earlier, now) && raiseSignal(e, r, why)) return -1;
  if (r->state == RAISED && inPlace(e, r, EP_NET_PLACED)) finish(e, r);
  if (r->state == DONE) return 0;
  return lost(e, r) ? abandon(e, r, why) : overdue(e, r, now, why);
}

static int advance(ep_net_engine_t *e, queue_t *q, int64_t now, char *why) {
  earlier_t earlier = {true, true, true};
  for (uint64_t i = q->first; i != q->next; i++) {
    ep_net_request_t *r = slot(q, i);
    if (step(e, r, earlier, now, why)) return -1;
    earlier.begun = earlier.begun && r->state != QUEUED;
    earlier.raised = earlier.raised && (r->state == FREE || r->state >= RAISED);
    earlier.done = earlier.done && (r->state == FREE || r->state == DONE);
  }
  return 0;
}

int epNetEngineProgress(ep_net_engine_t *e, int64_t now, char *why) {
  for (int i = 0; i < e->numContexts * e->numRanks; i++)
    if (e->queues[i] && advance(e, e->queues[i], now, why)) return -1;
  return 0;
}
