/* What other programs of the machine can do to a job: they see the names of its sockets
 * (/proc/net/unix), speak the protocol and may bind the name of a process that has ended. They get no
 * memory, starve nobody, and what they hand out is not mapped. And ranks of several process-id
 * namespaces see each other. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

#include "comm_wire.h"
#include "host_ranks.h"
#include "plan/process.h"

#define OK(call)      REQUIRE((call) == ncclSuccess, "%s: %s", #call, trefoilHostLastError())
#define CUDA_OK(call) REQUIRE((call) == cudaSuccess, "%s: %s", #call, trefoilHostLastError())

static double seconds(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *shared(size_t bytes) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}

static int ended(pid_t pid) {
  int status = -1;
  waitpid(pid, &status, 0);
  return status;
}

/* ---- What everybody can see and do ---- */

/* The name of a process's server, as /proc/net/unix lists it. */
static int findName(pid_t pid, char name[108]) {
  char line[512], want[64];
  int found = 0;
  FILE *file = fopen("/proc/net/unix", "r");
  snprintf(want, sizeof want, "@trefoil-host-%d-", (int)pid);
  while (file && !found && fgets(line, sizeof line, file)) {
    char *at = strstr(line, want);
    if (!at) continue;
    at[strcspn(at, "\n")] = 0;
    snprintf(name, 108, "%s", at + 1);
    found = 1;
  }
  if (file) fclose(file);
  return found;
}

static socklen_t nameSocket(struct sockaddr_un *address, const char *name) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  memcpy(address->sun_path + 1, name, strlen(name));
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
}

static int connectTo(const char *name) {
  struct sockaddr_un address;
  socklen_t length = nameSocket(&address, name);
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  struct timeval timeout = {3, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  if (connect(fd, (struct sockaddr *)&address, length) == 0) return fd;
  close(fd);
  return -1;
}

static uint64_t uidOfName(const char *name) {
  return strtoull(strrchr(name, '-') + 1, NULL, 16);
}

/* Whatever comes until the connection ends: 1 if a descriptor is among it. */
static int getsDescriptor(int fd) {
  char data[4096];
  for (;;) {
    struct iovec part = {data, sizeof data};
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof control};
    if (recvmsg(fd, &message, MSG_CMSG_CLOEXEC) <= 0) return 0;
    if (CMSG_FIRSTHDR(&message)) return 1;
  }
}

/* Asks in the form of version 0, which had the secret in the name, and numbers for segments. */
static int askPlainly(const char *name, uint32_t what, uint64_t id) {
  struct {
    uint32_t what;
    int32_t numRanks;
    uint64_t uid, id;
  } request = {what, 2, uidOfName(name), id};
  int fd = connectTo(name), got = 0;
  if (fd < 0) return 0;
  if (send(fd, &request, sizeof request, MSG_NOSIGNAL) > 0) got = getsDescriptor(fd);
  close(fd);
  return got;
}

/* Asks in today's form; a MAC with the wrong secret, or none. */
static int askProperly(const char *name, uint32_t what, uint64_t id, int withMac) {
  static const unsigned char guess[EP_SECRET_BYTES] = {1, 2, 3};
  ep_request_t request = {.what = what, .numRanks = 2, .uid = uidOfName(name), .id = id};
  ep_challenge_t challenge;
  int fd = connectTo(name), got = 0;
  if (fd < 0) return 0;
  if (recv(fd, &challenge, sizeof challenge, 0) == (ssize_t)sizeof challenge) {
    if (withMac) epWireMac(guess, &challenge, &request, NULL, request.mac);
    if (send(fd, &request, sizeof request, MSG_NOSIGNAL) > 0) got = getsDescriptor(fd);
  }
  close(fd);
  return got;
}

static int numDescriptors(void) {
  int n = 0;
  for (int fd = 0; fd < 4096; fd++) n += fcntl(fd, F_GETFD) >= 0;
  return n;
}

/* ---- Names and numbers are not enough ---- */

TEST(who_knows_the_name_gets_nothing) {
  ncclUniqueId id;
  void *mem;
  char name[108];
  OK(ncclGetUniqueId(&id));
  OK(ncclMemAlloc(&mem, 8192));
  REQUIRE(findName(getpid(), name), "no server in /proc/net/unix");
  for (uint32_t what = EP_ASK_BOARD; what <= EP_ASK_WATCH; what++) {
    for (uint64_t n = 0; n < 4; n++) {
      CHECK(!askPlainly(name, what, n), "ask %u for %d gives a descriptor", what, (int)n);
      CHECK(!askProperly(name, what, n, 0), "ask %u for %d without a MAC", what, (int)n);
      CHECK(!askProperly(name, what, n, 1), "ask %u for %d with another secret", what, (int)n);
    }
  }
  OK(ncclMemFree(mem));
}

TEST(invented_keys_do_not_pile_up) {
  ncclUniqueId id;
  char name[108];
  OK(ncclGetUniqueId(&id));
  REQUIRE(findName(getpid(), name), "no server in /proc/net/unix");
  int before = numDescriptors();
  for (uint64_t key = 1; key <= 200; key++) {
    askPlainly(name, EP_ASK_BOARD, key * 7919);
    askProperly(name, EP_ASK_BOARD, key * 104729, 1);
  }
  usleep(50000);
  int after = numDescriptors();
  CHECK(after <= before + 1, "%d descriptors before, %d after", before, after);
}

TEST(another_user_is_refused) {
  ncclUniqueId id;
  char name[108];
  if (geteuid() != 0) SKIP("needs root, to become another user");
  OK(ncclGetUniqueId(&id));
  REQUIRE(findName(getpid(), name), "no server in /proc/net/unix");
  fflush(NULL);
  pid_t pid = fork();
  if (pid == 0) {
    char data[512];
    if (setgid(65534) || setuid(65534)) _exit(2);
    int fd = connectTo(name);
    _exit(fd >= 0 && recv(fd, data, sizeof data, 0) <= 0 ? 0 : 1); /* not even a challenge */
  }
  CHECK(ended(pid) == 0, "another user is answered");
}

/* ---- Nobody is starved ---- */

static void allReduceBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  ncclComm_t comm;
  cudaStream_t stream;
  int sum = rank + 1;
  (void)arg;
  CUDA_OK(cudaStreamCreate(&stream));
  OK(ncclCommInitRank(&comm, numRanks, *id, rank));
  OK(ncclAllReduce(&sum, &sum, 1, ncclInt32, ncclSum, comm, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  CHECK(sum == numRanks * (numRanks + 1) / 2, "sum %d", sum);
  OK(ncclCommDestroy(comm));
}

TEST(silent_connections_starve_nobody) {
  enum { SILENT = 150 };
  ncclUniqueId id;
  char name[108];
  int fds[SILENT];
  OK(ncclGetUniqueId(&id));
  REQUIRE(findName(getpid(), name), "no server in /proc/net/unix");
  for (int i = 0; i < SILENT; i++) fds[i] = connectTo(name);
  double start = seconds(CLOCK_MONOTONIC);
  runProcesses(3, allReduceBody, NULL);
  double took = seconds(CLOCK_MONOTONIC) - start;
  CHECK(took < 10, "%.1f s", took);
  for (int i = 0; i < SILENT; i++) close(fds[i]);
}

/* With no descriptor left for them, connections wait and the server sleeps; later they are served. */
static int serveWithoutDescriptors(void) {
  ncclUniqueId id;
  char name[108], data[64];
  struct rlimit old, limit;
  if (ncclGetUniqueId(&id) != ncclSuccess || !findName(getpid(), name)) return 2;
  int fd = connectTo(name), late = -1;
  if (recv(fd, data, sizeof data, 0) <= 0) return 3;
  getrlimit(RLIMIT_NOFILE, &old);
  limit = old;
  late = socket(AF_UNIX, SOCK_SEQPACKET, 0);
  limit.rlim_cur = (rlim_t)late + 1;
  setrlimit(RLIMIT_NOFILE, &limit);
  for (int spare; (spare = dup(0)) >= 0;) continue; /* holes below */
  struct sockaddr_un address;
  socklen_t length = nameSocket(&address, name);
  if (connect(late, (struct sockaddr *)&address, length)) return 4;
  double start = seconds(CLOCK_PROCESS_CPUTIME_ID);
  usleep(500000);
  double used = seconds(CLOCK_PROCESS_CPUTIME_ID) - start;
  setrlimit(RLIMIT_NOFILE, &old);
  if (used > 0.1) return 5;
  struct pollfd poller = {late, POLLIN, 0};
  return poll(&poller, 1, 10000) == 1 && recv(late, data, sizeof data, 0) > 0 ? 0 : 6;
}

TEST(no_spin_without_descriptors) {
  fflush(NULL);
  pid_t pid = fork();
  if (pid == 0) _exit(serveWithoutDescriptors());
  int status = ended(pid);
  CHECK(status == 0, "status 0x%x (5: it spins)", status);
}

/* ---- The name of a process that has ended ---- */

typedef struct {
  ncclUniqueId id;
  _Atomic int ready;
  int heard; /* bytes of the id's secret that the impostor was told */
} impostor_t;

static const ep_process_t *ownerOf(const ncclUniqueId *id) {
  return (const ep_process_t *)(const void *)(id->internal + 16);
}

/* Binds the name, answers, and hands out memory that is shorter than it should be. */
static void impersonate(impostor_t *fake, int user) {
  struct sockaddr_un address;
  ep_answer_t answer = {.bytes = 1 << 20};
  ep_challenge_t challenge = {.magic = EP_CHALLENGE_MAGIC};
  char data[512];
  socklen_t length = nameSocket(&address, ownerOf(&fake->id)->address);
  if (user && (setgid(65534) || setuid(65534))) _exit(2);
  int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0), memory = memfd_create("small", 0);
  if (bind(fd, (struct sockaddr *)&address, length) || listen(fd, 8)) _exit(3);
  atomic_store(&fake->ready, 1);
  for (;;) {
    int client = accept(fd, NULL, NULL);
    send(client, &challenge, sizeof challenge, MSG_NOSIGNAL);
    ssize_t got = recv(client, data, sizeof data, 0);
    if (got > 0 && memmem(data, (size_t)got, ownerOf(&fake->id)->secret, EP_SECRET_BYTES))
      fake->heard = 1;
    struct iovec part = {&answer, sizeof answer};
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {0};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &memory, sizeof memory);
    sendmsg(client, &message, MSG_NOSIGNAL);
    close(client);
  }
}

static void believeNobody(int user, const char *want) {
  impostor_t *fake = shared(sizeof *fake);
  fflush(NULL);
  pid_t owner = fork();
  if (owner == 0) _exit(ncclGetUniqueId(&fake->id) == ncclSuccess ? 0 : 1);
  REQUIRE(ended(owner) == 0, "no id");
  pid_t attacker = fork();
  if (attacker == 0) impersonate(fake, user);
  for (int i = 0; i < 5000 && !atomic_load(&fake->ready); i++) usleep(1000);
  pid_t victim = fork();
  if (victim == 0) {
    ncclComm_t comm = NULL;
    ncclResult_t result = ncclCommInitRank(&comm, 2, fake->id, 0);
    int told = result == ncclRemoteError && !comm && strstr(trefoilHostLastError(), want);
    if (!told) fprintf(stderr, "%d: %s\n", result, trefoilHostLastError());
    _exit(told ? 0 : 1);
  }
  int status = ended(victim);
  CHECK(status == 0, "the victim ends with status 0x%x (a signal: its low bits)", status);
  CHECK(!fake->heard, "the impostor was told the secret");
  kill(attacker, SIGKILL);
  ended(attacker);
  munmap(fake, sizeof *fake);
}

TEST(an_impostor_of_the_same_user_is_not_believed) {
  believeNobody(0, "does not know the id's secret");
}

TEST(an_impostor_of_another_user_is_not_believed) {
  if (geteuid() != 0) SKIP("needs root, to become another user");
  believeNobody(1, "a process of another user has its name");
}

/* ---- Processes that have ended, and process-id namespaces ---- */

TEST(a_zombie_has_ended) {
  pid_t pid = fork();
  if (pid == 0) _exit(0);
  for (int ms = 0; ms < 5000 && !epPidEnded(pid); ms++) usleep(1000);
  int fd = epProcessOpen(pid);
  CHECK(kill(pid, 0) == 0 && epPidEnded(pid), "by its id");
  CHECK(epProcessEnded(fd, pid), "by a descriptor");
  if (fd >= 0) close(fd);
  ended(pid);
  CHECK(epPidEnded(pid) && epProcessEnded(epProcessOpen(pid), pid), "when it is reaped");
  CHECK(!epPidEnded(getpid()) && !epPidEnded(1), "this process and the first one live");
  fd = epProcessOpen(getppid());
  CHECK(!epProcessEnded(fd, getppid()), "the parent lives");
  if (fd >= 0) close(fd);
}

typedef struct {
  ncclUniqueId id;
  _Atomic int met, ended;
  char sentence[300];
  double took;
} spaces_t;

/* Meets; then rank 0 watches the others for a while, who all live, and at last for the end of rank 1. */
static int spaceRank(spaces_t *s, int rank) {
  ncclComm_t comm;
  cudaStream_t stream;
  int sum = 1;
  if (cudaStreamCreate(&stream) != cudaSuccess ||
      ncclCommInitRank(&comm, 3, s->id, rank) != ncclSuccess)
    return 2;
  for (int i = 0; i < 20; i++) {
    if (ncclAllReduce(&sum, &sum, 1, ncclInt32, ncclMax, comm, stream) != ncclSuccess ||
        cudaStreamSynchronize(stream) != cudaSuccess)
      return 3;
    for (int r = 0; r < 3; r++)
      if (trefoilHostPeerAlive(comm, r) != 1) return 4;
    usleep(2000);
  }
  atomic_fetch_add(&s->met, 1);
  if (rank != 0) {
    while (!atomic_load(&s->ended)) usleep(1000);
    return 0;
  }
  while (atomic_load(&s->met) < 3) usleep(1000);
  atomic_store(&s->met, 4); /* rank 1 is killed now */
  double start = seconds(CLOCK_MONOTONIC);
  ncclResult_t result = ncclAllReduce(&sum, &sum, 1, ncclInt32, ncclMax, comm, stream);
  if (result == ncclSuccess && cudaStreamSynchronize(stream) == cudaSuccess) return 5;
  s->took = seconds(CLOCK_MONOTONIC) - start;
  snprintf(s->sentence, sizeof s->sentence, "%s", trefoilHostLastError());
  atomic_store(&s->ended, 1);
  return 0;
}

/* A rank in a namespace of its own: the child of who called unshare is its first process. */
static pid_t startInSpace(spaces_t *s, int rank, _Atomic int *inner) {
  pid_t pid = fork();
  if (pid) return pid;
  if (unshare(CLONE_NEWPID)) _exit(77);
  pid_t child = fork();
  if (child == 0) _exit(spaceRank(s, rank));
  atomic_store(inner, child);
  int status = ended(child);
  _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 100);
}

TEST(ranks_of_several_pid_namespaces) {
  spaces_t *s = shared(sizeof *s + 3 * sizeof(int));
  _Atomic int *inner = (_Atomic int *)(s + 1);
  pid_t pids[3];
  fflush(NULL);
  pid_t probe = fork();
  if (probe == 0) _exit(unshare(CLONE_NEWPID) ? 77 : 0);
  if (ended(probe)) SKIP("process-id namespaces cannot be made here (needs root)");
  OK(ncclGetUniqueId(&s->id));
  for (int r = 1; r < 3; r++) pids[r] = startInSpace(s, r, &inner[r]);
  pids[0] = fork();
  if (pids[0] == 0) _exit(spaceRank(s, 0));
  for (int i = 0; i < 20000 && atomic_load(&s->met) < 4; i++) usleep(1000);
  CHECK(atomic_load(&s->met) == 4, "only %d ranks met", atomic_load(&s->met));
  if (atomic_load(&inner[1])) kill(atomic_load(&inner[1]), SIGKILL);
  CHECK(ended(pids[0]) == 0, "rank 0");
  CHECK(strstr(s->sentence, "rank 1 is gone") && s->took < 2.5, "after %.1f s: %s", s->took,
        s->sentence);
  atomic_store(&s->ended, 1);
  ended(pids[1]);
  CHECK(ended(pids[2]) == 0, "rank 2");
  munmap(s, sizeof *s + 3 * sizeof(int));
}

int main(int argc, char **argv) {
#if defined(__SANITIZE_THREAD__)
  printf("skipped: ThreadSanitizer does not follow threads made after a fork\n");
  return 77;
#endif
  setenv("NCCL_EP_TIMEOUT_MS", "15000", 1);
  return testRunAll(argc, argv);
}
