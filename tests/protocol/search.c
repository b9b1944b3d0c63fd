/* A state is known by 64 bits of XXH3 of its bytes. Two states that share them would hide one: with n
 * states that happens with a chance of n^2 / 2^65, one in a million for six million. Every path ends, since
 * no step is ever taken back, so a state needs to be visited once only. */
#include "search.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

typedef struct seen {
  uint64_t *slot, size, n;
} seen_t;

static bool seenAdd(seen_t *v, uint64_t h) {
  if (v->n * 2 >= v->size) {
    seen_t more = {NULL, v->size ? v->size * 2 : 1 << 16, 0};
    more.slot = calloc(more.size, sizeof *more.slot);
    if (!more.slot) {
      fprintf(stderr, "no memory for %llu states\n", (unsigned long long)more.size);
      exit(3);
    }
    for (uint64_t i = 0; i < v->size; i++) {
      if (v->slot[i]) seenAdd(&more, v->slot[i]);
    }
    free(v->slot);
    *v = more;
  }
  h += h == 0;
  uint64_t i = h & (v->size - 1);
  for (; v->slot[i]; i = (i + 1) & (v->size - 1)) {
    if (v->slot[i] == h) return false;
  }
  v->slot[i] = h;
  v->n++;
  return true;
}

/* The states of the path lie one behind the other. */
typedef struct frame {
  move_t moves[MAX_MOVES];
  int numMoves, next;
} frame_t;

typedef struct path {
  frame_t *frame;
  char *states;
  int depth, room;
} path_t;

static char *stateAt(const machine_t *m, const path_t *p, int i) {
  return p->states + (size_t)i * m->stateBytes;
}

static void push(const machine_t *m, path_t *p, const void *state) {
  if (p->depth == p->room) {
    p->room = p->room ? p->room * 2 : 64;
    p->frame = realloc(p->frame, (size_t)p->room * sizeof *p->frame);
    p->states = realloc(p->states, (size_t)p->room * m->stateBytes);
    if (!p->frame || !p->states) {
      fprintf(stderr, "no memory for a path of %d moves\n", p->room);
      exit(3);
    }
  }
  frame_t *f = &p->frame[p->depth];
  memcpy(stateAt(m, p, p->depth++), state, m->stateBytes);
  f->next = 0;
  f->numMoves = m->moves(m->model, state, f->moves);
}

static void printPath(const machine_t *m, const path_t *p, const char *wrong) {
  for (int i = 0; i < p->depth && p->frame[i].next > 0; i++) {
    char text[160];
    m->describe(m->model, stateAt(m, p, i), p->frame[i].moves[p->frame[i].next - 1], text,
                sizeof text);
    printf("%4d  %s\n", i + 1, text);
  }
  printf("then: %s\n", wrong);
}

outcome_t search(const machine_t *m, const void *start, uint64_t maxStates, bool trace) {
  seen_t seen = {NULL, 0, 0};
  path_t path = {NULL, NULL, 0, 0};
  outcome_t out = {0, 0, 0, NULL, true};
  char *s = malloc(m->stateBytes);
  if (!s) {
    fprintf(stderr, "no memory for a state\n");
    exit(3);
  }
  seenAdd(&seen, XXH3_64bits(start, m->stateBytes));
  push(m, &path, start);
  while (path.depth > 0 && !out.wrong) {
    frame_t *f = &path.frame[path.depth - 1];
    const char *now = stateAt(m, &path, path.depth - 1);
    if (f->numMoves == 0) out.wrong = m->unfinished(m->model, now);
    if (out.wrong || f->next == f->numMoves) {
      if (!out.wrong) path.depth--;
      continue;
    }
    memcpy(s, now, m->stateBytes);
    out.wrong = m->make(m->model, s, f->moves[f->next++]);
    out.numMoves++;
    if (out.wrong || !seenAdd(&seen, XXH3_64bits(s, m->stateBytes))) continue;
    if (maxStates && seen.n > maxStates) {
      out.isComplete = false;
      break;
    }
    push(m, &path, s);
    if (path.depth > out.depth) out.depth = path.depth;
  }
  out.numStates = seen.n;
  if (out.wrong) out.isComplete = false;
  if (out.wrong && trace) printPath(m, &path, out.wrong);
  free(s);
  free(seen.slot);
  free(path.frame);
  free(path.states);
  return out;
}
