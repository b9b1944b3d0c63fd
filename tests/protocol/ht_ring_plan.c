/* The tables: which tokens go where, and what each candidate of a launch reads and fills. */
#include <string.h>

#include "ht_ring_state.h"

static unsigned mix(unsigned a, unsigned b, unsigned c) {
  unsigned x = a * 2654435761u ^ b * 2246822519u ^ c * 3266489917u;
  x ^= x >> 15;
  x *= 2654435761u;
  return x >> 13;
}

static unsigned ranksOf(const plan_t *m, int operation, int owner, int token) {
  const ring_setup_t *p = m->p;
  if (p->owners && !(p->owners >> owner & 1)) return 0;
  if (!p->uneven) return (1u << m->numRanks) - 1;
  unsigned ranks = 0;
  for (int r = 0; r < m->numRanks; r++) {
    const unsigned x = mix((unsigned)(operation * 4 + owner), (unsigned)token, (unsigned)r);
    ranks |= (unsigned)(x % 4 < 3) << r;
  }
  return ranks;
}

int ringNumber(const plan_t *m, int kind, int operation, int owner, int token, unsigned ranks) {
  int n = 0;
  for (int e = 0; e <= operation; e++) {
    if (e < operation && kindOf(m, e) != kind) continue;
    const int end = e < operation ? m->p->numTokens : token;
    for (int t = 0; t < end; t++) n += (m->goes[e][owner][t] & ranks) != 0;
  }
  return n;
}

static void addLocation(location_t *to, uint8_t *n, bool isRing, int a, int b, int number,
                        int size) {
  to[(*n)++] = (location_t){isRing, (uint8_t)a, (uint8_t)b, (uint8_t)(number % size),
                            (uint8_t)(number / size + 1)};
}
static void addFifoSlot(const plan_t *m, location_t *to, uint8_t *n, int e, int o, int t,
                        int rank) {
  const int q = ringNumber(m, kindOf(m, e), e, o, t, 1u << rank);
  addLocation(to, n, false, o, rank, q, m->p->fifoSlots);
}
/* The ring slot of a token in the ring from rank r. */
static void addRingSlot(const plan_t *m, location_t *to, uint8_t *n, int e, int o, int t, int r) {
  const unsigned far = ~nearRanks(m, o);
  const int first =
      m->p->fault == RING_FAULT_RESTART ? ringNumber(m, kindOf(m, e), e, o, 0, far) : 0;
  addLocation(to, n, true, r, 0, ringNumber(m, kindOf(m, e), e, o, t, far) - first,
              m->p->ringSlots);
}

bool ringIsInPlace(const plan_t *m, int kind, int owner, int rank) {
  if (kind == DISPATCHES) return owner == rank;
  return m->p->flat && owner % m->p->perDomain == rank % m->p->perDomain;
}
/* FIFO slots of a token for the ranks of a set. */
static void addFifoSlots(const plan_t *m, location_t *to, uint8_t *n, int e, int o, int t,
                         unsigned ranks) {
  for (int h = 0; h < m->numRanks; h++) {
    if ((ranks >> h & 1) && !ringIsInPlace(m, kindOf(m, e), o, h))
      addFifoSlot(m, to, n, e, o, t, h);
  }
}

static item_t dispatchItem(const plan_t *m, int e, int r, int role, int c) {
  const int R = m->numRanks;
  const int t = role == RECEIVE ? c / R : c;
  const int o = role == SEND ? r : role == PASS ? peerOf(m, r) : (2 * R - 1 + r - c % R) % R;
  const unsigned ranks = m->goes[e][o][t], near = nearRanks(m, r);
  item_t i = {.id = (uint8_t)(1 + e * RING_TOKENS + t), .token = (uint8_t)(o * RING_TOKENS + t)};
  if (role == RECEIVE) {
    if ((i.is = ranks >> r & 1)) addFifoSlots(m, i.in, &i.numIn, e, o, t, 1u << r);
    return i;
  }
  if (role == SEND && (ranks & ~near)) addRingSlot(m, i.out, &i.numOut, e, o, t, r);
  if (role == PASS && (ranks & near)) addRingSlot(m, i.in, &i.numIn, e, o, t, o);
  addFifoSlots(m, i.out, &i.numOut, e, o, t, ranks & near);
  i.is = i.numOut > 0;
  return i;
}

static item_t combineItem(const plan_t *m, int e, int r, int role, int c) {
  const int R = m->numRanks, T = m->p->numTokens;
  const bool byOwner = m->p->fault == RING_FAULT_ORDER;
  const int turn = byOwner ? c / T : c % R, ofSender = byOwner ? c % T : c / R;
  const int t = role == SEND ? ofSender : c;
  const int o = role == SEND ? (r + 1 + turn) % R : role == PASS ? peerOf(m, r) : r;
  const unsigned ranks = m->goes[e][o][t], near = nearRanks(m, r);
  item_t i = {.id = (uint8_t)(1 + e * RING_TOKENS + t), .token = (uint8_t)(o * RING_TOKENS + t)};
  if (role == SEND) {
    addFifoSlots(m, i.out, &i.numOut, e, o, t, ranks & 1u << r);
    i.is = i.numOut > 0;
    return i;
  }
  addFifoSlots(m, i.in, &i.numIn, e, o, t, ranks & near);
  if (role == PASS && (ranks & near)) addRingSlot(m, i.out, &i.numOut, e, o, t, r);
  if (role == RECEIVE && (ranks & ~near)) addRingSlot(m, i.in, &i.numIn, e, o, t, peerOf(m, r));
  i.is = role == RECEIVE ? ranks != 0 : i.numOut > 0;
  return i;
}

static void planItems(plan_t *m, int e) {
  const int T = m->p->numTokens, kind = kindOf(m, e);
  for (int role = 0; role < RING_ROLES; role++) {
    const bool byRank = role == (kind == DISPATCHES ? RECEIVE : SEND);
    const int n = byRank ? T * m->numRanks : T;
    m->numCandidates[e][role] = (uint8_t)n;
    for (int r = 0; r < m->numRanks; r++) {
      for (int c = 0; c < n; c++) {
        const item_t i =
            kind == DISPATCHES ? dispatchItem(m, e, r, role, c) : combineItem(m, e, r, role, c);
        m->item[e][r][role][c] = i;
        if (role == RECEIVE && i.is) m->received[e][r] |= (uint16_t)(1u << i.token);
      }
    }
  }
}

static void planSlots(plan_t *m, int e) {
  const int kind = kindOf(m, e);
  for (int r = 0; r < m->numRanks; r++) {
    const int o = ownerOf(m, kind, r);
    int q = m->base[kind][e][r];
    for (int t = 0; t < m->p->numTokens; t++) {
      if (!(m->goes[e][o][t] & ~nearRanks(m, o))) continue;
      m->slotId[kind][r][q++] = (uint8_t)(1 + e * RING_TOKENS + t);
    }
    m->base[kind][e + 1][r] = (uint8_t)q;
    m->base[!kind][e + 1][r] = m->base[!kind][e][r];
  }
}

void ringPlan(plan_t *m, const ring_setup_t *p) {
  m->p = p;
  m->numRanks = 2 * p->perDomain;
  m->numOperations = (int)strlen(p->program);
  memcpy(m->blocks, p->blocks, sizeof m->blocks);
  if (p->fault == RING_FAULT_NO_MIDDLE) m->blocks[SEND] += m->blocks[PASS], m->blocks[PASS] = 0;
  if (p->fault == RING_FAULT_NO_RECEIVER)
    m->blocks[PASS] += m->blocks[RECEIVE], m->blocks[RECEIVE] = 0;
  for (int role = 0; role < RING_ROLES; role++) m->numBlocks += m->blocks[role];
  for (int e = 0; e < m->numOperations; e++) {
    for (int o = 0; o < m->numRanks; o++) {
      for (int t = 0; t < p->numTokens; t++) m->goes[e][o][t] = (uint8_t)ranksOf(m, e, o, t);
    }
  }
  for (int e = 0; e < m->numOperations; e++) {
    planItems(m, e);
    planSlots(m, e);
  }
}
