/* The rows of one chunk of one origin, counted per target rank and per target node. */
#ifndef TREFOIL_PLAN_CHUNK_H
#define TREFOIL_PLAN_CHUNK_H

#include "trefoil/plan.h"

/* Targets are the ranks [0, R), then the nodes R + [0, R/G). A row to a rank is a token, or a
 * (token, k) where perEntry is set; a row to a node is a token. */
typedef struct ep_chunk {
  const trefoil_routing_t *routing;
  int perEntry;
  int numTargets;        /* R + R/G */
  const int32_t *rankOf; /* [E] */

  int origin; /* the chunk: tokens [first, end) of origin */
  int64_t first, end;
  int64_t *rows;     /* [numTargets] rows to each target */
  uint64_t *touched; /* bitmap of the targets with rows */
  int64_t *stamp;    /* [numTargets] serial of the token counted last */
  int64_t serial;

  int listed;          /* rows below are filled */
  int64_t *start;      /* [numTargets] first entry of a target's list */
  trefoil_row_t *list; /* lists of all targets, each ascending by (token, k) */
  int64_t maxEntries;  /* room of list */
} ep_chunk_t;

/* Bytes of an ep_chunk_t's arrays for chunks of at most maxTokens tokens. */
size_t epChunkBytes(const trefoil_routing_t *routing, int64_t maxTokens);
/* memory: epChunkBytes, zeroed; rankOf [E] is borrowed. */
void epChunkInit(ep_chunk_t *c, const trefoil_routing_t *routing, int64_t maxTokens, void *memory);
/* Counts the rows of tokens [first, end) of origin: O(tokens * K), nothing per rank. */
void epChunkLoad(ep_chunk_t *c, int origin, int64_t first, int64_t end);
/* The next target with rows, at or after target; numTargets if none. */
int epChunkNextTarget(const ep_chunk_t *c, int target);
/* Copies the rows of a target; lists are built at the first call after a load. */
void epChunkRows(ep_chunk_t *c, int target, trefoil_row_t *rows);

#endif
