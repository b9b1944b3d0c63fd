/* The plugin as a library, called as NCCL calls it: found by its symbol, two ranks in two processes, a
 * thread that makes progress without a CUDA context, errors through the logger. argv: the library. */
#include "test.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "net/nccl_rma.h"

enum { RANKS = 2, CONTEXTS = 2, BYTES = 100000, HANDLE = 128 };

static const rma_plugin_t *plugin;
static char logged[1000];
static int warnings, hidden; /* that NCCL would not show by default */

__attribute__((format(printf, 5, 6))) static void
hear(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
  (void)file, (void)line;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(logged, sizeof logged, format, arguments);
  va_end(arguments);
  warnings += level == RMA_LOG_WARN;
  hidden += level == RMA_LOG_WARN && flags != RMA_LOG_ALL;
}

static struct {
  char handles[RANKS][HANDLE];
  _Atomic int arrived[4];
} * shared;

#define MUST(cond)                                                                                 \
  do {                                                                                             \
    if (cond) break;                                                                               \
    fprintf(stderr, "%s:%d: rank %d: %s; logged: %s\n", __FILE__, __LINE__, rank, #cond, logged);  \
    _exit(1);                                                                                      \
  } while (0)

static void doze(void) {
  nanosleep(&(struct timespec){0, 100000}, NULL);
}

static void everybody(int place) {
  shared->arrived[place]++;
  while (shared->arrived[place] < RANKS) doze();
}

static _Atomic bool stop;
static void *makeProgress(void *rma) {
  while (!stop && !plugin->progress(rma)) sched_yield();
  return NULL;
}

static void waitFor(int rank, void *comm, void *request) {
  for (int done = 0; !done; doze()) MUST(!plugin->test(comm, request, &done));
}

/* Memory of the stand-in GPU. */
static void allocate(int rank, size_t bytes, int shareable, void **device, void **host) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  MUST(driver);
  int (*fakeAlloc)(size_t, int, void **, void **), (*setCurrent)(void *);
  *(void **)&fakeAlloc = dlsym(driver, "fakeAlloc");
  *(void **)&setCurrent = dlsym(driver, "cuCtxSetCurrent");
  MUST(!setCurrent(shared) && !fakeAlloc(bytes, shareable, device, host));
}

/* Puts with every kind of signal into the other rank's window, and gets them back. */
static void exchange(int rank, void *comm, void *rma, void *window, unsigned char *data, void *pool,
                     _Atomic uint64_t *signals, void *inlined) {
  uint32_t other = (uint32_t)(1 - rank);
  void *requests[6] = {0};
  for (int i = 0; i < BYTES; i++) data[i] = (unsigned char)(i * 3 + rank);
  MUST(!plugin->iput(rma, 0, 0, window, BYTES / 2, BYTES, window, other, &requests[0]));
  MUST(!plugin->iputSignal(rma, 0, BYTES / 2, window, BYTES / 2, BYTES + BYTES / 2, window, other,
                           8, pool, 5, RMA_SIGNAL_ADD, true, &requests[1]));
  MUST(!plugin->iputSignal(rma, 1, 0, NULL, 0, 0, NULL, other, 16, pool, 99, RMA_SIGNAL_INC, false,
                           &requests[2]));
  MUST(!plugin->iputSignal(rma, 1, 0, inlined, 8, 2 * BYTES, window, other, 24, pool, 1,
                           RMA_SIGNAL_ADD, false, &requests[3]));
  while (signals[1] != 5 || signals[2] != 1 || signals[3] != 1) doze();
  for (int i = 0; i < BYTES; i++) MUST(data[BYTES + i] == (unsigned char)(i * 3 + 1 - rank));
  MUST(data[2 * BYTES] == 40 + 1 - rank);
  MUST(!plugin->iget(rma, 0, BYTES, window, BYTES, 3 * BYTES, window, other, &requests[4]));
  MUST(!plugin->iflush(rma, 0, window, other, &requests[5]));
  for (int i = 0; i < 6; i++) waitFor(rank, comm, requests[i]);
  MUST(!memcmp(data, data + 3 * BYTES, BYTES));
}

static void refuse(int rank, void *comm, void *rma, void *window) {
  void *request = NULL;
  bool failed = true;
  (void)comm;
  MUST(plugin->iput(rma, CONTEXTS, 0, window, 8, 0, window, 0, &request) &&
       strstr(logged, "is not in [0, 2)"));
  MUST(plugin->iput(rma, 0, 0, window, 8, 4 * BYTES, window, 0, &request) &&
       strstr(logged, "the remote side"));
  MUST(!plugin->queryLastError(rma, &failed) && !failed && !request && warnings == 2 && !hidden);
}

static void run(int rank) {
  void *context, *listener, *comm, *rma, *handles[RANKS], *window, *pool, *inlined, *pinned, *at,
      *data, *signals, *poolAt;
  pthread_t thread;
  rma_config_t config = {.numContexts = CONTEXTS};
  static uint64_t word, onHost[8];
  static char foreign[4096]; /* what connect is given: NCCL's network plugin's context */
  memset(foreign, 0xA5, sizeof foreign);
  word = 40 + (uint64_t)rank;
  MUST(!plugin->init(&context, 7, hear));
  MUST(!plugin->listen(context, 0, shared->handles[rank], &listener));
  everybody(0);
  for (int r = 0; r < RANKS; r++) handles[r] = shared->handles[r];
  MUST(!plugin->connect(foreign, handles, RANKS, rank, listener, &comm));
  MUST(!plugin->closeListen(listener));
  allocate(rank, 4 * BYTES, 1, &at, &data);
  allocate(rank, 64, 0, &poolAt, &signals);
  MUST(!plugin->createContext(comm, &config, &rma));
  MUST(!pthread_create(&thread, NULL, makeProgress, rma));
  MUST(!plugin->regMrSym(comm, at, 4 * BYTES, RMA_PTR_CUDA, 0, &window));
  MUST(!plugin->regMrSym(comm, poolAt, 64, RMA_PTR_CUDA, RMA_SIGNAL_NEVER_RESET, &pool));
  MUST(!plugin->regMrSym(comm, &word, 8, RMA_PTR_HOST, 0, &inlined));
  /* without GDRCopy NCCL registers the host's pinned memory as a GPU's */
  MUST(!plugin->regMrSym(comm, onHost, sizeof onHost, RMA_PTR_CUDA, 0, &pinned));
  exchange(rank, comm, rma, window, data, pool, signals, inlined);
  everybody(1);
  refuse(rank, comm, rma, window);
  stop = true;
  pthread_join(thread, NULL);
  MUST(!plugin->deregMrSym(comm, window) && !plugin->deregMrSym(comm, pool) &&
       !plugin->deregMrSym(comm, inlined) && !plugin->deregMrSym(comm, pinned));
  MUST(!plugin->destroyContext(rma) && !plugin->closeColl(comm) && !plugin->finalize(context));
}

/* Rank 1 fails in connect; rank 0's ends, too. */
static void connectInVain(int rank) {
  void *context, *listener, *comm = NULL, *handles[RANKS];
  setenv("TREFOIL_NET_TIMEOUT_MS", "500", 1);
  if (rank == 1) setenv("TREFOIL_NET_DEAD_RANK", "7:0", 1);
  MUST(!plugin->init(&context, 7, hear));
  MUST(!plugin->listen(context, 0, shared->handles[rank], &listener));
  everybody(0);
  for (int r = 0; r < RANKS; r++) handles[r] = shared->handles[r];
  MUST(plugin->connect(context, handles, RANKS, rank, listener, &comm) == RMA_SYSTEM_ERROR);
  MUST(strstr(logged, rank ? "names rank 7, which is not in" : "rank 1 did not connect within"));
  everybody(1);
  MUST(!plugin->closeListen(listener) && !plugin->finalize(context));
}

static int launch(const char *carrier, void (*run)(int)) {
  int failed = 0, status;
  pid_t children[RANKS];
  setenv("TREFOIL_NET_CARRIER", carrier, 1);
  setenv("TREFOIL_NET_ADDRESS", "127.0.0.1", 1);
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  for (int r = 0; r < RANKS; r++) {
    if ((children[r] = fork())) continue;
    alarm(60);
    run(r);
    exit(0);
  }
  for (int r = 0; r < RANKS; r++)
    failed += waitpid(children[r], &status, 0) != children[r] || status != 0;
  munmap(shared, sizeof *shared);
  return failed;
}

TEST(both_carriers_as_nccl_uses_them) {
  CHECK(!launch("copy", run), "copy");
  CHECK(!launch("tcp", run), "tcp");
}

TEST(a_rank_that_fails_in_connect_ends_the_others_wait) {
  CHECK(!launch("copy", connectInVain), "copy");
  CHECK(!launch("tcp", connectInVain), "tcp");
}

TEST(what_nccl_asks_first) {
  int count = 0;
  rma_properties_t p;
  CHECK(!plugin->devices(&count) && count == 1, "%d devices", count);
  REQUIRE(!plugin->getProperties(0, &p), "no properties");
  CHECK(p.netDeviceType == RMA_DEVICE_PROXY && p.ptrSupport == (RMA_PTR_HOST | RMA_PTR_CUDA), "%d",
        p.netDeviceType);
  CHECK(32 * p.maxRecvs == 512 && !p.pciPath && !strcmp(p.name, "trefoil0"), "%d %s", p.maxRecvs,
        p.name);
}

TEST(a_wrong_setting_is_an_error_of_init_and_logged) {
  void *context = NULL;
  setenv("TREFOIL_NET_CARRIER", "pigeon", 1);
  CHECK(plugin->init(&context, 1, hear) == RMA_SYSTEM_ERROR && !context, "it was taken");
  CHECK(strstr(logged, "TREFOIL_NET_CARRIER is 'pigeon'; must be copy or tcp"), "%s", logged);
  CHECK(plugin->init(&context, 1, NULL) == RMA_SYSTEM_ERROR, "without a logger");
  setenv("TREFOIL_NET_CARRIER", "tcp", 1);
  REQUIRE(!plugin->init(&context, 1, hear), "%s", logged);
  CHECK(strstr(logged, "carrier tcp"), "%s", logged);
  plugin->finalize(context);
}

TEST(a_dead_rank_that_does_not_exist_is_an_error_of_connect_and_logged) {
  void *context, *listener, *comm = NULL;
  char handle[HANDLE];
  void *handles[] = {handle};
  setenv("TREFOIL_NET_DEAD_RANK", "1:0", 1);
  REQUIRE(!plugin->init(&context, 1, hear), "%s", logged);
  unsetenv("TREFOIL_NET_DEAD_RANK");
  REQUIRE(!plugin->listen(context, 0, handle, &listener), "%s", logged);
  CHECK(plugin->connect(context, handles, 1, 0, listener, &comm) == RMA_SYSTEM_ERROR && !comm,
        "it was taken");
  CHECK(strstr(logged, "TREFOIL_NET_DEAD_RANK names rank 1, which is not in [0, 1)"), "%s", logged);
  plugin->closeListen(listener);
  plugin->finalize(context);
}

int main(int argc, char **argv) {
  void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
  plugin = library ? dlsym(library, "ncclRmaPlugin_v14") : NULL;
  if (plugin) return testRunAll(argc - 1, argv + 1);
  fprintf(stderr, "no plugin: %s\n", dlerror());
  return 1;
}
