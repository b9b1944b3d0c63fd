#include "validate/check_slot.h"

#include "plan/error.h"
#include "validate/check_report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void epTeamFail(ep_check_team_t *team, const ep_check_culprit_t *culprit, const char *what) {
  ep_check_job_t *job = team->job;
  int no = 0;
  if (!atomic_compare_exchange_strong(&job->failing, &no, 1)) return;
  job->finding = (ep_check_finding_t){.outcome = culprit->outcome,
                                      .caseIdx = culprit->caseIdx,
                                      .numCases = culprit->numCases,
                                      .rank = culprit->rank,
                                      .result = culprit->result};
  snprintf(job->finding.call, sizeof job->finding.call, "%s", culprit->call ? culprit->call : "");
  snprintf(job->finding.what, sizeof job->finding.what, "%s", what);
  atomic_store(&job->failed, 1);
  atomic_store(&job->stop, 1);
}

/* Half a timeout in one call is waiting; that rank comes back soon, or is the cause. */
void epTeamAwaitHanging(ep_check_team_t *team) {
  struct timespec pause = {0, 5000000};
  while (epWatchLongest(&team->job->watch, team->options->timeoutNs / 2) >= 0)
    nanosleep(&pause, NULL);
}

/* ---- Memory ------------------------------------------------------------------------------------- */

void epBuffersFree(ep_buffer_t *b, size_t count) {
  for (size_t i = 0; i < count; i++) free(b[i].data);
  memset(b, 0, count * sizeof *b);
}

/* Where an image of so many bytes lies; NULL: out of memory. */
static uint8_t *grow(ep_buffer_t *b, size_t bytes) {
  if (bytes <= b->bytes) return b->data;
  free(b->data);
  *b = (ep_buffer_t){0};
  bytes += bytes / 2;
  if (posix_memalign((void **)&b->data, 64, bytes) != 0) return b->data = NULL;
  b->bytes = bytes;
  return b->data;
}

static trefoil_result_t growSlot(ep_slot_t *slot, int R) {
  size_t bytes = slot->c.usedBytes;
  for (int r = 0; r < R; r++) {
    ep_buffer_t *images = slot->buffers[r];
    int enough = 1;
    for (int round = 0; round < slot->c.numRounds; round++) {
      slot->initial[round][r] = grow(&images[EP_INITIAL + round], bytes);
      slot->expected[round][r] = grow(&images[EP_EXPECTED + round], bytes);
      enough &= slot->initial[round][r] && slot->expected[round][r];
      if (!slot->c.group->orderFree) continue;
      slot->bounds[round][r] = grow(&images[EP_BOUNDS + round], bytes);
      enough &= !!slot->bounds[round][r];
    }
    EP_CHECK(enough, TREFOIL_SYSTEM_ERROR, "out of memory for the images of a case");
  }
  return TREFOIL_OK;
}

static trefoil_result_t growResults(ep_worker_rank_t *worker, const ep_check_case_t *c) {
  for (int round = 0; round < c->numRounds; round++) {
    worker->result[round] = grow(&worker->buffers[round], c->usedBytes);
    EP_CHECK(worker->result[round], TREFOIL_SYSTEM_ERROR,
             "out of memory for the results of a case");
  }
  return TREFOIL_OK;
}

trefoil_result_t epSlotMake(ep_slot_t *slot, const ep_check_team_t *team, uint64_t index) {
  const ep_check_group_t *g = &team->group;
  int R = g->shape.numRanks;
  epFreeCase(&slot->c);
  EP_TRY(epMakeCase(&slot->c, g, index));
  if (team->options->countBytes && !g->isGrad) EP_TRY(epPlanCounts(&slot->c, &slot->counts));
  EP_TRY(growSlot(slot, R));
  for (int round = 0; round < slot->c.numRounds; round++) {
    for (int r = 0; r < R; r++) {
      epFillImage(&slot->c, round, r, slot->initial[round][r]);
      memcpy(slot->expected[round][r], slot->initial[round][r], slot->c.usedBytes);
    }
    EP_TRY(epExpect(&slot->c, round, slot->expected[round]));
  }
  for (int round = 0; g->orderFree && round < slot->c.numRounds; round++) {
    for (int r = 0; r < R; r++) {
      memcpy(slot->bounds[round][r], slot->initial[round][r], slot->c.usedBytes);
      epMakeMagnitudes(&slot->c, r, slot->bounds[round][r]);
    }
    EP_TRY(epExpect(&slot->c, round, slot->bounds[round]));
  }
  return TREFOIL_OK;
}

/* ---- A rank ------------------------------------------------------------------------------------- */

void epWorkerRankInit(ep_worker_rank_t *worker, ep_check_team_t *team, int rank,
                      ep_buffer_t *buffers) {
  const ep_check_options_t *o = team->options;
  int local = o->launch ? o->launch->localRank : rank;
  ep_place_t *place = &team->job->watch.places[rank];
  *worker = (ep_worker_rank_t){
      .team = team,
      .buffers = buffers,
      .rank = {.lib = team->lib,
               .group = &team->group,
               .rank = rank,
               .device = local % (o->numDevices > 0 ? o->numDevices : 1),
               .timeoutNs = o->timeoutNs,
               .place = place,
               .watch = o->launch ? NULL : &team->job->watch,
               .stop = &team->job->failing,
               .counts = o->countBytes && epCanCount(team->lib) && !team->group.isGrad,
               .kept = team->comms ? &team->comms->of[team->group.shape.numRanks][rank] : NULL}};
  epWatchThread(rank);
}

void epWorkerRankPhase(ep_worker_rank_t *worker, ep_phase_t phase) {
  worker->rank.failedBy = EP_FAILED_BY_NOTHING;
  atomic_store(&worker->rank.place->phase, phase);
}

/* A call failed. */
static ep_check_culprit_t setCulprit(const ep_worker_rank_t *worker, uint64_t caseIdx,
                                     uint64_t many) {
  const ep_check_rank_t *rank = &worker->rank;
  int isRefusal = rank->failedBy == EP_FAILED_BY_EP &&
                  (rank->result == ncclInvalidArgument || rank->result == ncclInvalidUsage);
  return (ep_check_culprit_t){.outcome = isRefusal        ? EP_CASE_REFUSED
                                         : rank->failedBy ? EP_CASE_ABORTS
                                                          : EP_CASE_WRONG,
                              .rank = rank->rank,
                              .call = rank->failedBy ? rank->doing : "",
                              .result = rank->result,
                              .caseIdx = caseIdx,
                              .numCases = many};
}

void epWorkerRankFailed(ep_worker_rank_t *worker, ep_phase_t phase) {
  ep_check_team_t *team = worker->team;
  char what[EP_CHECK_SENTENCE];
  int isOpening = phase == EP_PHASE_OPENING;
  uint64_t at = atomic_load(&worker->rank.place->caseIdx);
  snprintf(what, sizeof what, "rank %d, %s the batch: %s", worker->rank.rank,
           isOpening ? "opening" : "closing", trefoilLastError());
  const ep_check_culprit_t culprit = setCulprit(worker, at, isOpening ? team->numCases : 0);
  epTeamFail(team, &culprit, what);
}

/* What this rank sent, as the library counts it. */
static trefoil_result_t compareCounts(ep_worker_rank_t *worker, const ep_slot_t *slot) {
  ep_check_compared_t compared = {0};
  ep_check_job_t *job = worker->team->job;
  if (!worker->rank.counts) return TREFOIL_OK;
  EP_TRY(epRankCompareCounts(&worker->rank, &slot->counts, &compared));
  atomic_fetch_add(&job->counted, compared.bytes);
  for (int k = 0; k < NCCL_EP_PUT_KINDS; k++) {
    atomic_fetch_add(&job->puts[k], compared.puts.counted[k]);
    atomic_fetch_add(&job->leastPuts[k], compared.puts.least[k]);
  }
  return TREFOIL_OK;
}

/* The last rank through a case gives it its outcome. */
static void pass(ep_worker_rank_t *worker, uint64_t index) {
  ep_check_job_t *job = worker->team->job;
  const ep_check_options_t *o = worker->team->options;
  uint64_t at = index % EP_BATCH_CASES;
  int R = o->launch ? 1 : worker->team->group.shape.numRanks;
  if (worker->rank.orderOpen) atomic_store(&job->open[at], 1);
  if (atomic_fetch_add(&job->passed[at], 1) + 1 != R) return;
  if (o->outcomes)
    o->outcomes[index - o->firstCase] =
        atomic_load(&job->open[at]) ? EP_CASE_ORDER_OPEN : EP_CASE_AGREES;
  atomic_fetch_add(&job->cases, 1);
  atomic_fetch_or(&job->settled, 1ull << at);
}

static trefoil_result_t runCalls(ep_worker_rank_t *worker, ep_slot_t *slot) {
  const ep_check_case_t *c = &slot->c;
  int r = worker->rank.rank;
  ep_free_images_t images;
  EP_TRY(growResults(worker, c));
  for (int round = 0; round < EP_MAX_ROUNDS; round++) {
    images.initial[round] = slot->initial[round][r];
    images.expected[round] = slot->expected[round][r];
    images.bounds[round] = slot->bounds[round][r];
    images.result[round] = worker->result[round];
  }
  if (c->group->orderFree) return epRankRunFree(&worker->rank, c, &images);
  return epRankRun(&worker->rank, c, images.initial, images.result);
}

static int callFailed(ep_worker_rank_t *worker, const ep_check_case_t *c) {
  char what[EP_CHECK_SENTENCE];
  snprintf(what, sizeof what, "rank %d: %s", worker->rank.rank, trefoilLastError());
  const ep_check_culprit_t culprit = setCulprit(worker, c->index, 1);
  epTeamFail(worker->team, &culprit, what);
  return 1;
}

int epSlotRun(ep_worker_rank_t *worker, ep_slot_t *slot, int *region,
              char what[EP_CHECK_SENTENCE]) {
  ep_check_team_t *team = worker->team;
  const ep_check_case_t *c = &slot->c;
  ep_place_t *place = worker->rank.place;
  *region = 0;
  worker->rank.orderOpen = 0;
  worker->rank.failedBy = EP_FAILED_BY_NOTHING;
  atomic_store(&place->op, -1);
  atomic_store(&place->caseIdx, c->index);
  if (runCalls(worker, slot) != TREFOIL_OK) return callFailed(worker, c);
  for (int round = 0; round < c->numRounds; round++) {
    uint8_t *const *expected = slot->expected[round];
    ep_check_images_t images = {expected, worker->result[round]};
    if (!memcmp(expected[worker->rank.rank], worker->result[round], c->usedBytes)) continue;
    *region = epDescribeDifference(c, round, worker->rank.rank, &images, what, EP_CHECK_SENTENCE);
    return 1;
  }
  if (compareCounts(worker, slot) != TREFOIL_OK) return callFailed(worker, c);
  atomic_fetch_add(&team->job->bytes, c->usedBytes * (uint64_t)c->numRounds);
  pass(worker, c->index);
  return 0;
}
