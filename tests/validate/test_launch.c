/* Who the launchers say we are, and how the ranks of a launch meet: with unknown clients, with
 * another launch of the same port, with ranks that are silent, stopped or gone. Ranks are processes. */
#include "validate/launch_rendezvous.h"

#include "test.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *const variables[] = {"RANK",
                                        "WORLD_SIZE",
                                        "LOCAL_RANK",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "LOCAL_WORLD_SIZE",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "MPI_LOCALRANKID",
                                        "PMIX_RANK",
                                        "PMIX_NAMESPACE",
                                        "MPI_LOCALNRANKS",
                                        "PMI_JOBID",
                                        "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "SLURM_PROCID",
                                        "SLURM_NTASKS",
                                        "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "SLURM_LOCALID",
                                        "SLURM_NODEID",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "SLURM_JOB_ID",
                                        "SLURM_STEP_ID",
                                        "SLURM_STEPID",
                                        "SLURM_NNODES",
                                        "SLURM_STEP_NUM_NODES",
                                        "SLURM_STEP_TASKS_PER_NODE",
                                        "SLURM_STEP_NUM_TASKS",
                                        "SLURM_TASKS_PER_NODE",
                                        "TORCHELASTIC_RUN_ID",
                                        "TREFOIL_LAUNCH_SECRET",
                                        "OMPI_MCA_ess_base_jobid",
                                        "TORCHELASTIC_RESTART_COUNT"};

/* The environment of "A=1 B=2", and of nothing else of a launcher. */
static void setOnly(const char *text) {
  char copy[1024], *save = NULL;
  for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) unsetenv(variables[i]);
  snprintf(copy, sizeof copy, "%s", text);
  for (char *word = strtok_r(copy, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
    char *value = strchr(word, '=');
    *value = 0;
    setenv(word, value + 1, 1);
  }
}

static void pauseMs(int ms) {
  struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
  nanosleep(&t, NULL);
}

/* ---- The environment ---- */

TEST(launchers_are_read) {
  static const struct {
    const char *environment;
    int rank, numRanks, localRank, numLocal;
  } cases[] = {
      {"", 0, 1, 0, 1},
      {"RANK=1 WORLD_SIZE=4", 1, 4, 1, 4},
      {"RANK=5 WORLD_SIZE=8 MASTER_ADDR=h MASTER_PORT=1", 5, 8, 5, 0},
      {"RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=h", 5, 8, 1, 4},
      {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
       "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=3",
       3, 4, 1, 2},
      {"PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1", 3, 4, 0, 1},
      {"SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 SLURM_NTASKS=8 "
       "SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=4(x2) "
       "PMIX_RANK=5",
       5, 8, 1, 4},
      {"SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=8 SLURM_NTASKS=11 SLURM_LOCALID=0 "
       "SLURM_NODEID=2 SLURM_TASKS_PER_NODE=4(x2),3",
       8, 11, 0, 3},
      {"SLURM_PROCID=0 SLURM_NTASKS=8", 0, 8, 0, 8},
      {"PMI_RANK=1 PMI_SIZE=2 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_JOB_ID=7 "
       "SLURM_LOCALID=0 SLURM_NNODES=2",
       1, 2, 0, 0},
      /* torchrun under srun, a task a node */
      {"TORCHELASTIC_RUN_ID=x RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8 MASTER_ADDR=h "
       "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 OMPI_COMM_WORLD_RANK=1 "
       "OMPI_COMM_WORLD_SIZE=2",
       9, 16, 1, 8},
      /* a batch script, an allocation's shell, and one task: nobody else was started */
      {"SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=8", 0, 1, 0, 1},
      {"SLURM_JOB_ID=7 SLURM_NTASKS=8", 0, 1, 0, 1},
      {"SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=8", 0, 1,
       0, 1}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    ep_launch_t l;
    setOnly(cases[i].environment);
    int ok = epLaunchFind(&l) == TREFOIL_OK;
    CHECK(ok, "%s: %s", cases[i].environment, trefoilLastError());
    CHECK(ok && l.rank == cases[i].rank && l.numRanks == cases[i].numRanks &&
              l.localRank == cases[i].localRank && l.numLocal == cases[i].numLocal,
          "%s: %d of %d, here %d of %d", cases[i].environment, l.rank, l.numRanks, l.localRank,
          l.numLocal);
  }
}

/* What is half said starts nothing alone. */
TEST(half_a_launch_is_refused) {
  static const char *const cases[][2] = {
      {"PMIX_RANK=3", "PMIX_RANK=3: a launcher started this process"},
      {"SLURM_PROCID=3", "SLURM_PROCID is set and SLURM_NTASKS is not"},
      {"PMI_RANK=1", "PMI_RANK is set and PMI_SIZE is not"},
      {"OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE is set and OMPI_COMM_WORLD_RANK is not"},
      {"RANK=1", "RANK is set and WORLD_SIZE is not"},
      {"SLURM_PROCID=x SLURM_NTASKS=2", "SLURM_PROCID=x, SLURM_NTASKS=2: expected whole numbers"},
      {"PMI_RANK=2 PMI_SIZE=2", "rank 2 of 2 processes"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    ep_launch_t l;
    setOnly(cases[i][0]);
    CHECK(epLaunchFind(&l) == TREFOIL_INVALID_ARGUMENT && strstr(trefoilLastError(), cases[i][1]),
          "%s: %s", cases[i][0], trefoilLastError());
  }
}

TEST(an_address_is_asked_for) {
  ep_launch_t l;
  setOnly("SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2");
  REQUIRE(epLaunchFind(&l) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(epLaunchOpen(&l) == TREFOIL_INVALID_ARGUMENT, "opened");
  CHECK(strstr(trefoilLastError(), "MASTER_ADDR") && strstr(trefoilLastError(), "scontrol"), "%s",
        trefoilLastError());
}

/* ---- Ranks as processes ---- */

typedef struct report {
  int rc, sum;
  double seconds;
  char text[512];
} report_t;

typedef struct rank_process {
  pid_t pid;
  int out;
} rank_process_t;

typedef struct ways {
  int rendezvousSeconds, gatherSeconds;
  int value;                /* that the rank gives to the gather */
  int wrapped;              /* behind a process of its own, as under `timeout` */
  int leaveAfterRendezvous; /* ends without the gather */
  int sleepAfterRendezvous; /* seconds before the gather */
  uid_t user;               /* 0: as the test */
  int hidden;               /* there is no /proc/net/tcp: another file system covers /proc */
} ways_t;

static report_t beRank(const ways_t *w) {
  report_t r = {.rc = -1};
  int all[EP_LAUNCH_MAX_RANKS] = {0};
  ep_launch_t l;
  double start = epNow();
  r.rc = epLaunchFind(&l);
  if (w->rendezvousSeconds) l.rendezvousSeconds = w->rendezvousSeconds;
  if (w->gatherSeconds) l.gatherSeconds = w->gatherSeconds;
  if (r.rc == TREFOIL_OK) r.rc = epLaunchOpen(&l);
  if (r.rc == TREFOIL_OK && w->leaveAfterRendezvous) _exit(0);
  if (r.rc == TREFOIL_OK && w->sleepAfterRendezvous) pauseMs(1000 * w->sleepAfterRendezvous);
  if (r.rc == TREFOIL_OK) r.rc = epLaunchGather(&l, &w->value, all, sizeof *all);
  for (int i = 0; i < l.numRanks; i++) r.sum += all[i];
  r.seconds = epNow() - start;
  if (r.rc != TREFOIL_OK) snprintf(r.text, sizeof r.text, "%s", trefoilLastError());
  return r;
}

static int hideTable(void) {
  return unshare(CLONE_NEWNS) == 0 && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
         mount("none", "/proc", "tmpfs", 0, NULL) == 0;
}

static int canHide(void) {
  pid_t child = fork();
  int status = 1;
  if (child == 0) _exit(!hideTable());
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

static rank_process_t startRank(const char *environment, ways_t w) {
  int ends[2];
  rank_process_t p = {-1, -1};
  if (pipe(ends) != 0) return p;
  p.pid = fork();
  if (p.pid == 0) {
    close(ends[0]);
    if (w.wrapped) {
      pid_t inner = fork();
      if (inner > 0) {
        close(ends[1]);
        waitpid(inner, NULL, 0);
        _exit(0);
      }
    }
    setOnly(environment);
    if (w.hidden && !hideTable()) _exit(1);
    if (w.user && setuid(w.user) != 0) _exit(1);
    report_t r = beRank(&w);
    _exit(write(ends[1], &r, sizeof r) != sizeof r);
  }
  close(ends[1]);
  p.out = ends[0];
  return p;
}

static report_t endRank(rank_process_t p) {
  report_t r = {.rc = -1, .text = "no report"};
  if (read(p.out, &r, sizeof r) != sizeof r) r.rc = -1;
  close(p.out);
  waitpid(p.pid, NULL, 0);
  return r;
}

/* A port that is free, as is the one after it, and the environment of a launch by hand over TCP. */
static int freePort(void) {
  static int next;
  return 20000 + ((int)getpid() * 16 + 2 * next++) % 12000;
}

static const char *byTcp(char *text, size_t bytes, int port, int rank, int numRanks) {
  snprintf(text, bytes, "RANK=%d WORLD_SIZE=%d MASTER_ADDR=127.0.0.1 MASTER_PORT=%d", rank,
           numRanks, port);
  return text;
}

/* A connection to a port of this host, when somebody listens there. */
static int callPort(int port) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (int i = 0; i < 500; i++) {
    int s = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(s, (struct sockaddr *)&a, sizeof a) == 0) return s;
    close(s);
    pauseMs(20);
  }
  return -1;
}

/* Three ranks meet under wrappers of their own, with nothing set but who they are. */
TEST(ranks_meet_behind_wrappers) {
  rank_process_t p[3];
  for (int r = 2; r >= 0; r--) {
    char text[64];
    snprintf(text, sizeof text, "RANK=%d WORLD_SIZE=3", r);
    p[r] = startRank(text, (ways_t){.value = 1 << r, .wrapped = 1, .rendezvousSeconds = 20});
  }
  for (int r = 0; r < 3; r++) {
    report_t got = endRank(p[r]);
    CHECK(got.rc == TREFOIL_OK && got.sum == 7, "rank %d: %d, %s", r, got.sum, got.text);
  }
}

/* Silent ones, one that sends a rank's number, one that sends garbage: the real rank is admitted. */
TEST(unknown_clients_are_not_admitted) {
  char text[200];
  int port = freePort(), unknown[40], one = 1;
  rank_process_t zero = startRank(byTcp(text, sizeof text, port, 0, 2),
                                  (ways_t){.value = 1, .rendezvousSeconds = 30});
  for (int i = 0; i < 40; i++) unknown[i] = callPort(port + 1);
  char garbage[300];
  memset(garbage, 'x', sizeof garbage);
  CHECK(send(unknown[0], &one, sizeof one, MSG_NOSIGNAL) == sizeof one, "%s", strerror(errno));
  CHECK(send(unknown[1], garbage, sizeof garbage, MSG_NOSIGNAL) > 0, "%s", strerror(errno));
  pauseMs(200);
  rank_process_t other = startRank(byTcp(text, sizeof text, port, 1, 2),
                                   (ways_t){.value = 2, .rendezvousSeconds = 30});
  report_t a = endRank(zero), b = endRank(other);
  CHECK(a.rc == TREFOIL_OK && a.sum == 3, "%d: %s", a.sum, a.text);
  CHECK(b.rc == TREFOIL_OK && b.sum == 3, "%d: %s", b.sum, b.text);
  for (int i = 0; i < 40; i++) close(unknown[i]);
}

/* What is public (port, command line, number of ranks) is not enough over TCP either, where the kernel knows
 * whose process it is: the intruder has all of it. */
static void intrude(const char *host) {
  char zeroEnv[200], oneEnv[200];
  int port = freePort();
  snprintf(zeroEnv, sizeof zeroEnv, "RANK=0 WORLD_SIZE=2 MASTER_ADDR=%s MASTER_PORT=%d", host,
           port);
  snprintf(oneEnv, sizeof oneEnv, "RANK=1 WORLD_SIZE=2 MASTER_ADDR=%s MASTER_PORT=%d", host, port);
  rank_process_t zero = startRank(zeroEnv, (ways_t){.value = 1, .rendezvousSeconds = 30});
  report_t intruder =
      endRank(startRank(oneEnv, (ways_t){.value = 100, .rendezvousSeconds = 2, .user = 65534}));
  rank_process_t one = startRank(oneEnv, (ways_t){.value = 2, .rendezvousSeconds = 30});
  report_t a = endRank(zero), b = endRank(one);
  CHECK(intruder.rc == TREFOIL_REMOTE_ERROR && strstr(intruder.text, "not of this launch"),
        "%s: %s", host, intruder.text);
  CHECK(a.rc == TREFOIL_OK && a.sum == 3, "%s: %d, %s", host, a.sum, a.text);
  CHECK(b.rc == TREFOIL_OK && b.sum == 3, "%s: %d, %s", host, b.sum, b.text);
}

TEST(another_user_is_not_admitted_over_tcp) {
  if (geteuid() != 0) SKIP("needs root, to play another user");
  intrude("127.0.0.1");
  intrude("localhost");
  if (access("/proc/net/if_inet6", R_OK) == 0) intrude("::1");
}

TEST(a_secret_keeps_out_who_does_not_know_it) {
  static const struct {
    const char *zero, *one;
    int accepted;
  } cases[] = {{"k3y", "k3y", 1}, {"k3y", "key", 0}, {"k3y", "", 0}, {"", "k3y", 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char text[2][300];
    int port = freePort();
    for (int r = 0; r < 2; r++) {
      const char *secret = r ? cases[i].one : cases[i].zero;
      byTcp(text[r], sizeof text[r], port, r, 2);
      if (*secret) snprintf(text[r] + strlen(text[r]), 80, " TREFOIL_LAUNCH_SECRET=%s", secret);
    }
    ways_t w = {.value = 1, .rendezvousSeconds = cases[i].accepted ? 30 : 2};
    rank_process_t zero = startRank(text[0], w), one = startRank(text[1], w);
    report_t a = endRank(zero), b = endRank(one);
    CHECK((a.rc == TREFOIL_OK && a.sum == 2) == cases[i].accepted, "%zu: %d, %s", i, a.sum, a.text);
    CHECK((b.rc == TREFOIL_OK && b.sum == 2) == cases[i].accepted, "%zu: %d, %s", i, b.sum, b.text);
    CHECK(cases[i].accepted ||
              (strstr(a.text, "not of this launch") && strstr(b.text, "not of this launch")),
          "%s; %s", a.text, b.text);
  }
}

/* A container may hide the table: a secret lets ranks meet, and without one the sentence says how. */
TEST(a_hidden_table_needs_a_secret) {
  if (!canHide()) SKIP("needs root and namespaces, to hide /proc/net/tcp");
  for (int secret = 0; secret < 2; secret++) {
    char text[2][300];
    int port = freePort();
    for (int r = 0; r < 2; r++) {
      byTcp(text[r], sizeof text[r], port, r, 2);
      if (secret) strcat(text[r], " TREFOIL_LAUNCH_SECRET=a-word-nobody-knows");
    }
    ways_t w = {.value = 1, .rendezvousSeconds = secret ? 30 : 2, .hidden = 1};
    rank_process_t zero = startRank(text[0], w), one = startRank(text[1], w);
    report_t a = endRank(zero), b = endRank(one);
    CHECK((a.rc == TREFOIL_OK && a.sum == 2) == secret, "%d: %d, %s", secret, a.sum, a.text);
    CHECK((b.rc == TREFOIL_OK && b.sum == 2) == secret, "%d: %d, %s", secret, b.sum, b.text);
    CHECK(secret || strstr(a.text, "/proc/net/tcp does not tell (it is hidden here): set "
                                   "TREFOIL_LAUNCH_SECRET on all ranks"),
          "%s", a.text);
  }
}

/* Who does not know the secret stays out also where the table is hidden. */
TEST(a_hidden_table_admits_no_unknown_client) {
  if (!canHide()) SKIP("needs root and namespaces, to hide /proc/net/tcp");
  char text[2][300];
  int port = freePort();
  for (int r = 0; r < 2; r++) {
    byTcp(text[r], sizeof text[r], port, r, 2);
    strcat(text[r], r ? " TREFOIL_LAUNCH_SECRET=another-word-quite"
                      : " TREFOIL_LAUNCH_SECRET=a-word-nobody-knows");
  }
  ways_t w = {.value = 1, .rendezvousSeconds = 2, .hidden = 1};
  rank_process_t zero = startRank(text[0], w), one = startRank(text[1], w);
  report_t a = endRank(zero), b = endRank(one);
  CHECK(a.rc != TREFOIL_OK && b.rc != TREFOIL_OK, "%s; %s", a.text, b.text);
}

/* Nobody comes but a silent connection: rank 0 ends within its limit and says so. */
TEST(silence_has_a_limit) {
  char text[200];
  int port = freePort();
  rank_process_t zero =
      startRank(byTcp(text, sizeof text, port, 0, 2), (ways_t){.rendezvousSeconds = 2});
  int silent = callPort(port + 1);
  report_t a = endRank(zero);
  CHECK(a.rc == TREFOIL_REMOTE_ERROR && a.seconds < 20, "%g s: %s", a.seconds, a.text);
  CHECK(strstr(a.text,
               "rank 1 did not come within 2 s of the start; 1 connection not of this launch "
               "was dropped"),
        "%s", a.text);
  close(silent);
}

/* A false rank 0: silent, with an answer but no proof, or with the proof that a process of the launch has. */
typedef enum { SILENT, NO_PROOF, PROOF } answer_t;

static void squatForEver(const ep_launch_t *l, int s, answer_t answer) {
  for (;;) {
    int c = accept(s, NULL, NULL);
    ep_launch_handshake_t handshake;
    ep_launch_answer_t said = {.magic = EP_LAUNCH_MAGIC, .verdict = EP_LAUNCH_WELCOME};
    if (answer == SILENT) continue;
    if (recv(c, &handshake, sizeof handshake, MSG_WAITALL) > 0) {
      if (answer == PROOF) said.proof = epLaunchProof(l, &handshake, 0, EP_LAUNCH_WELCOME, 0);
      send(c, &said, sizeof said, MSG_NOSIGNAL);
    }
    if (answer == NO_PROOF) close(c);
  }
}

static pid_t squatAt(const ep_launch_t *l, const void *address, socklen_t bytes, answer_t answer,
                     uid_t uid) {
  int ends[2];
  char ready;
  if (pipe(ends) != 0) return -1;
  pid_t pid = fork();
  if (pid > 0) {
    close(ends[1]);
    if (read(ends[0], &ready, 1) != 1) fprintf(stderr, "no squatter\n");
    close(ends[0]);
    return pid;
  }
  if (setuid(uid) != 0) _exit(1);
  int s = socket(((const struct sockaddr *)address)->sa_family, SOCK_STREAM, 0);
  if (bind(s, address, bytes) || listen(s, 64) || write(ends[1], "x", 1) != 1) _exit(1);
  squatForEver(l, s, answer);
  _exit(1);
}

static pid_t squat(const ep_launch_t *l, answer_t answer, uid_t uid) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  int n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "trefoil-%ld-%016llx", (long)getuid(),
                   (unsigned long long)epLaunchJobHash(l));
  return squatAt(l, &a, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n), answer,
                 uid);
}

/* One of another user that knows all that is public has the port first. */
TEST(another_user_is_no_rank_0_over_tcp) {
  if (geteuid() != 0) SKIP("needs root, to play another user");
  char text[2][200];
  int port = freePort();
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)(port + 1))};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ep_launch_t l;
  for (int r = 0; r < 2; r++) byTcp(text[r], sizeof text[r], port, r, 2);
  setOnly(text[0]);
  REQUIRE(epLaunchFind(&l) == TREFOIL_OK, "%s", trefoilLastError());
  pid_t pid = squatAt(&l, &address, sizeof address, PROOF, 65534);
  rank_process_t one = startRank(text[1], (ways_t){.rendezvousSeconds = 2});
  rank_process_t zero = startRank(text[0], (ways_t){.rendezvousSeconds = 2});
  report_t b = endRank(one), a = endRank(zero);
  CHECK(a.rc != TREFOIL_OK && strstr(a.text, "is taken; ") && strstr(a.text, "of user 65534"), "%s",
        a.text);
  CHECK(b.rc != TREFOIL_OK && strstr(b.text, "could not be reached") &&
            strstr(b.text, "of user 65534"),
        "%s", b.text);
  kill(pid, SIGKILL);
  waitpid(pid, NULL, 0);
}

TEST(a_squatter_is_not_believed) {
  static const char *const who[] = {"a false rank 0", "a silent one", "another user"};
  for (int kind = 0; kind < 3; kind++) {
    if (kind == 2 && geteuid() != 0) continue; /* nobody else can be played */
    char names[2][100];
    ep_launch_t l;
    for (int r = 0; r < 2; r++)
      snprintf(names[r], sizeof names[r], "RANK=%d WORLD_SIZE=2 MASTER_PORT=%d", r, 100 + kind);
    setOnly(names[1]);
    REQUIRE(epLaunchFind(&l) == TREFOIL_OK, "%s", trefoilLastError());
    pid_t pid = squat(&l, kind == 0 ? NO_PROOF : SILENT, kind == 2 ? 65534 : getuid());
    rank_process_t zero = startRank(names[0], (ways_t){.rendezvousSeconds = 1});
    rank_process_t one = startRank(names[1], (ways_t){.rendezvousSeconds = 1});
    report_t a = endRank(zero), b = endRank(one);
    CHECK(a.rc != TREFOIL_OK && a.seconds < 20 && strstr(a.text, "is taken; "), "%s: %g s, %s",
          who[kind], a.seconds, a.text);
    CHECK(b.rc != TREFOIL_OK && b.seconds < 20 && strstr(b.text, "not of this launch"),
          "%s: %g s, %s", who[kind], b.seconds, b.text);
    CHECK(kind != 2 || (strstr(a.text, "of user 65534") && strstr(b.text, "of user 65534")), "%s",
          b.text);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
  }
}

/* Two jobs of a scheduler with the same address and port take turns at it; none gets the other's rank. */
TEST(two_jobs_with_one_port) {
  rank_process_t p[2][3];
  int port = freePort();
  for (int r = 0; r < 3; r++)
    for (int job = 0; job < 2; job++) {
      char text[300];
      snprintf(text, sizeof text,
               "SLURM_JOB_ID=%d SLURM_STEP_ID=0 SLURM_PROCID=%d SLURM_NTASKS=3 SLURM_NNODES=2 "
               "MASTER_ADDR=127.0.0.1 MASTER_PORT=%d",
               job + 1, r, port);
      p[job][r] = startRank(text, (ways_t){.value = job ? 100 : 1, .rendezvousSeconds = 30});
    }
  for (int job = 0; job < 2; job++)
    for (int r = 0; r < 3; r++) {
      report_t got = endRank(p[job][r]);
      CHECK(got.rc == TREFOIL_OK && got.sum == (job ? 300 : 3), "job %d, rank %d: %d, %s", job, r,
            got.sum, got.text);
    }
}

/* Two launches of one shell with nothing to tell them apart: each rank is told so, none is paired. */
TEST(two_launches_of_one_name) {
  rank_process_t p[4];
  for (int i = 0; i < 4; i++) {
    char text[64];
    snprintf(text, sizeof text, "RANK=%d WORLD_SIZE=2", i < 2 ? i : 3 - i);
    p[i] = startRank(text, (ways_t){.value = i < 2 ? 1 : 100, .rendezvousSeconds = 3});
  }
  int numReported = 0, numOwn = 0;
  for (int i = 0; i < 4; i++) {
    report_t got = endRank(p[i]);
    /* own ranks may have met where the machine held the other launch back for so long */
    CHECK(got.rc != TREFOIL_OK || got.sum == (i < 2 ? 2 : 200), "process %d was paired: %d", i,
          got.sum);
    numOwn += got.rc == TREFOIL_OK;
    numReported += strstr(got.text, "two launches that cannot be told apart") != NULL;
  }
  CHECK(numOwn > 0 || numReported >= 2, "%d were told", numReported);
}

TEST(all_are_told_the_same_number) {
  char text[200];
  int port = freePort();
  rank_process_t zero =
      startRank(byTcp(text, sizeof text, port, 0, 2), (ways_t){.rendezvousSeconds = 3});
  rank_process_t one =
      startRank(byTcp(text, sizeof text, port, 1, 3), (ways_t){.rendezvousSeconds = 8});
  report_t b = endRank(one), a = endRank(zero);
  CHECK(strstr(b.text, "this process was told of 3 ranks, and rank 0 of 2"), "%s", b.text);
  CHECK(strstr(a.text, "rank 1 did not come"), "%s", a.text);
}

/* In a barrier round: who ends is named at once, whoever else is late; who is late, within the limit. */
TEST(rounds_have_limits) {
  rank_process_t p[3];
  for (int late = 0; late < 2; late++) {
    for (int r = 0; r < 3; r++) {
      char text[100];
      snprintf(text, sizeof text, "RANK=%d WORLD_SIZE=3 MASTER_PORT=%d", r, 200 + late);
      ways_t w = {.rendezvousSeconds = 20, .gatherSeconds = late ? 1 : 100};
      if (r == 1) w.sleepAfterRendezvous = late ? 4 : 2;
      if (r == 2 && !late) w.leaveAfterRendezvous = 1;
      p[r] = startRank(text, w);
    }
    report_t zero = endRank(p[0]);
    CHECK(strstr(zero.text, late ? "the process of rank 1 lives, but did not come"
                                 : "the process of rank 2 has ended"),
          "%s", zero.text);
    for (int r = 1; r < 3; r++) endRank(p[r]);
  }
}

TEST_MAIN()
