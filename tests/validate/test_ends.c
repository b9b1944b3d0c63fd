/* A library that refuses, ends, hangs or prints, as threads, processes and in a real shape: each is told with
 * outcome, rank, call, case and replay command, in bounded time, and the run goes on behind it. Every
 * fault is a process of this test; they sleep most of the time, so many run at once. */
#include "test.h"

#include "validate/checker.h"
#include "validate/real_shape.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LE = 1, LR = 2, LL = 3, HF = 4, HE = 8, HT = 12, ALL = 15 };
enum { THREADS = 1, PROCESSES = 2, REAL = 4, ANY = 7, RANDOM = 3 };
enum { AT_ONCE = 16, CASES = 320 };

typedef struct planted {
  const char *fault; /* KIND:CALL */
  unsigned modes;
  int runs; /* in which kinds of runs */
  ep_case_outcome_t outcome;
  const char *word; /* in the sentence */
} planted_t;

/* Sanitizers end a process that crashes in their own way. */
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
#define CRASHED " in the middle"
#else
#define CRASHED "was ended by signal 11"
#endif

#define HANG(call, modes, runs)                                                                    \
  { "hang:" call, modes, runs, EP_CASE_HANGS, "hangs: it has not returned for " }
static const planted_t table[] = {
    {"error:ncclEpDispatch", ALL, ANY, EP_CASE_REFUSED, "ncclEpDispatch: "},
    {"error:ncclEpCreateGroup", ALL, ANY, EP_CASE_REFUSED, "ncclEpCreateGroup: "},
    {"code:ncclEpCombine", ALL, ANY, EP_CASE_ABORTS, "ncclEpCombine: "},
    {"crash:ncclEpDispatch", ALL, ANY, EP_CASE_ABORTS, CRASHED},
    {"crash:ncclEpGroupDestroy", ALL, ANY, EP_CASE_ABORTS, CRASHED},
    {"abort:ncclEpCombine", ALL, ANY, EP_CASE_ABORTS, "signal 6"},
    {"exit0:ncclEpDispatch", ALL, ANY, EP_CASE_ABORTS, "exit code 0 in the middle"},
    {"exit0:ncclEpGroupDestroy", ALL, ANY, EP_CASE_ABORTS, "exit code 0 in the middle"},
    {"_exit0:ncclEpUpdateHandle", HT, ANY, EP_CASE_ABORTS, "exit code 0 in the middle"},
    {"exit1:ncclEpUpdateHandle", ALL, ANY, EP_CASE_ABORTS, "exit code 1 in the middle"},
    {"kill:ncclEpDispatch", ALL, ANY, EP_CASE_ABORTS, "signal 9"},
    {"throw:ncclEpDispatch", ALL, ANY, EP_CASE_ABORTS, "signal 6"},
    HANG("ncclEpCreateGroup", ALL, ANY),
    HANG("ncclEpInitHandle", ALL, ANY),
    HANG("ncclEpCreateHandle", ALL, RANDOM),
    HANG("ncclEpUpdateHandle", ALL, ANY),
    HANG("ncclEpDispatch", ALL, ANY),
    HANG("ncclEpCombine", ALL, ANY),
    HANG("ncclEpComplete", LL, RANDOM),
    HANG("ncclEpMaskUpdate", LL, RANDOM),
    HANG("ncclEpHandleDestroy", ALL, ANY),
    HANG("ncclEpGroupDestroy", ALL, ANY),
    {"stream:ncclEpDispatch", LL, ANY, EP_CASE_HANGS, "hangs: it has not returned for "},
    {"stream:ncclEpCombine", LL, ANY, EP_CASE_HANGS, "hangs: it has not returned for "},
    {"leak", ALL, RANDOM, EP_CASE_WRONG, "blocks from the caller's allocator are still live"},
};

/* Long enough for ranks that are held up on a loaded machine; what hangs takes that long. */
enum { TIMEOUT_MS = 5000, LIMIT_MS = 8000, PATIENT_MS = 90000, MOST_SECONDS = 80 };

/* Who waits for a rank that hangs waits for the timeout, others for nothing. */
static uint64_t timeoutOf(const planted_t *p) {
  return (p->outcome == EP_CASE_HANGS ? TIMEOUT_MS : PATIENT_MS) * 1000000ull;
}

static ep_library_paths_t pathsHere(void) {
  return (ep_library_paths_t){getenv("TREFOIL_FAULTY"), getenv("TREFOIL_HOST"),
                              getenv("TREFOIL_HOST")};
}

/* Rank 1 it is, but where the process of all ranks died without a word: then nobody's. */
static void checkText(const planted_t *p, const char *text, const char *how) {
  const char *call = strchr(p->fault, ':');
  int isMute = (!strncmp(p->fault, "kill", 4) || !strncmp(p->fault, "_exit", 5)) &&
               strcmp(how, "processes") != 0;
  CHECK(strstr(text, p->word), "%s, %s: '%s' is not in %s", p->fault, how, p->word, text);
  CHECK(strstr(text, "rank 1"), "%s, %s: no rank 1 in %s", p->fault, how, text);
  if (call && strncmp(p->fault, "stream", 6) != 0)
    CHECK(strstr(text, call + 1), "%s, %s: not the call in %s", p->fault, how, text);
  if (!isMute && p->outcome == EP_CASE_HANGS)
    CHECK(!strncmp(strstr(text, "rank "), "rank 1", 6), "%s, %s: not rank 1 first in %s", p->fault,
          how, text);
}

/* ---- Random cases ------------------------------------------------------------------------------- */

static void checkOutcomes(const planted_t *p, const uint8_t *outcomes,
                          const ep_check_outcome_t *outcome) {
  uint64_t agree = 0, found = 0, none = 0;
  for (int i = 0; i < CASES; i++) {
    agree += outcomes[i] == EP_CASE_AGREES;
    found += outcomes[i] == p->outcome;
    none += outcomes[i] == EP_CASE_NOT_RUN;
  }
  CHECK(none == 0, "%s: %d cases have no outcome", p->fault, (int)none);
  CHECK(agree == outcome->status.cases, "%s: %d agree, %d told", p->fault, (int)agree,
        (int)outcome->status.cases);
  CHECK(agree + outcome->findings[0].numCases == CASES, "%s: %d of %d agree", p->fault, (int)agree,
        CASES);
  CHECK(found == outcome->findings[0].numCases, "%s: %d found", p->fault, (int)found);
}

static void runRandom(const planted_t *p, int processes) {
  static ep_check_outcome_t outcome;
  static uint8_t outcomes[CASES];
  const char *how = processes ? "processes" : "threads";
  ep_check_options_t o = {.paths = pathsHere(),
                          .numCases = CASES,
                          .processes = processes,
                          .timeoutNs = timeoutOf(p),
                          .limitNs = p->outcome == EP_CASE_HANGS ? LIMIT_MS * 1000000ull : 0,
                          .maxFindings = -1,
                          .outcomes = outcomes,
                          .replay = "trefoil check --seed 9"};
  o.choice = (ep_check_choice_t){.seed = 9, .modes = p->modes, .minRanks = 2, .maxRanks = 3};
  REQUIRE(epCheckRun(&o, &outcome) == TREFOIL_OK, "%s, %s: %s", p->fault, how, trefoilLastError());
  REQUIRE(outcome.failed && outcome.numFindings == 1, "%s, %s: %d findings; %s", p->fault, how,
          outcome.numFindings, outcome.numFindings > 1 ? outcome.findings[1].text : outcome.text);
  const ep_check_finding_t *f = &outcome.findings[0];
  char replay[96], start[32];
  CHECK(f->outcome == p->outcome, "%s, %s: %s: %s", p->fault, how, epOutcomeName(f->outcome),
        f->text);
  checkText(p, f->what, how);
  snprintf(start, sizeof start, "case %d: ", (int)f->caseIdx);
  CHECK(!strncmp(f->text, start, strlen(start)), "%s, %s: %s", p->fault, how, f->text);
  snprintf(replay, sizeof replay, "replay: trefoil check --seed 9 --case %d", (int)f->caseIdx);
  CHECK(strstr(f->text, replay), "%s, %s: '%s' is not in %s", p->fault, how, replay, f->text);
  checkOutcomes(p, outcomes, &outcome);
}

/* ---- A real shape ------------------------------------------------------------------------------- */

static void runReal(const planted_t *p) {
  static ep_real_result_t result;
  ep_real_options_t o = {
      .paths = pathsHere(),
      .mode = p->modes == LL ? TREFOIL_LL_RANK_MAJOR : TREFOIL_HT_FLAT,
      .shape = {.numRanks = 3, .ranksPerNode = 3, .numExperts = 6, .topk = 2, .maxTokens = 8},
      .hidden = 128,
      .seed = 1,
      .timeoutNs = timeoutOf(p),
      .limitNs = LIMIT_MS * 1000000ull};
  REQUIRE(epRealRun(&o, &result) == TREFOIL_OK, "%s, real shape: %s", p->fault, trefoilLastError());
  CHECK(!result.ok, "%s was not seen", p->fault);
  ep_case_outcome_t wanted =
      strchr(p->word, ':') && p->outcome != EP_CASE_HANGS ? EP_CASE_WRONG : p->outcome;
  CHECK(result.outcome == wanted, "%s, real shape: %s: %s", p->fault, epOutcomeName(result.outcome),
        result.difference);
  checkText(p, result.difference, "real shape");
}

/* ---- All of them -------------------------------------------------------------------------------- */

typedef struct task {
  const planted_t *planted;
  int run;
  pid_t pid;
} task_t;

static void runTask(const task_t *t) {
  char log[64];
  struct timespec start, end;
  int seen = -1;
  snprintf(log, sizeof log, "/tmp/trefoil-end-%d", (int)getpid());
  setenv("TREFOIL_FAULT", t->planted->fault, 1);
  setenv("TREFOIL_FAULT_LOG", log, 1);
  setenv("TREFOIL_FAULT_LIBRARY", getenv("TREFOIL_CPU"), 1);
  unlink(log);
  if (t->run != THREADS) setenv("TREFOIL_FAULT_SOON", "1", 1); /* a process makes few calls */
  clock_gettime(CLOCK_MONOTONIC, &start);
  if (t->run == REAL)
    runReal(t->planted);
  else
    runRandom(t->planted, t->run == PROCESSES);
  clock_gettime(CLOCK_MONOTONIC, &end);
  CHECK((seen = open(log, O_RDONLY)) >= 0, "%s was never planted", t->planted->fault);
  CHECK(end.tv_sec - start.tv_sec < MOST_SECONDS, "%s, %d: took %d s", t->planted->fault, t->run,
        (int)(end.tv_sec - start.tv_sec));
  if (seen >= 0) close(seen);
  unlink(log);
}

#ifdef __SANITIZE_ADDRESS__
/* Symbols of planted crashes take seconds, in which the other ranks would pass their limits. */
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void) {
  return "symbolize=0";
}
#endif

/* One may end; its failures are this test's. */
static void awaitOne(task_t *tasks, int n, int *running) {
  int status;
  pid_t pid = wait(&status);
  for (int i = 0; i < n; i++)
    if (tasks[i].pid == pid)
      CHECK(status == 0, "%s, run %d", tasks[i].planted->fault, tasks[i].run);
  --*running;
}

TEST(every_end_is_told_and_the_run_goes_on) {
  enum { NUM = sizeof table / sizeof *table };
  task_t tasks[3 * NUM];
  int n = 0, running = 0;
  const char *only = getenv("TREFOIL_ONLY_FAULT"); /* for a look at one */
  for (int i = 0; i < NUM; i++)
    for (int run = THREADS; run <= REAL; run *= 2) {
      if (!(table[i].runs & run) || (only && strcmp(only, table[i].fault))) continue;
      if (running == AT_ONCE) awaitOne(tasks, n, &running);
      fflush(NULL);
      tasks[n] = (task_t){&table[i], run, fork()};
      if (tasks[n].pid == 0) {
        testFailures = 0;
        runTask(&tasks[n]);
        _exit(testFailures > 0);
      }
      n++;
      running++;
    }
  while (running > 0) awaitOne(tasks, n, &running);
}

/* ---- The rest ----------------------------------------------------------------------------------- */

/* Findings end the run when there are as many as were asked for; with several jobs, too. */
TEST(as_many_findings_as_asked_for) {
  static ep_check_outcome_t outcome;
  setenv("TREFOIL_FAULT", "error:ncclEpDispatch", 1);
  setenv("TREFOIL_FAULT_ALWAYS", "1", 1);
  setenv("TREFOIL_FAULT_LOG", "/dev/null", 1);
  setenv("TREFOIL_FAULT_LIBRARY", getenv("TREFOIL_CPU"), 1);
  for (int jobs = 1; jobs <= 2; jobs++) {
    ep_check_options_t o = {
        .paths = pathsHere(), .numCases = 640, .jobs = jobs, .maxFindings = 3, .replay = "x"};
    o.choice = (ep_check_choice_t){.seed = 9, .minRanks = 2, .maxRanks = 3};
    REQUIRE(epCheckRun(&o, &outcome) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(outcome.numFindings == 3, "%d findings", outcome.numFindings);
    CHECK(outcome.findings[0].caseIdx < outcome.findings[1].caseIdx &&
              outcome.findings[1].caseIdx < outcome.findings[2].caseIdx,
          "in order of cases");
    CHECK(outcome.failedCase == outcome.findings[0].caseIdx, "the first");
    CHECK(outcome.status.cases < 640, "%d cases", (int)outcome.status.cases);
  }
  unsetenv("TREFOIL_FAULT_ALWAYS");
}

/* What a library prints is on stderr, and changes nothing. */
TEST(prints_are_kept_out) {
  static ep_check_outcome_t outcome;
  static ep_real_result_t result;
  char name[64] = "/tmp/trefoil-print-XXXXXX";
  int fd = mkstemp(name), saved = dup(STDOUT_FILENO);
  REQUIRE(fd >= 0 && saved >= 0, "a file");
  unlink(name);
  setenv("TREFOIL_FAULT", "print:ncclEpDispatch", 1);
  setenv("TREFOIL_FAULT_LIBRARY", getenv("TREFOIL_CPU"), 1);
  ep_check_options_t o = {.paths = pathsHere(), .numCases = 64, .replay = "x"};
  o.choice = (ep_check_choice_t){.seed = 9, .minRanks = 2, .maxRanks = 3};
  ep_real_options_t real = {.paths = pathsHere(),
                            .shape = {2, 2, 4, 2, 8},
                            .hidden = 128,
                            .seed = 1,
                            .timeoutNs = 20000000000u};
  fflush(stdout);
  dup2(fd, STDOUT_FILENO);
  trefoil_result_t a = epCheckRun(&o, &outcome), b = epRealRun(&real, &result);
  o.processes = 1;
  trefoil_result_t c = epCheckRun(&o, &outcome);
  fflush(stdout);
  dup2(saved, STDOUT_FILENO);
  CHECK(a == TREFOIL_OK && b == TREFOIL_OK && c == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(!outcome.failed && outcome.status.cases == 64, "%s", outcome.text);
  CHECK(result.ok, "%s", result.difference);
  CHECK(lseek(fd, 0, SEEK_END) == 0, "%d bytes on stdout", (int)lseek(fd, 0, SEEK_END));
  close(fd);
  close(saved);
}

TEST_MAIN()
