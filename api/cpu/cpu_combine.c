/* Combine: messages go out to every origin and come back as sums.
 *
 * LL has one chunk, of all tokens, and its two halves are separate: the sending half waits for
 * nothing but a free slot (and, with partial sums, the origin's weights). HT sends, relays and sums
 * chunk by chunk in one loop that does whatever can be done and sleeps when nothing can, so rings
 * stay small and no order of ranks can lock: messages flow experts' rank -> relay -> origin and
 * the last of these depends on no other. */
#include <string.h>

#include "api/cpu/cpu.h"
#include "api/cpu/cpu_hang.h"

#define RING_SLOTS 2u

static int hasMasks(const ep_op_t *op) {
  return !epIsHt(op->g->group) && op->g->group->limits.enableMask;
}

/* ---- low latency ----------------------------------------------------------------------------- */

/* Another routing was dispatched since the call (a graph comes later than it was captured): this one is
 * exchanged on its own. */
static int freshenRouting(const ep_op_t *op, ep_record_t *r) {
  ep_cpu_handle_t *h = op->h;
  if (h->layoutNo == r->routingNo) return 1;
  ep_op_t update = *op;
  update.kind = EP_KIND_UPDATE;
  update.no = ++op->a->ops[EP_KIND_UPDATE];
  if (!epExchangeRouting(&update, &r->routing)) return 0;
  h->layoutNo = r->routingNo;
  return 1;
}

static int publishWeights(const ep_op_t *op, const ep_combine_call_t *c) {
  ep_cpu_group_t *g = op->g;
  for (int r = 0; r < g->R && op->no > 2; r++) {
    ep_word_t *taken = epWordOf(op, r, EP_ARRAY_WEIGHTS_TAKEN, g->me);
    if (r == g->me || !epOwesReading(op, r, op->no - 2)) continue;
    if (!epWait(op, r, taken, op->no - 2, "reading of earlier weights") && !hasMasks(op)) return 0;
  }
  if (c->numTokens > 0) {
    char *slot = epBufferOf(op, g->me, EP_BUFFER_COMBINE_WEIGHTS);
    memcpy(slot + op->no % 2 * op->a->sizing.weightBytes, c->weights,
           (size_t)(c->numTokens * op->h->head->topk) * sizeof(float));
  }
  epStore(&epHeadOf(op, g->me)->weightsPublished, op->no);
  epRingAll(g, op->kind);
  return 1;
}

static int sendTo(const ep_op_t *op, const ep_combine_call_t *c, int origin) {
  ep_cpu_group_t *g = op->g;
  ep_word_t *taken = epWordOf(op, origin, EP_ARRAY_OWN_TAKEN, g->me);
  if (op->no > RING_SLOTS && epOwesReading(op, origin, op->no - RING_SLOTS) &&
      !epWait(op, origin, taken, op->no - RING_SLOTS, "reading of an earlier combine") &&
      !hasMasks(op)) {
    return 0;
  }
  int partial = epPartial(op, c);
  if (partial && epActive(g, origin) &&
      !epWait(op, origin, &epHeadOf(op, origin)->weightsPublished, op->no, "weights") &&
      !hasMasks(op)) {
    return 0;
  }
  epWriteMessage(op, c, origin, 0, epMessageAt(op, g->me, origin, op->no));
  if (partial) epStore(epWordOf(op, g->me, EP_ARRAY_WEIGHTS_TAKEN, origin), op->no);
  epStore(epWordOf(op, g->me, EP_ARRAY_SENT, origin), op->no);
  if (origin != g->me) epRing(g, origin, op->kind);
  return 1;
}

static int sendHalf(const ep_op_t *op, ep_record_t *r) {
  const ep_combine_call_t *c = &r->call.combine;
  if (!freshenRouting(op, r)) return 0;
  epRecordMasked(op);
  if (epPartial(op, c) && !publishWeights(op, c)) return 0;
  for (int i = 1; i <= op->g->R; i++) {
    if (!sendTo(op, c, (op->g->me + i) % op->g->R)) return 0;
  }
  return 1;
}

static int checkMessage(const ep_op_t *op, const ep_combine_call_t *c, int sender) {
  const ep_message_t *head = (const ep_message_t *)op->g->peers[sender].message;
  int64_t meaning = epMeaning(c->backward, c->quant, c->dtype);
  char theirs[60], ours[60];
  if (head->rowBytes == (int64_t)epWireBytes(c) && head->meaning == meaning) return 1;
  if (head->meaning == EP_MEANING_REFUSED && epIsHt(op->g->group)) {
    epReport(
        op->g->group, EP_DEFERRED_STICKY, TREFOIL_REMOTE_ERROR,
        "ncclEpCombine %llu on rank %d lacks rows: a rank refused its input (rank %d, or one of "
        "its node); call ncclEpErrorClear and repeat it",
        (unsigned long long)op->no, op->g->me, sender);
    return 1;
  }
  if (hasMasks(op)) {
    int wentOn = epLoad(epWordOf(op, sender, EP_ARRAY_SENT, op->g->me)) >= op->no + RING_SLOTS;
    if (wentOn) return 1; /* noticed after the sum */
    epGiveUp(op, sender, "sends rows of another size or kind", "rows");
    op->g->peers[sender].message = NULL;
    return 1;
  }
  epReport(op->g->group, EP_DEFERRED_FATAL, TREFOIL_INVALID_ARGUMENT,
           "ncclEpCombine: rank %d sends %lld bytes a row (%s), rank %d expects %zu (%s); must be "
           "equal; the group is lost",
           sender, (long long)head->rowBytes, epMeaningName(head->meaning, theirs), op->g->me,
           epWireBytes(c), epMeaningName(meaning, ours));
  atomic_store(&op->g->failed, 1);
  return 0;
}

static int collect(const ep_op_t *op, const ep_combine_call_t *c) {
  ep_cpu_group_t *g = op->g;
  for (int i = 0; i < g->R; i++) {
    int s = (g->me + i) % g->R;
    ep_peer_t *p = &g->peers[s];
    p->message = NULL;
    p->cursor = 0;
    if (!epActive(g, s)) continue;
    if (!epWait(op, s, epWordOf(op, s, EP_ARRAY_SENT, g->me), op->no, "rows")) {
      if (!hasMasks(op)) return 0;
      continue;
    }
    p->message = epMessageAt(op, s, g->me, op->no);
    if (!checkMessage(op, c, s)) return 0;
  }
  return 1;
}

/* With masks: a sender that went on without us may have overwritten what we read. */
static int lostOne(const ep_op_t *op) {
  ep_cpu_group_t *g = op->g;
  int lost = 0;
  if (!hasMasks(op)) return 0;
  atomic_thread_fence(memory_order_acquire);
  for (int s = 0; s < g->R; s++) {
    ep_peer_t *p = &g->peers[s];
    if (p->message && epLoad(epWordOf(op, s, EP_ARRAY_SENT, g->me)) >= op->no + RING_SLOTS) {
      epWentOn(op, s);
      p->message = NULL;
      lost = 1;
    }
    p->cursor = 0;
  }
  return lost;
}

static void receiveHalf(const ep_op_t *op, const ep_combine_call_t *c) {
  ep_cpu_group_t *g = op->g;
  if (!collect(op, c)) return;
  do {
    epForgetTaken(op);
    epReduceChunk(op, c, 0);
  } while (lostOne(op));
  epPublishTaken(op);
  for (int s = 0; s < g->R; s++) epStore(epWordOf(op, g->me, EP_ARRAY_OWN_TAKEN, s), op->no);
  epRingAll(g, op->kind);
}

/* ---- high throughput ------------------------------------------------------------------------- */

typedef struct loop {
  const ep_op_t *op;
  const ep_combine_call_t *c;
  int me, R, G, M, myNode, rail;
  int64_t reduceNext, left; /* chunks not sent, relayed or summed yet */
} loop_t;

static uint64_t seqOf(const loop_t *l, int origin, int64_t chunk) {
  return l->op->g->peers[origin].ringSeq[l->op->arenaIdx] + (uint64_t)chunk + 1;
}

static int nodeOf(const loop_t *l, int r) {
  return r / l->G;
}

/* Ring of the relay at p for a node's origin. */
static int relayRing(const loop_t *l, int p, int node) {
  return l->R + (node < nodeOf(l, p) ? node : node - 1);
}

static int hasRoom(const ep_word_t *taken, uint64_t seq) {
  return seq <= RING_SLOTS || epLoad(taken) >= seq - RING_SLOTS;
}

/* The rank that reads this rank's messages to origin, and the word with its progress. */
static int readerOf(const loop_t *l, int origin, ep_word_t **taken) {
  if (nodeOf(l, origin) == l->myNode) {
    *taken = epWordOf(l->op, origin, EP_ARRAY_OWN_TAKEN, l->me);
    return origin;
  }
  int p = l->myNode * l->G + origin % l->G;
  *taken = epWordOf(l->op, p, EP_ARRAY_RELAY_TAKEN, nodeOf(l, origin) * l->G + l->rail);
  return p;
}

static int trySend(loop_t *l, int origin) {
  ep_peer_t *p = &l->op->g->peers[origin];
  if (p->sendNext >= epNumChunks(l->op, origin)) return 0;
  uint64_t seq = seqOf(l, origin, p->sendNext);
  ep_word_t *taken;
  int reader = readerOf(l, origin, &taken);
  if (!hasRoom(taken, seq)) return 0;
  epWriteMessage(l->op, l->c, origin, p->sendNext, epMessageAt(l->op, l->me, origin, seq));
  epStore(epWordOf(l->op, l->me, EP_ARRAY_SENT, origin), seq);
  if (reader != l->me) epRing(l->op->g, reader, l->op->kind);
  p->sendNext++;
  return 1;
}

/* The first rank of this node whose message `seq` to origin is not there; -1: all are. */
static int missingInNode(const loop_t *l, int origin, uint64_t seq) {
  for (int s = l->myNode * l->G; s < (l->myNode + 1) * l->G; s++) {
    if (epLoad(epWordOf(l->op, s, EP_ARRAY_SENT, origin)) < seq) return s;
  }
  return -1;
}

static int takeNode(const loop_t *l, int origin, uint64_t seq) {
  for (int s = l->myNode * l->G; s < (l->myNode + 1) * l->G; s++) {
    l->op->g->peers[s].message = epMessageAt(l->op, s, origin, seq);
    l->op->g->peers[s].cursor = 0;
    if (!checkMessage(l->op, l->c, s)) return 0;
  }
  return 1;
}

static void giveBack(const loop_t *l, ep_array_t array, int first, int s, uint64_t seq) {
  epStore(epWordOf(l->op, l->me, array, first), seq);
  if (s != l->me) epRing(l->op->g, s, l->op->kind);
}

/* 1 progress, 0 nothing to do, -1 failed. */
static int tryRelay(loop_t *l, int node) {
  int origin = node * l->G + l->rail;
  ep_peer_t *p = &l->op->g->peers[origin];
  if (node == l->myNode || p->relayNext >= epNumChunks(l->op, origin)) return 0;
  uint64_t seq = seqOf(l, origin, p->relayNext);
  if (missingInNode(l, origin, seq) >= 0) return 0;
  if (!hasRoom(epWordOf(l->op, origin, EP_ARRAY_OWN_TAKEN, l->me), seq)) return 0;
  if (!takeNode(l, origin, seq) || !epBeginReading(l->op, l->myNode * l->G, l->G)) return -1;
  epRelayChunk(l->op, l->c, origin, p->relayNext,
               epMessageAt(l->op, l->me, relayRing(l, l->me, node), seq));
  epEndReading(l->op);
  epPublishTaken(l->op);
  epStore(epWordOf(l->op, l->me, EP_ARRAY_RELAY_SENT, node), seq);
  epRing(l->op->g, origin, l->op->kind);
  for (int i = 0; i < l->G; i++) {
    giveBack(l, EP_ARRAY_RELAY_TAKEN, node * l->G + i, l->myNode * l->G + i, seq);
  }
  p->relayNext++;
  return 1;
}

/* The first rank whose part of this rank's chunk is not there; -1: all are. */
static int missingForSum(const loop_t *l, uint64_t seq) {
  int s = missingInNode(l, l->me, seq);
  for (int n = 0; n < l->M && s < 0; n++) {
    int p = n * l->G + l->rail;
    if (n != l->myNode && epLoad(epWordOf(l->op, p, EP_ARRAY_RELAY_SENT, l->myNode)) < seq) s = p;
  }
  return s;
}

static int trySum(loop_t *l) {
  if (l->reduceNext >= epNumChunks(l->op, l->me)) return 0;
  uint64_t seq = seqOf(l, l->me, l->reduceNext);
  if (missingForSum(l, seq) >= 0) return 0;
  for (int s = 0; s < l->R; s++) l->op->g->peers[s].message = NULL;
  if (!takeNode(l, l->me, seq)) return -1;
  for (int n = 0; n < l->M; n++) {
    int p = n * l->G + l->rail;
    if (n == l->myNode) continue;
    l->op->g->peers[p].message = epMessageAt(l->op, p, relayRing(l, p, l->myNode), seq);
    l->op->g->peers[p].cursor = 0;
    if (!checkMessage(l->op, l->c, p)) return -1;
  }
  if (!epBeginReading(l->op, l->myNode * l->G, l->G)) return -1;
  epReduceChunk(l->op, l->c, l->reduceNext++);
  epEndReading(l->op);
  epPublishTaken(l->op);
  for (int s = 0; s < l->R; s++) {
    if (l->op->g->peers[s].message) giveBack(l, EP_ARRAY_OWN_TAKEN, s, s, seq);
  }
  return 1;
}

/* Whom this rank waits for when nothing can be done. */
static int nameCulprit(const loop_t *l, const char **what) {
  if (l->reduceNext < epNumChunks(l->op, l->me)) {
    *what = "rows";
    return missingForSum(l, seqOf(l, l->me, l->reduceNext));
  }
  for (int o = 0; o < l->R; o++) {
    const ep_peer_t *p = &l->op->g->peers[o];
    ep_word_t *taken;
    if (p->sendNext >= epNumChunks(l->op, o)) continue;
    *what = "reading of earlier rows";
    return readerOf(l, o, &taken);
  }
  for (int n = 0; n < l->M; n++) {
    int o = n * l->G + l->rail;
    if (n == l->myNode || l->op->g->peers[o].relayNext >= epNumChunks(l->op, o)) continue;
    int s = missingInNode(l, o, seqOf(l, o, l->op->g->peers[o].relayNext));
    *what = s < 0 ? "reading of earlier rows" : "rows";
    return s < 0 ? o : s;
  }
  return -1;
}

/* One pass over everything that could be done; how much was, or -1. */
static int64_t pass(loop_t *l) {
  int64_t done = 0;
  for (int i = 1; i <= l->R; i++) done += trySend(l, (l->me + i) % l->R);
  for (int n = 0; n < l->M; n++) {
    int relayed = tryRelay(l, n);
    if (relayed < 0) return -1;
    done += relayed;
  }
  int summed = trySum(l);
  return summed < 0 ? -1 : done + summed;
}

/* Rows given by address must stay until they are read: the operation ends when all are. */
static int awaitReaders(const loop_t *l) {
  for (int o = 0; o < l->R && l->op->g->oneProcess; o++) {
    ep_word_t *taken;
    int reader = readerOf(l, o, &taken);
    int64_t chunks = epNumChunks(l->op, o);
    if (chunks > 0 && !epWait(l->op, reader, taken, seqOf(l, o, chunks - 1), "reading of rows")) {
      return 0;
    }
  }
  return 1;
}

static void runLoop(loop_t *l) {
  const ep_op_t *op = l->op;
  ep_deadline_t deadline = {.peer = -1};
  for (int o = 0; o < l->R; o++) {
    op->g->peers[o].sendNext = op->g->peers[o].relayNext = 0;
    int relayed = nodeOf(l, o) != l->myNode && o % l->G == l->rail;
    l->left += epNumChunks(op, o) * (1 + relayed);
  }
  l->left += epNumChunks(op, l->me);
  while (l->left > 0) {
    uint32_t seen = epBell(op);
    int64_t done = pass(l);
    if (done < 0) return;
    l->left -= done;
    if (done > 0) {
      if (deadline.deadlineNs) epHangGo(op);
      deadline.deadlineNs = 0;
      continue;
    }
    const char *what = "rows";
    int peer = nameCulprit(l, &what);
    if (l->left > 0 && !epSleep(op, seen, peer, what, &deadline)) return;
  }
  if (!awaitReaders(l)) return;
  for (int o = 0; o < l->R; o++) {
    op->g->peers[o].ringSeq[op->arenaIdx] += (uint64_t)epNumChunks(op, o);
  }
}

/* Too few rows for the slots that arrived, which only the operation sees: this rank sends none, and
 * every rank that misses them gets the reason. */
static void checkSlotWeights(ep_op_t *op, const ep_combine_call_t *c) {
  int64_t slots = op->h->layout.numSlots[op->g->me];
  op->refuses = c->rows < slots || (c->backward && c->slotWeightRows < slots);
  if (!op->refuses) return;
  epReport(
      op->g->group, EP_DEFERRED_STICKY, TREFOIL_INVALID_ARGUMENT,
      "rank %d holds %lld slots; inputs->tokens has %lld rows, inputs->topk_weights %lld: it sent "
      "none; call ncclEpErrorClear",
      op->g->me, (long long)slots, (long long)c->rows, (long long)c->slotWeightRows);
}

static void combineHt(ep_op_t *op, const ep_combine_call_t *c) {
  ep_cpu_group_t *g = op->g;
  loop_t l = {.op = op, .c = c, .me = g->me, .R = g->R, .G = g->G, .M = g->M};
  l.myNode = g->me / g->G;
  l.rail = g->me % g->G;
  if (!epRefreshLayout(op, c->numTokens, c->topk)) return;
  checkSlotWeights(op, c);
  runLoop(&l);
}

void epRunCombine(ep_record_t *r) {
  ep_cpu_handle_t *h = r->h;
  ep_cpu_group_t *g = r->g;
  ep_arena_t *a = &g->arenas[h->arenaIdx];
  ep_op_t op = {g, a, h, h->arenaIdx, EP_KIND_COMBINE, 0, 0, r->counts};
  int ok = 1, ht = epIsHt(g->group);
  if (r->stage & EP_STAGE_SEND) h->flightOps[EP_KIND_COMBINE] = ++a->ops[EP_KIND_COMBINE];
  op.no = h->flightOps[EP_KIND_COMBINE];
  if (!epWasSent(&op)) return;
  if (r->stage & EP_STAGE_RECEIVE) h->flightOps[EP_KIND_COMBINE] = 0;
  epHangBegin(&op);
  if (ht) {
    combineHt(&op, &r->call.combine);
  } else {
    if (r->stage & EP_STAGE_SEND) ok = sendHalf(&op, r);
    if (ok && r->stage & EP_STAGE_RECEIVE) receiveHalf(&op, &r->call.combine);
  }
  epHangEnd(&op);
}
