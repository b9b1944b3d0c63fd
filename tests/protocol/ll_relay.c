#include "ll_relay.h"

#include <stdio.h>
#include <string.h>

/* What lies in a mirror, a message or exchange memory: of which operation its first word and its rows are. */
typedef struct message {
  uint8_t op, distance, row[RELAY_ROWS];
} message_t;

typedef struct warp {
  uint8_t step, rows;
} warp_t;

/* A rank's side of what it has with a peer. By parity of the operation. */
typedef struct link {
  message_t mirror[2], out[2], in[2], exchange[2];
  uint8_t mirrorFree[2], freeWord[2], acked[2];
  uint8_t signal[2], freeSignal[2];
  uint8_t put[2], parts[2]; /* to the peer: the operation, what has arrived of it */
  uint8_t freePut[2];       /* a signal under way that it has received this operation */
  uint8_t isFree, wordStored, rowsStored, wordTaken, rowsTaken, freeStored; /* of the launch */
  uint8_t packed, landed, freePassed;
  warp_t pack[RELAY_WARPS], land[RELAY_WARPS];
} link_t;

typedef struct relay_rank {
  uint8_t launch, sent, received, done[2];
  link_t link[RELAY_RANKS];
} relay_rank_t;

typedef struct relay_state {
  relay_rank_t rank[RELAY_RANKS];
} relay_state_t;

enum {
  WAIT_FREE,
  STORE_WORD,
  STORE_ROW,
  TAKE_WORD,
  TAKE_ROW,
  STORE_FREE,
  LAND_FREE,
  PACK_WORD,
  PACK_ROW,
  POST,
  ARRIVE,
  SIGNAL,
  SIGNAL_FREE,
  AWAIT,
  LAND_WORD,
  LAND_ROW,
  LANDED,
  PASS_FREE,
  LEAVE
};
/* Steps of warps. */
enum { BEGIN, HAS_FREE, HAS_WORD, AT_END, PASSES, THROUGH };

typedef struct view {
  const relay_setup_t *p;
  int rank, op; /* of the launch */
  char parts;
} view_t;

static char launchOf(const relay_setup_t *p, int rank, int launch) {
  return (p->program[rank] ? p->program[rank] : p->program[0])[launch];
}
static view_t viewOf(const relay_setup_t *p, const relay_state_t *s, int rank) {
  const relay_rank_t *k = &s->rank[rank];
  const char parts = launchOf(p, rank, k->launch);
  return (view_t){p, rank, parts == 'R' ? k->received + 1 : k->sent + 1, parts};
}
static bool sends(const view_t *v) {
  return v->parts == 'B' || v->parts == 'S';
}
static bool receives(const view_t *v) {
  return v->parts == 'B' || v->parts == 'R';
}
static int messageOf(const relay_setup_t *p, int op) {
  return p->fault == RELAY_FAULT_ONE_MESSAGE ? 0 : op & 1;
}
static uint8_t allRows(const relay_setup_t *p) {
  return (uint8_t)((1u << p->numRows) - 1);
}
static uint8_t rowsOf(const relay_setup_t *p, int warp) {
  unsigned rows = 0;
  for (int j = warp; j < p->numRows; j += p->numWarps) rows |= 1u << j;
  return (uint8_t)rows;
}

/* What the relay knows of the peer's receipts, for an operation that waits to be stored (readReceived). */
static int receivedBy(const relay_setup_t *p, const link_t *l, int op) {
  const int other = (op - 1) & 1;
  if (p->fault != RELAY_FAULT_NO_HEAD && l->signal[other] >= op - 1 &&
      l->in[messageOf(p, op - 1)].distance == 1)
    return op - 2;
  return l->freeSignal[op & 1];
}

typedef struct list {
  move_t *moves;
  int n;
} list_t;

static void add(list_t *to, int kind, const view_t *v, int peer, int warp, int item) {
  to->moves[to->n++] =
      (move_t){(uint8_t)kind, (uint8_t)v->rank, (uint8_t)warp, (uint8_t)peer, (uint8_t)item};
}
static void addRows(list_t *to, int kind, const view_t *v, int peer, int warp, uint8_t rows) {
  for (int j = 0; j < RELAY_ROWS; j++) {
    if (rows >> j & 1) add(to, kind, v, peer, warp, j);
  }
}
/* Rows of `from` that are of this operation. */
static uint8_t rowsThere(const message_t *from, int op) {
  unsigned rows = 0;
  for (int j = 0; j < RELAY_ROWS; j++) rows |= (unsigned)(from->row[j] == op) << j;
  return (uint8_t)rows;
}

/* The kernel of one domain. */
static void kernelMoves(const view_t *v, const link_t *l, int peer, list_t *to) {
  const int b = v->op & 1;
  if (sends(v) && !l->isFree) {
    if (l->acked[b] + 2 >= v->op || l->freeWord[b] + 2 >= v->op ||
        v->p->fault == RELAY_FAULT_NO_FREE_CHECK)
      add(to, WAIT_FREE, v, peer, 0, 0);
  } else if (sends(v)) {
    if (!l->wordStored) add(to, STORE_WORD, v, peer, 0, 0);
    addRows(to, STORE_ROW, v, peer, 0, (uint8_t)(allRows(v->p) & ~l->rowsStored));
  }
  if (!receives(v)) return;
  if (!l->wordTaken && l->exchange[b].op == v->op) add(to, TAKE_WORD, v, peer, 0, 0);
  addRows(to, TAKE_ROW, v, peer, 0,
          (uint8_t)(rowsThere(&l->exchange[b], v->op) & allRows(v->p) & ~l->rowsTaken));
}

static void packMoves(const view_t *v, const link_t *l, int peer, int w, list_t *to) {
  const warp_t *warp = &l->pack[w];
  const message_t *mirror = &l->mirror[v->op & 1];
  const uint8_t left = rowsOf(v->p, w) & (uint8_t)~warp->rows;
  if (warp->step == BEGIN) {
    if (w || v->op < 3 || mirror->op == v->op || receivedBy(v->p, l, v->op) + 2 >= v->op)
      add(to, LAND_FREE, v, peer, w, 0);
  } else if (warp->step == HAS_FREE) {
    if (mirror->op == v->op) add(to, PACK_WORD, v, peer, w, 0);
  } else if (warp->step == HAS_WORD) {
    addRows(to, PACK_ROW, v, peer, w,
            v->p->fault == RELAY_FAULT_ROWS_UNCHECKED ? left : left & rowsThere(mirror, v->op));
    if (!left) add(to, POST, v, peer, w, 0);
  }
}

static void landMoves(const view_t *v, const link_t *l, int peer, int w, list_t *to) {
  const warp_t *warp = &l->land[w];
  const uint8_t left = rowsOf(v->p, w) & (uint8_t)~warp->rows;
  const relay_fault_t fault = v->p->fault;
  if (warp->step == BEGIN) {
    if (l->signal[v->op & 1] >= v->op || fault == RELAY_FAULT_NO_SIGNAL)
      add(to, AWAIT, v, peer, w, 0);
  } else if (warp->step == HAS_FREE) {
    add(to, LAND_WORD, v, peer, w, 0);
  } else if (warp->step == HAS_WORD) {
    addRows(to, LAND_ROW, v, peer, w, left);
    if (!left) add(to, LANDED, v, peer, w, 0);
  } else if (warp->step == PASSES) {
    if (l->mirrorFree[v->op & 1] == v->op || fault == RELAY_FAULT_FREE_EARLY)
      add(to, PASS_FREE, v, peer, w, 0);
  }
}

static uint8_t allParts(const relay_setup_t *p) {
  return (uint8_t)((1u << (p->numRows + 1)) - 1);
}

static void networkMoves(const view_t *v, const link_t *l, int peer, list_t *to) {
  for (int b = 0; b < 2; b++) {
    if (l->put[b]) {
      for (int part = 0; part <= v->p->numRows; part++) {
        if (!(l->parts[b] >> part & 1)) add(to, ARRIVE, v, peer, b, part);
      }
      const bool isThere = (l->parts[b] & allParts(v->p)) == allParts(v->p);
      if (isThere || (v->p->fault == RELAY_FAULT_SIGNAL_FIRST && !(l->parts[b] >> 7)))
        add(to, SIGNAL, v, peer, b, 0);
    }
    if (l->freePut[b]) add(to, SIGNAL_FREE, v, peer, b, 0);
  }
}

static bool hasTakenAll(const view_t *v, const relay_rank_t *k) {
  for (int q = 0; q < v->p->numRanks; q++) {
    const link_t *l = &k->link[q];
    if (q != v->rank && (!l->wordTaken || l->rowsTaken != allRows(v->p))) return false;
  }
  return true;
}

static bool mayLeave(const view_t *v, const relay_rank_t *k) {
  if (receives(v) && !hasTakenAll(v, k)) return false;
  for (int q = 0; q < v->p->numRanks; q++) {
    const link_t *l = &k->link[q];
    if (q == v->rank) continue;
    if (sends(v) && (!l->wordStored || l->rowsStored != allRows(v->p))) return false;
    if (v->parts == 'R' && !l->freeStored) return false;
    for (int w = 0; w < v->p->numWarps; w++) {
      if (sends(v) && l->pack[w].step != THROUGH) return false;
      if (receives(v) && l->land[w].step != THROUGH) return false;
    }
  }
  return true;
}

static int relayMoves(const void *model, const void *state, move_t moves[MAX_MOVES]) {
  const relay_setup_t *p = model;
  const relay_state_t *s = state;
  list_t to = {moves, 0};
  for (int r = 0; r < p->numRanks; r++) {
    const relay_rank_t *k = &s->rank[r];
    const view_t v = viewOf(p, s, r);
    for (int q = 0; q < p->numRanks; q++) {
      const link_t *l = &k->link[q];
      if (q == r) continue;
      networkMoves(&v, l, q, &to);
      if (!v.parts) continue;
      kernelMoves(&v, l, q, &to);
      for (int w = 0; w < p->numWarps; w++) {
        if (sends(&v)) packMoves(&v, l, q, w, &to);
        if (receives(&v)) landMoves(&v, l, q, w, &to);
      }
      if (v.parts == 'R' && !l->freeStored && hasTakenAll(&v, k)) add(&to, STORE_FREE, &v, q, 0, 0);
    }
    if (v.parts && mayLeave(&v, k)) add(&to, LEAVE, &v, 0, 0, 0);
  }
  return to.n;
}

/* ---- Moves ---- */

/* The rank learns that its peer has received this operation. */
static const char *learn(const relay_state_t *s, uint8_t word[2], int peer, int op) {
  if (op < 1) return NULL;
  if (s->rank[peer].done[op & 1] < op) return "a rank is said to have received what it has not";
  if (word[op & 1] < op) word[op & 1] = (uint8_t)op;
  return NULL;
}

static const char *post(const view_t *v, relay_rank_t *k, link_t *l, int w) {
  const int m = messageOf(v->p, v->op);
  l->pack[w].step = THROUGH;
  const bool isFirst = l->packed++ == 0, isLast = l->packed == v->p->numWarps;
  if (v->p->fault == RELAY_FAULT_POST_BY_FIRST ? !isFirst : !isLast) return NULL;
  if (l->put[m]) return "a message is posted while an older one out of its place is under way";
  l->out[m].op = (uint8_t)v->op;
  l->out[m].distance = (uint8_t)(v->op - k->done[(v->op & 1) ^ 1]);
  l->put[m] = (uint8_t)v->op;
  l->parts[m] = 0;
  return NULL;
}

static const char *arrive(const link_t *from, link_t *to, int m, int part) {
  const message_t *out = &from->out[m];
  message_t *in = &to->in[m];
  if ((part ? out->row[part - 1] : out->op) != from->put[m])
    return "a message carries what is not of its operation";
  if (part) {
    in->row[part - 1] = out->row[part - 1];
  } else {
    in->op = out->op, in->distance = out->distance;
  }
  return NULL;
}

/* What the signal lacks to the operation's number is added. */
static void signal(link_t *from, link_t *to, int m) {
  const int op = from->put[m];
  to->signal[op & 1] = (uint8_t)(to->signal[op & 1] + (op > 2 ? 2 : op));
}

static const char *landWord(const view_t *v, const relay_state_t *s, link_t *l, int peer, int w) {
  const message_t *in = &l->in[messageOf(v->p, v->op)];
  const int b = v->op & 1;
  l->land[w].step = HAS_WORD;
  if (in->op != v->op) return "the head of another operation is read";
  if (w) return NULL;
  l->exchange[b].op = (uint8_t)v->op;
  l->exchange[b].distance = in->distance;
  return in->distance == 1 ? learn(s, l->freeWord, peer, v->op - 1) : NULL;
}

static const char *landRow(const view_t *v, link_t *l, int w, int j) {
  const message_t *in = &l->in[messageOf(v->p, v->op)];
  l->land[w].rows |= (uint8_t)(1u << j);
  if (in->row[j] != v->op) return "a row of another operation is landed";
  l->exchange[v->op & 1].row[j] = in->row[j];
  return NULL;
}

static void landed(const view_t *v, link_t *l, int w) {
  const bool isLast = ++l->landed == v->p->numWarps;
  const bool passes = v->p->fault == RELAY_FAULT_FREE_BY_FIRST ? w == 0 : isLast;
  const bool is = v->parts == 'R' && passes && v->p->fault != RELAY_FAULT_NO_FREE;
  l->land[w].step = is ? PASSES : THROUGH;
}

static void leave(const view_t *v, relay_rank_t *k) {
  if (sends(v)) k->sent++;
  if (receives(v)) {
    k->received++;
    k->done[v->op & 1] = (uint8_t)v->op;
  }
  k->launch++;
  for (int q = 0; q < v->p->numRanks; q++) {
    link_t *l = &k->link[q];
    l->isFree = l->wordStored = l->rowsStored = l->wordTaken = l->rowsTaken = l->freeStored = 0;
    l->packed = l->landed = 0;
    memset(l->pack, 0, sizeof l->pack);
    memset(l->land, 0, sizeof l->land);
  }
}

static const char *networkMake(const view_t *v, link_t *l, link_t *to, move_t m) {
  const int b = m.block;
  if (m.kind == SIGNAL_FREE) {
    to->freeSignal[b] = l->freePut[b];
    l->freePut[b] = 0;
    return NULL;
  }
  const uint8_t part = m.kind == SIGNAL ? 128 : (uint8_t)(1u << m.item);
  const char *wrong = m.kind == ARRIVE ? arrive(l, to, b, m.item) : NULL;
  if (m.kind == SIGNAL) signal(l, to, b);
  l->parts[b] |= part;
  if (l->parts[b] == (allParts(v->p) | 128)) l->put[b] = l->parts[b] = 0;
  return wrong;
}

static const char *relayMake(const void *model, void *state, move_t m) {
  const relay_setup_t *p = model;
  relay_state_t *s = state;
  relay_rank_t *k = &s->rank[m.rank];
  const view_t v = viewOf(p, s, m.rank);
  const int peer = m.role, w = m.block, b = v.op & 1;
  const uint8_t op = (uint8_t)v.op, bit = (uint8_t)(1u << m.item);
  link_t *l = &k->link[peer];
  switch (m.kind) {
  case WAIT_FREE:
    l->isFree = 1;
    return NULL;
  case STORE_WORD:
    l->wordStored = 1;
    l->mirror[b].op = op;
    return NULL;
  case STORE_ROW:
    l->rowsStored |= bit;
    l->mirror[b].row[m.item] = op;
    return NULL;
  case TAKE_WORD:
    l->wordTaken = 1;
    return learn(s, l->acked, peer, op - l->exchange[b].distance);
  case TAKE_ROW:
    l->rowsTaken |= bit;
    return NULL;
  case STORE_FREE:
    l->freeStored = 1;
    k->done[b] = op; /* the launch has received, whatever its relay still does */
    l->mirrorFree[b] = op;
    return NULL;
  case LAND_FREE:
    l->pack[w].step = HAS_FREE;
    return w || op < 3 ? NULL : learn(s, l->freeWord, peer, receivedBy(p, l, op));
  case PACK_WORD:
    l->pack[w].step = HAS_WORD;
    return NULL;
  case PACK_ROW:
    l->pack[w].rows |= bit;
    l->out[messageOf(p, op)].row[m.item] = l->mirror[b].row[m.item];
    return NULL;
  case POST:
    return post(&v, k, l, w);
  case AWAIT:
    l->land[w].step = HAS_FREE;
    if (p->fault == RELAY_FAULT_RESET) l->signal[b] = 0;
    return NULL;
  case LAND_WORD:
    return landWord(&v, s, l, peer, w);
  case LAND_ROW:
    return landRow(&v, l, w, m.item);
  case LANDED:
    landed(&v, l, w);
    return NULL;
  case PASS_FREE:
    l->land[w].step = THROUGH;
    l->freePut[b] = op;
    return NULL;
  case LEAVE:
    leave(&v, k);
    return NULL;
  default:
    return networkMake(&v, l, &s->rank[peer].link[m.rank], m);
  }
}

static const char *relayUnfinished(const void *model, const void *state) {
  const relay_setup_t *p = model;
  const relay_state_t *s = state;
  for (int r = 0; r < p->numRanks; r++) {
    if (launchOf(p, r, s->rank[r].launch)) return "ranks wait for each other forever";
  }
  return NULL;
}

static void relayDescribe(const void *model, const void *state, move_t m, char *text, size_t size) {
  static const char *const DOES[] = {
      "may store for",     "stores the word for", "stores a row for",
      "takes the word of", "takes a row of",      "says free to",
      "looks for free of", "packs the word for",  "packs a row for",
      "posts to",          "put arrives at",      "signal arrives at",
      "free arrives at",   "sees the signal of",  "lands the word of",
      "lands a row of",    "has landed from",     "signals free to",
      "leaves, as"};
  const relay_state_t *s = state;
  const view_t v = viewOf(model, s, m.rank);
  snprintf(text, size, "rank %d, launch %d (%c %d), %s rank %d (warp or message %d, item %d)",
           m.rank, s->rank[m.rank].launch, v.parts ? v.parts : '-', v.op, DOES[m.kind], m.role,
           m.block, m.item);
}

outcome_t exploreRelay(const relay_setup_t *p, uint64_t maxStates, bool trace) {
  relay_state_t s;
  memset(&s, 0, sizeof s);
  const machine_t machine = {p, sizeof s, relayMoves, relayMake, relayUnfinished, relayDescribe};
  return search(&machine, &s, maxStates, trace);
}
