/* Order and faults of the engine, over a link of plain copies in one process, with a clock of its own.
 *
 * A case is a seed: it chooses settings, operations and the order of events. Data move in pieces, in
 * any order, and are read as late as the engine allows. When a signal is raised, the data that it
 * stands for must be in place; at the end each signal's total and each byte must be right. */
#include "test.h"

#include "net/net_engine.h"

enum { RANKS = 3, CONTEXTS = 2, OPS = 60, BYTES = 48, SIGNALS = 4 };

typedef struct {
  ep_net_op_t op;
  int rank, context;
  ep_net_request_t *request;
  uint64_t bytesMoved;
  bool moving, raised, done;
  unsigned char source[BYTES], target[BYTES];
} item_t;

typedef struct {
  unsigned state;
  bool stream; /* a link that keeps the order of a peer's messages: ORDERED at once */
  int64_t now;
  item_t items[OPS];
  int numItems, queue[2 * OPS], numQueued; /* of a stream: items, and ~items for their signals */
  uint64_t signals[RANKS][SIGNALS], expected[RANKS][SIGNALS];
  int early, doubled, mostInFlight; /* of one rank */
} world_t;

static unsigned roll(world_t *w, unsigned limit) {
  w->state = w->state * 1664525u + 1013904223u;
  return (w->state >> 8) % limit;
}

static item_t *itemOf(world_t *w, const ep_net_op_t *op) {
  return &w->items[op->localOffset];
}

static bool placed(const item_t *item) {
  return item->bytesMoved == item->op.bytes;
}

static void movePart(item_t *item, uint64_t bytes) {
  for (; bytes && !placed(item); bytes--, item->bytesMoved++)
    item->target[item->bytesMoved] = item->source[item->bytesMoved];
}

static bool sameQueue(const item_t *a, const item_t *b) {
  return a->rank == b->rank && a->context == b->context && a->op.peer == b->op.peer;
}

/* A signal arrives: is what it stands for there? */
static void arrive(world_t *w, item_t *item) {
  w->early += !placed(item);
  for (item_t *i = w->items; item->op.strong && i < item; i++)
    w->early += sameQueue(i, item) && (!placed(i) || (i->op.hasSignal && !i->raised));
  w->doubled += item->raised;
  item->raised = true;
  w->signals[item->op.peer][item->op.signalOffset] += item->op.add;
}

static int inFlight(const world_t *w, int rank) {
  int flying = 0;
  for (const item_t *i = w->items; i < w->items + OPS; i++)
    flying += i->rank == rank && i->moving && !placed(i);
  return flying;
}

static int move(void *self, const ep_net_op_t *op, uint64_t *ticket, char *why) {
  (void)why;
  world_t *w = self;
  if (roll(w, 8) == 0) return 0; /* no room now */
  *ticket = op->localOffset;
  itemOf(w, op)->moving = true;
  int flying = inFlight(w, itemOf(w, op)->rank);
  if (flying > w->mostInFlight) w->mostInFlight = flying;
  if (w->stream) w->queue[w->numQueued++] = (int)op->localOffset;
  return 1;
}

static ep_net_reach_t reach(void *self, const ep_net_op_t *op, uint64_t ticket) {
  world_t *w = self;
  if (ticket != op->localOffset) return EP_NET_MOVING;
  return placed(itemOf(w, op)) ? EP_NET_PLACED : w->stream ? EP_NET_ORDERED : EP_NET_MOVING;
}

static int raiseIt(void *self, const ep_net_op_t *op, char *why) {
  (void)why;
  world_t *w = self;
  if (roll(w, 8) == 0) return 0;
  if (w->stream)
    w->queue[w->numQueued++] = ~(int)op->localOffset;
  else
    arrive(w, itemOf(w, op));
  return 1;
}

/* One event: a piece of data, or the next message of a stream. */
static void carry(world_t *w) {
  if (w->stream && w->numQueued) {
    int next = w->queue[0];
    if (next < 0)
      arrive(w, &w->items[~next]);
    else
      movePart(&w->items[next], BYTES);
    memmove(w->queue, w->queue + 1, (size_t)--w->numQueued * sizeof *w->queue);
  } else if (!w->stream) {
    item_t *item = &w->items[roll(w, OPS)];
    if (item->moving) movePart(item, 1 + roll(w, BYTES));
  }
}

static ep_net_settings_t randomSettings(world_t *w) {
  ep_net_settings_t s = {
      .limitNs = 1000000000, .rails = 1 + roll(w, 3), .slowRail = -1, .failingRail = -1};
  s.deadRank = -1;
  s.seed = (int64_t)w->state;
  s.mbps = roll(w, 2) * 8000;
  s.latencyNs = roll(w, 3) * 500;
  s.jitterNs = roll(w, 3) * 700;
  s.reorder = roll(w, 3) * 300000;
  s.reorderNs = 5000;
  s.inFlight = roll(w, 2) * (1 + roll(w, 4));
  s.slowRail = roll(w, 2) ? -1 : (int64_t)roll(w, (unsigned)s.rails);
  s.slowFactor = 5;
  s.failingRail = roll(w, 2) ? -1 : (int64_t)roll(w, (unsigned)s.rails);
  s.failures = 500000;
  s.retryNs = 3000;
  return s;
}

static void randomItem(world_t *w, int index) {
  item_t *item = &w->items[index];
  unsigned kind = roll(w, 10);
  item->rank = (int)roll(w, RANKS);
  item->context = (int)roll(w, CONTEXTS);
  item->op = (ep_net_op_t){
      .kind = EP_NET_PUT, .peer = (int)roll(w, RANKS), .localOffset = (uint64_t)index};
  if (kind == 0)
    item->op.kind = EP_NET_FLUSH;
  else if (kind == 1)
    item->op.kind = EP_NET_GET;
  if (kind > 0) item->op.bytes = kind == 2 ? 0 : 1 + roll(w, BYTES);
  item->op.hasSignal = kind > 1 && (kind == 2 || roll(w, 3));
  item->op.strong = item->op.hasSignal && roll(w, 2);
  item->op.signalOffset = roll(w, SIGNALS);
  item->op.add = 1 + roll(w, 5);
  for (int i = 0; i < BYTES; i++) item->source[i] = (unsigned char)(index * 7 + i + 1);
  if (item->op.hasSignal) w->expected[item->op.peer][item->op.signalOffset] += item->op.add;
}

/* A flush that is done says that all earlier requests of its queue are. */
static int flushedEarly(world_t *w, const item_t *flush) {
  int early = 0;
  for (const item_t *i = w->items; flush->op.kind == EP_NET_FLUSH && i < flush; i++)
    early += sameQueue(i, flush) && (!placed(i) || (i->op.hasSignal && !i->raised && !w->stream));
  return early;
}

static void finishItem(world_t *w, item_t *item) {
  item->done = true;
  w->early += flushedEarly(w, item);
  memset(item->source, 0, BYTES); /* the source may be used again: no piece may be read any more */
}

static int postAll(world_t *w, ep_net_engine_t **engines, int *posted, char *why) {
  for (unsigned n = roll(w, 4); n && *posted < w->numItems; n--, ++*posted) {
    item_t *item = &w->items[*posted];
    if (epNetEnginePost(engines[item->rank], item->context, &item->op, w->now, &item->request, why))
      return -1;
  }
  return 0;
}

static int run(world_t *w, ep_net_engine_t **engines, char *why) {
  int posted = 0, left = w->numItems;
  for (int turn = 0; left && turn < 20000; turn++) {
    if (postAll(w, engines, &posted, why)) return -1;
    w->now += roll(w, 400);
    for (unsigned n = roll(w, 6); n; n--) carry(w);
    if (epNetEngineProgress(engines[roll(w, RANKS)], w->now, why)) return -1;
    for (item_t *i = w->items; i < w->items + posted; i++)
      if (!i->done && epNetEngineTest(i->request)) finishItem(w, i), left--;
  }
  while (w->numQueued) carry(w); /* signals on their way */
  return left;
}

static int wrongBytes(const world_t *w) {
  int wrong = 0;
  for (int n = 0; n < w->numItems; n++)
    for (uint64_t i = 0; i < w->items[n].op.bytes; i++)
      wrong += w->items[n].target[i] != (unsigned char)(n * 7 + (int)i + 1);
  return wrong;
}

static int makeEngines(world_t *w, const ep_net_settings_t *s, ep_net_engine_t **engines,
                       char *why) {
  for (int r = 0; r < RANKS; r++) {
    int first;
    ep_net_link_t link = {w, move, reach, raiseIt};
    if (epNetEngineCreate(s, link, r, RANKS, &engines[r], why)) return -1;
    if (epNetEngineContexts(engines[r], CONTEXTS, &first, why)) return -1;
  }
  return 0;
}

static void oneSeed(unsigned seed) {
  static world_t w;
  char why[EP_NET_WHY] = "";
  ep_net_engine_t *engines[RANKS] = {0};
  w = (world_t){.state = seed * 2654435761u + 1, .numItems = OPS};
  w.stream = roll(&w, 2);
  ep_net_settings_t s = randomSettings(&w);
  for (int i = 0; i < OPS; i++) randomItem(&w, i);
  REQUIRE(!makeEngines(&w, &s, engines, why), "seed %u: %s", seed, why);
  int left = run(&w, engines, why);
  CHECK(!left, "seed %u: %d requests are not done: %s", seed, left, why);
  CHECK(!w.early, "seed %u: %d signals or flushes before their data", seed, w.early);
  CHECK(!w.doubled, "seed %u: %d signals twice", seed, w.doubled);
  CHECK(!memcmp(w.signals, w.expected, sizeof w.signals), "seed %u: a signal's total is wrong",
        seed);
  CHECK(!wrongBytes(&w), "seed %u: %d bytes are wrong", seed, wrongBytes(&w));
  CHECK(!s.inFlight || w.mostInFlight <= s.inFlight, "seed %u: %d in flight, %lld allowed", seed,
        w.mostInFlight, (long long)s.inFlight);
  for (int r = 0; r < RANKS; r++) epNetEngineDestroy(engines[r]);
}

TEST(order_and_totals_hold_for_thousands_of_seeds) {
  for (unsigned seed = 0; seed < 2000 && testFailures < 5; seed++) oneSeed(seed);
}

/* ---- Times: one rank sends to itself, over a link that is done at once ---- */

typedef struct {
  int64_t raisedAt[16], now;
  int numRaised, order[16];
} log_t;

static int moveAtOnce(void *self, const ep_net_op_t *op, uint64_t *ticket, char *why) {
  (void)self, (void)op, (void)ticket, (void)why;
  return 1;
}

static ep_net_reach_t always(void *self, const ep_net_op_t *op, uint64_t ticket) {
  (void)self, (void)op, (void)ticket;
  return EP_NET_PLACED;
}

static int recordOp(void *self, const ep_net_op_t *op, char *why) {
  (void)why;
  log_t *log = self;
  log->raisedAt[op->signalOffset] = log->now;
  log->order[log->numRaised++] = (int)op->signalOffset;
  return 1;
}

static ep_net_settings_t plain(void) {
  return (ep_net_settings_t){
      .limitNs = 1000000, .rails = 1, .slowRail = -1, .failingRail = -1, .deadRank = -1, .seed = 1};
}

/* Posts `count` puts of 1000 bytes at 0 and runs the clock up to `until`, 10 ns a step. */
static int timed(const ep_net_settings_t *s, int count, int64_t until, bool strong, log_t *log,
                 char *why) {
  ep_net_engine_t *e = NULL;
  ep_net_request_t *request;
  int first, failed = 0;
  *log = (log_t){.now = 0};
  if (epNetEngineCreate(s, (ep_net_link_t){log, moveAtOnce, always, recordOp}, 0, 1, &e, why))
    return -1;
  failed = epNetEngineContexts(e, 1, &first, why);
  for (int i = 0; i < count && !failed; i++) {
    ep_net_op_t op = {
        .bytes = 1000, .hasSignal = true, .strong = strong, .signalOffset = (uint64_t)i};
    failed = epNetEnginePost(e, first, &op, 0, &request, why);
  }
  for (; !failed && log->now <= until; log->now += 10)
    failed = epNetEngineProgress(e, log->now, why);
  epNetEngineDestroy(e);
  return failed;
}

TEST(bandwidth_and_latency_add_up) {
  char why[EP_NET_WHY] = "";
  log_t log;
  ep_net_settings_t s = plain();
  s.mbps = 8000; /* 1 byte a ns */
  s.latencyNs = 5000;
  REQUIRE(!timed(&s, 3, 20000, false, &log, why), "%s", why);
  for (int i = 0; i < 3; i++)
    CHECK(log.raisedAt[i] == 5000 + 1000 * (i + 1), "message %d at %lld", i,
          (long long)log.raisedAt[i]);
}

TEST(a_slow_rail_is_slow_and_a_failing_one_is_replaced) {
  char why[EP_NET_WHY] = "";
  log_t log;
  ep_net_settings_t s = plain();
  s.mbps = 16000;
  s.rails = 2;
  s.slowRail = 1;
  s.slowFactor = 4;
  REQUIRE(!timed(&s, 2, 20000, false, &log, why), "%s", why);
  CHECK(log.raisedAt[0] == 1000 && log.raisedAt[1] == 4000, "%lld %lld", (long long)log.raisedAt[0],
        (long long)log.raisedAt[1]);
  s.slowRail = -1;
  s.failingRail = 0;
  s.failures = 1000000;
  s.retryNs = 7000;
  REQUIRE(!timed(&s, 1, 20000, false, &log, why), "%s", why);
  CHECK(log.raisedAt[0] == 9000, "1000 lost, 7000 to notice, 1000 again: %lld",
        (long long)log.raisedAt[0]);
}

TEST(weak_signals_are_reordered_and_strong_ones_are_not) {
  char why[EP_NET_WHY] = "";
  log_t weak, again, strong;
  ep_net_settings_t s = plain();
  s.reorder = 500000;
  s.reorderNs = 10000;
  REQUIRE(!timed(&s, 16, 20000, false, &weak, why), "%s", why);
  REQUIRE(!timed(&s, 16, 20000, false, &again, why), "%s", why);
  REQUIRE(!timed(&s, 16, 20000, true, &strong, why), "%s", why);
  int descents[2] = {0, 0};
  for (int i = 1; i < 16; i++) {
    descents[0] += weak.order[i] < weak.order[i - 1];
    descents[1] += strong.order[i] < strong.order[i - 1];
  }
  CHECK(descents[0] > 0 && descents[1] == 0, "%d %d", descents[0], descents[1]);
  CHECK(!memcmp(&weak, &again, sizeof weak), "the same seed gives the same run");
}

TEST(a_dead_rank_is_named_within_the_limit_or_dropped) {
  char why[EP_NET_WHY] = "";
  log_t log;
  ep_net_settings_t s = plain();
  s.deadRank = 0;
  s.deadAfter = 2;
  CHECK(timed(&s, 3, 2000000, false, &log, why) == -1, "a request to a dead rank was done");
  CHECK(strstr(why, "rank 0 did not take a put of 1000 bytes within 1 ms"), "%s", why);
  CHECK(log.numRaised == 2 && log.now >= 1000000 && log.now < 1000100, "%d at %lld", log.numRaised,
        (long long)log.now);
  s.onDead = EP_NET_DEAD_DROP;
  CHECK(!timed(&s, 3, 2000000, false, &log, why) && log.numRaised == 2, "%d: %s", log.numRaised,
        why);
}

TEST(a_peer_that_is_gone_fails_what_goes_to_it) {
  char why[EP_NET_WHY] = "";
  log_t log = {.now = 0};
  for (int drop = 0; drop < 2; drop++) {
    ep_net_settings_t s = plain();
    ep_net_engine_t *e = NULL;
    ep_net_request_t *request = NULL;
    ep_net_op_t op = {.peer = 1, .bytes = 8};
    int first = -1;
    s.onDead = drop;
    REQUIRE(
        !epNetEngineCreate(&s, (ep_net_link_t){&log, moveAtOnce, always, recordOp}, 0, 2, &e, why),
        "%s", why);
    REQUIRE(!epNetEngineContexts(e, 1, &first, why), "%s", why);
    epNetEngineGone(e, 1);
    CHECK(!epNetEngineProgress(e, 0, why), "nothing was posted: %s", why);
    REQUIRE(!epNetEnginePost(e, first, &op, 0, &request, why), "%s", why);
    CHECK(epNetEngineProgress(e, 0, why) == (drop ? 0 : -1), "%s", why);
    CHECK(epNetEngineTest(request) == (drop == 1), "done by dropping alone");
    if (!drop) CHECK(strstr(why, "rank 1 is gone"), "%s", why);
    epNetEngineDestroy(e);
  }
}

TEST(a_full_queue_is_an_error_and_free_slots_are_used_again) {
  char why[EP_NET_WHY] = "";
  log_t log = {.now = 0};
  ep_net_settings_t s = plain();
  ep_net_engine_t *e = NULL;
  ep_net_request_t *requests[EP_NET_DEPTH], *more;
  ep_net_op_t op = {.bytes = 8};
  int first = -1;
  REQUIRE(
      !epNetEngineCreate(&s, (ep_net_link_t){&log, moveAtOnce, always, recordOp}, 0, 1, &e, why),
      "%s", why);
  REQUIRE(!epNetEngineContexts(e, 1, &first, why), "%s", why);
  for (int i = 0; i < EP_NET_DEPTH; i++)
    REQUIRE(!epNetEnginePost(e, first, &op, 0, &requests[i], why), "%d: %s", i, why);
  CHECK(epNetEnginePost(e, first, &op, 0, &more, why) == -1 && strstr(why, "at most 512"), "%s",
        why);
  CHECK(!epNetEngineProgress(e, 0, why) && epNetEngineTest(requests[0]), "%s", why);
  CHECK(!epNetEngineTest(requests[0]), "a request is done once");
  CHECK(!epNetEnginePost(e, first, &op, 0, &more, why), "%s", why);
  epNetEngineDestroy(e);
}

/* ---- Settings ---- */

static const char *givenName, *givenValue;
static char *given(const char *name) {
  return strcmp(name, givenName) ? NULL : (char *)givenValue;
}

TEST(settings_are_read_and_wrong_ones_refused) {
  static const struct {
    const char *name, *value, *says;
  } BAD[] = {
      {"TREFOIL_NET_CARRIER", "ib", "must be copy or tcp"},
      {"TREFOIL_NET_TIMEOUT_MS", "0", "must be an integer in [1, 86400000]"},
      {"TREFOIL_NET_MBPS", "10x", "must be an integer"},
      {"TREFOIL_NET_SEED", "99999999999999999999", "must be an integer"},
      {"TREFOIL_NET_RAILS", "17", "must be an integer in [1, 16]"},
      {"TREFOIL_NET_DEAD_RANK", "3", "must be NUMBER:VALUE"},
      {"TREFOIL_NET_SLOW_RAIL", "1:4", "not in [0, 1)"},
      {"TREFOIL_NET_SLOW_RAIL", "0:4", "needs TREFOIL_NET_MBPS"},
      {"TREFOIL_NET_FAILING_RAIL", "0:1000001", "must be NUMBER:VALUE"},
  };
  ep_net_settings_t s;
  char why[EP_NET_WHY];
  for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
    givenName = BAD[i].name;
    givenValue = BAD[i].value;
    CHECK(epNetSettings(given, &s, why) == -1 && strstr(why, BAD[i].says), "%s=%s: %s", givenName,
          givenValue, why);
  }
  givenName = "TREFOIL_NET_TIMEOUT_MS";
  givenValue = "250";
  CHECK(!epNetSettings(given, &s, why) && s.limitNs == 250000000 && s.rails == 1 &&
            s.deadRank == -1,
        "%s", why);
  givenName = "TREFOIL_NET_DEAD_RANK";
  givenValue = "3:40";
  CHECK(!epNetSettings(given, &s, why) && s.deadRank == 3 && s.deadAfter == 40, "%s", why);
}

TEST(a_dead_rank_must_be_one_of_the_communicator) {
  char why[EP_NET_WHY] = "";
  ep_net_engine_t *e = NULL;
  ep_net_settings_t s = plain();
  const ep_net_link_t link = {NULL, moveAtOnce, always, recordOp};
  s.deadRank = 3;
  CHECK(epNetEngineCreate(&s, link, 0, 3, &e, why) == -1 && !e, "3 is none of 3 ranks");
  CHECK(strstr(why, "TREFOIL_NET_DEAD_RANK names rank 3, which is not in [0, 3)"), "%s", why);
  CHECK(!epNetEngineCreate(&s, link, 0, 4, &e, why), "%s", why);
  epNetEngineDestroy(e);
}

TEST_MAIN()
