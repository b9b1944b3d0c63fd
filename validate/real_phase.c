/* A phase of a real shape: all ranks begin it together, and the time is that of all of them. */
#include "validate/real_work.h"

#include "plan/error.h"
#include "validate/checker.h"

double epRealPhase(real_rank_t *rank, real_phase_t phase, const char *name) {
  real_t *run = rank->run;
  int R = run->options->shape.numRanks;
  pthread_barrier_wait(&run->barrier);
  run->started[rank->rank] = epNow();
  atomic_fetch_add(&rank->place->op, 1); /* how far this rank is */
  if (!atomic_load(&run->failed) && phase(rank) != TREFOIL_OK)
    epRealFail(run, "rank %d, %s: %s", rank->rank, name, trefoilLastError());
  run->ended[rank->rank] = epNow();
  atomic_fetch_add(run->numDone, 1);
  pthread_barrier_wait(&run->barrier);
  double first = run->started[0], last = run->ended[0];
  for (int r = 1; r < R; r++) {
    if (run->started[r] < first) first = run->started[r];
    if (run->ended[r] > last) last = run->ended[r];
  }
  pthread_barrier_wait(&run->barrier);
  return last - first;
}
