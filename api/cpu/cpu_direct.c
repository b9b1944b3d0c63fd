/* Rows of a combine read where they lie (HT, all ranks in one process): the reader's side and the way out.
 * Against rows copied into messages (8 ranks on two cores, hidden 7168, top-8, 512 and 2048 tokens): 1.6 to
 * 2.5 times as fast with flat slots, 1.15 to 1.4 times with expert-major ones, whose sums take longer.
 *
 * An operation whose rows are read in the caller's memory ends when they are read. If it ends without,
 * because the group has failed here, the caller may free them at once while a late rank still comes.
 * So a rank that fails withdraws its rows first, and waits for the present readers; a reader raises
 * its word, then checks whether the rows are still there. Each side writes its own word and then
 * looks at the other's, both in sequentially consistent order, so that one of them sees the other. A
 * reader waits for no rank while it reads: the wait of the one that leaves is a copy long at most. */
#include <sched.h>

#include "api/cpu/cpu.h"

static int isDirect(const ep_cpu_group_t *g) {
  return g->oneProcess && epIsHt(g->group);
}

int epBeginReading(const ep_op_t *op, int first, int n) {
  ep_cpu_group_t *g = op->g;
  if (!isDirect(g)) return 1;
  atomic_fetch_add(&g->peers[g->me].control->readers, 1);
  for (int r = first; r < first + n; r++) {
    if (r == g->me || !atomic_load(&g->peers[r].control->withdrawn)) continue;
    epEndReading(op);
    epPeerWithdrawn(op, r);
    return 0;
  }
  return 1;
}

void epEndReading(const ep_op_t *op) {
  ep_cpu_group_t *g = op->g;
  if (isDirect(g)) atomic_fetch_sub(&g->peers[g->me].control->readers, 1);
}

void epWithdraw(ep_cpu_group_t *g) {
  if (!isDirect(g)) return;
  atomic_store(&g->peers[g->me].control->withdrawn, 1);
  for (int r = 0; r < g->R; r++) {
    while (r != g->me && atomic_load(&g->peers[r].control->readers)) sched_yield();
  }
}
