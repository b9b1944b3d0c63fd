/* The steps of the model: what a role reads, stores, waits for and notes, and how a launch ends.
 *
 * Reductions, all off if setup.fine: a step that only adds to what is on its way, or notes what was just
 * read, is made together with the step before it (storing later is the same as arriving later); all that
 * a step waits for is taken at one moment (taking some of it earlier exposes it for less time). Moves that
 * alone are enough are chosen in moves.c. */
#include "model.h"

#include "kernels/common/protocol.h"

#include <string.h>

static const char *const FAULT_NAMES[NUM_FAULTS] = {"none",
                                                    "no free check",
                                                    "one buffer",
                                                    "ack distance too short",
                                                    "least ack distance",
                                                    "acked too early",
                                                    "done at send",
                                                    "free by first block",
                                                    "acks not sent",
                                                    "acks not sent by whole launches",
                                                    "clock by one block",
                                                    "clock at start",
                                                    "number by clock",
                                                    "never cleared",
                                                    "cleared by first block",
                                                    "clearing unfenced",
                                                    "other buffer cleared",
                                                    "short flags",
                                                    "arrivals stay",
                                                    "no limit on free",
                                                    "no limit on words"};

const char *faultName(fault_t fault) {
  return FAULT_NAMES[fault];
}

static void fillSteps(uint8_t *out, const step_t *steps, int n) {
  for (int i = 0; i < n; i++) out[i] = (uint8_t)steps[i];
}
#define STEPS(out, ...)                                                                            \
  fillSteps(out, (const step_t[]){__VA_ARGS__},                                                    \
            (int)(sizeof((const step_t[]){__VA_ARGS__}) / sizeof(step_t)))

/* As in kernels/ll/dispatch_kernel.cuh, combine_kernel.cuh, partial_kernel.cuh: [parts][role][not the
 * block that announces]. */
static void initSteps(model_t *m) {
  memset(m->steps, STEP_END, sizeof m->steps);
  for (int other = 0; other < 2; other++) {
    uint8_t *send = m->steps[SEND][0][other], *recv = m->steps[RECV][1][other];
    uint8_t *sends = m->steps[BOTH][0][other], *receives = m->steps[BOTH][1][other];
    if (m->setup.kind == DISPATCH) {
      STEPS(sends, STEP_READ, STEP_FREE, STEP_PUT_ROWS);
      if (other) {
        STEPS(send, STEP_READ, STEP_FREE, STEP_PUT_WORDS, STEP_PUT_ROWS);
        STEPS(recv, STEP_READ, STEP_GET_WORDS, STEP_GET_ROWS);
        STEPS(receives, STEP_READ, STEP_FREE, STEP_PUT_WORDS, STEP_GET_WORDS, STEP_GET_ROWS);
      } else {
        STEPS(send, STEP_READ, STEP_FREE, STEP_PUT_WORDS, STEP_ACK, STEP_PUT_ROWS);
        STEPS(recv, STEP_READ, STEP_GET_WORDS, STEP_RECORD, STEP_GET_ROWS);
        STEPS(receives, STEP_READ, STEP_FREE, STEP_PUT_WORDS, STEP_ACK, STEP_GET_WORDS, STEP_RECORD,
              STEP_GET_ROWS);
      }
    } else if (m->setup.kind == COMBINE && other) {
      STEPS(send, STEP_READ, STEP_FREE, STEP_PUT_ROWS);
      STEPS(recv, STEP_READ, STEP_GET_ROWS);
      STEPS(sends, STEP_READ, STEP_FREE, STEP_PUT_ROWS);
      STEPS(receives, STEP_READ, STEP_GET_ROWS);
    } else if (m->setup.kind == COMBINE) {
      STEPS(send, STEP_READ, STEP_FREE, STEP_PUT_ROWS, STEP_PUT_ANNOUNCE, STEP_ACK);
      STEPS(recv, STEP_READ, STEP_GET_ROWS, STEP_GET_ANNOUNCE, STEP_RECORD);
      STEPS(sends, STEP_READ, STEP_FREE, STEP_PUT_ROWS, STEP_GET_ANNOUNCE, STEP_RECORD);
      STEPS(receives, STEP_READ, STEP_FREE, STEP_PUT_ANNOUNCE, STEP_ACK, STEP_GET_ROWS);
    } else if (other) {
      STEPS(send, STEP_READ, STEP_FREE, STEP_PUT_WORDS, STEP_GET_WORDS, STEP_PUT_ROWS);
      STEPS(recv, STEP_READ, STEP_GET_ROWS);
      STEPS(sends, STEP_READ, STEP_FREE, STEP_GET_WORDS, STEP_PUT_ROWS);
      STEPS(receives, STEP_READ, STEP_FREE, STEP_PUT_WORDS, STEP_GET_ROWS);
    } else {
      STEPS(send, STEP_READ, STEP_FREE, STEP_PUT_WORDS, STEP_PUT_ANNOUNCE, STEP_ACK, STEP_GET_WORDS,
            STEP_PUT_ROWS);
      STEPS(recv, STEP_READ, STEP_GET_ROWS, STEP_GET_ANNOUNCE, STEP_RECORD);
      STEPS(sends, STEP_READ, STEP_FREE, STEP_GET_WORDS, STEP_PUT_ROWS, STEP_GET_ANNOUNCE,
            STEP_RECORD);
      STEPS(receives, STEP_READ, STEP_FREE, STEP_PUT_WORDS, STEP_PUT_ANNOUNCE, STEP_ACK,
            STEP_GET_ROWS);
    }
  }
}

void modelInit(model_t *m, const setup_t *setup) {
  memset(m, 0, sizeof *m);
  m->setup = *setup;
  for (int r = 0; r < setup->numRanks; r++) {
    const char *program = setup->program[r] ? setup->program[r] : setup->program[0];
    int sent = setup->first, waiting[2] = {0, 0};
    for (const char *p = program; *p; p++) {
      launch_t *l = &m->launch[r][m->numLaunches[r]++];
      l->parts = *p == 'B' ? BOTH : *p == 'S' ? SEND : RECV;
      l->ordinal = (uint8_t)(l->parts & SEND ? ++sent : waiting[*p == 'L' && waiting[1]]);
      if (l->parts == SEND) waiting[waiting[0] != 0] = sent;
      if (l->parts != RECV) continue;
      if (l->ordinal == waiting[0]) waiting[0] = waiting[1];
      waiting[1] = 0;
    }
  }
  m->numCells = numCellsOf(m);
  initSteps(m);
}

/* As epLlControlInit. */
void modelStart(const model_t *m, state_t *s) {
  memset(s, 0, sizeof *s);
  const int f = m->setup.first;
  for (int r = 0; r < m->setup.numRanks; r++) {
    rank_t *k = &s->rank[r];
    k->clock = (uint32_t)f << 16;
    k->done[f & 1] = k->acked[f & 1] = (uint8_t)f;
    k->done[~f & 1] = k->acked[~f & 1] = (uint8_t)(f ? f - 1 : 0);
    k->mask = (uint8_t)((1 << m->setup.numRanks) - 1);
  }
}

int bufOf(const model_t *m, int number) {
  return m->setup.fault == FAULT_ONE_BUFFER ? 0 : number & 1;
}
unsigned flagOf(const model_t *m, int number) {
  return epLlFlag((uint64_t)number,
                  m->setup.fault == FAULT_SHORT_FLAGS ? 2 : (uint64_t)m->setup.flags);
}

step_t stepOf(const model_t *m, const state_t *s, int r, int b, int role) {
  const rank_t *k = &s->rank[r];
  const role_t *o = &k->block[b].role[role];
  const bool other = m->setup.kind == DISPATCH ? b > 0 : b < m->setup.numBlocks - 1;
  return (step_t)m->steps[m->launch[r][k->launch].parts][role][other][o->pc];
}

actor_t actorOf(const model_t *m, const state_t *s, int r, int b, int role) {
  const role_t *o = &s->rank[r].block[b].role[role];
  return (actor_t){o, r, b, m->launch[r][s->rank[r].launch].ordinal, bufOf(m, o->number)};
}

/* The wait for `source` has been given up. */
static bool isGivenUp(const model_t *m, const rank_t *k, int source, step_t step) {
  if (m->setup.fault == FAULT_NO_TIMEOUT_FREE && step == STEP_FREE) return false;
  if (m->setup.fault == FAULT_NO_TIMEOUT_WORDS && step != STEP_FREE && step != STEP_GET_ROWS) {
    return false;
  }
  return k->failed || !(k->mask >> source & 1);
}

/* The peer has received operation e - 2: its free word says so. */
static bool hasFreed(const model_t *m, const state_t *s, const actor_t *a, int peer) {
  const word_t word = s->rank[a->rank].cell[freeCell(m, a->buf, peer)].now;
  return epLlIsFree((uint64_t)a->role->number, ordinalIn(word));
}

bool canSend(const model_t *m, const state_t *s, const actor_t *a, int *waitsFor) {
  if (a->role->isFree || m->setup.fault == FAULT_NO_FREE_CHECK) return true;
  for (int r = 0; r < m->setup.numRanks; r++) {
    if (r == a->rank || !(a->role->active >> r & 1)) continue;
    if (hasFreed(m, s, a, r) || isGivenUp(m, &s->rank[a->rank], r, STEP_FREE)) continue;
    *waitsFor |= 1 << r;
  }
  return *waitsFor == 0;
}

bool isThere(const model_t *m, const state_t *s, const actor_t *a, place_t p) {
  return markIn(s->rank[a->rank].cell[p.cell].now) == flagOf(m, a->role->number);
}

bool canGet(const model_t *m, const state_t *s, const actor_t *a, place_t p, step_t step) {
  return isThere(m, s, a, p) || isGivenUp(m, &s->rank[a->rank], p.source, step);
}

const char *store(state_t *s, place_t p, word_t w) {
  rank_t *at = &s->rank[p.at];
  if (at->gone) return NULL;
  cell_t *c = &at->cell[p.cell];
  if (c->queue[1]) return "three stores are on their way to one cell";
  c->queue[c->queue[0] ? 1 : 0] = w;
  return NULL;
}

static const char *take(const model_t *m, state_t *s, const actor_t *a, place_t p, step_t step) {
  role_t *role = (role_t *)a->role;
  const word_t w = s->rank[a->rank].cell[p.cell].now;
  if (!isThere(m, s, a, p)) return NULL; /* given up */
  if (ordinalIn(w) != (unsigned)a->ordinal) return "a cell of another operation was taken";
  if (sourceIn(w) != p.source) return "a cell of another source was taken";
  const bool carriesAck =
      m->setup.kind == DISPATCH ? step == STEP_GET_WORDS : step == STEP_GET_ANNOUNCE;
  if (!carriesAck) return NULL;
  const bool first = p.cell == firstWordCell(m, a->buf, p.source);
  if (first && m->setup.fault == FAULT_LEAST_ACK_DISTANCE) {
    role->greatestDistance =
        (uint8_t)(role->greatestDistance && role->greatestDistance < ackDistanceIn(w)
                      ? role->greatestDistance
                      : ackDistanceIn(w));
  } else if (first && ackDistanceIn(w) > role->greatestDistance) {
    role->greatestDistance = (uint8_t)ackDistanceIn(w);
  }
  return NULL;
}

static const char *readControl(const model_t *m, state_t *s, int r, int b, int i) {
  rank_t *k = &s->rank[r];
  role_t *role = &k->block[b].role[i];
  const launch_t l = m->launch[r][k->launch];
  uint64_t n = k->sent[l.ordinal % NUM_HANDLES];
  if (l.parts & SEND) n = epLlNumSent(k->clock) + 1;
  if (m->setup.fault == FAULT_NUMBER_BY_CLOCK && l.parts == RECV) n = epLlNumSent(k->clock);
  if (m->setup.fault == FAULT_CLOCK_AT_START && l.parts & SEND && i == 0) {
    k->clock += (uint32_t)epBlockTick((unsigned)b, (unsigned)m->setup.numBlocks);
  }
  if (n > MAX_ORDINAL) return "the number of operations ran away";
  const int buf = bufOf(m, (int)n), other = bufOf(m, (int)n - 1);
  role->number = (uint8_t)n;
  role->isFree = (uint8_t)epLlIsFree(n, k->acked[buf]);
  role->ackDistance = (uint8_t)epLlAckDistance(n, k->done[other]);
  if (role->ackDistance > MAX_ACK_DISTANCE_SENT) role->ackDistance = MAX_ACK_DISTANCE_SENT;
  if (m->setup.fault == FAULT_ACK_DISTANCE_SHORT && role->ackDistance) role->ackDistance--;
  role->active = m->setup.dies == DIES_UNMASKED ? (uint8_t)((1 << m->setup.numRanks) - 1)
                                                : (uint8_t)(k->mask | 1u << r);
  return NULL;
}

/* Whoever sends operation e tells that it has received e - 1, if it has. */
static const char *sendAcks(const model_t *m, state_t *s, const actor_t *a) {
  const rank_t *k = &s->rank[a->rank];
  const bool isWhole = m->launch[a->rank][k->launch].parts == BOTH;
  const int e = a->role->number;
  if (m->setup.fault == FAULT_NO_ACKS || (m->setup.fault == FAULT_WHOLE_UNTOLD && isWhole)) {
    return NULL;
  }
  return a->role->ackDistance == 1 && e > 1 ? postFree(m, s, a->rank, e - 1) : NULL;
}

static void recordAnnounced(const model_t *m, state_t *s, const actor_t *a) {
  rank_t *k = &s->rank[a->rank];
  const int e = a->role->number;
  k->done[a->buf] = (uint8_t)e;
  k->acked[bufOf(m, e - 1)] = (uint8_t)epLlAcked((uint64_t)e, a->role->greatestDistance);
  if (m->setup.fault == FAULT_ACKED_EARLY) k->acked[bufOf(m, e - 1)] = (uint8_t)e;
}

static const char *putStep(const model_t *m, state_t *s, const actor_t *a, step_t step) {
  role_t *role = (role_t *)a->role;
  place_list_t l;
  placesToPut(m, a, step, &l);
  const int from = m->setup.fine ? role->got : 0, to = m->setup.fine ? from + 1 : l.n;
  for (int i = from; i < to && i < l.n; i++) {
    const unsigned ackDistance = step == STEP_PUT_ROWS ? 0 : role->ackDistance;
    const char *wrong = store(
        s, l.place[i],
        wordOf(flagOf(m, role->number), (unsigned)a->ordinal, (unsigned)a->rank, ackDistance));
    if (wrong) return wrong;
  }
  role->got = (uint16_t)to;
  if (to >= l.n) {
    role->pc++;
    role->got = 0;
  }
  return NULL;
}

static const char *getStep(const model_t *m, state_t *s, const actor_t *a, step_t step, int item) {
  role_t *role = (role_t *)a->role;
  place_list_t l;
  placesUnused(m, a, &l);
  for (int i = 0; step == STEP_GET_WORDS && i < l.n; i++) {
    if (isThere(m, s, a, l.place[i])) return "a word that nobody stored was taken";
  }
  placesToGet(m, a, step, &l);
  for (int i = 0; i < l.n; i++) {
    if (item != ALL_ITEMS && item != i) continue;
    const char *wrong = take(m, s, a, l.place[i], step);
    if (wrong) return wrong;
    role->got |= (uint16_t)(1u << i);
  }
  if (role->got == (1u << l.n) - 1) {
    role->pc++;
    role->got = 0;
  }
  return NULL;
}

/* After both roles of a block: what comes first at its end. */
static void endRoles(const model_t *m, state_t *s, int r, int b) {
  block_t *k = &s->rank[r].block[b];
  for (int i = 0; i < 2; i++) {
    if (stepOf(m, s, r, b, i) != STEP_END) return;
  }
  const int parts = m->launch[r][s->rank[r].launch].parts;
  const int number = k->role[0].number ? k->role[0].number : k->role[1].number;
  memset(k->role, 0, sizeof k->role);
  k->role[0].number = (uint8_t)number;
  k->role[0].pc = k->role[1].pc = MAX_STEPS - 1;
  const bool clears = parts & RECV && m->setup.fault != FAULT_NO_CLEAR &&
                      epLlClears((uint64_t)number, (uint64_t)m->setup.clearPeriod);
  k->finish = (uint8_t)(parts == RECV || clears ? STEP_ARRIVE : STEP_COUNT);
}

static const char *roleMove(const model_t *m, state_t *s, move_t v) {
  role_t *role = &s->rank[v.rank].block[v.block].role[v.role];
  for (bool first = true;; first = false) {
    const step_t step = stepOf(m, s, v.rank, v.block, v.role);
    const actor_t a = actorOf(m, s, v.rank, v.block, v.role);
    const char *wrong = NULL;
    int waitsFor = 0;
    if (step == STEP_END) break;
    if (!first) {
      const bool waits =
          step == STEP_GET_WORDS || step == STEP_GET_ROWS || step == STEP_GET_ANNOUNCE;
      if (m->setup.fine || waits || (step == STEP_FREE && !canSend(m, s, &a, &waitsFor))) break;
    }
    switch (step) {
    case STEP_READ:
      wrong = readControl(m, s, v.rank, v.block, v.role);
      role->pc++;
      break;
    case STEP_ACK:
      wrong = sendAcks(m, s, &a);
      role->pc++;
      break;
    case STEP_FREE:
      role->pc++;
      break;
    case STEP_RECORD:
      recordAnnounced(m, s, &a);
      role->pc++;
      break;
    case STEP_PUT_WORDS:
    case STEP_PUT_ROWS:
    case STEP_PUT_ANNOUNCE:
      wrong = putStep(m, s, &a, step);
      break;
    default:
      wrong = getStep(m, s, &a, step, v.item);
      break;
    }
    if (wrong) return wrong;
    if (m->setup.fault == FAULT_DONE_AT_SEND && step == STEP_PUT_ROWS) {
      s->rank[v.rank].done[a.buf] = role->number;
    }
  }
  endRoles(m, s, v.rank, v.block);
  return NULL;
}

static void forget(const model_t *m, rank_t *k, int source) {
  for (int i = 0; i < m->numCells; i++) {
    cell_t *c = &k->cell[i];
    word_t kept[2] = {0, 0};
    int n = 0;
    for (int q = 0; q < 2; q++) {
      if (c->queue[q] && (c->queue[q] == CLEARING || (int)sourceIn(c->queue[q]) != source)) {
        kept[n++] = c->queue[q];
      }
    }
    memcpy(c->queue, kept, sizeof kept);
  }
}

const char *modelMake(const model_t *m, state_t *s, move_t v) {
  rank_t *k = &s->rank[v.rank];
  switch ((move_kind_t)v.kind) {
  case MOVE_ROLE:
    return roleMove(m, s, v);
  case MOVE_FINISH:
    return finishMove(m, s, v.rank, v.block);
  case MOVE_ARRIVES: {
    cell_t *c = &k->cell[v.item];
    const word_t w = c->queue[v.role];
    c->now = w == CLEARING ? 0 : w;
    if (v.role == 0) c->queue[0] = c->queue[1];
    c->queue[1] = 0;
    return NULL;
  }
  case MOVE_DIES:
    k->gone = 1;
    memset(k->block, 0, sizeof k->block);
    memset(k->cell, 0, sizeof k->cell);
    k->launch = (uint8_t)m->numLaunches[v.rank];
    return NULL;
  default:
    /* What a rank has stored arrives long before it is given up, or never. */
    if (m->setup.dies != LATE) forget(m, k, v.item);
    if (m->setup.dies == DIES_UNMASKED) {
      k->failed = 1;
    } else {
      k->mask &= (uint8_t) ~(1u << v.item);
    }
    return NULL;
  }
}

const char *modelUnfinished(const model_t *m, const state_t *s) {
  static const char *const STUCK[] = {"rank 0 waits forever", "rank 1 waits forever",
                                      "rank 2 waits forever"};
  for (int r = 0; r < m->setup.numRanks; r++) {
    if (s->rank[r].launch < m->numLaunches[r]) return STUCK[r];
  }
  return NULL;
}
