/* Ranks that never come or come late, with masks and without: the others go on or get an error that
 * names the rank, within the timeout, in a process that lives; and `trefoil doctor --hang` names the
 * same rank from the progress records. TREFOIL_CLI is the program. */
#include "test.h"

#include "gpu_fault.h"
#include "plan/error.h"
#include "validate/checker.h"

enum { DEADLINE_MS = 5000 };

/* ---- A rank that never enters ---- */

/* Waits out the victim; then a call must name it. */
static trefoil_result_t waitForNobody(gpu_rank_t *rank) {
  ep_check_rank_t *k = &rank->rank;
  const fault_t *f = rank->run->context;
  const ep_check_case_t *c = &f->list.cases[0];
  gpuBarrier(rank);
  if (k->rank == f->victim) return TREFOIL_OK;
  double start = epNow();
  trefoil_result_t rc =
      faultWork(k, &f->list, 0, 0); /* with its routing: other memory has no ids */
  if (rc == TREFOIL_OK) rc = epCallOp(k, c, &c->ops[1]);
  double ms = 1e3 * (epNow() - start);
  char name[32];
  snprintf(name, sizeof name, "rank %d ", f->victim);
  EP_CHECK(rc != TREFOIL_OK, TREFOIL_INTERNAL_ERROR, "every call succeeded without rank %d",
           f->victim);
  EP_CHECK(strstr(trefoilLastError(), name), TREFOIL_INTERNAL_ERROR, "'%.400s' does not name %s",
           trefoilLastError(), name);
  EP_CHECK(ms < (double)rank->run->timeoutNs * 1e-6 + DEADLINE_MS, TREFOIL_INTERNAL_ERROR,
           "it took %.0f ms", ms);
  return TREFOIL_OK;
}

/* Asks until the doctor says it, for so long. */
static int doctorSays(doctor_t *d, const char *first, const char *second, int ms) {
  for (double end = epNow() + 1e-3 * ms; epNow() < end; faultSleep(100)) {
    doctorAsk(d);
    if (d->code == 1 && strstr(d->output, first) && strstr(d->output, second)) return 1;
  }
  return 0;
}

static void neverEnters(int R, int highThroughput) {
  ep_check_group_t g = (highThroughput ? gpuGroupHt : gpuGroup)(R, 8, 256);
  fault_t f = {.victim = R - 1};
  static gpu_run_t run;
  run = (gpu_run_t){
      .group = &g, .work = waitForNobody, .context = &f, .isLossy = 1, .timeoutNs = 3000000000u};
  doctor_t d;
  char wanted[64];
  snprintf(wanted, sizeof wanted, "rank %d (process", f.victim);
  epBatchEnvironment(&g);
  REQUIRE(faultScripts(&f, &g) == TREFOIL_OK, "%s", trefoilLastError());
  int hasDoctor = doctorOpen(&d);
  gpuStart(&run, R);
  int said = hasDoctor && doctorSays(&d, wanted, highThroughput ? "Update 1" : "Dispatch 1", 20000);
  gpuJoin(&run);
  CHECK(!*run.failure, "%s", run.failure);
  CHECK(said || !hasDoctor, "the doctor said, with code %d: %s", d.code, d.output);
  if (said) printf("doctor: %s", d.output);
  if (hasDoctor) doctorClose(&d);
  scriptListFree(&f.list);
}

TEST(a_rank_that_never_enters_is_named) {
  GPU_RANKS(R, 2);
  neverEnters(R, 0);
}

TEST(high_throughput_names_who_never_enters) {
  GPU_RANKS(R, 2);
  neverEnters(R, 1);
}

/* ---- Masks ---- */

/* All come together again, and the next step is exact on all. */
static trefoil_result_t together(gpu_rank_t *rank, const fault_t *f) {
  ep_check_rank_t *k = &rank->rank;
  gpuBarrier(rank);
  k->doing = "ncclEpMaskClean";
  EP_TRY_EP(k, k->lib->ncclEpMaskClean(k->epGroup, k->stream));
  k->doing = "ncclEpErrorClear";
  EP_TRY_EP(k, k->lib->ncclEpErrorClear(k->epGroup));
  k->doing = "cudaStreamSynchronize";
  EP_TRY_CUDA(k, k->lib->cudaStreamSynchronize(k->stream));
  gpuBarrier(rank);
  return faultWork(k, &f->list, 2, 1);
}

/* The victim stays away for a step and a half, makes up for it alone, and is taken back. */
static trefoil_result_t goOnWithout(gpu_rank_t *rank) {
  ep_check_rank_t *k = &rank->rank;
  const fault_t *f = rank->run->context;
  gpuBarrier(rank);
  if (k->rank != f->victim) {
    EP_TRY(faultWork(k, &f->list, 0, 0)); /* in it the victim is given up */
    EP_TRY(faultMask(k, f->victim, 1));
    EP_TRY(faultWork(k, &f->list, 1, 1)); /* from here on exact without it */
    EP_TRY(faultMask(k, f->victim, 0));
  }
  gpuBarrier(rank);
  if (k->rank == f->victim) {
    int alone[EP_MAX_RANKS] = {0};
    alone[k->rank] = 1;
    k->doing = "ncclEpMaskUpdate";
    EP_TRY_EP(k, k->lib->ncclEpMaskUpdate(k->epGroup, alone, k->stream));
    EP_TRY(faultWork(k, &f->list, 0, 0));
    EP_TRY(faultWork(k, &f->list, 1, 1));
  }
  return together(rank, f);
}

/* The victim comes when the others have given it up; both sides get through. */
static trefoil_result_t comeTooLate(gpu_rank_t *rank) {
  ep_check_rank_t *k = &rank->rank;
  const fault_t *f = rank->run->context;
  gpuBarrier(rank);
  if (k->rank == f->victim) faultSleep(f->lateMs);
  EP_TRY(faultWork(k, &f->list, 0, 0));
  if (k->rank != f->victim) EP_TRY(faultMask(k, f->victim, 1));
  return together(rank, f);
}

/* The victim comes late, but not too late: nothing is lost. */
static trefoil_result_t comeLate(gpu_rank_t *rank) {
  ep_check_rank_t *k = &rank->rank;
  const fault_t *f = rank->run->context;
  gpuBarrier(rank);
  if (k->rank == f->victim) faultSleep(f->lateMs);
  EP_TRY(faultWork(k, &f->list, 0, 1));
  if (k->group->enableMask) EP_TRY(faultMask(k, -1, 0));
  return faultWork(k, &f->list, 2, 1);
}

static void runFault(ep_check_group_t g, trefoil_result_t (*what)(gpu_rank_t *), int lateMs,
                     int timeoutMs) {
  int numRanks = g.shape.numRanks;
  fault_t f = {.victim = numRanks - 1, .lateMs = lateMs};
  gpu_run_t run = {
      .group = &g, .work = what, .context = &f, .timeoutNs = (uint64_t)timeoutMs * 1000000u};
  epBatchEnvironment(&g);
  REQUIRE(faultScripts(&f, &g) == TREFOIL_OK, "%s", trefoilLastError());
  gpuRun(&run, numRanks);
  CHECK(!*run.failure, "%s", run.failure);
  scriptListFree(&f.list);
}

static void withFault(int numRanks, trefoil_result_t (*what)(gpu_rank_t *), int enableMask,
                      int lateMs, int timeoutMs) {
  ep_check_group_t g = gpuGroup(numRanks, 8, 256);
  g.enableMask = enableMask;
  runFault(g, what, lateMs, timeoutMs);
}

TEST(with_masks_the_others_go_on_and_take_it_back) {
  GPU_RANKS(R, 2);
  withFault(R, goOnWithout, 1, 0, FAULT_TIMEOUT_MS);
}

TEST(who_comes_too_late_is_masked_and_comes_back) {
  GPU_RANKS(R, 2);
  withFault(R, comeTooLate, 1, 2 * FAULT_TIMEOUT_MS, FAULT_TIMEOUT_MS);
}

TEST(who_comes_late_is_waited_for) {
  GPU_RANKS(R, 2);
  withFault(R, comeLate, 0, FAULT_TIMEOUT_MS / 2, 10 * FAULT_TIMEOUT_MS);
  withFault(R, comeLate, 1, FAULT_TIMEOUT_MS / 2, 10 * FAULT_TIMEOUT_MS);
}

TEST(high_throughput_waits_for_who_comes_late) {
  GPU_RANKS(R, 2);
  runFault(gpuGroupHt(R, 8, 256), comeLate, FAULT_TIMEOUT_MS / 2, 10 * FAULT_TIMEOUT_MS);
}

TEST_MAIN()
