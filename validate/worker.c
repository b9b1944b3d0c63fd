/* Forking, watching and describing workers. */
#include "validate/worker.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

uint64_t epCallLimitNs(uint64_t timeoutNs, int isHost) {
  return timeoutNs + timeoutNs / 4 + (isHost ? 5000000000u : 60000000000u);
}

const char *epOutcomeName(ep_case_outcome_t outcome) {
  static const char *const names[] = {"not run", "agrees", "order open", "refused",
                                      "aborts",  "hangs",  "different"};
  return names[outcome];
}

/* ---- Places ------------------------------------------------------------------------------------- */

void epPlaceEnter(ep_place_t *place, const char *call) {
  if (!place) return;
  uint64_t now = epMonotonicNs();
  atomic_store_explicit(&place->sinceNs, now, memory_order_relaxed);
  atomic_store_explicit(&place->deadlineNs, place->limitNs ? now + place->limitNs : UINT64_MAX,
                        memory_order_relaxed);
  atomic_store_explicit(&place->call, call, memory_order_release); /* cheap: calls are timed */
}

void epPlaceLeave(ep_place_t *place) {
  if (place) atomic_store_explicit(&place->call, NULL, memory_order_release);
}

void epWatchReset(ep_watch_t *watch, int numRanks, uint64_t limitNs) {
  for (int r = 0; r < EP_WATCH_MAX_RANKS; r++) {
    ep_place_t *p = &watch->places[r];
    atomic_store(&p->call, NULL);
    atomic_store(&p->phase, EP_PHASE_OPENING);
    atomic_store(&p->op, -1);
    p->limitNs = limitNs;
    atomic_store(&p->rounds, 0);
  }
  atomic_store(&watch->isEnding, 0);
  atomic_store(&watch->endedRank, -1);
  atomic_store(&watch->numRanks, numRanks);
}

void epWatchBarrier(ep_watch_t *watch, int rank, int numRanks, const _Atomic int *stop) {
  struct timespec pause = {0, 20000};
  uint64_t mine = atomic_fetch_add(&watch->places[rank].rounds, 1) + 1;
  uint64_t end = epMonotonicNs() + watch->places[rank].limitNs;
  for (int r = 0; r < numRanks; r++)
    while (atomic_load(&watch->places[r].rounds) < mine && !atomic_load(stop) &&
           epMonotonicNs() < end)
      nanosleep(&pause, NULL);
}

/* ---- Last words --------------------------------------------------------------------------------- */

static ep_watch_t *hooked;
static _Thread_local int threadRank = -1;

void epWatchThread(int rank) {
  threadRank = rank;
}

static void leaveWord(void) {
  if (!hooked) return;
  atomic_store(&hooked->endedRank, threadRank);
  atomic_store(&hooked->isEnding, 1);
}

/* Sanitizers have handlers of their own, which tell more. */
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
static void onCrash(int number) {
  leaveWord();
  signal(number, SIG_DFL);
  raise(number);
}
#endif

/* Libraries' own threads may be at work: none of their destructors. */
static void onExit(int status, void *context) {
  (void)context;
  leaveWord();
  fflush(stdout);
  _exit(status);
}

void epWatchHooks(ep_watch_t *watch) {
  hooked = watch;
  on_exit(onExit, NULL);
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
  static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
  struct sigaction action = {.sa_handler = onCrash, .sa_flags = (int)(SA_RESETHAND | SA_NODEFER)};
  for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
    sigaction(signals[i], &action, NULL);
#endif
}

/* ---- What the parent sees ----------------------------------------------------------------------- */

typedef struct writer {
  char text[600];
  size_t used;
} writer_t;

static void put(writer_t *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(writer_t *w, const char *format, ...) {
  va_list ap;
  if (w->used >= sizeof w->text) return;
  va_start(ap, format);
  int n = vsnprintf(w->text + w->used, sizeof w->text - w->used, format, ap);
  va_end(ap);
  if (n > 0) w->used += (size_t)n;
}

/* How long a rank has been in its call; 0: in none. */
static uint64_t timeInCall(const ep_place_t *p, uint64_t now) {
  if (!atomic_load(&((ep_place_t *)p)->call)) return 0;
  uint64_t since = atomic_load(&((ep_place_t *)p)->sinceNs);
  return now > since ? now - since : 1;
}

int epWatchLongest(const ep_watch_t *watch, uint64_t ns) {
  uint64_t now = epMonotonicNs();
  for (int r = 0; r < atomic_load(&((ep_watch_t *)watch)->numRanks); r++)
    if (timeInCall(&watch->places[r], now) > ns) return r;
  return -1;
}

/* Is a less far than b? */
static int compareFar(const ep_place_t *a, const ep_place_t *b) {
  ep_place_t *x = (ep_place_t *)a, *y = (ep_place_t *)b;
  int phases = atomic_load(&x->phase) - atomic_load(&y->phase);
  if (phases) return phases;
  uint64_t i = atomic_load(&x->caseIdx), j = atomic_load(&y->caseIdx);
  if (i != j) return i < j ? -1 : 1;
  return atomic_load(&x->op) - atomic_load(&y->op);
}

const ep_place_t *epWatchFirst(const ep_watch_t *watch) {
  const ep_place_t *first = &watch->places[0];
  for (int r = 1; r < atomic_load(&((ep_watch_t *)watch)->numRanks); r++)
    if (compareFar(&watch->places[r], first) < 0) first = &watch->places[r];
  return first;
}

/* "ncclEpDispatch (operation 3)"; "": in no call. */
static void putCall(writer_t *w, const ep_place_t *place) {
  ep_place_t *p = (ep_place_t *)place;
  const char *call = atomic_load(&p->call);
  int op = atomic_load(&p->op), phase = atomic_load(&p->phase);
  if (call) put(w, "%s", call);
  if (call && phase == EP_PHASE_CASE && op >= 0) put(w, " (operation %d)", op);
}

/* Where the other ranks are; except: bit per rank. */
static void putOthers(writer_t *w, const ep_watch_t *watch, uint64_t except, uint64_t now) {
  int R = atomic_load(&((ep_watch_t *)watch)->numRanks), first = 1;
  for (int r = 0; r < R && r < 16; r++) {
    const ep_place_t *p = &watch->places[r];
    uint64_t time = timeInCall(p, now);
    if (except >> r & 1) continue;
    put(w, first ? "; rank %d is in " : ", rank %d in ", r);
    putCall(w, p);
    put(w, time ? " for %.1f s" : "no call", 1e-9 * (double)time);
    first = 0;
  }
}

int epWatchHang(const ep_watch_t *watch, char text[EP_WATCH_TEXT]) {
  writer_t who = {.used = 0}, call = {.used = 0}, others = {.used = 0};
  uint64_t now = epMonotonicNs(), named = 0;
  int R = atomic_load(&((ep_watch_t *)watch)->numRanks), first = -1, isOver = 0;
  for (int r = 0; r < R; r++) {
    ep_place_t *p = (ep_place_t *)&watch->places[r];
    uint64_t time = timeInCall(p, now);
    if (!time) continue;
    isOver |= now > atomic_load(&p->deadlineNs);
    /* Waiting ranks came a little earlier or later: half the limit is long enough to count. */
    if (time > p->limitNs / 2 && (first < 0 || compareFar(p, &watch->places[first]) < 0)) first = r;
  }
  if (!isOver || first < 0) return -1;
  for (int r = first; r < R; r++) {
    const ep_place_t *p = &watch->places[r];
    if (timeInCall(p, now) <= p->limitNs / 2 || compareFar(p, &watch->places[first])) continue;
    put(&who, r == first ? "rank %d" : ", rank %d", r);
    named |= 1ull << r;
  }
  putCall(&call, &watch->places[first]);
  putOthers(&others, watch, named, now);
  snprintf(text, EP_WATCH_TEXT, "%s: %s hangs: it has not returned for %.1f s%s", who.text,
           call.text, 1e-9 * (double)timeInCall(&watch->places[first], now), others.text);
  return first;
}

int epWatchEnd(const ep_watch_t *watch, int status, int rank, char text[EP_WATCH_TEXT]) {
  writer_t call = {.used = 0}, others = {.used = 0};
  const char *whose = rank >= 0 ? "its process" : "the process of all ranks";
  if (rank < 0 && atomic_load(&((ep_watch_t *)watch)->isEnding))
    rank = atomic_load(&((ep_watch_t *)watch)->endedRank);
  if (rank >= 0) {
    put(&call, "rank %d: ", rank);
    putCall(&call, &watch->places[rank]);
    put(&call, ": ");
  } else {
    putOthers(&others, watch, 0, epMonotonicNs());
  }
  if (WIFSIGNALED(status))
    snprintf(text, EP_WATCH_TEXT, "%s%s was ended by signal %d (%s)%s", call.text, whose,
             WTERMSIG(status), strsignal(WTERMSIG(status)), others.text);
  else
    snprintf(text, EP_WATCH_TEXT, "%s%s ended with exit code %d in the middle%s", call.text, whose,
             WEXITSTATUS(status), others.text);
  return rank;
}

/* ---- Processes ---------------------------------------------------------------------------------- */

int epStdoutAway(void) {
  fflush(NULL);
  int saved = dup(STDOUT_FILENO);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  return saved;
}

void epStdoutBack(int saved) {
  fflush(stdout);
  if (saved < 0) return;
  dup2(saved, STDOUT_FILENO);
  close(saved);
}

pid_t epWorkerFork(int isHead) {
  fflush(NULL); /* else a child's exit() writes it again */
  pid_t parent = getpid(), pid = fork();
  if (pid > 0 && isHead) setpgid(pid, pid);
  if (pid != 0) return pid;
  if (isHead) setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  signal(SIGINT, SIG_DFL);
  signal(SIGTERM, SIG_DFL);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  return 0;
}

void epWorkerKill(pid_t pid) {
  if (pid <= 0) return;
  kill(-pid, SIGKILL);
  kill(pid, SIGKILL);
  while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) continue;
}
