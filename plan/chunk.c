/* Counting a chunk: one visit of its entries. A bitmap of touched targets makes walking them
 * ascending, and clearing them, cost what was touched and not the number of ranks. The lists of
 * rows are a counting sort by target, made only where rows are asked for. */
#include "plan/chunk.h"

#include <string.h>

static int numWords(int numTargets) {
  return (numTargets + 63) / 64;
}

static int64_t maxEntriesOf(const trefoil_routing_t *r, int64_t maxTokens) {
  return 2 * maxTokens * r->shape.topk; /* each entry at most one row to a rank, one to a node */
}

static size_t round16(size_t bytes) {
  return (bytes + 15) / 16 * 16;
}

size_t epChunkBytes(const trefoil_routing_t *r, int64_t maxTokens) {
  size_t targets = (size_t)(r->shape.numRanks + r->shape.numRanks / r->shape.ranksPerNode);
  return round16((size_t)r->shape.numExperts * sizeof(int32_t)) +
         3 * round16(targets * sizeof(int64_t)) +
         round16((size_t)numWords((int)targets) * sizeof(uint64_t)) +
         (size_t)maxEntriesOf(r, maxTokens) * sizeof(trefoil_row_t);
}

static void *take(char **next, size_t bytes) {
  void *p = *next;
  *next += round16(bytes);
  return p;
}

void epChunkInit(ep_chunk_t *c, const trefoil_routing_t *r, int64_t maxTokens, void *memory) {
  const trefoil_shape_t *s = &r->shape;
  char *next = memory;
  memset(c, 0, sizeof *c);
  c->routing = r;
  c->numTargets = s->numRanks + s->numRanks / s->ranksPerNode;
  int32_t *rankOf = take(&next, (size_t)s->numExperts * sizeof(int32_t));
  for (int e = 0; e < s->numExperts; e++) rankOf[e] = trefoilRankOfExpert(s, e);
  c->rankOf = rankOf;
  size_t perTarget = (size_t)c->numTargets * sizeof(int64_t);
  c->rows = take(&next, perTarget);
  c->stamp = take(&next, perTarget);
  c->start = take(&next, perTarget);
  c->touched = take(&next, (size_t)numWords(c->numTargets) * sizeof(uint64_t));
  c->list = (trefoil_row_t *)next;
  c->maxEntries = maxEntriesOf(r, maxTokens);
}

int epChunkNextTarget(const ep_chunk_t *c, int target) {
  if (target >= c->numTargets) return c->numTargets;
  int word = target >> 6, words = numWords(c->numTargets);
  uint64_t bits = c->touched[word] & (~(uint64_t)0 << (target & 63));
  while (!bits) {
    if (++word == words) return c->numTargets;
    bits = c->touched[word];
  }
  return word * 64 + __builtin_ctzll(bits);
}

static void clear(ep_chunk_t *c) {
  for (int t = epChunkNextTarget(c, 0); t < c->numTargets; t = epChunkNextTarget(c, t + 1)) {
    c->rows[t] = 0;
  }
  memset(c->touched, 0, (size_t)numWords(c->numTargets) * sizeof *c->touched);
}

/* Whether this entry is a new row for the target; every entry where each counts. */
static inline int isNewRow(ep_chunk_t *c, int target, int64_t serial, int eachCounts) {
  if (!eachCounts && c->stamp[target] == serial) return 0;
  c->stamp[target] = serial;
  return 1;
}

void epChunkLoad(ep_chunk_t *c, int origin, int64_t first, int64_t end) {
  const trefoil_shape_t *s = &c->routing->shape;
  clear(c);
  c->origin = origin;
  c->first = first;
  c->end = end;
  c->listed = 0;
  if (first >= end) return;
  const int32_t *row = c->routing->topkIdx[origin] + first * s->topk;
  for (int64_t t = first; t < end; t++, row += s->topk) {
    int64_t serial = ++c->serial;
    for (int k = 0; k < s->topk; k++) {
      if (row[k] < 0) continue;
      int rank = c->rankOf[row[k]];
      if (!isNewRow(c, rank, serial, c->perEntry)) continue;
      c->touched[rank >> 6] |= (uint64_t)1 << (rank & 63);
      c->rows[rank]++;
      int node = s->numRanks + rank / s->ranksPerNode;
      if (!isNewRow(c, node, serial, 0)) continue;
      c->touched[node >> 6] |= (uint64_t)1 << (node & 63);
      c->rows[node]++;
    }
  }
}

static void buildLists(ep_chunk_t *c) {
  const trefoil_shape_t *s = &c->routing->shape;
  int64_t sum = 0;
  for (int t = epChunkNextTarget(c, 0); t < c->numTargets; t = epChunkNextTarget(c, t + 1)) {
    c->start[t] = sum;
    sum += c->rows[t];
  }
  /* each start walks to its list's end, and is put back below */
  const int32_t *row = c->routing->topkIdx[c->origin] + c->first * s->topk;
  for (int64_t token = c->first; token < c->end; token++, row += s->topk) {
    int64_t serial = ++c->serial;
    for (int k = 0; k < s->topk; k++) {
      if (row[k] < 0) continue;
      int rank = c->rankOf[row[k]], node = s->numRanks + rank / s->ranksPerNode;
      if (!isNewRow(c, rank, serial, c->perEntry)) continue;
      c->list[c->start[rank]++] = (trefoil_row_t){token, c->perEntry ? k : -1};
      if (isNewRow(c, node, serial, 0)) c->list[c->start[node]++] = (trefoil_row_t){token, -1};
    }
  }
  for (int t = epChunkNextTarget(c, 0); t < c->numTargets; t = epChunkNextTarget(c, t + 1)) {
    c->start[t] -= c->rows[t];
  }
  c->listed = 1;
}

void epChunkRows(ep_chunk_t *c, int target, trefoil_row_t *rows) {
  if (!c->listed) buildLists(c);
  memcpy(rows, c->list + c->start[target], (size_t)c->rows[target] * sizeof *rows);
}
