/* A rank's process is killed at work: the others name it, or with masks go on exactly; so does the
 * doctor. This program starts itself once a rank; who is a rank says with END_OF_WORDS that it is
 * through, and stays until its stdin ends, so that the doctor finds it alive. */
#include "test.h"

#include "gpu_fault.h"
#include "plan/error.h"
#include "validate/checker.h"
#include "validate/launch.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { END_OF_WORDS = 4 };

static int killedMs; /* the victim's end, after it has begun to work */

static void *endLater(void *unused) {
  (void)unused;
  faultSleep(killedMs);
  raise(SIGKILL);
  return NULL;
}

/* One step after the other until a call fails (no masks) or the mask has changed. With masks the victim ends
 * between two steps: else one survivor could miss it a step earlier than the other, and begin without it. */
static trefoil_result_t workOn(ep_check_rank_t *k, const fault_t *f, int *isMasked) {
  double killedAt = epNow() + 1e-3 * killedMs;
  for (double end = epNow() + 30; epNow() < end;) {
    if (k->group->enableMask && k->rank == f->victim && epNow() > killedAt) raise(SIGKILL);
    EP_TRY(faultWork(k, &f->list, 0, 0));
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
static int childMain(int victim, int enableMask, int ms, int highThroughput) {
  ep_launch_t launch;
  char why[600];
  ncclUniqueId ids[EP_MAX_RANKS];
  memset(ids, 0, sizeof ids);
  int devices = gpuTeam(why, sizeof why);
  if (devices < 0 || epLaunchFind(&launch) != TREFOIL_OK || epLaunchOpen(&launch) != TREFOIL_OK) {
    printf("%s", devices < 0 ? why : trefoilLastError());
    return 2;
  }
  int R = launch.numRanks, isMasked = 0;
  const ep_library_t *lib = gpuLibrary();
  ep_check_group_t g = (highThroughput ? gpuGroupHt : gpuGroup)(R, 8, 256);
  fault_t f = {.victim = victim};
  g.enableMask = enableMask;
  epBatchEnvironment(&g);
  if (launch.rank == 0) lib->ncclGetUniqueId(&ids[0]);
  ncclUniqueId mine = ids[0];
  ep_check_rank_t k = {.lib = lib,
                       .group = &g,
                       .rank = launch.rank,
                       .device = launch.rank,
                       .timeoutNs = (uint64_t)FAULT_TIMEOUT_MS * 1500000u};
  trefoil_result_t rc = faultScripts(&f, &g);
  if (rc == TREFOIL_OK) rc = epLaunchGather(&launch, &mine, ids, sizeof mine);
  if (rc == TREFOIL_OK) rc = epRankOpen(&k, &ids[0]);
  if (rc == TREFOIL_OK) rc = epLaunchGather(&launch, &mine, ids, sizeof mine);
  if (rc != TREFOIL_OK) {
    printf("%s", trefoilLastError());
    return 2;
  }
  pthread_t thread;
  killedMs = ms;
  if (launch.rank == victim && !enableMask) pthread_create(&thread, NULL, endLater, NULL);
  rc = workOn(&k, &f, &isMasked);
  if (!enableMask) {
    printf("%s", trefoilLastError());
    return rc == TREFOIL_OK;
  }
  if (rc == TREFOIL_OK) rc = faultMask(&k, victim, 1);
  for (int i = 0; i < 20 && rc == TREFOIL_OK; i++) rc = faultWork(&k, &f.list, 1, 1);
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
  int numRanks, victim, enableMask, highThroughput;
  pid_t pids[EP_MAX_RANKS];
  int ends[EP_MAX_RANKS][2];
  char words[EP_MAX_RANKS][1200];
} children_t;

static int startChildren(children_t *c, int ms) {
  char number[4][16];
  snprintf(number[0], sizeof number[0], "%d", c->victim);
  snprintf(number[1], sizeof number[1], "%d", c->enableMask);
  snprintf(number[2], sizeof number[2], "%d", ms);
  snprintf(number[3], sizeof number[3], "%d", c->highThroughput);
  char *arguments[] = {"test_gpu_killed", "--child", number[0], number[1],
                       number[2],         number[3], NULL};
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

/* Whether rank r names the victim, or one that it waited for and that does: who needs nothing of the killed
 * rank may be an operation ahead. */
static int namesVictim(const children_t *c, int r) {
  char name[24];
  snprintf(name, sizeof name, "rank %d ", c->victim);
  for (int hops = 0; hops < c->numRanks; hops++) {
    if (strstr(c->words[r], name)) return 1;
    const char *other = strstr(c->words[r], "rank ");
    if (!other || sscanf(other, "rank %d", &r) != 1 || r < 0 || r >= c->numRanks) return 0;
  }
  return 0;
}

static void endChildren(children_t *c) {
  for (int r = 0; r < c->numRanks; r++) {
    int status = 0;
    close(c->ends[r][0]);
    close(c->ends[r][1]);
    if (r == c->victim) continue;
    waitpid(c->pids[r], &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank %d: %s", r, c->words[r]);
    CHECK(c->enableMask || namesVictim(c, r), "rank %d: %s", r, c->words[r]);
  }
  printf("rank 0: %s\n", c->words[0]);
}

static void killOne(int numRanks, int enableMask, int highThroughput, int ms) {
  static children_t c;
  c = (children_t){.numRanks = numRanks,
                   .victim = numRanks - 1,
                   .enableMask = enableMask,
                   .highThroughput = highThroughput};
  doctor_t d;
  int hasDoctor = doctorOpen(&d);
  REQUIRE(startChildren(&c, ms), "a process could not be started");
  hearChildren(&c);
  if (hasDoctor) doctorAsk(&d);
  endChildren(&c);
  if (!hasDoctor) return;
  char wanted[64];
  snprintf(wanted, sizeof wanted, "rank %d is gone", c.victim);
  /* with masks nobody waits any more */
  CHECK(enableMask || (d.code == 1 && strstr(d.output, wanted)),
        "the doctor said, with code %d: %s", d.code, d.output);
  printf("doctor: %s", d.output);
  doctorClose(&d);
}

TEST(survivors_of_a_killed_process_name_it) {
  GPU_RANKS(R, 2);
  killOne(R, 0, 0, 50);
}

TEST(in_high_throughput_survivors_of_a_killed_process_name_it) {
  GPU_RANKS(R, 2);
  killOne(R, 0, 1, 50);
}

TEST(with_masks_survivors_of_a_killed_process_go_on) {
  GPU_RANKS(R, 2);
  killOne(R, 1, 0, 80);
}

int main(int argc, char **argv) {
  if (argc == 6 && !strcmp(argv[1], "--child")) {
    int code = childMain(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
    putchar(END_OF_WORDS);
    fflush(stdout);
    while (getchar() != EOF) { /* the doctor is asked first */
    }
    _exit(code); /* a group that lost a rank is not taken apart */
  }
  return testRunAll(argc, argv);
}
