#include "ll_rails.h"

#include <stdio.h>
#include <string.h>

/* What lies in exchange memory, of a source and parity: the operation, and the ack distance beside it. */
typedef struct cell {
  uint8_t op, distance;
} cell_t;

/* To the two ranks of a domain, by their rails: whose words and row it has. */
typedef struct message {
  uint8_t op, distance, word[2], row;
} message_t;

typedef struct rails_rank {
  uint8_t launch, sent, received, done[2];
  cell_t exchange[RAILS_RANKS][2];
  uint8_t freeWord[RAILS_RANKS][2], acked[RAILS_RANKS][2]; /* known receipts */
  uint8_t mirror[2][2], packed[2][2];                      /* [rail of the far rank][parity] */
  message_t out[2], in[2];
  uint8_t put[2], parts[2], signal[2]; /* of messages; signal: of the peer's */
  uint8_t freePut[2], freeSignal[2];   /* receipts of receive-only launches; the peer's */
  uint8_t storedNear, storedFar, heardFree, posted, landed, taken, freeStored, freePassed;
} rails_rank_t;

typedef struct rails_state {
  rails_rank_t rank[RAILS_RANKS];
} rails_state_t;

enum {
  STORE_NEAR,
  STORE_FAR,
  HEAR_FREE,
  PACK,
  ARRIVE,
  SIGNAL,
  SIGNAL_FREE,
  LAND,
  TAKE,
  STORE_FREE,
  PASS_FREE,
  LEAVE
};
enum { WORDS = 1, ROW = 2, ALL = WORDS | ROW, SIGNALLED = 4 }; /* parts of a put */

typedef struct view {
  const rails_setup_t *p;
  int rank, op; /* of the launch */
  char parts;
} view_t;

static int mateOf(int rank) {
  return rank ^ 1;
}
static int peerOf(int rank) {
  return rank ^ 2;
}
static char launchOf(const rails_setup_t *p, int rank, int launch) {
  return (p->program[rank] ? p->program[rank] : p->program[0])[launch];
}
static view_t viewOf(const rails_setup_t *p, const rails_state_t *s, int rank) {
  const rails_rank_t *k = &s->rank[rank];
  const char parts = launchOf(p, rank, k->launch);
  return (view_t){p, rank, parts == 'R' ? k->received + 1 : k->sent + 1, parts};
}
static bool sends(const view_t *v) {
  return v->parts == 'B' || v->parts == 'S';
}
static bool receives(const view_t *v) {
  return v->parts == 'B' || v->parts == 'R';
}
static int messageOf(const rails_setup_t *p, int op) {
  return p->fault == RAILS_FAULT_ONE_MESSAGE ? 0 : op & 1;
}

/* ---- Moves that are possible ---- */

typedef struct list {
  move_t *moves;
  int n;
} list_t;

static void add(list_t *to, int kind, const view_t *v, int item) {
  to->moves[to->n++] = (move_t){(uint8_t)kind, (uint8_t)v->rank, 0, 0, (uint8_t)item};
}

static bool isFree(const view_t *v, const rails_rank_t *k) {
  const int b = v->op & 1;
  for (int q = 0; q < RAILS_RANKS; q++) {
    if (q == v->rank) continue;
    if (v->p->fault == RAILS_FAULT_CREDIT_EARLY && q == mateOf(peerOf(v->rank))) continue;
    if (k->acked[q][b] + 2 < v->op && k->freeWord[q][b] + 2 < v->op) return false;
  }
  return true;
}

/* What the relay knows of the peer's receipts. */
static int receivedBy(const view_t *v, const rails_rank_t *k) {
  const int other = (v->op - 1) & 1;
  const message_t *in = &k->in[messageOf(v->p, v->op - 1)];
  if (k->signal[other] >= v->op - 1 && in->distance == 1) return v->op - 2;
  return k->freeSignal[v->op & 1];
}

static void sendMoves(const view_t *v, const rails_rank_t *k, list_t *to) {
  const int b = v->op & 1;
  if (v->p->fault == RAILS_FAULT_NO_FREE_CHECK || isFree(v, k)) {
    if (!k->storedNear) add(to, STORE_NEAR, v, 0);
    if (!k->storedFar) add(to, STORE_FAR, v, 0);
  }
  if (!k->heardFree) {
    if (v->op < 3 || k->storedFar || receivedBy(v, k) + 2 >= v->op) add(to, HEAR_FREE, v, 0);
    return;
  }
  for (int x = 0; x < 2 && k->storedFar; x++) {
    if (k->packed[x][b] != v->op) add(to, PACK, v, x);
  }
}

static bool isThere(const view_t *v, const rails_rank_t *k) {
  for (int q = 0; q < RAILS_RANKS; q++) {
    if (q != v->rank && k->exchange[q][v->op & 1].op != v->op) return false;
  }
  return true;
}

static void receiveMoves(const view_t *v, const rails_rank_t *k, list_t *to) {
  const rails_fault_t fault = v->p->fault;
  const int own = 1 << (v->rank & 1);
  const bool forwards = fault != RAILS_FAULT_NO_FORWARDER;
  const bool isRead =
      forwards && fault != RAILS_FAULT_CREDIT_EARLY ? k->landed == 3 : k->landed & own;
  if (!k->taken && isThere(v, k)) add(to, TAKE, v, 0);
  if (v->parts == 'R' && k->taken) {
    if (!k->freeStored) add(to, STORE_FREE, v, 0);
    if (k->freeStored && isRead && !k->freePassed) add(to, PASS_FREE, v, 0);
  }
  if (k->signal[v->op & 1] < v->op && fault != RAILS_FAULT_NO_SIGNAL) return;
  for (int d = 0; d < 2; d++) {
    if (!(k->landed >> d & 1) && (forwards || d == (v->rank & 1))) add(to, LAND, v, d);
  }
}

static void networkMoves(const view_t *v, const rails_rank_t *k, list_t *to) {
  for (int b = 0; b < 2; b++) {
    if (k->freePut[b]) add(to, SIGNAL_FREE, v, b);
    if (!k->put[b]) continue;
    if (!(k->parts[b] & WORDS)) add(to, ARRIVE, v, b << 4 | WORDS);
    if (!(k->parts[b] & ROW)) add(to, ARRIVE, v, b << 4 | ROW);
    if ((k->parts[b] & ALL) == ALL ||
        (v->p->fault == RAILS_FAULT_SIGNAL_FIRST && !(k->parts[b] & SIGNALLED)))
      add(to, SIGNAL, v, b);
  }
}

static bool mayLeave(const view_t *v, const rails_rank_t *k) {
  const rails_fault_t fault = v->p->fault;
  const bool own = fault == RAILS_FAULT_OWN_RELAY || fault == RAILS_FAULT_NO_FORWARDER;
  if (sends(v) && (!k->storedNear || !k->storedFar || !k->posted)) return false;
  if (receives(v) && (!k->taken || (own ? !k->landed : k->landed != 3))) return false;
  return v->parts != 'R' || k->freePassed;
}

/* Whether a move may be made before all others: it takes nothing away from them, its checks do not get
 * harder later, and later it shows nothing more. What a rank is told may not be chosen so where a relay that
 * looks for receipts would find others, nor what ends a receive, lands, or arrives. */
static bool isFirst(const rails_state_t *s, const view_t *v, const move_t *m) {
  const view_t other = viewOf(v->p, s, peerOf(v->rank));
  switch (m->kind) {
  case STORE_NEAR:
  case STORE_FAR:
  case TAKE:
    return true;
  case PACK:
    return v->p->fault != RAILS_FAULT_POST_BY_FIRST;
  case HEAR_FREE:
    return v->op < 3;
  case SIGNAL:
    return (s->rank[v->rank].parts[m->item] & ALL) == ALL &&
           (!sends(&other) || other.op < 3 || s->rank[other.rank].heardFree);
  case LEAVE:
    return v->parts == 'S';
  default:
    return false;
  }
}

static int railsMoves(const void *model, const void *state, move_t moves[MAX_MOVES]) {
  const rails_state_t *s = state;
  list_t to = {moves, 0};
  for (int r = 0; r < RAILS_RANKS; r++) {
    const rails_rank_t *k = &s->rank[r];
    const view_t v = viewOf(model, s, r);
    networkMoves(&v, k, &to);
    if (!v.parts) continue;
    if (sends(&v)) sendMoves(&v, k, &to);
    if (receives(&v)) receiveMoves(&v, k, &to);
    if (mayLeave(&v, k)) add(&to, LEAVE, &v, 0);
  }
  for (int i = 0; i < to.n; i++) {
    const view_t v = viewOf(model, s, moves[i].rank);
    if (!isFirst(s, &v, &moves[i])) continue;
    moves[0] = moves[i];
    return 1;
  }
  return to.n;
}

/* ---- Moves made ---- */

/* `at` learns that `of` has received this operation. */
static const char *learn(rails_state_t *s, uint8_t word[2], int of, int op) {
  if (op < 1) return NULL;
  if (s->rank[of].done[op & 1] < op) return "a rank is said to have received what it has not";
  if (word[op & 1] < op) word[op & 1] = (uint8_t)op;
  return NULL;
}

/* The relay of a rank tells both ranks here what it knows of its peer. */
static const char *tellFree(const view_t *v, rails_state_t *s, int op) {
  const int peer = peerOf(v->rank), mate = mateOf(v->rank);
  const char *wrong = learn(s, s->rank[v->rank].freeWord[peer], peer, op);
  if (wrong || v->p->fault == RAILS_FAULT_FREE_UNTOLD) return wrong;
  return learn(s, s->rank[mate].freeWord[peer], peer, op);
}

/* A source's words and row come into a rank's exchange memory. */
static const char *deliver(rails_state_t *s, int to, int from, int op, int distance) {
  rails_rank_t *k = &s->rank[to];
  const int b = op & 1;
  if (k->done[b] + 2 < op) return "exchange memory is written before its rank has received";
  k->exchange[from][b] = (cell_t){(uint8_t)op, (uint8_t)distance};
  return NULL;
}

static int distanceOf(const view_t *v, const rails_rank_t *k) {
  return v->op - k->done[(v->op & 1) ^ 1];
}

static const char *storeNear(const view_t *v, rails_state_t *s) {
  rails_rank_t *k = &s->rank[v->rank];
  const int mate = mateOf(v->rank), distance = distanceOf(v, k);
  k->storedNear = 1;
  const char *wrong = deliver(s, mate, v->rank, v->op, distance);
  if (wrong || distance != 1) return wrong;
  return learn(s, s->rank[mate].freeWord[v->rank], v->rank, v->op - 1);
}

static const char *storeFar(const view_t *v, rails_rank_t *k) {
  const int b = v->op & 1;
  k->storedFar = 1;
  for (int x = 0; x < 2; x++) {
    if (k->mirror[x][b] != k->packed[x][b]) return "a mirror is written before it was packed";
    k->mirror[x][b] = (uint8_t)v->op;
  }
  return NULL;
}

static const char *pack(const view_t *v, rails_rank_t *k, int x) {
  const int b = v->op & 1, m = messageOf(v->p, v->op);
  const uint8_t op = (uint8_t)v->op;
  k->packed[x][b] = k->out[m].word[x] = k->out[m].row = op;
  const bool isAll = k->packed[x ^ 1][b] == op;
  if (v->p->fault == RAILS_FAULT_POST_BY_FIRST ? isAll : !isAll) return NULL;
  if (k->put[m]) return "a message is posted while an older one out of its place is under way";
  k->out[m].op = op;
  k->out[m].distance = (uint8_t)distanceOf(v, k);
  k->put[m] = op;
  k->parts[m] = 0;
  k->posted = 1;
  return NULL;
}

static const char *arrive(const rails_rank_t *from, rails_rank_t *to, int m, int part) {
  const message_t *out = &from->out[m];
  message_t *in = &to->in[m];
  const uint8_t op = from->put[m];
  const bool is =
      part == ROW ? out->row == op : out->op == op && out->word[0] == op && out->word[1] == op;
  if (!is) return "a message carries what is not of its operation";
  const uint8_t row = in->row;
  if (part == ROW) {
    in->row = out->row;
  } else {
    *in = *out;
    in->row = row;
  }
  return NULL;
}

static const char *network(const view_t *v, rails_state_t *s, move_t m) {
  rails_rank_t *k = &s->rank[v->rank], *to = &s->rank[peerOf(v->rank)];
  const int b = m.kind == ARRIVE ? m.item >> 4 : m.item;
  if (m.kind == SIGNAL_FREE) {
    to->freeSignal[b] = k->freePut[b];
    k->freePut[b] = 0;
    return NULL;
  }
  const int op = k->put[b];
  const char *wrong = m.kind == ARRIVE ? arrive(k, to, b, m.item & ALL) : NULL;
  if (m.kind == SIGNAL) to->signal[op & 1] = (uint8_t)op;
  k->parts[b] |= m.kind == ARRIVE ? m.item & ALL : SIGNALLED;
  if (k->parts[b] == (ALL | SIGNALLED)) k->put[b] = k->parts[b] = 0;
  return wrong;
}

static const char *land(const view_t *v, rails_state_t *s, int d) {
  rails_rank_t *k = &s->rank[v->rank];
  const message_t *in = &k->in[messageOf(v->p, v->op)];
  const bool isFirst = !k->landed;
  k->landed |= (uint8_t)(1 << d);
  if (in->op != v->op || in->word[d] != v->op) return "the head of another operation is read";
  if (in->row != v->op) return "a row of another operation is landed";
  const char *wrong = isFirst && in->distance == 1 ? tellFree(v, s, v->op - 1) : NULL;
  return wrong ? wrong : deliver(s, (v->rank & 2) | d, peerOf(v->rank), v->op, in->distance);
}

static const char *take(const view_t *v, rails_state_t *s) {
  rails_rank_t *k = &s->rank[v->rank];
  k->taken = 1;
  for (int q = 0; q < RAILS_RANKS; q++) {
    if (q == v->rank) continue;
    const char *wrong = learn(s, k->acked[q], q, v->op - k->exchange[q][v->op & 1].distance);
    if (wrong) return wrong;
  }
  return NULL;
}

static const char *storeFree(const view_t *v, rails_state_t *s) {
  rails_rank_t *k = &s->rank[v->rank];
  k->freeStored = 1;
  k->done[v->op & 1] = (uint8_t)v->op; /* the launch has received, whatever its relay still does */
  return learn(s, s->rank[mateOf(v->rank)].freeWord[v->rank], v->rank, v->op);
}

static void leave(const view_t *v, rails_rank_t *k) {
  if (sends(v)) k->sent++;
  if (receives(v)) {
    k->received++;
    k->done[v->op & 1] = (uint8_t)v->op;
  }
  k->launch++;
  k->storedNear = k->storedFar = k->heardFree = k->posted = 0;
  k->landed = k->taken = k->freeStored = k->freePassed = 0;
}

static const char *railsMake(const void *model, void *state, move_t m) {
  rails_state_t *s = state;
  rails_rank_t *k = &s->rank[m.rank];
  const view_t v = viewOf(model, s, m.rank);
  switch (m.kind) {
  case STORE_NEAR:
    return storeNear(&v, s);
  case STORE_FAR:
    return storeFar(&v, k);
  case HEAR_FREE:
    k->heardFree = 1;
    return v.op >= 3 && receivedBy(&v, k) + 2 >= v.op ? tellFree(&v, s, receivedBy(&v, k)) : NULL;
  case PACK:
    return pack(&v, k, m.item);
  case LAND:
    return land(&v, s, m.item);
  case TAKE:
    return take(&v, s);
  case STORE_FREE:
    return storeFree(&v, s);
  case PASS_FREE:
    k->freePassed = 1;
    k->freePut[v.op & 1] = (uint8_t)v.op;
    return NULL;
  case LEAVE:
    leave(&v, k);
    return NULL;
  default:
    return network(&v, s, m);
  }
}

static const char *railsUnfinished(const void *model, const void *state) {
  const rails_state_t *s = state;
  for (int r = 0; r < RAILS_RANKS; r++) {
    if (launchOf(model, r, s->rank[r].launch)) return "ranks wait for each other forever";
  }
  return NULL;
}

static void railsDescribe(const void *model, const void *state, move_t m, char *text, size_t size) {
  static const char *const DOES[] = {"stores for its mate",
                                     "stores into its mirrors",
                                     "has looked for its peer's receipts",
                                     "packs the mirror of rail",
                                     "its put arrives, part",
                                     "its signal arrives, message",
                                     "its receipt arrives, parity",
                                     "lands what is for rail",
                                     "has received",
                                     "says free to its mate",
                                     "signals free to its peer",
                                     "leaves"};
  const rails_state_t *s = state;
  const view_t v = viewOf(model, s, m.rank);
  snprintf(text, size, "rank %d, launch %d (%c %d): %s %d", m.rank, s->rank[m.rank].launch,
           v.parts ? v.parts : '-', v.op, DOES[m.kind], m.item);
}

outcome_t exploreRails(const rails_setup_t *p, uint64_t maxStates, bool trace) {
  rails_state_t s;
  memset(&s, 0, sizeof s);
  const machine_t machine = {p, sizeof s, railsMoves, railsMake, railsUnfinished, railsDescribe};
  return search(&machine, &s, maxStates, trace);
}
