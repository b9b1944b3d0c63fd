/* What the files of the model share. */
#ifndef TREFOIL_TESTS_PROTOCOL_MODEL_H
#define TREFOIL_TESTS_PROTOCOL_MODEL_H

#include "explorer.h"

enum { MAX_PLACES = 16 };

typedef struct place {
  uint8_t at, cell, source; /* rank whose memory it is, cell, rank that stores there */
} place_t;
typedef struct place_list {
  int n;
  place_t place[MAX_PLACES];
} place_list_t;

/* A role at a step: what it is and what it read. */
typedef struct actor {
  const role_t *role;
  int rank, block, ordinal, buf;
} actor_t;

enum { ENDED = 255 }; /* block_t.finish */

int bufOf(const model_t *m, int number);
unsigned flagOf(const model_t *m, int number);
/* Queues a store at its cell. NULL, or what is wrong. */
const char *store(state_t *s, place_t p, word_t w);
/* To all peers: this rank has received `number`. */
const char *postFree(const model_t *m, state_t *s, int r, int number);
/* One step of a block whose roles have ended. */
const char *finishMove(const model_t *m, state_t *s, int r, int b);
step_t stepOf(const model_t *m, const state_t *s, int r, int b, int role);
actor_t actorOf(const model_t *m, const state_t *s, int r, int b, int role);
/* What a waiting step may do; *waitsFor gets the ranks that it waits for, as bits. */
bool canSend(const model_t *m, const state_t *s, const actor_t *a, int *waitsFor);
bool isThere(const model_t *m, const state_t *s, const actor_t *a, place_t p);
bool canGet(const model_t *m, const state_t *s, const actor_t *a, place_t p, step_t step);

int tokensOf(const model_t *m, int ordinal, int r);
int rankOfEntry(const model_t *m, int ordinal, int r, int t, int k);
int freeCell(const model_t *m, int buf, int from);
/* The word that carries the ack distance: a routing word of token 0, or an announcement. */
int firstWordCell(const model_t *m, int buf, int from);
int numCellsOf(const model_t *m);
bool isClearedWith(const model_t *m, int cell, int buf);
void placesToPut(const model_t *m, const actor_t *a, step_t step, place_list_t *l);
void placesToGet(const model_t *m, const actor_t *a, step_t step, place_list_t *l);
/* Words that a receiver looks at although nobody stores them in this operation. */
void placesUnused(const model_t *m, const actor_t *a, place_list_t *l);

#endif
