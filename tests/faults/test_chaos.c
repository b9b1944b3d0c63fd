/* Eight rank processes make low-latency steps with masks while they are killed (kill -9), stopped for a
 * short time and for longer than the timeout, and while the clock of the day jumps. Rounds of fresh
 * processes until enough steps are made. Expected: nobody hangs, nobody dies of anything else, and what
 * every survivor gets equals the reference byte for byte: all of it in steps in which its masks did not
 * change, else everything that concerns only ranks that stayed. Masks are cleaned now and then.
 *
 * argv: [--steps N] [--seed N] */
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <nccl.h>

#include "../api/step.h"
#include "test.h"
#include "trefoil_host.h"

enum { R = 8, ROUND_STEPS = 50, TIMEOUT_MS = 1500, LONG_STOP_MS = 2500, LIMIT_S = 120 };

typedef enum { WORKING, DONE, LEFT, NO_GROUP, TOLD, WRONG } state_t;

typedef struct {
  _Atomic int state, step;
  int whole, partial, cleaned; /* steps by how much was compared; cleanings */
  char sentence[500];
} player_t;

/* What a rank's masks were in a step, + 1; 0: it has not come so far. */
typedef struct {
  _Atomic unsigned char before[R], between[R];
} view_t;

typedef struct {
  _Atomic int64_t clockJumpNs;
  ncclUniqueId id;
  _Atomic int idReady;
  player_t players[R];
  view_t views[ROUND_STEPS][R];
} shared_t;
static shared_t *shared;

/* ---- The clock of the day, in front of libc's ---- */

int clock_gettime(clockid_t clock, struct timespec *t) {
  int result = (int)syscall(SYS_clock_gettime, clock, t);
  if (result || clock != CLOCK_REALTIME || !shared) return result;
  int64_t ns = t->tv_nsec + t->tv_sec * 1000000000ll + atomic_load(&shared->clockJumpNs);
  *t = (struct timespec){ns / 1000000000, ns % 1000000000};
  return 0;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  *t = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
  return 0;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- One rank ---- */

typedef struct {
  int me, round;
  player_t *out;
  ncclComm_t comm;
  cudaStream_t stream;
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  step_case_t c;
  int *pinned; /* [R] */
} rank_t;

static state_t end(rank_t *r, state_t state, const char *why) {
  snprintf(r->out->sentence, sizeof r->out->sentence, "round %d, step %d, rank %d: %.400s",
           r->round, atomic_load(&r->out->step), r->me, why);
  return state;
}

/* A call that failed: it must say why. */
static state_t told(rank_t *r, state_t state) {
  const char *why = ncclEpGetLastError();
  if (!why || !*why) why = trefoilHostLastError();
  return end(r, why && *why ? state : WRONG,
             why && *why ? why : "a call failed without a sentence");
}

static int masksOf(rank_t *r, int mask[R]) {
  int got = ncclEpMaskQuery(r->group, r->pinned, r->stream) == ncclSuccess &&
            cudaStreamSynchronize(r->stream) == cudaSuccess;
  memcpy(mask, r->pinned, R * sizeof *mask);
  return got;
}

static int publish(_Atomic unsigned char shown[R], const int mask[R]) {
  for (int s = 0; s < R; s++) atomic_store(&shown[s], (unsigned char)(1 + (mask[s] != 0)));
  return 1;
}

static int isSame(const int a[R], const int b[R]) {
  return !memcmp(a, b, R * sizeof *a);
}

/* Experts give back what they got, so that a sum depends on its token alone and not on the slots of other
 * rows at its experts, where masks may have changed. */
static void expertsReturn(step_data_t *d) {
  memcpy(d->expertRows[d->me], d->outTokens, (size_t)d->slots * (size_t)d->c->width * 2);
}

/* The masks of this rank and what the others' were about it: a row travels if both sides regard each other as
 * alive. Whoever has answered has shown its masks before. */
static void tellActive(uint8_t active[R * R], int me, const int mine[R], const int theirs[R]) {
  memset(active, 1, R * R);
  for (int s = 0; s < R; s++) {
    active[me * R + s] = mine[s] != 0;
    active[s * R + me] = s == me || theirs[s];
  }
}

/* One step's masks: this rank's at three moments, and whether each other had not masked it. */
typedef struct {
  int before[R], between[R], after[R];
  int sent[R], returned[R];
} masks_t;

static void expectUnder(step_data_t *d, const masks_t *m, uint8_t active[2][R * R]) {
  trefoil_source_t sources[R];
  for (int s = 0; s < R; s++) sources[s] = (trefoil_source_t){.tokens = d->tokens[s]};
  tellActive(active[0], d->me, m->before, m->sent);
  tellActive(active[1], d->me, m->between, m->returned);
  d->ref.active = active[0];
  d->ref.activeCombine = active[1];
  for (int s = 0; s < R; s++) {
    trefoil_received_t out = {.tokens = d->expertRows[s]};
    if (trefoilRefDispatch(&d->ref, s, sources, &out) != TREFOIL_OK) abort();
  }
  stepPoisonWanted(d);
  stepExpect(d);
}

/* Rank-major: rows of a rank that stayed are whole, wherever the others are. */
static const char *compareStayed(const step_data_t *d, const int stayed[R]) {
  size_t row = (size_t)d->c->width * 2, block = (size_t)d->c->maxTokens * row;
  if (d->c->mode != TREFOIL_LL_RANK_MAJOR) return "";
  for (int s = 0; s < R; s++) {
    if (!stayed[s]) continue;
    if (d->sources32[s] != d->wantSources[s]) return "a count of rows from a rank that stayed";
    if (memcmp((char *)d->outTokens + (size_t)s * block, (char *)d->wantTokens + (size_t)s * block,
               (size_t)d->sources32[s] * row))
      return "rows from a rank that stayed";
  }
  return "";
}

/* Tokens all of whose experts are on ranks that stayed. */
static const char *compareSums(const step_data_t *d, const int stayed[R]) {
  size_t row = (size_t)d->c->width * 2;
  for (int64_t t = 0; t < d->numTokens[d->me]; t++) {
    int whole = 1;
    for (int k = 0; k < d->c->topk; k++) {
      int expert = d->idx[d->me][t * d->c->topk + k];
      if (expert >= 0 && !stayed[expert / d->L]) whole = 0;
    }
    if (whole && memcmp((char *)d->combined + (size_t)t * row,
                        (char *)d->wantCombined + (size_t)t * row, row))
      return "the sum of a token whose experts stayed";
  }
  return "";
}

/* What the others' masks were about this rank. 0: one ended in the dispatch or changed its mind about this
 * rank, before or after it sent. (One that does so later is masked here by the end of the step.) */
static int askOthers(const view_t *views, int me, masks_t *m) {
  int certain = 1;
  for (int s = 0; s < R; s++) {
    int before = atomic_load(&views[s].before[me]), between = atomic_load(&views[s].between[me]);
    m->sent[s] = before == 2;
    m->returned[s] = before == 2 && between == 2;
    if (m->before[s] && before != between) certain = 0;
  }
  return certain;
}

static const char *compareStep(rank_t *r, step_data_t *d, masks_t *m) {
  uint8_t active[2][R * R];
  int stayed[R], whole = isSame(m->before, m->between) && isSame(m->between, m->after);
  whole &= askOthers(shared->views[atomic_load(&r->out->step)], d->me, m);
  for (int s = 0; s < R; s++)
    stayed[s] = m->before[s] && m->between[s] && m->after[s] && m->returned[s];
  expectUnder(d, m, active);
  const char *why = whole ? stepCompareDispatch(d) : compareStayed(d, stayed);
  if (*why) return why;
  r->out->whole += whole;
  r->out->partial += !whole;
  return whole ? stepCompareCombine(d) : compareSums(d, stayed);
}

/* A difference, with the masks that explain it, or do not: of this rank, and of the others about it. */
static state_t endWrong(rank_t *r, const step_data_t *d, const masks_t *m, const char *why) {
  const view_t *views = shared->views[atomic_load(&r->out->step)];
  char text[280];
  size_t n = (size_t)snprintf(text, sizeof text, "%s;", why);
  for (int s = 0; s < R && n < sizeof text; s++)
    n += (size_t)snprintf(text + n, sizeof text - n, " %d:%d%d%d/%d%d %d:%d", s, m->before[s],
                          m->between[s], m->after[s], atomic_load(&views[s].before[d->me]),
                          atomic_load(&views[s].between[d->me]), d->sources32[s],
                          (int)d->wantSources[s]);
  return end(r, WRONG, text);
}

static state_t doStep(rank_t *r, int step) {
  masks_t m;
  int numLeft = 0;
  state_t state = WORKING;
  view_t *view = &shared->views[step][r->me];
  r->c.seed = (uint64_t)r->round * 1000 + (uint64_t)step;
  step_data_t *d = stepMake(&r->c, r->me, R, R);
  int went = masksOf(r, m.before) && publish(view->before, m.before) &&
             stepUpdate(d, r->handle, r->stream) && stepDispatch(d, r->handle, r->stream) &&
             masksOf(r, m.between) && publish(view->between, m.between);
  if (went) expertsReturn(d);
  went = went && stepCombine(d, r->handle, r->stream) && masksOf(r, m.after);
  if (!went) {
    state = told(r, TOLD);
  } else {
    const char *why = compareStep(r, d, &m);
    if (*why) state = endWrong(r, d, &m, why);
    for (int s = 0; s < R; s++) numLeft += m.after[s] != 0;
    if (state == WORKING && numLeft == 1) state = end(r, LEFT, "alone");
  }
  stepFree(d);
  return state;
}

static state_t makeGroup(rank_t *r) {
  ncclEpGroupConfig_t config;
  r->c = (step_case_t){.topk = 3, .numExperts = 16, .maxTokens = 6, .width = 32};
  r->c.mode = r->round & 1 ? TREFOIL_LL_EXPERT_MAJOR : TREFOIL_LL_RANK_MAJOR;
  config = stepGroupConfig(&r->c, R);
  config.enable_mask = 1;
  if (ncclCommInitRank(&r->comm, R, shared->id, r->me) != ncclSuccess)
    return end(r, *trefoilHostLastError() ? NO_GROUP : WRONG, trefoilHostLastError());
  int made =
      cudaStreamCreate(&r->stream) == cudaSuccess &&
      cudaMallocHost((void **)&r->pinned, R * sizeof(int)) == cudaSuccess &&
      ncclEpCreateGroup(&r->group, r->comm, &config) == ncclSuccess &&
      ncclEpInitHandle(&r->handle, r->group, stepLayout(&r->c), NULL, 3, NULL) == ncclSuccess;
  return made ? WORKING : told(r, NO_GROUP);
}

static state_t playRank(rank_t *r) {
  state_t state = makeGroup(r);
  for (int step = 0; step < ROUND_STEPS && state == WORKING; step++) {
    atomic_store(&r->out->step, step);
    if (step % 17 == 16) { /* whoever is gone is masked again by the next step */
      if (ncclEpErrorClear(r->group) != ncclSuccess ||
          ncclEpMaskClean(r->group, r->stream) != ncclSuccess ||
          cudaStreamSynchronize(r->stream) != cudaSuccess)
        state = told(r, TOLD);
      r->out->cleaned++;
    }
    if (state == WORKING) state = doStep(r, step);
  }
  if (r->handle) ncclEpHandleDestroy(r->handle);
  if (r->group) ncclEpGroupDestroy(r->group);
  if (r->comm) ncclCommDestroy(r->comm);
  return state == WORKING ? DONE : state;
}

static void rankMain(int me, int round) {
  rank_t r = {.me = me, .round = round, .out = &shared->players[me]};
  cudaSetDevice(me);
  if (me == 0) {
    atomic_store(&shared->idReady, ncclGetUniqueId(&shared->id) == ncclSuccess ? 1 : 2);
  }
  for (int ms = 0; ms < 20000 && !atomic_load(&shared->idReady); ms++) usleep(1000);
  state_t state = atomic_load(&shared->idReady) == 1 ? playRank(&r) : end(&r, NO_GROUP, "no id");
  atomic_store(&r.out->state, (int)state);
  _exit(0);
}

/* ---- What happens to them ---- */

typedef struct {
  int rounds, kills, shortStops, longStops, jumps;
  int steps, whole, partial, cleaned, ends[WRONG + 1];
} counts_t;
static counts_t counts;

typedef struct {
  pid_t pids[R];
  int alive[R], killed[R];
  double resumeAt[R]; /* 0: not stopped */
  int numKilled, numLong, numAlive;
} round_t;

static void stop(round_t *g, int r, double duration) {
  if (g->resumeAt[r] != 0) return;
  kill(g->pids[r], SIGSTOP);
  g->resumeAt[r] = seconds() + duration;
}

static void happen(round_t *g) {
  int r = rand() % R, what = rand() % 100;
  if (what < 25) {
    atomic_store(&shared->clockJumpNs, (int64_t)(rand() % 200000 - 100000) * 1000000000ll);
    counts.jumps++;
    return;
  }
  if (!g->alive[r]) return;
  if (what < 45 && g->numKilled < 4) {
    kill(g->pids[r], SIGKILL);
    g->killed[r] = 1;
    g->numKilled++;
    counts.kills++;
  } else if (what < 50 && g->numLong < 1) {
    stop(g, r, LONG_STOP_MS * 1e-3);
    g->numLong++;
    counts.longStops++;
  } else if (what >= 50) {
    stop(g, r, (rand() % 60 + 2) * 1e-3);
    counts.shortStops++;
  }
}

static void tend(round_t *g) {
  for (int r = 0; r < R; r++) {
    int status = 0;
    if (g->resumeAt[r] != 0 && seconds() >= g->resumeAt[r]) {
      kill(g->pids[r], SIGCONT);
      g->resumeAt[r] = 0;
    }
    if (!g->alive[r] || waitpid(g->pids[r], &status, WNOHANG) != g->pids[r]) continue;
    g->alive[r] = 0;
    g->numAlive--;
    CHECK(g->killed[r] || (WIFEXITED(status) && WEXITSTATUS(status) == 0),
          "round %d: rank %d ended with status 0x%x", counts.rounds, r, status);
  }
}

static void count(const round_t *g) {
  int most = 0;
  for (int r = 0; r < R; r++) {
    const player_t *p = &shared->players[r];
    int state = atomic_load(&p->state);
    counts.whole += p->whole;
    counts.partial += p->partial;
    counts.cleaned += p->cleaned;
    if (p->whole + p->partial > most) most = p->whole + p->partial;
    if (g->killed[r] && state == WORKING) continue;
    counts.ends[state]++;
    CHECK(state != WRONG && state != WORKING, "%s", p->sentence);
    int late = strstr(p->sentence, "within") != NULL; /* a busy machine is no fault */
    CHECK((state != TOLD && state != NO_GROUP) || g->numKilled || g->numLong || late,
          "nobody was killed: %s", p->sentence);
  }
  counts.steps += most;
}

static void playRound(void) {
  round_t g = {.numAlive = R};
  memset(shared, 0, sizeof *shared);
  fflush(NULL);
  for (int r = 0; r < R; r++) {
    g.alive[r] = 1;
    g.pids[r] = fork();
    if (g.pids[r] == 0) rankMain(r, counts.rounds);
  }
  double start = seconds(), next = start;
  while (g.numAlive && seconds() - start < LIMIT_S) {
    if (seconds() >= next) {
      if (next > start) happen(&g);
      next = seconds() + (rand() % 60 + 3) * 1e-3;
    }
    tend(&g);
    usleep(1000);
  }
  CHECK(g.numAlive == 0, "round %d: %d ranks hang", counts.rounds, g.numAlive);
  for (int r = 0; r < R; r++) {
    if (!g.alive[r]) continue;
    kill(g.pids[r], SIGKILL);
    waitpid(g.pids[r], NULL, 0);
    g.killed[r] = 1;
  }
  count(&g);
  counts.rounds++;
}

static int wantedSteps = 150;

/* Steps are quick on some machines: of each kind something, however many rounds that takes. */
static int enough(void) {
  int each = counts.kills > 0 && counts.shortStops > 0 && counts.jumps > 0;
  return each && counts.steps >= wantedSteps;
}

TEST(survivors_compute_the_reference) {
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(shared != MAP_FAILED, "mmap");
  while (!enough() && counts.rounds < 20 + wantedSteps / 10 && testFailures < 5) playRound();
  printf("%d steps in %d rounds of %d ranks: %d kills, %d short and %d long stops, %d jumps of the "
         "clock, %d cleanings\n",
         counts.steps, counts.rounds, R, counts.kills, counts.shortStops, counts.longStops,
         counts.jumps, counts.cleaned);
  printf(
      "ranks' steps compared: %d whole, %d in part; ends: %d did all steps, %d were left alone, %d "
      "had no group, %d were told of a loss\n",
      counts.whole, counts.partial, counts.ends[DONE], counts.ends[LEFT], counts.ends[NO_GROUP],
      counts.ends[TOLD]);
  CHECK(enough(), "too little happened in so many rounds");
  CHECK(counts.whole > 2 * counts.steps, "too little was compared");
}

int main(int argc, char **argv) {
  unsigned seed = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!strcmp(argv[i], "--steps")) wantedSteps = atoi(argv[i + 1]);
    if (!strcmp(argv[i], "--seed")) seed = (unsigned)atoi(argv[i + 1]);
  }
  char ms[16];
  snprintf(ms, sizeof ms, "%d", TIMEOUT_MS);
  setenv("NCCL_EP_TIMEOUT_MS", ms, 1);
  printf("seed %u\n", seed);
  srand(seed);
  return testRunAll(1, argv);
}
