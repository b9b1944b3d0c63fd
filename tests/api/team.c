/* Teams of ranks: threads, or processes made by fork before this process touches CUDA. */
#include "team.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_RANKS 32

typedef struct team_shared {
  pthread_barrier_t barrier;
  char errors[MAX_RANKS][400];
} team_shared_t;

static char verdict[500];

void teamFail(team_rank_t *r, const char *format, ...) {
  if (r->error[0]) return;
  va_list args;
  va_start(args, format);
  vsnprintf(r->error, sizeof r->error, format, args);
  va_end(args);
}

void teamBarrier(team_rank_t *r) {
  pthread_barrier_wait(&r->shared->barrier);
}

static team_shared_t *makeShared(int numRanks) {
  team_shared_t *s =
      mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (s == MAP_FAILED) abort();
  pthread_barrierattr_t attr;
  pthread_barrierattr_init(&attr);
  pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&s->barrier, &attr, (unsigned)numRanks);
  return s;
}

void teamPin(team_rank_t *r, void *memory, size_t bytes) {
  cudaError_t error = cudaHostRegister(memory, bytes, 0);
  if (!r || (error == cudaSuccess && r->numPinned < 16)) {
    if (r) r->pinned[r->numPinned++] = memory;
    return;
  }
  teamFail(r, "cudaHostRegister: %s", cudaGetErrorString(error));
}

static void runRank(team_rank_t *r, team_body_t body) {
  cudaSetDevice(r->rank % 8);
  if (ncclCommInitRank(&r->comm, r->numRanks, r->id, r->rank) != ncclSuccess) {
    teamFail(r, "ncclCommInitRank: %s", ncclGetLastError(NULL));
  } else if (cudaStreamCreate(&r->stream) != cudaSuccess) {
    teamFail(r, "cudaStreamCreate");
  } else {
    body(r);
    for (int i = 0; i < r->numPinned; i++) cudaHostUnregister(r->pinned[i]);
    cudaStreamDestroy(r->stream);
    ncclCommDestroy(r->comm);
  }
}

static const char *collect(team_shared_t *s, int numRanks) {
  verdict[0] = 0;
  for (int r = 0; r < numRanks && !verdict[0]; r++) {
    if (s->errors[r][0]) snprintf(verdict, sizeof verdict, "rank %d: %s", r, s->errors[r]);
  }
  munmap(s, sizeof *s);
  return verdict;
}

typedef struct thread_start {
  team_rank_t rank;
  team_body_t body;
} thread_start_t;

static void *threadMain(void *argument) {
  thread_start_t *t = argument;
  runRank(&t->rank, t->body);
  memcpy(t->rank.shared->errors[t->rank.rank], t->rank.error, sizeof t->rank.error);
  return NULL;
}

const char *teamThreads(int numRanks, team_body_t body, void *user) {
  team_shared_t *shared = makeShared(numRanks);
  thread_start_t *starts = calloc((size_t)numRanks, sizeof *starts);
  pthread_t threads[MAX_RANKS];
  ncclUniqueId id;
  if (ncclGetUniqueId(&id) != ncclSuccess) return "ncclGetUniqueId failed";
  for (int r = 0; r < numRanks; r++) {
    starts[r].rank = (team_rank_t){.rank = r, .numRanks = numRanks, .user = user, .shared = shared};
    starts[r].rank.id = id;
    starts[r].body = body;
    pthread_create(&threads[r], NULL, threadMain, &starts[r]);
  }
  for (int r = 0; r < numRanks; r++) pthread_join(threads[r], NULL);
  free(starts);
  return collect(shared, numRanks);
}

static void childMain(team_rank_t *r, team_body_t body, int *pipe) {
  if (r->rank == 0) {
    if (ncclGetUniqueId(&r->id) != ncclSuccess) _exit(3);
    for (int i = 1; i < r->numRanks; i++) {
      if (write(pipe[1], &r->id, sizeof r->id) != sizeof r->id) _exit(3);
    }
  } else if (read(pipe[0], &r->id, sizeof r->id) != sizeof r->id) {
    _exit(3);
  }
  runRank(r, body);
  memcpy(r->shared->errors[r->rank], r->error, sizeof r->error);
  _exit(r->error[0] ? 1 : 0);
}

const char *teamProcesses(int numRanks, team_body_t body, void *user, unsigned mayDie) {
  team_shared_t *shared = makeShared(numRanks);
  pid_t pids[MAX_RANKS];
  int fds[2];
  if (pipe(fds)) return "pipe failed";
  fflush(NULL);
  for (int r = 0; r < numRanks; r++) {
    pids[r] = fork();
    if (pids[r]) continue;
    team_rank_t rank = {.rank = r, .numRanks = numRanks, .user = user, .shared = shared};
    rank.processes = 1;
    childMain(&rank, body, fds);
  }
  close(fds[0]);
  close(fds[1]);
  for (int r = 0; r < numRanks; r++) {
    int status = 0;
    waitpid(pids[r], &status, 0);
    int fine = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!fine && !(mayDie >> r & 1) && !shared->errors[r][0]) {
      snprintf(shared->errors[r], sizeof shared->errors[r], "ended with wait status 0x%x", status);
    }
  }
  return collect(shared, numRanks);
}
