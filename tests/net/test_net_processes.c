/* The carriers between processes: memory of the host and of a stand-in GPU (fake_cuda.c), by peer copies and
 * by TCP; order, faults, dead ranks, shutdown. Each rank is a process with threads that make progress. */
#include "test.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "net/net_comm.h"

enum { RANKS = 3, THREADS = 2, ROUNDS = 24, MOST = 1300000, SLOTS = 2 * RANKS };

typedef struct {
  char handles[RANKS][EP_NET_HANDLE_BYTES];
  _Atomic int arrived[8];
} shared_t;
static shared_t *shared;

/* A rank: what its process has. */
typedef struct {
  int rank, ranks;
  ep_net_settings_t settings;
  bool device, shareable;
  ep_net_comm_t *comm;
  int context;
  ep_net_region_t *window, *signals;
  unsigned char *data; /* as the host sees them */
  uint64_t *slots;
  char why[EP_NET_WHY];
  pthread_t threads[THREADS];
  _Atomic bool stop;
} rank_t;

#define MUST(cond)                                                                                 \
  do {                                                                                             \
    if (cond) break;                                                                               \
    fprintf(stderr, "%s:%d: rank %d: %s: %s\n", __FILE__, __LINE__, k->rank, #cond, k->why);       \
    _exit(1);                                                                                      \
  } while (0)

static void doze(int64_t ns) {
  nanosleep(&(struct timespec){ns / 1000000000, ns % 1000000000}, NULL);
}

static void everybody(const rank_t *k, int place) {
  shared->arrived[place]++;
  while (shared->arrived[place] < k->ranks) doze(50000);
}

static char *unset(const char *name) {
  return (void)name, NULL;
}

static ep_net_settings_t settingsOf(ep_net_carrier_t carrier) {
  ep_net_settings_t s;
  char why[EP_NET_WHY];
  if (epNetSettings(unset, &s, why)) abort();
  s.carrier = carrier;
  snprintf(s.address, sizeof s.address, "127.0.0.1");
  return s;
}

static void allocate(rank_t *k, size_t bytes, bool shareable, void **at, void **host) {
  if (!k->device) {
    *at = *host = calloc(1, bytes);
    return;
  }
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  snprintf(k->why, sizeof k->why, "%s", driver ? "" : dlerror());
  MUST(driver);
  int (*fakeAlloc)(size_t, int, void **, void **);
  *(void **)&fakeAlloc = dlsym(driver, "fakeAlloc");
  int (*setCurrent)(void *);
  *(void **)&setCurrent = dlsym(driver, "cuCtxSetCurrent");
  MUST(fakeAlloc && setCurrent && !setCurrent(shared) && !fakeAlloc(bytes, shareable, at, host));
}

static void *makeProgress(void *argument) {
  rank_t *k = argument;
  char why[EP_NET_WHY];
  while (!k->stop) {
    epNetProgress(k->comm, why);
    sched_yield();
  }
  return NULL;
}

static void start(rank_t *k) {
  void *handles[RANKS], *at, *host;
  ep_net_listener_t *listener;
  MUST(!epNetListen(&k->settings, shared->handles[k->rank], &listener, k->why));
  everybody(k, 0);
  for (int r = 0; r < k->ranks; r++) handles[r] = shared->handles[r];
  MUST(!epNetConnect(&k->settings, listener, handles, k->ranks, k->rank, &k->comm, k->why));
  epNetListenClose(listener);
  MUST(!epNetContexts(k->comm, 2, &k->context, k->why));
  for (int i = 0; i < THREADS; i++) pthread_create(&k->threads[i], NULL, makeProgress, k);
  allocate(k, (size_t)2 * RANKS * MOST, k->shareable, &at, &host);
  k->data = host;
  const ep_net_memory_t window = {at, (uint64_t)2 * RANKS * MOST, k->device, false};
  MUST(!epNetRegister(k->comm, &window, &k->window, k->why));
  allocate(k, SLOTS * 8, false, &at, &host);
  k->slots = host;
  const ep_net_memory_t signals = {at, SLOTS * 8, k->device, k->rank == 1};
  MUST(!epNetRegister(k->comm, &signals, &k->signals, k->why));
}

static void end(rank_t *k) {
  k->stop = true;
  for (int i = 0; i < THREADS; i++) pthread_join(k->threads[i], NULL);
  epNetDeregister(k->comm, k->window);
  epNetDeregister(k->comm, k->signals);
  epNetClose(k->comm);
  if (!k->device) free(k->data), free(k->slots);
}

static uint64_t signalOf(const rank_t *k, int slot) {
  return __atomic_load_n(&k->slots[slot], __ATOMIC_ACQUIRE);
}

static void waitSignal(rank_t *k, int slot, uint64_t value) {
  int64_t limit = epNetNow() + 20000000000;
  while (signalOf(k, slot) < value) {
    snprintf(k->why, sizeof k->why, "slot %d is %llu, not %llu", slot,
             (unsigned long long)signalOf(k, slot), (unsigned long long)value);
    MUST(!epNetFailed(k->comm) && epNetNow() < limit);
    doze(20000);
  }
  MUST(signalOf(k, slot) == value);
}

static void waitDone(rank_t *k, ep_net_request_t *request) {
  int64_t limit = epNetNow() + 20000000000;
  for (bool done = false; !done;) {
    MUST(!epNetTest(k->comm, request, &done, k->why) && epNetNow() < limit);
    doze(5000);
  }
}

static unsigned char valueAt(int round, int from, int to, uint64_t i) {
  return (unsigned char)(round * 31 + from * 7 + to * 3 + (int)(i % 251));
}

static uint64_t bytesOf(int round, int from, int to) {
  unsigned x = (unsigned)(round * 977 + from * 131 + to * 17) * 2654435761u;
  return round % 20 == 7 ? MOST - x % 1000 : 1 + x % 9000;
}

/* Rank k sends from place `peer` to place RANKS + k. */
static ep_net_request_t *sendTo(rank_t *k, int peer, uint64_t bytes, int slot, uint64_t add,
                                bool strong) {
  ep_net_request_t *request = NULL;
  ep_net_post_t post = {.local = k->window, .remote = k->window, .signal = k->signals};
  post.op.peer = peer;
  post.op.bytes = bytes;
  post.op.localOffset = (uint64_t)peer * MOST;
  post.op.remoteOffset = (uint64_t)(RANKS + k->rank) * MOST;
  post.op.hasSignal = true;
  post.op.strong = strong;
  post.op.signalOffset = (uint64_t)slot * 8;
  post.op.add = add;
  MUST(!epNetPost(k->comm, k->context + peer % 2, &post, &request, k->why));
  return request;
}

static void checkRound(rank_t *k, int round, int from) {
  waitSignal(k, from, 3 * (uint64_t)(round + 1));
  const unsigned char *got = k->data + (size_t)(RANKS + from) * MOST;
  for (uint64_t i = 0; i < bytesOf(round, from, k->rank); i++)
    MUST(got[i] == valueAt(round, from, k->rank, i));
}

static void oneRound(rank_t *k, int round) {
  ep_net_request_t *requests[2 * RANKS];
  for (int p = 0; p < k->ranks; p++) {
    uint64_t bytes = bytesOf(round, k->rank, p);
    for (uint64_t i = 0; i < bytes; i++)
      k->data[(size_t)p * MOST + i] = valueAt(round, k->rank, p, i);
    requests[p] = sendTo(k, p, bytes, k->rank, 3, round % 2);
  }
  for (int p = 0; p < k->ranks; p++) checkRound(k, round, p);
  for (int p = 0; p < k->ranks; p++)
    requests[RANKS + p] = sendTo(k, p, 0, RANKS + k->rank, 1, false);
  for (int p = 0; p < k->ranks; p++) waitSignal(k, RANKS + p, (uint64_t)round + 1);
  for (int p = 0; p < k->ranks; p++) waitDone(k, requests[p]), waitDone(k, requests[RANKS + p]);
}

/* Gets what the last round sent to the rank before this one. */
static void getBack(rank_t *k) {
  int from = (k->rank + 1) % k->ranks;
  ep_net_request_t *get = NULL, *flush = NULL;
  ep_net_post_t post = {.local = k->window, .remote = k->window};
  post.op =
      (ep_net_op_t){.kind = EP_NET_GET, .peer = from, .bytes = bytesOf(ROUNDS - 1, k->rank, from)};
  post.op.remoteOffset = (uint64_t)(RANKS + k->rank) * MOST;
  memset(k->data, 0, MOST);
  MUST(!epNetPost(k->comm, k->context, &post, &get, k->why));
  post.op.kind = EP_NET_FLUSH;
  post.op.bytes = 0;
  MUST(!epNetPost(k->comm, k->context, &post, &flush, k->why));
  waitDone(k, flush);
  for (uint64_t i = 0; i < bytesOf(ROUNDS - 1, k->rank, from); i++)
    MUST(k->data[i] == valueAt(ROUNDS - 1, k->rank, from, i));
  waitDone(k, get);
  everybody(k, 3);
}

static void rounds(rank_t *k) {
  start(k);
  for (int round = 0; round < ROUNDS; round++) oneRound(k, round);
  getBack(k);
  end(k);
}

/* Runs ranks as processes; how many of them failed. */
static int launch(int ranks, ep_net_settings_t settings, bool device, bool shareable,
                  void (*body)(rank_t *)) {
  int failed = 0, status;
  pid_t children[RANKS];
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  for (int r = 0; r < ranks; r++) {
    children[r] = fork();
    if (children[r]) continue;
    static rank_t k;
    k.rank = r;
    k.ranks = ranks;
    k.settings = settings;
    k.device = device;
    k.shareable = shareable;
    alarm(60);
    body(&k);
    exit(0);
  }
  for (int r = 0; r < ranks; r++)
    failed += waitpid(children[r], &status, 0) != children[r] || status != 0;
  munmap(shared, sizeof *shared);
  return failed;
}

static int withFaults(ep_net_carrier_t carrier, bool device, bool shareable) {
  ep_net_settings_t s = settingsOf(carrier);
  s.jitterNs = 200000;
  s.reorder = 300000;
  s.rails = 2;
  s.failingRail = 1;
  s.failures = 200000;
  s.retryNs = 100000;
  s.inFlight = 4;
  return launch(RANKS, s, device, shareable, rounds);
}

TEST(host_memory) {
  for (int carrier = 0; carrier < 2; carrier++) {
    CHECK(!launch(RANKS, settingsOf(carrier), false, false, rounds), "carrier %d", carrier);
    CHECK(!withFaults(carrier, false, false), "carrier %d with faults", carrier);
  }
}

TEST(gpu_memory_by_peer_copies) {
  CHECK(!launch(RANKS, settingsOf(EP_NET_COPY), true, true, rounds), "plain");
  CHECK(!withFaults(EP_NET_COPY, true, true), "with faults");
}

TEST(gpu_memory_through_the_host) {
  CHECK(!launch(RANKS, settingsOf(EP_NET_TCP), true, true, rounds), "plain");
  CHECK(!launch(2, settingsOf(EP_NET_COPY), true, false, rounds), "memory that cannot be shared");
}

/* Many small messages at once, all to rank 0 and one signal: answers and signals are put together. */
static void burst(rank_t *k) {
  enum { COUNT = 200 };
  ep_net_request_t *requests[COUNT];
  start(k);
  for (int i = 0; i < COUNT; i++) requests[i] = sendTo(k, 0, 8, 0, 1, i % 2);
  for (int i = 0; i < COUNT; i++) waitDone(k, requests[i]);
  everybody(k, 1);
  if (k->rank == 0) waitSignal(k, 0, (uint64_t)k->ranks * COUNT);
  everybody(k, 2);
  end(k);
}

TEST(bursts_to_one_signal_add_up) {
  for (int carrier = 0; carrier < 2; carrier++)
    for (int device = 0; device < 2; device++)
      CHECK(!launch(RANKS, settingsOf(carrier), device, true, burst), "carrier %d, gpu %d", carrier,
            device);
}

/* ---- Faults ---- */

/* The last rank ends after the start; the others send to it and to each other. */
static void oneDies(rank_t *k) {
  bool done = false;
  start(k);
  everybody(k, 1);
  if (k->rank == RANKS - 1) shared->arrived[2]++; /* the survivors meet again without it */
  if (k->rank == RANKS - 1) _exit(0);
  ep_net_request_t *lost = sendTo(k, RANKS - 1, 64, k->rank, 1, true);
  if (k->settings.onDead == EP_NET_DEAD_DROP) {
    int other = 1 - k->rank;
    doze(50000000);
    waitDone(k, sendTo(k, RANKS - 1, 64, k->rank, 1, true));
    waitDone(k, sendTo(k, other, 64, k->rank, 1, true));
    waitSignal(k, other, 1);
  } else {
    int64_t limit = epNetNow() + 10000000000;
    while (!epNetTest(k->comm, lost, &done, k->why) && epNetNow() < limit) {
      if (done) lost = sendTo(k, RANKS - 1, 64, k->rank, 1, true); /* it was still there */
      doze(1000000);
    }
    MUST(strstr(k->why, "rank 2 is gone, its connection has ended"));
  }
  everybody(k, 2);
  end(k);
}

TEST(a_dead_rank_is_named_or_dropped) {
  for (int drop = 0; drop < 2; drop++) {
    ep_net_settings_t s = settingsOf(EP_NET_TCP);
    s.onDead = drop;
    CHECK(!launch(RANKS, s, false, false, oneDies), "drop %d", drop);
  }
}

static void stopped(rank_t *k) {
  bool done = false;
  start(k);
  if (k->rank == 1) {
    k->stop = true;
    for (int i = 0; i < THREADS; i++) pthread_join(k->threads[i], NULL);
    everybody(k, 1);
    everybody(k, 2);
    _exit(0);
  }
  everybody(k, 1);
  int64_t began = epNetNow();
  ep_net_request_t *request = sendTo(k, 1, 64, 0, 1, true);
  while (!epNetTest(k->comm, request, &done, k->why) && epNetNow() < began + 10000000000)
    doze(1000000);
  MUST(strstr(k->why, "rank 0: rank 1 did not take a put of 64 bytes within 500 ms"));
  MUST(epNetNow() - began >= 500000000 && epNetFailed(k->comm));
  everybody(k, 2);
  end(k);
}

TEST(a_rank_that_stops_is_named_within_the_limit) {
  ep_net_settings_t s = settingsOf(EP_NET_TCP);
  s.limitNs = 500000000;
  CHECK(!launch(2, s, false, false, stopped), "the sender waits or names another");
}

/* The last signal reaches a rank that looks late, though its sender has closed. */
static void lastWords(rank_t *k) {
  start(k);
  if (k->rank == 1) {
    k->stop = true;
    for (int i = 0; i < THREADS; i++) pthread_join(k->threads[i], NULL);
  }
  everybody(k, 1);
  if (k->rank == 0) {
    waitDone(k, sendTo(k, 1, 0, 0, 7, false));
    end(k);
    return;
  }
  doze(200000000);
  k->stop = false;
  for (int i = 0; i < THREADS; i++) pthread_create(&k->threads[i], NULL, makeProgress, k);
  waitSignal(k, 0, 7);
  end(k);
}

TEST(what_was_sent_arrives_after_the_sender_closed) {
  for (int carrier = 0; carrier < 2; carrier++)
    CHECK(!launch(2, settingsOf(carrier), false, false, lastWords), "carrier %d", carrier);
}

static void refused(rank_t *k) {
  static const struct {
    ep_net_op_t op;
    const char *says;
  } BAD[] = {
      {{.peer = 2, .bytes = 8}, "which is not in [0, 2)"},
      {{.peer = 1, .bytes = 8, .localOffset = (uint64_t)2 * RANKS * MOST - 7}, "the local side of"},
      {{.peer = 1, .bytes = 8, .remoteOffset = UINT64_MAX}, "the remote side of"},
      {{.peer = 1, .hasSignal = true, .signalOffset = SLOTS * 8}, "the signal of"},
      {{.peer = 1, .hasSignal = true, .signalOffset = 4}, "the signal of"},
  };
  ep_net_request_t *request = NULL;
  start(k);
  for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
    ep_net_post_t post = {BAD[i].op, k->window, k->window, k->signals};
    MUST(epNetPost(k->comm, k->context, &post, &request, k->why) == -1 &&
         strstr(k->why, BAD[i].says));
  }
  waitDone(k, sendTo(k, 1 - k->rank, 8, k->rank, 1, true)); /* nothing is lost */
  waitSignal(k, 1 - k->rank, 1);
  everybody(k, 1);
  end(k);
}

TEST(wrong_requests_are_refused_and_the_communicator_goes_on) {
  CHECK(!launch(2, settingsOf(EP_NET_TCP), false, false, refused), "see above");
}

/* ---- Start ---- */

TEST(a_rank_that_does_not_come_ends_the_wait) {
  char handles[2][EP_NET_HANDLE_BYTES], why[EP_NET_WHY] = "";
  void *const all[] = {handles[0], handles[1]};
  ep_net_listener_t *listeners[2];
  ep_net_comm_t *comm;
  ep_net_settings_t s = settingsOf(EP_NET_TCP);
  s.limitNs = 200000000;
  for (int r = 0; r < 2; r++) REQUIRE(!epNetListen(&s, handles[r], &listeners[r], why), "%s", why);
  int64_t began = epNetNow();
  CHECK(epNetConnect(&s, listeners[0], all, 2, 0, &comm, why) == -1, "nobody came");
  CHECK(strstr(why, "rank 0: rank 1 did not connect within") && epNetNow() - began < 3000000000,
        "%s", why);
  CHECK(epNetConnect(&s, listeners[0], all, 2, 2, &comm, why) == -1 &&
            strstr(why, "rank 2 is not in [0, 2)"),
        "%s", why);
  for (int r = 0; r < 2; r++) epNetListenClose(listeners[r]);
}

TEST(a_rank_that_has_stopped_listening_is_named) {
  char handles[2][EP_NET_HANDLE_BYTES], why[EP_NET_WHY] = "";
  void *const all[] = {handles[0], handles[1]};
  ep_net_listener_t *listeners[2];
  ep_net_comm_t *comm;
  for (int carrier = 0; carrier < 2; carrier++) {
    ep_net_settings_t s = settingsOf(carrier);
    for (int r = 0; r < 2; r++)
      REQUIRE(!epNetListen(&s, handles[r], &listeners[r], why), "%s", why);
    epNetListenClose(listeners[0]);
    CHECK(epNetConnect(&s, listeners[1], all, 2, 1, &comm, why) == -1, "nobody listens");
    CHECK(strstr(why, "rank 1, to rank 0: a rank's listener cannot be reached: "), "%s", why);
    epNetListenClose(listeners[1]);
  }
}

TEST(ranks_with_different_carriers_are_told) {
  char handles[2][EP_NET_HANDLE_BYTES], why[EP_NET_WHY] = "";
  void *const all[] = {handles[0], handles[1]};
  ep_net_listener_t *listeners[2];
  ep_net_comm_t *comm;
  for (int r = 0; r < 2; r++) {
    ep_net_settings_t s = settingsOf(r);
    REQUIRE(!epNetListen(&s, handles[r], &listeners[r], why), "%s", why);
  }
  ep_net_settings_t s = settingsOf(0);
  CHECK(epNetConnect(&s, listeners[0], all, 2, 0, &comm, why) == -1, "they cannot meet");
  CHECK(strstr(why, "rank 1 has another carrier"), "%s", why);
  memset(handles[1], 1, sizeof handles[1]);
  CHECK(epNetConnect(&s, listeners[0], all, 2, 0, &comm, why) == -1 &&
            strstr(why, "none of this network"),
        "%s", why);
  for (int r = 0; r < 2; r++) epNetListenClose(listeners[r]);
}

TEST(a_wrong_address_is_refused) {
  char handle[EP_NET_HANDLE_BYTES], why[EP_NET_WHY] = "";
  ep_net_listener_t *listener;
  ep_net_settings_t s = settingsOf(EP_NET_TCP);
  snprintf(s.address, sizeof s.address, "nowhere");
  CHECK(epNetListen(&s, handle, &listener, why) == -1 && strstr(why, "must be an IPv4 address"),
        "%s", why);
}

TEST_MAIN()
