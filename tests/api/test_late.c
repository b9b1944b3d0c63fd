/* Ranks that are late, masked or dead: the others name them, leave them out or take them back, and nobody
 * reads what a rank has freed. */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "api/hang_record.h"
#include "step.h"
#include "test.h"

static step_case_t smallCase(trefoil_mode_t mode, uint64_t seed) {
  step_case_t c = {.mode = mode, .topk = 3, .numExperts = 8, .maxTokens = 7, .width = 16};
  c.seed = seed;
  if (mode >= TREFOIL_HT_FLAT) c.maxRecv = 4 * 7 * 3 + 8;
  return c;
}

typedef struct one_op {
  step_case_t c;
  int combine, ranksPerNode;
} one_op_t;

/* Rank 1 never dispatches: the others say so within the timeout, and the process lives. */
static void runLate(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  config.timeout_ns = 100000000u;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, NULL));
  if (r->rank != 1) {
    teamCheck(r, stepUpdate(d, h, r->stream), "update");
    stepDispatch(d, h, r->stream);
    cudaStreamSynchronize(r->stream);
    teamCheck(r, stepCombine(d, h, r->stream) == 0, "a call after the timeout was taken");
    const char *why = ncclEpGetLastError();
    teamCheck(r, strstr(why, "rank 1 ") != NULL, "does not name rank 1: %s", why);
    teamCheck(r, !getenv("NCCL_EP_TIMEOUT_MS") || strstr(why, "0.150 s"), "%s", why);
  }
  teamBarrier(r);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(late_rank_is_named) {
  for (int mode = 0; mode < 4; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 600);
    const char *error = teamThreads(3, runLate, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* The environment's time overrides the configuration's, which is 100 ms. */
TEST(timeout_of_the_environment) {
  step_case_t c = smallCase(TREFOIL_LL_EXPERT_MAJOR, 605);
  setenv("NCCL_EP_TIMEOUT_MS", "150", 1);
  const char *error = teamThreads(2, runLate, &c);
  unsetenv("NCCL_EP_TIMEOUT_MS");
  CHECK(!*error, "%s", error);
}

/* Rank 1 dispatches (or combines) after rank 0 gave up on it, freed its tensors and left: in one process it
 * must not read them any more. A dispatch finds the copies that rank 0 made, a combine that they are gone. */
static void runFreed(team_rank_t *r) {
  const one_op_t *f = r->user;
  step_data_t *d = stepMake(&f->c, r->rank, r->numRanks, f->ranksPerNode);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(&f->c, r->numRanks);
  /* rank 1 has time */
  config.timeout_ns = r->rank == 0 ? 100000000u : 20000000000u;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(&f->c), NULL, 3, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update");
  if (f->combine) teamCheck(r, stepDispatch(d, h, r->stream), "dispatch");
  cudaStreamSynchronize(r->stream);
  teamBarrier(r);
  /* rank 0's own rows, in memory that goes away */
  void *rows = f->combine ? (void *)d->expertRows[r->rank] : (void *)d->tokens[r->rank], *mine;
  teamCheck(r, d->numTokens[0] > 0 && d->numTokens[1] > 0, "no rows to read");
  size_t bytes = (size_t)f->c.width * 2 * (size_t)(f->combine ? d->slots : d->numTokens[r->rank]);
  mine = mmap(NULL, bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  teamCheck(r, mine != MAP_FAILED, "mmap");
  teamPin(r, mine, bytes + 1);
  memcpy(mine, rows, bytes);
  uint16_t **place = f->combine ? &d->expertRows[r->rank] : &d->tokens[r->rank];
  *place = mine;
  if (r->rank == 1) teamBarrier(r); /* rank 0 has given up and freed */
  int taken = f->combine ? stepCombine(d, h, r->stream) : stepDispatch(d, h, r->stream);
  teamCheck(r, taken, "%s", ncclEpGetLastError());
  cudaStreamSynchronize(r->stream);
  mprotect(mine, bytes + 1, PROT_NONE); /* who reads it now is killed */
  *place = rows;
  if (r->rank == 0) teamBarrier(r);
  if (f->combine || r->rank == 0) {
    teamCheck(r, !stepUpdate(d, h, r->stream), "a call after the loss was taken");
    const char *why = ncclEpGetLastError();
    teamCheck(r, strstr(why, r->rank ? "rank 0 gave up" : "rank 1 "), "%s", why);
  }
  teamBarrier(r);
  munmap(mine, bytes + 1);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(late_rank_reads_no_freed_rows) {
  for (int i = 0; i < 4; i++) {
    one_op_t f = {.c = smallCase(i & 1 ? TREFOIL_HT_EXPERT_MAJOR : TREFOIL_HT_FLAT, 650)};

    f.combine = i / 2;
    f.ranksPerNode = 2;
    const char *error = teamThreads(2, runFreed, &f);
    CHECK(!*error, "%s, mode %d: %s", f.combine ? "combine" : "dispatch", f.c.mode, error);
  }
}

/* With masks rank 1 is skipped, the flag goes up, and after Clean everybody is back. */
static void runMasked(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  config.enable_mask = 1;
  config.timeout_ns = 200000000u;
  int mask[3] = {9, 9, 9}, error = 9;
  teamPin(r, mask, sizeof mask);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update");
  if (r->rank != 1) {
    teamCheck(r, stepDispatch(d, h, r->stream), "dispatch");
    teamOk(r, ncclEpMaskQuery(group, mask, r->stream));
    cudaStreamSynchronize(r->stream);
    teamOk(r, ncclEpGetAsyncError(group, &error));
    teamCheck(r, error == 1 && mask[1] == 0 && mask[0] == 1 && mask[2] == 1, "not masked");
    teamOk(r, ncclEpErrorClear(group));
  }
  teamBarrier(r);
  /* rank 1 makes up for the dispatch it missed, in its own mask view */
  if (r->rank == 1) {
    int alone[3] = {0, 1, 0};
    teamOk(r, ncclEpMaskUpdate(group, alone, r->stream));
    teamCheck(r, stepDispatch(d, h, r->stream), "dispatch");
    cudaStreamSynchronize(r->stream);
  }
  teamBarrier(r);
  teamOk(r, ncclEpMaskClean(group, r->stream));
  cudaStreamSynchronize(r->stream);
  teamBarrier(r);
  stepPoison(d);
  teamCheck(r, stepDispatch(d, h, r->stream), "dispatch");
  teamCheck(r, stepCombine(d, h, r->stream), "combine");
  teamOk(r, ncclEpMaskQuery(group, mask, r->stream));
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpGetAsyncError(group, &error));
  teamCheck(r, error == 0 && mask[0] == 1 && mask[1] == 1 && mask[2] == 1, "not clean: %d%d%d, %d",
            mask[0], mask[1], mask[2], error);
  teamCheck(r, !*stepCompareDispatch(d), "%s", stepCompareDispatch(d));
  teamCheck(r, !*stepCompareCombine(d), "%s", stepCompareCombine(d));
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(masked_rank_comes_back) {
  for (int mode = 0; mode < 2; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 700);
    const char *error = teamThreads(3, runMasked, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

static double nowS(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Rank 1 never comes: the first dispatch waits for it and masks it, those after it do not wait, neither
 * for its rows nor for its reading of rows that lie in slots which they take again. */
static void runGone(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  config.enable_mask = 1;
  config.timeout_ns = 400000000u;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update");
  if (r->rank != 1) {
    teamCheck(r, stepDispatch(d, h, r->stream), "dispatch");
    cudaStreamSynchronize(r->stream);
    double began = nowS();
    for (int i = 0; i < 6; i++) {
      teamCheck(r, stepDispatch(d, h, r->stream), "dispatch");
      teamCheck(r, stepCombine(d, h, r->stream), "combine");
    }
    cudaStreamSynchronize(r->stream);
    double took = nowS() - began;
    teamCheck(r, took < 0.8, "%.3f s for twelve operations without the rank that is masked", took);
  }
  teamBarrier(r);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(a_masked_rank_is_not_waited_for) {
  for (int mode = 0; mode < 2; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 710);
    const char *error = teamThreads(3, runGone, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* Rank 0 regards rank 1 as dead, rank 1 does not: rows travel neither way (M1), all others do. */
static void runOneSided(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  config.enable_mask = 1;
  config.timeout_ns = 5000000000u;
  int without1[3] = {1, 0, 1};
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update");
  if (r->rank == 0) teamOk(r, ncclEpMaskUpdate(group, without1, r->stream));
  teamCheck(r, stepDispatch(d, h, r->stream), "dispatch");
  cudaStreamSynchronize(r->stream);
  for (int s = 0; s < r->numRanks; s++) {
    int isLost = s + r->rank == 1; /* ranks 0 and 1 */
    teamCheck(r, d->wantSources[s] > 0, "nothing comes from rank %d anyway", s);
    teamCheck(r, d->sources32[s] == (isLost ? 0 : d->wantSources[s]), "%d rows from rank %d",
              d->sources32[s], s);
  }
  teamBarrier(r);
  teamOk(r, ncclEpMaskClean(group, r->stream));
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(one_sides_mask_counts_for_both) {
  step_case_t c = smallCase(TREFOIL_LL_RANK_MAJOR, 710);
  const char *error = teamThreads(3, runOneSided, &c);
  CHECK(!*error, "%s", error);
}

/* After the dispatch rank 1 regards rank 0 as dead, rank 0 does not: what rank 1 would give back to it
 * counts for nothing (M4), although its message comes. */
static void runOneSidedCombine(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  config.enable_mask = 1;
  config.timeout_ns = 5000000000u;
  int without0[3] = {0, 1, 1};
  const uint8_t now[9] = {1, 1, 1, 0, 1, 1, 1, 1, 1};
  trefoil_case_t back = d->ref;
  trefoil_expert_rows_t experts[3];
  for (int k = 0; k < 3; k++) experts[k] = (trefoil_expert_rows_t){.tokens = d->expertRows[k]};
  back.activeCombine = now;
  size_t bytes = (size_t)(d->numTokens[r->rank] * c->width) * 2;
  uint16_t *all = memcpy(malloc(bytes + 1), d->wantCombined, bytes);
  teamCheck(r,
            trefoilRefCombine(&back, r->rank, experts, d->weights[r->rank], d->wantCombined,
                              NULL) == TREFOIL_OK,
            "%s", trefoilLastError());
  teamCheck(r, r->rank == 2 || memcmp(all, d->wantCombined, bytes), "the mask changes nothing");
  free(all);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream), "update");
  teamCheck(r, stepDispatch(d, h, r->stream), "dispatch");
  cudaStreamSynchronize(r->stream);
  teamBarrier(r);
  if (r->rank == 1) teamOk(r, ncclEpMaskUpdate(group, without0, r->stream));
  teamCheck(r, stepCombine(d, h, r->stream), "combine");
  cudaStreamSynchronize(r->stream);
  teamCheck(r, !*stepCompareDispatch(d), "%s", stepCompareDispatch(d));
  teamCheck(r, !*stepCompareCombine(d), "%s", stepCompareCombine(d));
  teamBarrier(r);
  teamOk(r, ncclEpMaskClean(group, r->stream));
  cudaStreamSynchronize(r->stream);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(one_sides_mask_counts_in_combine) {
  for (int mode = 0; mode < 2; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 715);
    const char *error = teamThreads(3, runOneSidedCombine, &c);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* Ranks 0 and 1 clean without rank 2, which they had masked and which need not come; then all three clean:
 * nobody waits for a clean that rank 2 was not asked to. */
static void runClean(team_rank_t *r) {
  step_case_t c = smallCase(TREFOIL_LL_EXPERT_MAJOR, 720);
  ncclEpGroup_t group;
  ncclEpGroupConfig_t config = stepGroupConfig(&c, r->numRanks);
  config.enable_mask = 1;
  config.timeout_ns = 2000000000u;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  int mask[3];
  teamPin(r, mask, sizeof mask);
  for (int round = 0; round < 3; round++) {
    int without2[3] = {1, 1, 0}, error = 9;
    for (int i = 0; i < 3; i++) mask[i] = 9;
    if (r->rank < 2) {
      teamOk(r, ncclEpMaskUpdate(group, without2, r->stream));
      teamOk(r, ncclEpMaskClean(group, r->stream));
      cudaStreamSynchronize(r->stream);
    }
    teamBarrier(r);
    teamOk(r, ncclEpMaskClean(group, r->stream));
    teamOk(r, ncclEpMaskQuery(group, mask, r->stream));
    cudaStreamSynchronize(r->stream);
    teamOk(r, ncclEpGetAsyncError(group, &error));
    teamCheck(r, !error && mask[0] == 1 && mask[1] == 1 && mask[2] == 1, "round %d: %d%d%d, %d",
              round, mask[0], mask[1], mask[2], error);
  }
  teamOk(r, ncclEpGroupDestroy(group));
}

TEST(clean_without_a_masked_rank) {
  const char *error = teamThreads(3, runClean, NULL);
  CHECK(!*error, "%s", error);
}

/* Rank 2's process dies before its dispatch: the survivors name it long before the timeout. */
static void runKilled(team_rank_t *r) {
  const step_case_t *c = r->user;
  step_data_t *d = stepMake(c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(c, r->numRanks);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(c), NULL, 3, NULL));
  if (r->rank == 2) kill(getpid(), SIGKILL);
  stepUpdate(d, h, r->stream);
  stepDispatch(d, h, r->stream);
  cudaStreamSynchronize(r->stream);
  teamCheck(r, stepCombine(d, h, r->stream) == 0, "a call after the loss was taken");
  teamCheck(r, strstr(ncclEpGetLastError(), "rank 2 "), "%s", ncclEpGetLastError());
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
}

TEST(killed_rank_is_named) {
#ifdef __SANITIZE_THREAD__
  SKIP("ThreadSanitizer does not follow a process with threads through fork");
#endif
  for (int mode = 0; mode < 4; mode++) {
    step_case_t c = smallCase((trefoil_mode_t)mode, 800);
    const char *error = teamProcesses(3, runKilled, &c, 1u << 2);
    CHECK(!*error, "mode %d: %s", mode, error);
  }
}

/* The rank that rank 1's combine waits for by its progress record; -1: it waits for none. */
static int peerInRecord(const char *folder) {
  enum { COMBINE = 2 };
  int peer = -1;
  DIR *dir = opendir(folder);
  for (struct dirent *e; dir && (e = readdir(dir));) {
    ep_hang_record_t record;
    int fd = openat(dirfd(dir), e->d_name, O_RDONLY | O_CLOEXEC);
    if (pread(fd, &record, sizeof record, 0) == (ssize_t)sizeof record && record.rank == 1 &&
        record.kinds[COMBINE].state == EP_HANG_WAITING)
      peer = record.kinds[COMBINE].peer;
    if (fd >= 0) close(fd);
  }
  if (dir) closedir(dir);
  return peer;
}

/* Rank 0 combines when rank 1's record names it, rank 2 when it names rank 2. */
static void runInTurn(team_rank_t *r) {
  step_case_t c = smallCase(TREFOIL_HT_FLAT, 660);
  step_data_t *d = stepMake(&c, r->rank, r->numRanks, r->numRanks);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(&c, r->numRanks);
  config.timeout_ns = 20000000000u;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(&c), NULL, 3, NULL));
  teamCheck(r, stepUpdate(d, h, r->stream) && stepDispatch(d, h, r->stream), "dispatch");
  cudaStreamSynchronize(r->stream);
  teamBarrier(r);
  int named = -1;
  for (int ms = 0; ms < 5000 && r->rank != 1 && named != r->rank; ms++) {
    nanosleep(&(struct timespec){0, 1000000}, NULL);
    named = peerInRecord(r->user);
  }
  teamCheck(r, stepCombine(d, h, r->stream), "combine");
  cudaStreamSynchronize(r->stream);
  teamBarrier(r);
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  stepFree(d);
  teamCheck(r, r->rank == 1 || named == r->rank, "rank 1's record names %d", named);
}

TEST(the_record_names_the_peer_of_the_present_wait) {
  char folder[] = "/tmp/trefoil-late-XXXXXX";
  REQUIRE(mkdtemp(folder), "no folder");
  setenv("NCCL_EP_HANG_DIR", folder, 1);
  const char *error = teamThreads(3, runInTurn, folder);
  unsetenv("NCCL_EP_HANG_DIR");
  CHECK(!*error, "%s", error);
  CHECK(!rmdir(folder), "records are left in %s", folder);
}

TEST_MAIN()
