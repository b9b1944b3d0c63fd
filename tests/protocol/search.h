/* Depth-first search through every state that a machine can reach. */
#ifndef TREFOIL_TESTS_PROTOCOL_SEARCH_H
#define TREFOIL_TESTS_PROTOCOL_SEARCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One possible step of a state; what the fields mean is the machine's. */
typedef struct move {
  uint8_t kind, rank, block, role, item;
} move_t;
enum { MAX_MOVES = 256 };

/* States are plain bytes: equal states are equal bytes. No step may ever be taken back. */
typedef struct machine {
  const void *model;
  size_t stateBytes;
  /* The moves that are possible, or fewer if they are enough. */
  int (*moves)(const void *model, const void *state, move_t moves[MAX_MOVES]);
  /* Makes a move. NULL, or what is wrong. */
  const char *(*make)(const void *model, void *state, move_t move);
  /* Of a state without moves: NULL, or what has not ended. */
  const char *(*unfinished)(const void *model, const void *state);
  void (*describe)(const void *model, const void *state, move_t move, char *text, size_t size);
} machine_t;

typedef struct outcome {
  uint64_t numStates, numMoves;
  int depth;         /* of the longest path */
  const char *wrong; /* NULL, or the first thing found wrong */
  bool isComplete;   /* every reachable state was seen */
} outcome_t;

/* maxStates 0: no limit. With `trace`, prints the way to what is wrong. */
outcome_t search(const machine_t *machine, const void *start, uint64_t maxStates, bool trace);

#endif
