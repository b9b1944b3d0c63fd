/* Where ranks meet before NCCL's collective calls (api/gpu/rendezvous.c), with communicators that are no more
 * than a rank, a count, a hash and a number of NVLink domains: who comes, who fails, who stays away, who
 * dies; in shared memory and over TCP. Needs no GPU and no NCCL. */
#include "api/gpu/rendezvous.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "api/own_file.h"
#include "small_tmpfs.h"
#include "test.h"

enum { R = 4 };
#define SECOND 1000000000ull

struct ncclComm {
  int rank, count;
  uint64_t hash;
  int domains;
};
uint64_t epGpuCommHash(ncclComm_t comm);
int epGpuCommDomains(ncclComm_t comm);
trefoil_result_t epGpuBroadcast(ncclComm_t comm, void *bytes, size_t n);

uint64_t epGpuCommHash(ncclComm_t comm) {
  return comm->hash;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
  *count = comm->count;
  return ncclSuccess;
}

int epGpuCommDomains(ncclComm_t comm) {
  return comm->domains;
}

/* Broadcasts, by hash: all processes of the test share them. */
typedef struct aired {
  _Atomic uint64_t hash;
  char bytes[128];
} aired_t;
enum { AIRED = 64 };
static aired_t *air;

__attribute__((constructor)) static void shareAir(void) {
  air = mmap(NULL, AIRED * sizeof *air, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

trefoil_result_t epGpuBroadcast(ncclComm_t comm, void *bytes, size_t n) {
  aired_t *a = &air[comm->hash % AIRED];
  if (n > sizeof a->bytes) return TREFOIL_INTERNAL_ERROR;
  if (comm->rank == 0) {
    memcpy(a->bytes, bytes, n);
    atomic_store(&a->hash, comm->hash);
    return TREFOIL_OK;
  }
  for (int ms = 0; atomic_load(&a->hash) != comm->hash; ms++) {
    if (ms == 30000) return TREFOIL_REMOTE_ERROR;
    usleep(1000);
  }
  memcpy(bytes, a->bytes, n);
  return TREFOIL_OK;
}

/* Connections of this process, while they are refused. */
static _Atomic int refusesAll;
int connect(int socket, const struct sockaddr *address, socklen_t length) {
  if (!refusesAll) return (int)syscall(SYS_connect, socket, address, length);
  errno = ECONNREFUSED;
  return -1;
}

static uint64_t nowNs(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

/* Another communicator for each test and run. */
static uint64_t freshHash(void) {
  static uint64_t number;
  return nowNs() * 31 + (uint64_t)getpid() * 7919 + ++number;
}

static void nameOf(uint64_t hash, char name[96]) {
  snprintf(name, 96, "/dev/shm/nccl_ep.%u.%016llx", (unsigned)geteuid(), (unsigned long long)hash);
}

typedef struct member {
  struct ncclComm comm;
  struct ep_rendezvous *rendezvous;
  trefoil_result_t result;
  char why[400];
  uint64_t tookNs;
} member_t;

static void barrierRound(member_t *m, uint32_t call, uint32_t topk, uint64_t timeoutNs) {
  ep_rendezvous_word_t all[R], mine = {.call = call, .topk = topk};
  uint64_t from = nowNs();
  m->result = epRendezvousWait(m->rendezvous, &mine, timeoutNs, all);
  m->tookNs = nowNs() - from;
  m->why[0] = 0;
  if (m->result != TREFOIL_OK) {
    snprintf(m->why, sizeof m->why, "%s", trefoilLastError());
    return;
  }
  for (int r = 0; r < R; r++) {
    if (all[r].topk != (topk & ~15u) + (uint32_t)r) m->result = TREFOIL_INTERNAL_ERROR;
  }
}

static int domains = 1; /* of the communicators: with one the place is shared memory */

static void openOne(member_t *m, uint64_t hash, int rank) {
  *m = (member_t){.comm = {rank, R, hash, domains}};
  m->result = epRendezvousOpen(&m->comm, rank, R, domains, 20 * SECOND, &m->rendezvous);
}

/* Processes of a test that have threads of their own: ThreadSanitizer does not follow them. */
#ifdef __SANITIZE_THREAD__
#define FORKS_AND_THREADS(overTcp)                                                                 \
  if (overTcp) SKIP("ThreadSanitizer does not follow threads made after a fork")
#else
#define FORKS_AND_THREADS(overTcp)
#endif

/* A test at both places. */
#define TEST_PLACES(name)                                                                          \
  static void name##_at(void);                                                                     \
  TEST(name) {                                                                                     \
    domains = 1;                                                                                   \
    name##_at();                                                                                   \
  }                                                                                                \
  TEST(name##_over_tcp) {                                                                          \
    domains = 2;                                                                                   \
    name##_at();                                                                                   \
    domains = 1;                                                                                   \
  }                                                                                                \
  static void name##_at(void)

static void fail(member_t *m, const char *why) {
  epRendezvousCallFail(&m->comm, TREFOIL_INVALID_ARGUMENT, why);
}

typedef struct scene {
  void (*play)(member_t *m, int rank);
  member_t members[R];
  pthread_barrier_t barrier;
} scene_t;
static scene_t scene;

static void *playMember(void *argument) {
  member_t *m = argument;
  scene.play(m, m->comm.rank);
  epRendezvousAllCame(m->rendezvous);
  epRendezvousClose(m->rendezvous);
  return NULL;
}

static void play(void (*act)(member_t *m, int rank)) {
  pthread_t threads[R];
  uint64_t hash = freshHash();
  scene.play = act;
  pthread_barrier_init(&scene.barrier, NULL, R);
  for (int r = 0; r < R; r++) openOne(&scene.members[r], hash, r);
  for (int r = 0; r < R; r++) {
    pthread_create(&threads[r], NULL, playMember, &scene.members[r]);
  }
  for (int r = 0; r < R; r++) pthread_join(threads[r], NULL);
  pthread_barrier_destroy(&scene.barrier);
}

/* ---- all come -------------------------------------------------------------------------------- */

static void comeOften(member_t *m, int rank) {
  for (uint32_t i = 0; i < 2000; i++) {
    if (i % 97 == (uint32_t)rank) usleep(300);
    barrierRound(m, EP_RENDEZVOUS_INIT_HANDLE, i * 16 + (uint32_t)rank, 20 * SECOND);
    if (m->result != TREFOIL_OK) return;
  }
}

TEST_PLACES(everybody_hears_everybody) {
  play(comeOften);
  for (int r = 0; r < R; r++) {
    CHECK(scene.members[r].result == TREFOIL_OK, "rank %d: %s", r, scene.members[r].why);
  }
}

static void callDifferently(member_t *m, int rank) {
  barrierRound(m, rank == 2 ? EP_RENDEZVOUS_DESTROY_GROUP : EP_RENDEZVOUS_INIT_HANDLE,
               (uint32_t)rank, 20 * SECOND);
}

TEST_PLACES(another_call_is_told) {
  play(callDifferently);
  for (int r = 0; r < R; r++) {
    const member_t *m = &scene.members[r];
    CHECK(m->result == TREFOIL_INVALID_USAGE && strstr(m->why, "rank 2 ncclEpGroupDestroy"),
          "rank %d: %d, %s", r, (int)m->result, m->why);
  }
}

/* ---- one does not ---------------------------------------------------------------------------- */

static void stayAway(member_t *m, int rank) {
  if (rank == 1) {
    m->result = TREFOIL_REMOTE_ERROR;
    snprintf(m->why, sizeof m->why, "rank 1 did not come within 1.0 s");
  } else {
    if (rank == 3) usleep(100000);
    barrierRound(m, EP_RENDEZVOUS_CREATE_GROUP, (uint32_t)rank, SECOND);
    if (m->tookNs > 5 * SECOND) m->result = TREFOIL_INTERNAL_ERROR;
  }
}

static void stayAwayThenCome(member_t *m, int rank) {
  stayAway(m, rank);
  if (m->result != TREFOIL_REMOTE_ERROR || !strstr(m->why, "rank 1 did not come within")) {
    return;
  }
  pthread_barrier_wait(&scene.barrier);
  barrierRound(m, EP_RENDEZVOUS_CREATE_GROUP, (uint32_t)rank, 20 * SECOND);
}

TEST_PLACES(who_stays_away_is_named_and_may_come_later) {
  play(stayAwayThenCome);
  for (int r = 0; r < R; r++) {
    const member_t *m = &scene.members[r];
    CHECK(m->result == TREFOIL_OK, "rank %d: %d, %s", r, (int)m->result, m->why);
  }
}

static void beRefused(member_t *m, int rank) {
  if (rank == 2) {
    fail(m, "num_experts is 0");
    m->result = TREFOIL_INVALID_ARGUMENT;
    snprintf(m->why, sizeof m->why, "rank 2: num_experts is 0");
    return;
  }
  barrierRound(m, EP_RENDEZVOUS_CREATE_GROUP, (uint32_t)rank, 20 * SECOND);
  if (m->tookNs > 5 * SECOND) m->result = TREFOIL_INTERNAL_ERROR;
}

/* The failure that all share leaves nothing behind: the next round waits for rank 2 again. */
static void beRefusedThenStayAway(member_t *m, int rank) {
  beRefused(m, rank);
  int told = m->result == TREFOIL_INVALID_ARGUMENT && strstr(m->why, "num_experts is 0") &&
             strstr(m->why, "rank 2");
  if (rank != 2) fail(m, m->why);
  pthread_barrier_wait(&scene.barrier);
  epRendezvousCallBegin(&m->comm);
  if (rank == 2) usleep(1500000); /* longer than a rank waits for one whose call has failed */
  barrierRound(m, EP_RENDEZVOUS_CREATE_GROUP, (uint32_t)rank, 20 * SECOND);
  if (!told) m->result = TREFOIL_INTERNAL_ERROR;
}

TEST_PLACES(a_refused_rank_is_named_and_may_try_again) {
  play(beRefusedThenStayAway);
  for (int r = 0; r < R; r++) {
    const member_t *m = &scene.members[r];
    CHECK(m->result == TREFOIL_OK, "rank %d: %d, %s", r, (int)m->result, m->why);
  }
}

/* Rank 2's part fails between the two barrier rounds of a call; the next call is another one. */
static void failHalfway(member_t *m, int rank) {
  barrierRound(m, EP_RENDEZVOUS_CREATE_GROUP, (uint32_t)rank, 20 * SECOND);
  if (m->result != TREFOIL_OK) return;
  beRefused(m, rank);
  int told = m->result == TREFOIL_INVALID_ARGUMENT && strstr(m->why, "num_experts is 0");
  if (rank != 2) fail(m, m->why);
  pthread_barrier_wait(&scene.barrier);
  if (rank == 2) usleep(1500000);
  barrierRound(m, EP_RENDEZVOUS_DESTROY_GROUP, (uint32_t)rank, 20 * SECOND);
  if (!told) m->result = TREFOIL_INTERNAL_ERROR;
}

TEST_PLACES(a_rank_that_fails_between_two_rounds_is_named) {
  play(failHalfway);
  for (int r = 0; r < R; r++) {
    const member_t *m = &scene.members[r];
    CHECK(m->result == TREFOIL_OK, "rank %d: %d, %s", r, (int)m->result, m->why);
  }
}

/* ---- processes ------------------------------------------------------------------------------- */

/* In a process: another root is not for the others, and a signal would not end the rest. */
static int statusOf(void (*body)(void)) {
  int status = -1;
  fflush(NULL);
  pid_t pid = fork();
  if (pid == 0) {
    testFailures = 0;
    body();
    fflush(NULL);
    _exit(testFailures ? 1 : 0);
  }
  waitpid(pid, &status, 0);
  return status;
}

/* Rank 1 is killed, and nobody asks for its end: a zombie is gone, too. The others wait for it: how long? */
static void childOfNobody(uint64_t hash, int rank, uint64_t *tookNs) {
  member_t m;
  openOne(&m, hash, rank);
  if (m.result == TREFOIL_OK)
    barrierRound(&m, EP_RENDEZVOUS_CREATE_GROUP, (uint32_t)rank, 20 * SECOND);
  if (m.result != TREFOIL_OK) _exit(1);
  epRendezvousAllCame(m.rendezvous);
  if (rank == 1 && getpid() == 1) _exit(1); /* init of a namespace cannot kill itself */
  if (rank == 1) raise(SIGKILL);
  barrierRound(&m, EP_RENDEZVOUS_INIT_HANDLE, (uint32_t)rank, 15 * SECOND);
  int named = m.result == TREFOIL_REMOTE_ERROR && strstr(m.why, "rank 1 is gone") != NULL;
  __atomic_store_n(&tookNs[rank], named ? m.tookNs : 60 * SECOND, __ATOMIC_SEQ_CST);
  for (int ms = 0; ms < 30000 && !__atomic_load_n(&tookNs[R], __ATOMIC_SEQ_CST); ms++) usleep(1000);
  _exit(0);
}

/* In a process-id namespace of its own: as init of it, or, for 0, where the test is. */
static pid_t forkInSpace(int ownSpace) {
  if (!ownSpace) return fork();
  pid_t outer = fork();
  if (outer != 0) return outer;
  if (unshare(CLONE_NEWPID) != 0) _exit(1);
  pid_t inner = fork();
  if (inner == 0) return 0;
  waitpid(inner, NULL, 0);
  _exit(0);
}

static void killOneOfAll(int ownSpaces) {
  uint64_t *tookNs = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(tookNs != MAP_FAILED, "mmap");
  uint64_t hash = freshHash();
  pid_t pids[R];
  fflush(NULL);
  for (int r = 0; r < R; r++) {
    pids[r] = forkInSpace(ownSpaces && r > 0);
    if (pids[r] == 0) childOfNobody(hash, r, tookNs);
  }
  for (int ms = 0; ms < 20000; ms++, usleep(1000)) {
    int told = 0;
    for (int r = 0; r < R; r++) told += __atomic_load_n(&tookNs[r], __ATOMIC_SEQ_CST) != 0;
    if (told == R - 1) break;
  }
  __atomic_store_n(&tookNs[R], 1, __ATOMIC_SEQ_CST);
  for (int r = 0; r < R; r++) {
    if (r == 1) continue;
    CHECK(tookNs[r] && tookNs[r] < 4 * SECOND, "rank %d: %.3f s", r, (double)tookNs[r] * 1e-9);
  }
  for (int r = 0; r < R; r++) waitpid(pids[r], NULL, 0);
  munmap(tookNs, 4096);
}

TEST_PLACES(a_killed_process_that_nobody_reaps_is_named) {
  FORKS_AND_THREADS(domains > 1);
  killOneOfAll(0);
}

static void tryNewSpace(void) {
  CHECK(!unshare(CLONE_NEWPID), "%s", strerror(errno));
}

TEST_PLACES(a_killed_process_of_another_pid_namespace_is_named) {
  FORKS_AND_THREADS(domains > 1);
  if (geteuid() != 0 || statusOf(tryNewSpace)) SKIP("needs root, to make process-id namespaces");
  killOneOfAll(1);
}

static void childMain(uint64_t hash, int rank, _Atomic int *good) {
  member_t m;
  openOne(&m, hash, rank);
  if (m.result != TREFOIL_OK) _exit(1);
  barrierRound(&m, EP_RENDEZVOUS_CREATE_GROUP, (uint32_t)rank, 20 * SECOND);
  if (m.result != TREFOIL_OK) _exit(2);
  epRendezvousAllCame(m.rendezvous);
  if (rank == 1) raise(SIGKILL);
  barrierRound(&m, EP_RENDEZVOUS_INIT_HANDLE, (uint32_t)rank, 60 * SECOND);
  int named = m.result == TREFOIL_REMOTE_ERROR && strstr(m.why, "rank 1 is gone") != NULL;
  atomic_fetch_add(good, named && m.tookNs < 20 * SECOND);
  /* Nobody else ends before all have looked: who comes late would name that rank, and be right. */
  atomic_fetch_add(good + 1, 1);
  for (int ms = 0; ms < 30000 && atomic_load(good + 1) < R - 1; ms++) usleep(1000);
  _exit(named ? 0 : 3);
}

TEST_PLACES(a_killed_process_is_named) {
  FORKS_AND_THREADS(domains > 1);
  _Atomic int *good = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(good != MAP_FAILED, "mmap");
  uint64_t hash = freshHash();
  pid_t pids[R];
  fflush(NULL);
  for (int r = 0; r < R; r++) {
    pids[r] = fork();
    if (pids[r] == 0) childMain(hash, r, good);
  }
  waitpid(pids[1], NULL, 0); /* gone for good, or it would still be there as a zombie */
  for (int r = 0; r < R; r++) {
    if (r != 1) waitpid(pids[r], NULL, 0);
  }
  CHECK(atomic_load(good) == R - 1, "%d ranks named it", atomic_load(good));
  munmap(good, 4096);
}

TEST(no_file_is_left) {
  member_t m[R];
  uint64_t hash = freshHash();
  for (int r = 0; r < R; r++) openOne(&m[r], hash, r);
  char name[96];
  nameOf(hash, name);
  CHECK(access(name, F_OK) == 0, "no file while ranks have not met");
  epRendezvousAllCame(m[0].rendezvous);
  CHECK(access(name, F_OK) != 0, "the file is still there");
  for (int r = 0; r < R; r++) epRendezvousClose(m[r].rendezvous);
}

/* ---- over TCP alone ------------------------------------------------------------------------------ */

/* Rank 0's process answers in its place. */
static void rank0StaysAway(member_t *m, int rank) {
  if (rank) barrierRound(m, EP_RENDEZVOUS_CREATE_GROUP, (uint32_t)rank, SECOND);
  pthread_barrier_wait(&scene.barrier);
}

TEST(rank_0_is_named_as_any_other) {
  domains = 2;
  play(rank0StaysAway);
  domains = 1;
  for (int r = 1; r < R; r++) {
    const member_t *m = &scene.members[r];
    CHECK(m->result == TREFOIL_REMOTE_ERROR && strstr(m->why, "rank 0 did not come within") &&
              m->tookNs < 5 * SECOND,
          "rank %d: %d, %s", r, (int)m->result, m->why);
  }
}

static void rank0Dies(uint64_t hash, int rank, _Atomic int *good) {
  member_t m;
  openOne(&m, hash, rank);
  barrierRound(&m, EP_RENDEZVOUS_CREATE_GROUP, (uint32_t)rank, 20 * SECOND);
  if (m.result != TREFOIL_OK) _exit(1);
  if (rank == 0) {
    usleep(300000); /* the others wait by then */
    raise(SIGKILL);
  }
  barrierRound(&m, EP_RENDEZVOUS_INIT_HANDLE, (uint32_t)rank, 30 * SECOND);
  int named = m.result == TREFOIL_REMOTE_ERROR && strstr(m.why, "rank 0 is gone") != NULL;
  atomic_fetch_add(good, named && m.tookNs < 5 * SECOND);
  _exit(0);
}

static void rank0IsKilled(void) {
  _Atomic int *good = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(good != MAP_FAILED, "mmap");
  uint64_t hash = freshHash();
  pid_t pids[R];
  fflush(NULL);
  for (int r = 0; r < R; r++) {
    pids[r] = fork();
    if (pids[r] == 0) rank0Dies(hash, r, good);
  }
  for (int r = 0; r < R; r++) waitpid(pids[r], NULL, 0);
  CHECK(atomic_load(good) == R - 1, "%d ranks named it", atomic_load(good));
  munmap(good, 4096);
}

TEST(a_killed_rank_0_is_named) {
  FORKS_AND_THREADS(1);
  domains = 2;
  rank0IsKilled();
  domains = 1;
}

/* The broadcast does not come: the call ends all the same, and the next one goes on with it. */
TEST(a_rendezvous_that_is_late_may_be_opened_again) {
  uint64_t hash = freshHash();
  struct ncclComm comms[2] = {{0, 2, hash, 2}, {1, 2, hash, 2}};
  struct ep_rendezvous *b[2] = {NULL, NULL};
  uint64_t from = nowNs();
  trefoil_result_t result = epRendezvousOpen(&comms[1], 1, 2, 2, SECOND / 4, &b[1]);
  CHECK(result == TREFOIL_REMOTE_ERROR && nowNs() - from < 5 * SECOND &&
            strstr(trefoilLastError(), "some rank did not come within 0.2 s"),
        "%d, %s", (int)result, trefoilLastError());
  REQUIRE(epRendezvousOpen(&comms[0], 0, 2, 2, 20 * SECOND, &b[0]) == TREFOIL_OK &&
              epRendezvousOpen(&comms[1], 1, 2, 2, 20 * SECOND, &b[1]) == TREFOIL_OK,
          "%s", trefoilLastError());
  for (int i = 2; i--;) {
    epRendezvousAllCame(b[i]);
    epRendezvousClose(b[i]);
  }
}

/* Rank 1 dials again in its next call, and counts calls as the others do: in the one after it rank 2 is
 * refused, and named at once. */
TEST(a_rank_that_could_not_connect_tries_again) {
  pthread_t threads[R];
  uint64_t hash = freshHash();
  domains = 2;
  scene.play = beRefused;
  for (int r = 0; r < R; r++) {
    refusesAll = r == 1;
    openOne(&scene.members[r], hash, r);
  }
  refusesAll = 0;
  member_t *m = &scene.members[1];
  CHECK(m->result == TREFOIL_REMOTE_ERROR && strstr(trefoilLastError(), "cannot be reached"),
        "%d, %s", (int)m->result, trefoilLastError());
  for (int r = 0; r < R; r++) epRendezvousCallBegin(&scene.members[r].comm);
  m->result = epRendezvousOpen(&m->comm, 1, R, 2, 20 * SECOND, &m->rendezvous);
  REQUIRE(m->result == TREFOIL_OK, "%s", trefoilLastError());
  for (int r = 0; r < R; r++) pthread_create(&threads[r], NULL, playMember, &scene.members[r]);
  for (int r = 0; r < R; r++) pthread_join(threads[r], NULL);
  domains = 1;
  for (int r = 0; r < R; r++) {
    CHECK(scene.members[r].result == TREFOIL_INVALID_ARGUMENT &&
              strstr(scene.members[r].why, "rank 2: num_experts is 0"),
          "rank %d: %d, %s", r, (int)scene.members[r].result, scene.members[r].why);
  }
}

TEST(an_address_of_another_machine_is_a_sentence) {
  struct ncclComm comm = {0, 2, freshHash(), 2};
  struct ep_rendezvous *b = NULL;
  setenv("TREFOIL_NET_ADDRESS", "192.0.2.1", 1);
  trefoil_result_t result = epRendezvousOpen(&comm, 0, 2, 2, 20 * SECOND, &b);
  unsetenv("TREFOIL_NET_ADDRESS");
  CHECK(result == TREFOIL_REMOTE_ERROR && strstr(trefoilLastError(), "TREFOIL_NET_ADDRESS"),
        "%d, %s", (int)result, trefoilLastError());
  epRendezvousCallBegin(&comm); /* the next call finds one */
  REQUIRE(epRendezvousOpen(&comm, 0, 2, 2, 20 * SECOND, &b) == TREFOIL_OK, "%s",
          trefoilLastError());
  epRendezvousAllCame(b);
  epRendezvousClose(b);
}

static int small = -1; /* what the process below sees as / */

static void inFullMemory(void) {
  member_t m;
  char name[96];
  uint64_t hash = freshHash();
  nameOf(hash, name);
  REQUIRE(!fchdir(small) && !mkdir("dev", 0755) && !mkdir("dev/shm", 0777) && !chroot(".") &&
              fillFolder(small),
          "%s", strerror(errno));
  openOne(&m, hash, 0);
  CHECK(m.result == TREFOIL_SYSTEM_ERROR && strstr(trefoilLastError(), "No space left"), "%d, %s",
        (int)m.result, trefoilLastError());
  CHECK(access(name, F_OK) != 0, "the file is left");
}

TEST(full_shared_memory_is_a_sentence) {
  small = smallTmpfs("64k");
  if (small < 0) SKIP("no file system can be made here (needs root)");
  int status = statusOf(inFullMemory);
  CHECK(status == 0, "status 0x%x (7: SIGBUS)", status);
  close(small);
}

TEST(a_link_in_its_place_is_refused) {
  char name[96], target[64];
  uint64_t hash = freshHash();
  member_t m;
  nameOf(hash, name);
  snprintf(target, sizeof target, "/tmp/trefoil-rendezvous-%d", (int)getpid());
  int fd = open(target, O_RDWR | O_CREAT, 0600);
  REQUIRE(fd >= 0 && !symlink(target, name), "%s", strerror(errno));
  openOne(&m, hash, 0);
  CHECK(m.result == TREFOIL_SYSTEM_ERROR && strstr(trefoilLastError(), "or a link"), "%d, %s",
        (int)m.result, trefoilLastError());
  CHECK(lseek(fd, 0, SEEK_END) == 0, "the link's target has grown");
  close(fd);
  unlink(target);
  unlink(name);
}

static void withFileLimit(void) {
  struct rlimit limit = {1024, 1024};
  setrlimit(RLIMIT_FSIZE, &limit);
  char path[64];
  snprintf(path, sizeof path, "/tmp/trefoil-limit-%d", (int)getpid());
  CHECK(epOwnFileNew(path, 4096) < 0 && errno == EFBIG, "%s", strerror(errno));
  CHECK(access(path, F_OK) != 0, "the file is left");
}

TEST(a_limit_of_file_sizes_is_no_signal) {
  int status = statusOf(withFileLimit);
  CHECK(status == 0, "status 0x%x", status);
}

TEST_MAIN()
