/* The barrier round of ranks that a launcher started: each shows how far it is, and all learn of a failure.
 * */
#include "validate/checker.h"

#include "plan/error.h"

#include <stdlib.h>
#include <string.h>

/* What a rank brings to a barrier round. */
typedef struct state {
  int failed, over;  /* over: rank 0 has seen enough time go by */
  int sharedDevices; /* of this rank's host, if there are not enough for its ranks */
  uint64_t cases, bytes, counted;
  ep_puts_t puts;
  ncclUniqueId id;
  ep_check_finding_t finding;
} state_t;

static state_t stateOf(const ep_check_team_t *team) {
  ep_check_job_t *job = team->job;
  const ep_check_options_t *o = team->options;
  return (state_t){.sharedDevices = o->launch->localRank >= o->numDevices ? o->numDevices : 0,
                   .failed = atomic_load(&job->failed),
                   .over = team->deadline > 0 && epNow() > team->deadline,
                   .cases = atomic_load(&job->cases),
                   .bytes = atomic_load(&job->bytes),
                   .counted = atomic_load(&job->counted),
                   .puts = epPutsLoad(job->puts, job->leastPuts),
                   .finding = job->finding,
                   .id = job->id};
}

/* The failure to tell: of the earliest case; there, who found something different rather than who
 * then waited for that rank. */
static const state_t *firstFailure(const state_t *all, int R) {
  const state_t *first = NULL;
  for (int r = 0; r < R; r++) {
    if (!all[r].failed) continue;
    const ep_check_finding_t *f = &all[r].finding;
    int isEarlier = !first || f->caseIdx < first->finding.caseIdx;
    int isCause = first && f->caseIdx == first->finding.caseIdx && strstr(f->what, "expected") &&
                  !strstr(first->finding.what, "expected");
    if (isEarlier || isCause) first = &all[r];
  }
  return first;
}

void epLaunchedBarrier(ep_check_team_t *team) {
  ep_launch_t *launch = team->options->launch;
  ep_check_job_t *job = team->job;
  if (atomic_load(&job->numArrived) == UINT64_MAX) return; /* all know already */
  state_t mine = stateOf(team), *all = calloc((size_t)launch->numRanks, sizeof *all);
  if (!all || epLaunchGather(launch, &mine, all, sizeof mine) != TREFOIL_OK) {
    const ep_check_culprit_t culprit = {EP_CASE_ABORTS,
                                        -1,
                                        "",
                                        ncclSuccess,
                                        atomic_load(&job->watch.places[launch->rank].caseIdx),
                                        1};
    epTeamFail(team, &culprit, all ? trefoilLastError() : "out of memory for a barrier round");
    atomic_store(&job->numArrived, UINT64_MAX);
  } else {
    const state_t *first = firstFailure(all, launch->numRanks);
    job->id = all[0].id;
    if (first) {
      job->finding = first->finding;
      atomic_store(&job->failed, 1);
    }
    if (all[0].over) atomic_store(&job->timeOver, 1);
    if (first || all[0].over) {
      atomic_store(&job->stop, 1);
      atomic_store(&job->numArrived, UINT64_MAX);
    }
    team->bytesOfAll = team->countedOfAll = 0;
    team->putsOfAll = (ep_puts_t){0};
    team->leastOfAll = all[0].cases;
    for (int r = 0; r < launch->numRanks; r++) {
      if (all[r].sharedDevices) team->sharedDevices = all[r].sharedDevices;
      team->bytesOfAll += all[r].bytes;
      team->countedOfAll += all[r].counted;
      epPutsAdd(&team->putsOfAll, &all[r].puts);
      if (all[r].cases < team->leastOfAll) team->leastOfAll = all[r].cases;
    }
  }
  free(all);
}
