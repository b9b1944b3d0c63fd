/* Ranks that never come, come late, or are killed, with masks and without: the others go on or get
 * an error that names the rank, within the timeout, in a process that lives; and `trefoil doctor
 * --hang` names the same rank from the progress records. TREFOIL_CLI is the program. */
#include "test.h"

#include "gpu_script.h"
#include "plan/error.h"
#include "validate/checker.h"
#include "validate/launch.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

enum { TIMEOUT_MS = 1000, PATIENCE_MS = 5000 };

typedef struct fault {
  script_list_t list; /* [0] before or during the fault, [1] without the victim, [2] all again */
  int victim;
  int lateMs; /* the victim comes after so long; 0: never */
} fault_t;

static void sleepMs(int64_t ms) {
  struct timespec t = {ms / 1000, ms % 1000 * 1000000};
  while (nanosleep(&t, &t) != 0 && errno == EINTR) {
  }
}

/* ---- Scripts: an Update, a Dispatch, a Combine ---- */

static trefoil_result_t makeScript(ep_check_case_t *c, const ep_check_group_t *g, uint64_t seed,
                                   int without) {
  EP_TRY(scriptBegin(c, g, seed, 1));
  scriptUpdate(c, 0, 0);
  scriptAdd(c, EP_OP_DISPATCH, 0);
  scriptAdd(c, EP_OP_COMBINE, 0);
  if (without >= 0) {
    int R = g->shape.numRanks;
    c->numMasks = 1;
    for (int r = 0; r < R; r++)
      for (int q = 0; q < R; q++) c->active[r * R + q] = (r == without) == (q == without);
  }
  return scriptEnd(c);
}

static trefoil_result_t makeScripts(fault_t *f, const ep_check_group_t *g) {
  EP_TRY(scriptListBegin(&f->list, g, 3));
  EP_TRY(makeScript(&f->list.cases[0], g, 1, -1));
  EP_TRY(makeScript(&f->list.cases[1], g, 2, f->victim));
  EP_TRY(makeScript(&f->list.cases[2], g, 3, -1));
  return scriptListExpect(&f->list);
}

static trefoil_result_t runScript(ep_check_rank_t *k, const ep_check_case_t *c) {
  for (int i = 0; i < c->numOps; i++) EP_TRY(epCallOp(k, c, &c->ops[i]));
  k->doing = "cudaStreamSynchronize";
  EP_TRY_CUDA(k, k->lib->cudaStreamSynchronize(k->stream));
  return TREFOIL_OK;
}

static trefoil_result_t move(ep_check_rank_t *k, void *to, const void *from, size_t bytes,
                             enum cudaMemcpyKind kind) {
  k->doing = "cudaMemcpyAsync";
  EP_TRY_CUDA(k, k->lib->cudaMemcpyAsync(to, from, bytes, kind, k->stream));
  EP_TRY_CUDA(k, k->lib->cudaStreamSynchronize(k->stream));
  return TREFOIL_OK;
}

/* Runs one of the scripts; compares if asked. */
static trefoil_result_t work(ep_check_rank_t *k, const script_list_t *list, int i, int compare) {
  const ep_check_case_t *c = &list->cases[i];
  EP_TRY(move(k, k->image, list->initial[0][k->rank] + list->offsets[i], c->usedBytes,
              cudaMemcpyHostToDevice));
  EP_TRY(runScript(k, c));
  if (!compare) return TREFOIL_OK;
  uint8_t *result = malloc(c->usedBytes);
  EP_CHECK(result, TREFOIL_SYSTEM_ERROR, "out of memory for a result");
  trefoil_result_t rc = move(k, result, k->image, c->usedBytes, cudaMemcpyDeviceToHost);
  if (rc == TREFOIL_OK) rc = scriptCompare(list, i, 0, k->rank, result);
  free(result);
  return rc;
}

/* ---- The doctor ---- */

typedef struct doctor {
  char folder[64], output[1200];
  int code;
} doctor_t;

static void askDoctor(doctor_t *d) {
  char command[700];
  snprintf(command, sizeof command, "%.400s doctor --hang %s/*.hang 2>&1", getenv("TREFOIL_CLI"),
           d->folder);
  FILE *pipe = popen(command, "r");
  if (!pipe) return;
  size_t n = fread(d->output, 1, sizeof d->output - 1, pipe);
  d->output[n] = 0;
  d->code = WEXITSTATUS(pclose(pipe));
}

/* Progress records from here on; 0: there is no doctor to read them. */
static int openDoctor(doctor_t *d) {
  *d = (doctor_t){.code = -1};
  snprintf(d->folder, sizeof d->folder, "%s/trefoil-hang-XXXXXX",
           access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
  if (!getenv("TREFOIL_CLI") || !mkdtemp(d->folder)) return 0;
  setenv("NCCL_EP_HANG_DIR", d->folder, 1);
  return 1;
}

static void closeDoctor(doctor_t *d) {
  char pattern[96];
  glob_t found;
  unsetenv("NCCL_EP_HANG_DIR");
  snprintf(pattern, sizeof pattern, "%s/*", d->folder);
  if (glob(pattern, 0, NULL, &found) == 0)
    for (size_t i = 0; i < found.gl_pathc; i++) unlink(found.gl_pathv[i]);
  globfree(&found);
  rmdir(d->folder);
}

/* ---- A rank that never enters ---- */

/* Waits out the victim; then a call must name it. */
static trefoil_result_t waitForNobody(gpu_rank_t *rank) {
  ep_check_rank_t *k = &rank->rank;
  const fault_t *f = rank->run->context;
  const ep_check_case_t *c = &f->list.cases[0];
  gpuBarrier(rank);
  if (k->rank == f->victim) return TREFOIL_OK;
  double start = epNow();
  trefoil_result_t rc = runScript(k, c);
  if (rc == TREFOIL_OK) rc = epCallOp(k, c, &c->ops[1]);
  double ms = 1e3 * (epNow() - start);
  char name[32];
  snprintf(name, sizeof name, "rank %d ", f->victim);
  EP_CHECK(rc != TREFOIL_OK, TREFOIL_INTERNAL_ERROR, "every call succeeded without rank %d",
           f->victim);
  EP_CHECK(strstr(trefoilLastError(), name), TREFOIL_INTERNAL_ERROR, "'%.400s' does not name %s",
           trefoilLastError(), name);
  EP_CHECK(ms < (double)rank->run->timeoutNs * 1e-6 + PATIENCE_MS, TREFOIL_INTERNAL_ERROR,
           "it took %.0f ms", ms);
  return TREFOIL_OK;
}

/* Asks until the doctor says it, for so long. */
static int doctorSays(doctor_t *d, const char *first, const char *second, int ms) {
  for (double end = epNow() + 1e-3 * ms; epNow() < end; sleepMs(100)) {
    askDoctor(d);
    if (d->code == 1 && strstr(d->output, first) && strstr(d->output, second)) return 1;
  }
  return 0;
}

TEST(a_rank_that_never_enters_is_named) {
  GPU_RANKS(R, 2);
  ep_check_group_t g = gpuGroup(R, 8, 256);
  fault_t f = {.victim = R - 1};
  static gpu_run_t run;
  run = (gpu_run_t){
      .group = &g, .work = waitForNobody, .context = &f, .isLossy = 1, .timeoutNs = 3000000000u};
  doctor_t d;
  char wanted[64];
  snprintf(wanted, sizeof wanted, "rank %d (process", f.victim);
  epBatchEnvironment(&g);
  REQUIRE(makeScripts(&f, &g) == TREFOIL_OK, "%s", trefoilLastError());
  int hasDoctor = openDoctor(&d);
  gpuStart(&run, R);
  int said = hasDoctor && doctorSays(&d, wanted, "Dispatch 1", 20000);
  gpuJoin(&run);
  CHECK(!*run.failure, "%s", run.failure);
  CHECK(said || !hasDoctor, "the doctor said, with code %d: %s", d.code, d.output);
  if (said) printf("doctor: %s", d.output);
  if (hasDoctor) closeDoctor(&d);
  scriptListFree(&f.list);
}

/* ---- Masks ---- */

static trefoil_result_t expectMask(ep_check_rank_t *k, int victim, int wantedFlag) {
  const ep_library_t *lib = k->lib;
  int mask[EP_MAX_RANKS] = {0}, flag = -1;
  k->doing = "ncclEpMaskQuery";
  EP_TRY_EP(k, lib->ncclEpMaskQuery(k->epGroup, k->image, k->stream));
  EP_TRY(move(k, mask, k->image, sizeof(int) * (size_t)k->group->shape.numRanks,
              cudaMemcpyDeviceToHost));
  for (int q = 0; q < k->group->shape.numRanks; q++)
    EP_CHECK(mask[q] == (q != victim), TREFOIL_INTERNAL_ERROR, "rank %d is %s, victim %d", q,
             mask[q] ? "active" : "masked", victim);
  k->doing = "ncclEpGetAsyncError";
  EP_TRY_EP(k, lib->ncclEpGetAsyncError(k->epGroup, &flag));
  EP_CHECK(flag == wantedFlag, TREFOIL_INTERNAL_ERROR, "the async error is %d, expected %d", flag,
           wantedFlag);
  k->doing = "ncclEpErrorClear";
  EP_TRY_EP(k, lib->ncclEpErrorClear(k->epGroup));
  return TREFOIL_OK;
}

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
  return work(k, &f->list, 2, 1);
}

/* The victim stays away for a step and a half, makes up for it alone, and is taken back. */
static trefoil_result_t goOnWithout(gpu_rank_t *rank) {
  ep_check_rank_t *k = &rank->rank;
  const fault_t *f = rank->run->context;
  gpuBarrier(rank);
  if (k->rank != f->victim) {
    EP_TRY(work(k, &f->list, 0, 0)); /* in it the victim is given up */
    EP_TRY(expectMask(k, f->victim, 1));
    EP_TRY(work(k, &f->list, 1, 1)); /* from here on exact without it */
    EP_TRY(expectMask(k, f->victim, 0));
  }
  gpuBarrier(rank);
  if (k->rank == f->victim) {
    int alone[EP_MAX_RANKS] = {0};
    alone[k->rank] = 1;
    k->doing = "ncclEpMaskUpdate";
    EP_TRY_EP(k, k->lib->ncclEpMaskUpdate(k->epGroup, alone, k->stream));
    EP_TRY(work(k, &f->list, 0, 0));
    EP_TRY(work(k, &f->list, 1, 1));
  }
  return together(rank, f);
}

/* The victim comes when the others have given it up; both sides get through. */
static trefoil_result_t comeTooLate(gpu_rank_t *rank) {
  ep_check_rank_t *k = &rank->rank;
  const fault_t *f = rank->run->context;
  gpuBarrier(rank);
  if (k->rank == f->victim) sleepMs(f->lateMs);
  EP_TRY(work(k, &f->list, 0, 0));
  if (k->rank != f->victim) EP_TRY(expectMask(k, f->victim, 1));
  return together(rank, f);
}

/* The victim comes late, but not too late: nothing is lost. */
static trefoil_result_t comeLate(gpu_rank_t *rank) {
  ep_check_rank_t *k = &rank->rank;
  const fault_t *f = rank->run->context;
  gpuBarrier(rank);
  if (k->rank == f->victim) sleepMs(f->lateMs);
  EP_TRY(work(k, &f->list, 0, 1));
  if (k->group->enableMask) EP_TRY(expectMask(k, -1, 0));
  return work(k, &f->list, 2, 1);
}

static void withFault(int numRanks, trefoil_result_t (*what)(gpu_rank_t *), int enableMask,
                      int lateMs, int timeoutMs) {
  ep_check_group_t g = gpuGroup(numRanks, 8, 256);
  fault_t f = {.victim = numRanks - 1, .lateMs = lateMs};
  gpu_run_t run = {
      .group = &g, .work = what, .context = &f, .timeoutNs = (uint64_t)timeoutMs * 1000000u};
  g.enableMask = enableMask;
  epBatchEnvironment(&g);
  REQUIRE(makeScripts(&f, &g) == TREFOIL_OK, "%s", trefoilLastError());
  gpuRun(&run, numRanks);
  CHECK(!*run.failure, "%s", run.failure);
  scriptListFree(&f.list);
}

TEST(with_masks_the_others_go_on_and_take_it_back) {
  GPU_RANKS(R, 2);
  withFault(R, goOnWithout, 1, 0, TIMEOUT_MS);
}

TEST(who_comes_too_late_is_masked_and_comes_back) {
  GPU_RANKS(R, 2);
  withFault(R, comeTooLate, 1, 2 * TIMEOUT_MS, TIMEOUT_MS);
}

TEST(who_comes_late_is_waited_for) {
  GPU_RANKS(R, 2);
  withFault(R, comeLate, 0, TIMEOUT_MS / 2, 10 * TIMEOUT_MS);
  withFault(R, comeLate, 1, TIMEOUT_MS / 2, 10 * TIMEOUT_MS);
}

/* ---- A process that is killed ---- */

enum { END_OF_WORDS = 4 };

static int killedMs; /* the victim's end, after it has begun to work */

static void *endLater(void *unused) {
  (void)unused;
  sleepMs(killedMs);
  raise(SIGKILL);
  return NULL;
}

/* One step after the other until a call fails (no masks) or the mask has changed. */
static trefoil_result_t workOn(ep_check_rank_t *k, const fault_t *f, int *isMasked) {
  for (double end = epNow() + 30; epNow() < end;) {
    EP_TRY(work(k, &f->list, 0, 0));
    if (!k->group->enableMask) continue;
    int flag = 0;
    k->doing = "ncclEpGetAsyncError";
    EP_TRY_EP(k, k->lib->ncclEpGetAsyncError(k->epGroup, &flag));
    if (!flag) continue;
    *isMasked = 1;
    return TREFOIL_OK;
  }
  return epFail(TREFOIL_INTERNAL_ERROR, "rank %d was never missed", f->victim);
}

/* A survivor's words go to stdout; the exit code is 0 if all is as it should be. */
static int childMain(int victim, int enableMask, int ms) {
  ep_launch_t launch;
  char why[600], name[32];
  ncclUniqueId ids[EP_MAX_RANKS];
  memset(ids, 0, sizeof ids);
  int devices = gpuTeam(why, sizeof why);
  if (devices < 0 || epLaunchFind(&launch) != TREFOIL_OK || epLaunchOpen(&launch) != TREFOIL_OK) {
    printf("%s", devices < 0 ? why : trefoilLastError());
    return 2;
  }
  int R = launch.numRanks, isMasked = 0;
  const ep_library_t *lib = gpuLibrary();
  ep_check_group_t g = gpuGroup(R, 8, 256);
  fault_t f = {.victim = victim};
  g.enableMask = enableMask;
  epBatchEnvironment(&g);
  if (launch.rank == 0) lib->ncclGetUniqueId(&ids[0]);
  ncclUniqueId mine = ids[0];
  ep_check_rank_t k = {.lib = lib,
                       .group = &g,
                       .rank = launch.rank,
                       .device = launch.rank,
                       .timeoutNs = (uint64_t)TIMEOUT_MS * 1500000u};
  trefoil_result_t rc = makeScripts(&f, &g);
  if (rc == TREFOIL_OK) rc = epLaunchGather(&launch, &mine, ids, sizeof mine);
  if (rc == TREFOIL_OK) rc = epRankOpen(&k, &ids[0]);
  if (rc == TREFOIL_OK) rc = epLaunchGather(&launch, &mine, ids, sizeof mine);
  if (rc != TREFOIL_OK) {
    printf("%s", trefoilLastError());
    return 2;
  }
  pthread_t thread;
  killedMs = ms;
  if (launch.rank == victim) pthread_create(&thread, NULL, endLater, NULL);
  rc = workOn(&k, &f, &isMasked);
  snprintf(name, sizeof name, "rank %d ", victim);
  if (!enableMask) {
    printf("%s", trefoilLastError());
    return rc != TREFOIL_OK && strstr(trefoilLastError(), name) ? 0 : 1;
  }
  if (rc == TREFOIL_OK) rc = expectMask(&k, victim, 1);
  for (int i = 0; i < 20 && rc == TREFOIL_OK; i++) rc = work(&k, &f.list, 1, 1);
  printf("%s", rc == TREFOIL_OK ? "went on" : trefoilLastError());
  return rc != TREFOIL_OK;
}

/* ends: [0] its stdin, [1] its stdout. */
static pid_t startChild(int rank, int numRanks, char *const *arguments, int ends[2]) {
  int in[2], out[2];
  char values[4][32];
  posix_spawn_file_actions_t actions;
  pid_t pid = -1;
  snprintf(values[0], sizeof values[0], "%d", rank);
  snprintf(values[1], sizeof values[1], "%d", numRanks);
  snprintf(values[2], sizeof values[2], "%d", 20000 + (int)getpid() % 20000);
  setenv("RANK", values[0], 1);
  setenv("WORLD_SIZE", values[1], 1);
  setenv("LOCAL_WORLD_SIZE", values[1], 1);
  setenv("MASTER_PORT", values[2], 1);
  if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) return -1;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], 0);
  posix_spawn_file_actions_adddup2(&actions, out[1], 1);
  if (posix_spawn(&pid, "/proc/self/exe", &actions, NULL, arguments, environ) != 0) pid = -1;
  posix_spawn_file_actions_destroy(&actions);
  close(in[0]);
  close(out[1]);
  ends[0] = in[1];
  ends[1] = out[0];
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  unsetenv("LOCAL_WORLD_SIZE");
  unsetenv("MASTER_PORT");
  return pid;
}

/* What a child said until it was through, or the limit passed. */
static int hear(int end, char *text, size_t bytes, int ms) {
  size_t n = 0;
  double until = epNow() + 1e-3 * ms;
  for (;;) {
    struct pollfd ready = {.fd = end, .events = POLLIN};
    int left = (int)(1e3 * (until - epNow()));
    if (left <= 0 || poll(&ready, 1, left) <= 0) return 0;
    ssize_t got = read(end, text + n, bytes - 1 - n);
    if (got <= 0) return 1;
    n += (size_t)got;
    text[n] = 0;
    if (text[n - 1] != END_OF_WORDS) continue;
    text[n - 1] = 0;
    return 1;
  }
}

typedef struct children {
  int numRanks, victim, enableMask;
  pid_t pids[EP_MAX_RANKS];
  int ends[EP_MAX_RANKS][2];
  char words[EP_MAX_RANKS][1200];
} children_t;

static int startChildren(children_t *c, int ms) {
  char number[3][16];
  snprintf(number[0], sizeof number[0], "%d", c->victim);
  snprintf(number[1], sizeof number[1], "%d", c->enableMask);
  snprintf(number[2], sizeof number[2], "%d", ms);
  char *arguments[] = {"test_gpu_faults", "--child", number[0], number[1], number[2], NULL};
  for (int r = 0; r < c->numRanks; r++)
    if ((c->pids[r] = startChild(r, c->numRanks, arguments, c->ends[r])) <= 0) return 0;
  return 1;
}

/* Everybody has spoken, and the victim is buried, so that its process is seen to be gone. */
static void hearChildren(children_t *c) {
  for (int r = 0; r < c->numRanks; r++) {
    int spoke = hear(c->ends[r][1], c->words[r], sizeof c->words[r], 60000), status = 0;
    CHECK(spoke, "rank %d did not end: %s", r, c->words[r]);
    if (!spoke) kill(c->pids[r], SIGKILL);
    if (r != c->victim) continue;
    waitpid(c->pids[r], &status, 0);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "rank %d was to be killed: %s", r,
          c->words[r]);
  }
}

static void endChildren(children_t *c) {
  for (int r = 0; r < c->numRanks; r++) {
    int status = 0;
    close(c->ends[r][0]);
    close(c->ends[r][1]);
    if (r == c->victim) continue;
    waitpid(c->pids[r], &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank %d: %s", r, c->words[r]);
  }
  printf("rank 0: %s\n", c->words[0]);
}

static void killOne(int numRanks, int enableMask, int ms) {
  static children_t c;
  c = (children_t){.numRanks = numRanks, .victim = numRanks - 1, .enableMask = enableMask};
  doctor_t d;
  int hasDoctor = openDoctor(&d);
  REQUIRE(startChildren(&c, ms), "a process could not be started");
  hearChildren(&c);
  if (hasDoctor) askDoctor(&d);
  endChildren(&c);
  if (!hasDoctor) return;
  char wanted[64];
  snprintf(wanted, sizeof wanted, "rank %d is gone", c.victim);
  /* with masks nobody waits any more */
  CHECK(enableMask || (d.code == 1 && strstr(d.output, wanted)),
        "the doctor said, with code %d: %s", d.code, d.output);
  printf("doctor: %s", d.output);
  closeDoctor(&d);
}

TEST(survivors_of_a_killed_process_name_it) {
  GPU_RANKS(R, 2);
  killOne(R, 0, 50);
}

TEST(with_masks_survivors_of_a_killed_process_go_on) {
  GPU_RANKS(R, 2);
  killOne(R, 1, 80);
}

int main(int argc, char **argv) {
  if (argc == 5 && !strcmp(argv[1], "--child")) {
    int code = childMain(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]));
    putchar(END_OF_WORDS);
    fflush(stdout);
    while (getchar() != EOF) { /* the doctor is asked first */
    }
    _exit(code); /* a group that lost a rank is not taken apart */
  }
  return testRunAll(argc, argv);
}
