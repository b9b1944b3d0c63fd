/* The board's layout: the ranks' entries, then a ring for each ordered pair. */
#include "comm_internal.h"

static size_t ringsAt(int numRanks) {
  size_t bytes = sizeof(ep_board_t) + (size_t)numRanks * sizeof(ep_rank_entry_t);
  return (bytes + 4095) & ~(size_t)4095;
}

/* Sparse: pages of rings that are not used do not exist. */
size_t epBoardBytes(int numRanks) {
  return ringsAt(numRanks) + (size_t)numRanks * (size_t)numRanks * sizeof(ep_ring_t);
}

ep_ring_t *epBoardRing(ep_board_t *board, int src, int dst) {
  char *rings = (char *)board + ringsAt(board->numRanks);
  return (ep_ring_t *)(void *)rings + (size_t)src * (size_t)board->numRanks + (size_t)dst;
}
