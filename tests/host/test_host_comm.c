/* Communicators whose ranks are threads: collectives against brute force, point to point, groups, split,
 * windows, capture, and what happens when ranks disagree, leave, or never come. */
#include <fcntl.h>
#include <math.h>
#include <stdint.h>

#include "host_ranks.h"
#include "trefoil_host.h"

#define OK(call)      REQUIRE((call) == ncclSuccess, "%s: %s", #call, trefoilHostLastError())
#define CUDA_OK(call) REQUIRE((call) == cudaSuccess, "%s: %s", #call, trefoilHostLastError())

typedef struct {
  ncclComm_t comm;
  cudaStream_t stream;
  int rank, numRanks;
} rank_t;

static void openRank(rank_t *me, int rank, int numRanks, const ncclUniqueId *id) {
  me->rank = rank;
  me->numRanks = numRanks;
  me->comm = NULL;
  CUDA_OK(cudaStreamCreate(&me->stream));
  OK(ncclCommInitRank(&me->comm, numRanks, *id, rank));
}

static void closeRank(rank_t *me) {
  OK(ncclCommDestroy(me->comm));
  CUDA_OK(cudaStreamDestroy(me->stream));
}

/* The payload of rank r at element i: small integers, exact in every type. */
static int value(int r, size_t i) {
  return (int)((size_t)(r * 7 + 3) + i * 5) % 11 - 3;
}

static void store(void *at, size_t i, ncclDataType_t type, double v) {
  switch (type) {
  case ncclInt8:
    ((int8_t *)at)[i] = (int8_t)v;
    break;
  case ncclUint8:
    ((uint8_t *)at)[i] = (uint8_t)(int)v;
    break;
  case ncclInt32:
    ((int32_t *)at)[i] = (int32_t)v;
    break;
  case ncclUint32:
    ((uint32_t *)at)[i] = (uint32_t)(int64_t)v;
    break;
  case ncclInt64:
    ((int64_t *)at)[i] = (int64_t)v;
    break;
  case ncclUint64:
    ((uint64_t *)at)[i] = (uint64_t)(int64_t)v;
    break;
  case ncclFloat32:
    ((float *)at)[i] = (float)v;
    break;
  case ncclFloat64:
    ((double *)at)[i] = v;
    break;
  case ncclBfloat16: { /* small integers: exact by cutting */
    float f = (float)v;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    ((uint16_t *)at)[i] = (uint16_t)(bits >> 16);
    break;
  }
  default: { /* f16 of an integer of magnitude below 2048 */
    int exponent;
    double frac = frexp(fabs(v), &exponent); /* |v| = frac * 2^exponent, frac in [0.5, 1) */
    uint16_t bits = v == 0 ? 0 : (uint16_t)((exponent + 14) << 10 | ((int)(frac * 2048) & 1023));
    ((uint16_t *)at)[i] = (uint16_t)(bits | (signbit(v) ? 0x8000 : 0));
  }
  }
}

static size_t typeBytes(ncclDataType_t t) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return bytes[t];
}

static double reduced(int numRanks, size_t i, ncclRedOp_t op) {
  double acc = value(0, i);
  for (int r = 1; r < numRanks; r++) {
    double v = value(r, i);
    acc = op == ncclProd  ? acc * v
          : op == ncclMax ? fmax(acc, v)
          : op == ncclMin ? fmin(acc, v)
                          : acc + v;
  }
  return acc;
}

/* Every type and operation on `count` elements, in place or not, against brute force. */
static void reduceEverything(rank_t *me, size_t count, int inPlace) {
  static const ncclDataType_t types[] = {ncclInt8,    ncclInt32,   ncclUint32,
                                         ncclInt64,   ncclUint64,  ncclFloat16,
                                         ncclFloat32, ncclFloat64, ncclBfloat16};
  for (size_t t = 0; t < sizeof types / sizeof types[0]; t++)
    for (int op = ncclSum; op <= ncclMin; op++) {
      size_t bytes = count * typeBytes(types[t]);
      char *send, *recv, *want = malloc(bytes);
      bool isUnsigned = types[t] == ncclUint32 || types[t] == ncclUint64;
      if (isUnsigned && op >= ncclMax) { /* -3 is large there: the brute force above is signed */
        free(want);
        continue;
      }
      CUDA_OK(cudaMalloc((void **)&send, bytes));
      CUDA_OK(cudaMalloc((void **)&recv, bytes));
      for (size_t i = 0; i < count; i++) {
        store(send, i, types[t], value(me->rank, i));
        double v = reduced(me->numRanks, i, (ncclRedOp_t)op);
        if (types[t] == ncclInt8) v = (int8_t)(int64_t)v;
        store(want, i, types[t], v);
      }
      char *out = inPlace ? send : recv;
      OK(ncclAllReduce(send, out, count, types[t], (ncclRedOp_t)op, me->comm, me->stream));
      CUDA_OK(cudaStreamSynchronize(me->stream));
      CHECK(!memcmp(out, want, bytes), "type %d op %d count %zu in place %d rank %d", types[t], op,
            count, inPlace, me->rank);
      CUDA_OK(cudaFree(send));
      CUDA_OK(cudaFree(recv));
      free(want);
    }
}

static void reduceBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  rank_t me;
  (void)arg;
  openRank(&me, rank, numRanks, id);
  reduceEverything(&me, 1, 0);
  reduceEverything(&me, 1000, 1);
  reduceEverything(&me, 20011, 0);
  closeRank(&me);
}

TEST(all_reduce_of_every_type_and_operation) {
  runThreads(3, reduceBody, NULL);
}

/* In f32 the order shows: (1e8 + 1) - 1e8 is 0, 1e8 - 1e8 + 1 is 1. Ranks 0, 1, 2 in this order. */
static void orderBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  static const float terms[] = {1e8f, 1.0f, -1e8f};
  static const uint16_t halves[] = {0x4380, 0x3f80, 0xc380}; /* 256, 1, -256 in bf16 */
  rank_t me;
  float x = terms[rank];
  uint16_t h = halves[rank];
  int32_t n = rank == 0 ? -8 : 1;
  (void)arg;
  openRank(&me, rank, numRanks, id);
  OK(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, me.comm, me.stream));
  OK(ncclAllReduce(&h, &h, 1, ncclBfloat16, ncclSum, me.comm, me.stream));
  OK(ncclAllReduce(&n, &n, 1, ncclInt32, ncclAvg, me.comm, me.stream));
  CUDA_OK(cudaStreamSynchronize(me.stream));
  CHECK(x == 0.0f, "f32 sum in rank order is 0, got %g", x);
  CHECK(h == 0x3f80, "bf16 is added in f32 and rounded once: 1.0, got %04x", h);
  CHECK(n == -2, "the average of -8, 1, 1 towards zero is -2, got %d", n);
  closeRank(&me);
}

TEST(sums_are_in_rank_order) {
  runThreads(3, orderBody, NULL);
}

static void moveBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  rank_t me;
  int R = numRanks;
  (void)arg;
  openRank(&me, rank, numRanks, id);
  for (size_t count = 1; count < 200000; count = count * 37 + 5) {
    int *block, *all, *out;
    size_t n = count * sizeof(int);
    CUDA_OK(cudaMalloc((void **)&block, n));
    CUDA_OK(cudaMalloc((void **)&all, n * (size_t)R));
    CUDA_OK(cudaMalloc((void **)&out, n * (size_t)R));
    for (size_t i = 0; i < count; i++) block[i] = rank * 1000000 + (int)i;
    OK(ncclAllGather(block, all, count, ncclInt32, me.comm, me.stream));
    OK(ncclAlltoAll(all, out, count, ncclInt32, me.comm,
                    me.stream)); /* all equal: block p is p's */
    CUDA_OK(cudaStreamSynchronize(me.stream));
    for (int p = 0; p < R; p++)
      for (size_t i = 0; i < count; i += count / 7 + 1) {
        CHECK(all[(size_t)p * count + i] == p * 1000000 + (int)i, "gather %d %zu", p, i);
        CHECK(out[(size_t)p * count + i] == rank * 1000000 + (int)i, "all to all %d %zu", p, i);
      }
    for (int root = 0; root < R; root++) {
      OK(ncclBroadcast(block, out, count, ncclInt32, root, me.comm, me.stream));
      CUDA_OK(cudaStreamSynchronize(me.stream));
      CHECK(out[count - 1] == root * 1000000 + (int)count - 1, "broadcast from %d", root);
      memset(out, 0xff, n * (size_t)R);
      OK(ncclGather(block, out, count, ncclInt32, root, me.comm, me.stream));
      CUDA_OK(cudaStreamSynchronize(me.stream));
      for (int p = 0; p < R; p++)
        CHECK(out[(size_t)p * count] == (rank == root ? p * 1000000 : -1), "gather to %d", root);
      OK(ncclScatter(all, out, count, ncclInt32, root, me.comm, me.stream));
      OK(ncclReduce(block, all, count, ncclInt32, ncclMax, root, me.comm, me.stream));
      CUDA_OK(cudaStreamSynchronize(me.stream));
      CHECK(out[0] == rank * 1000000, "scatter from %d: %d", root, out[0]);
      CHECK(all[0] == (rank == root ? (R - 1) * 1000000 : 0), "reduce to %d: %d", root, all[0]);
      OK(ncclAllGather(block, all, count, ncclInt32, me.comm, me.stream));
      CUDA_OK(cudaStreamSynchronize(me.stream));
    }
    OK(ncclReduceScatter(all, all + (size_t)rank * count, count, ncclInt32, ncclSum, me.comm,
                         me.stream)); /* in place */
    CUDA_OK(cudaStreamSynchronize(me.stream));
    CHECK(all[(size_t)rank * count + count - 1] == R * (rank * 1000000 + (int)count - 1),
          "scatter");
    CUDA_OK(cudaFree(block));
    CUDA_OK(cudaFree(all));
    CUDA_OK(cudaFree(out));
  }
  closeRank(&me);
}

TEST(moving_collectives_of_all_sizes) {
  runThreads(4, moveBody, NULL);
}

/* Everybody sends several messages to everybody, itself included, receives first: no deadlock. */
static void exchangeBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  enum { MESSAGES = 3, COUNT = 70000 };
  rank_t me;
  int *send, *recv;
  size_t total = (size_t)numRanks * MESSAGES * COUNT;
  (void)arg;
  openRank(&me, rank, numRanks, id);
  CUDA_OK(cudaMalloc((void **)&send, total * sizeof(int)));
  CUDA_OK(cudaMalloc((void **)&recv, total * sizeof(int)));
  for (size_t i = 0; i < total; i++) send[i] = rank * 10000000 + (int)i;
  OK(ncclGroupStart());
  for (int m = 0; m < MESSAGES; m++)
    for (int p = 0; p < numRanks; p++)
      OK(ncclRecv(recv + (size_t)(p * MESSAGES + m) * COUNT, COUNT, ncclInt32, p, me.comm,
                  me.stream));
  for (int p = numRanks - 1; p >= 0; p--)
    for (int m = 0; m < MESSAGES; m++)
      OK(ncclSend(send + (size_t)(p * MESSAGES + m) * COUNT, COUNT, ncclInt32, p, me.comm,
                  me.stream));
  CHECK(cudaStreamQuery(me.stream) == cudaSuccess, "a group issued before its end");
  OK(ncclGroupEnd());
  CUDA_OK(cudaStreamSynchronize(me.stream));
  for (int p = 0; p < numRanks; p++)
    for (int m = 0; m < MESSAGES; m++)
      for (int i = 0; i < COUNT; i += 9973)
        CHECK(recv[(size_t)(p * MESSAGES + m) * COUNT + (size_t)i] ==
                  p * 10000000 + (rank * MESSAGES + m) * COUNT + i,
              "rank %d from %d message %d at %d", rank, p, m, i);
  CUDA_OK(cudaFree(send));
  CUDA_OK(cudaFree(recv));
  closeRank(&me);
}

TEST(groups_of_sends_and_receives) {
  runThreads(4, exchangeBody, NULL);
}

/* A ring of single sends and receives, each on a stream of its own, ordered by the communicator. */
static void streamsBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  rank_t me;
  cudaStream_t other;
  int left = (rank + numRanks - 1) % numRanks, right = (rank + 1) % numRanks;
  (void)arg;
  openRank(&me, rank, numRanks, id);
  CUDA_OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  for (int round = 0; round < 50; round++) {
    int out = rank * 100 + round, in = -1, sum = rank;
    OK(ncclGroupStart());
    OK(ncclSend(&out, 1, ncclInt32, right, me.comm, me.stream));
    OK(ncclRecv(&in, 1, ncclInt32, left, me.comm, other));
    OK(ncclGroupEnd());
    OK(ncclAllReduce(&sum, &sum, 1, ncclInt32, ncclSum, me.comm, round % 2 ? other : me.stream));
    CUDA_OK(cudaStreamSynchronize(other));
    CHECK(in == left * 100 + round, "round %d: %d", round, in);
    CUDA_OK(cudaStreamSynchronize(me.stream));
    CHECK(sum == numRanks * (numRanks - 1) / 2, "round %d: sum %d", round, sum);
  }
  CUDA_OK(cudaStreamDestroy(other));
  closeRank(&me);
}

TEST(one_communicator_on_several_streams) {
  runThreads(3, streamsBody, NULL);
}

TEST(one_thread_drives_all_ranks) {
  enum { R = 4 };
  ncclComm_t comms[R], halves[R];
  cudaStream_t streams[R];
  ncclWindow_t wins[R];
  void *mem[R];
  int data[R], devices[R] = {3, 2, 1, 0}, count, device, rank;
  OK(ncclCommInitAll(comms, R, devices));
  OK(ncclCommCount(comms[1], &count));
  OK(ncclCommCuDevice(comms[1], &device));
  OK(ncclCommUserRank(comms[1], &rank));
  CHECK(count == R && device == 2 && rank == 1, "%d %d %d", count, device, rank);
  for (int r = 0; r < R; r++) {
    CUDA_OK(cudaSetDevice(devices[r]));
    CUDA_OK(cudaStreamCreate(&streams[r]));
    OK(ncclMemAlloc(&mem[r], 8192));
    data[r] = 1 << r;
  }
  OK(ncclGroupStart());
  for (int r = 0; r < R; r++)
    OK(ncclAllReduce(&data[r], &data[r], 1, ncclInt32, ncclSum, comms[r], streams[r]));
  OK(ncclGroupEnd());
  OK(ncclGroupStart());
  for (int r = 0; r < R; r++) OK(ncclCommWindowRegister(comms[r], mem[r], 8192, &wins[r], 0));
  for (int r = 0; r < R; r++) OK(ncclCommSplit(comms[r], r / 2, -r, &halves[r], NULL));
  OK(ncclGroupEnd());
  for (int r = 0; r < R; r++) {
    void *peer;
    CUDA_OK(cudaStreamSynchronize(streams[r]));
    CHECK(data[r] == 15, "rank %d: %d", r, data[r]);
    OK(ncclGetPeerDevicePointer(wins[r], 100, (r + 1) % R, &peer));
    CHECK(peer == (char *)mem[(r + 1) % R] + 100, "rank %d: %p", r, peer);
    OK(ncclCommUserRank(halves[r], &rank));
    OK(ncclCommCount(halves[r], &count));
    CHECK(count == 2 && rank == 1 - r % 2, "rank %d: %d of %d", r, rank, count);
  }
  for (int r = 0; r < R; r++) {
    OK(ncclCommDestroy(halves[r]));
    OK(ncclCommDestroy(comms[r]));
    OK(ncclMemFree(mem[r]));
    CUDA_OK(cudaStreamDestroy(streams[r]));
  }
  CUDA_OK(cudaSetDevice(0));
}

static void splitBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  rank_t me;
  ncclComm_t part = (ncclComm_t)1;
  int sum = rank, at, count;
  (void)arg;
  openRank(&me, rank, numRanks, id);
  OK(ncclCommSplit(me.comm, rank == 0 ? NCCL_SPLIT_NOCOLOR : rank % 2, numRanks - rank, &part,
                   NULL));
  if (rank == 0) {
    CHECK(!part, "a rank without colour got a communicator");
  } else {
    OK(ncclCommUserRank(part, &at));
    OK(ncclCommCount(part, &count));
    OK(ncclAllReduce(&sum, &sum, 1, ncclInt32, ncclSum, part, me.stream));
    CUDA_OK(cudaStreamSynchronize(me.stream));
    CHECK(count == 2 + (rank % 2) && sum == (rank % 2 ? 1 + 3 + 5 : 2 + 4), "%d ranks, sum %d",
          count, sum);
    CHECK(at == (rank % 2 ? (5 - rank) / 2 : (4 - rank) / 2), "key order: rank %d is %d", rank, at);
    OK(ncclCommDestroy(part));
  }
  closeRank(&me);
}

TEST(split_by_colour_and_key) {
  runThreads(6, splitBody, NULL);
}

static void windowBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  rank_t me;
  ncclWindow_t win = NULL;
  ncclCommProperties_t props = NCCL_COMM_PROPERTIES_INITIALIZER;
  void *mem, *ptr, *user, *pageable = malloc(8192);
  (void)arg;
  openRank(&me, rank, numRanks, id);
  OK(ncclMemAlloc(&mem, 3 << 20));
  OK(ncclCommWindowRegister(me.comm, mem, 3 << 20, &win, NCCL_WIN_COLL_SYMMETRIC));
  OK(ncclWinGetUserPtr(me.comm, win, &user));
  CHECK(user == mem, "user pointer");
  size_t bytes = 0;
  int flags = -1;
  OK(trefoilHostWindowRange(me.comm, win, &ptr, &bytes, &flags));
  CHECK(ptr == mem && bytes == 3 << 20 && flags == NCCL_WIN_COLL_SYMMETRIC, "%p, %zu bytes, 0x%x",
        ptr, bytes, flags);
  CHECK(trefoilHostWindowRange(me.comm, (ncclWindow_t)mem, &ptr, NULL, NULL) == ncclInvalidArgument,
        "not a window");
  OK(ncclCommQueryProperties(me.comm, &props));
  CHECK(props.nLsaTeams == 2 && props.deviceApiSupport && props.rank == rank, "%d teams",
        props.nLsaTeams);
  CHECK(ncclTeamLsa(me.comm).nRanks == 2 && ncclTeamLsa(me.comm).rank == rank % 2, "lsa team");
  CHECK(ncclTeamRankToWorld(me.comm, ncclTeamRail(me.comm), 1) == 2 + rank % 2, "rail team");
  for (int p = 0; p < numRanks; p++) {
    OK(ncclGetPeerDevicePointer(win, 16, p, &ptr));
    CHECK((ptr != NULL) == (p / 2 == rank / 2), "rank %d sees %d across nodes: %p", rank, p, ptr);
    OK(trefoilHostPeerPointer(win, 16, p, &ptr));
    CHECK(ptr != NULL, "no pointer");
  }
  OK(ncclGetLsaDevicePointer(win, 0, rank % 2, &ptr));
  CHECK(ptr == mem, "own place in the lsa team");
  CHECK(ncclGetPeerDevicePointer(win, 0, numRanks, &ptr) == ncclInvalidArgument, "rank");
  CHECK(ncclGetPeerDevicePointer(win, (3 << 20) + 1, 0, &ptr) == ncclInvalidArgument, "offset");
  /* One rank's bad argument fails the call on every rank, with its sentence. */
  ncclWindow_t bad = NULL;
  CHECK(ncclCommWindowRegister(me.comm, rank == 1 ? pageable : mem, 4096, &bad, 0) ==
                ncclInvalidArgument &&
            !bad,
        "pageable memory");
  CHECK(rank == 1 || strstr(ncclGetLastError(me.comm), "rank 1"), "%s", ncclGetLastError(me.comm));
  CHECK(ncclCommWindowRegister(me.comm, mem, rank ? 4096 : 8192, &bad, NCCL_WIN_COLL_SYMMETRIC) ==
                ncclInvalidArgument &&
            !bad,
        "sizes differ");
  CHECK(ncclCommWindowRegister(me.comm, (char *)mem + 64, 4096, &bad, 0) == ncclInvalidArgument,
        "alignment");
  OK(ncclCommWindowRegister(me.comm, mem, 4096, &bad, 0)); /* and the communicator is usable */
  OK(ncclCommWindowDeregister(me.comm, bad));
  CHECK(ncclCommWindowDeregister(me.comm, bad) == ncclInvalidArgument, "deregistered twice");
  OK(ncclCommWindowDeregister(me.comm, win));
  closeRank(&me);
  OK(ncclMemFree(mem));
  free(pageable);
}

TEST(windows_and_pretended_nodes) {
  setenv("NCCL_LSA_TEAM_SIZE", "2", 1);
  runThreads(4, windowBody, NULL);
  unsetenv("NCCL_LSA_TEAM_SIZE");
}

static void captureBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  rank_t me;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  int *in, *out;
  (void)arg;
  openRank(&me, rank, numRanks, id);
  CUDA_OK(cudaMallocHost((void **)&in, sizeof(int)));
  CUDA_OK(cudaMallocHost((void **)&out, sizeof(int) * (size_t)numRanks));
  CUDA_OK(cudaStreamBeginCapture(me.stream, cudaStreamCaptureModeThreadLocal));
  OK(ncclAllGather(in, out, 1, ncclInt32, me.comm, me.stream));
  OK(ncclAllReduce(out, out, (size_t)numRanks, ncclInt32, ncclSum, me.comm, me.stream));
  CUDA_OK(cudaStreamEndCapture(me.stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  for (int round = 0; round < 30; round++) {
    int live = round;
    *in = rank * 100 + round;
    CUDA_OK(cudaGraphLaunch(exec, me.stream));
    OK(ncclAllReduce(&live, &live, 1, ncclInt32, ncclSum, me.comm, me.stream)); /* in between */
    CUDA_OK(cudaStreamSynchronize(me.stream));
    CHECK(live == round * numRanks, "live %d", live);
    for (int p = 0; p < numRanks; p++)
      CHECK(out[p] == numRanks * (p * 100 + round), "round %d rank %d: %d", round, p, out[p]);
  }
  CUDA_OK(cudaGraphExecDestroy(exec));
  CUDA_OK(cudaGraphDestroy(graph));
  closeRank(&me);
  CUDA_OK(cudaFreeHost(in));
  CUDA_OK(cudaFreeHost(out));
}

TEST(collectives_in_graphs) {
  runThreads(3, captureBody, NULL);
}

/* ---- When it goes wrong ---- */

static void disagreeBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  rank_t me;
  int data[8] = {0};
  ncclResult_t error;
  (void)arg;
  openRank(&me, rank, numRanks, id);
  OK(ncclAllReduce(data, data, rank == 0 ? 4 : 8, ncclInt32, ncclSum, me.comm, me.stream));
  CHECK(cudaStreamSynchronize(me.stream) == cudaErrorExternalDevice, "no error");
  OK(ncclCommGetAsyncError(me.comm, &error));
  CHECK(error != ncclSuccess, "no async error");
  CHECK(strstr(ncclGetLastError(me.comm), "ncclAllReduce") &&
            strstr(ncclGetLastError(me.comm), "bytes"),
        "%s", ncclGetLastError(me.comm));
  CHECK(ncclAllReduce(data, data, 4, ncclInt32, ncclSum, me.comm, me.stream) != ncclSuccess,
        "a failed communicator took work");
  closeRank(&me);
}

TEST(ranks_that_disagree_are_told) {
  runThreads(2, disagreeBody, NULL);
}

static void missingBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  rank_t me;
  int data = 0;
  (void)arg;
  openRank(&me, rank, numRanks, id);
  if (rank != 2) OK(ncclAllReduce(&data, &data, 1, ncclInt32, ncclSum, me.comm, me.stream));
  if (rank != 2) {
    CHECK(cudaStreamSynchronize(me.stream) == cudaErrorExternalDevice, "no error");
    CHECK(strstr(trefoilHostLastError(), "rank 2") &&
              strstr(trefoilHostLastError(), "ncclAllReduce"),
          "%s", trefoilHostLastError());
  }
  closeRank(&me);
}

TEST(a_rank_that_does_not_call_is_named) {
  setenv("NCCL_EP_TIMEOUT_MS", "300", 1);
  runThreads(4, missingBody, NULL);
  unsetenv("NCCL_EP_TIMEOUT_MS");
}

TEST(a_rank_that_never_arrives_is_named) {
  ncclUniqueId id;
  ncclComm_t comm = NULL;
  setenv("NCCL_EP_TIMEOUT_MS", "200", 1);
  OK(ncclGetUniqueId(&id));
  CHECK(ncclCommInitRank(&comm, 3, id, 0) == ncclRemoteError && !comm, "no error");
  CHECK(strstr(trefoilHostLastError(), "rank 1 did not arrive"), "%s", trefoilHostLastError());
  unsetenv("NCCL_EP_TIMEOUT_MS");
}

static void abortBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  rank_t me;
  int data = 0;
  (void)arg;
  openRank(&me, rank, numRanks, id);
  if (rank == 0) {
    OK(ncclCommAbort(me.comm));
    CHECK(ncclCommCount(me.comm, &data) == ncclInvalidArgument, "an aborted communicator answers");
  } else {
    OK(ncclAllReduce(&data, &data, 1, ncclInt32, ncclSum, me.comm, me.stream));
    CHECK(cudaStreamSynchronize(me.stream) == cudaErrorExternalDevice, "no error");
    CHECK(strstr(trefoilHostLastError(), "rank 0 is gone"), "%s", trefoilHostLastError());
    OK(ncclCommDestroy(me.comm));
  }
  CUDA_OK(cudaStreamDestroy(me.stream));
}

TEST(an_aborted_rank_is_named_at_once) {
  runThreads(3, abortBody, NULL);
}

static void abortSelfBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  rank_t me;
  int data = 0;
  (void)arg;
  openRank(&me, rank, numRanks, id);
  OK(ncclRecv(&data, 1, ncclInt32, 1 - rank, me.comm, me.stream)); /* nobody sends */
  OK(ncclCommAbort(me.comm));
  CHECK(cudaStreamSynchronize(me.stream) == cudaErrorExternalDevice, "no error");
  CUDA_OK(cudaStreamDestroy(me.stream));
}

TEST(abort_ends_work_that_waits) {
  runThreads(2, abortSelfBody, NULL);
}

TEST(bad_arguments) {
  ncclUniqueId id, junk;
  ncclComm_t comm = NULL;
  int x[4] = {0};
  memset(&junk, 7, sizeof junk);
  OK(ncclGetUniqueId(&id));
  CHECK(ncclGetUniqueId(NULL) == ncclInvalidArgument, "NULL id");
  CHECK(ncclCommInitRank(NULL, 1, id, 0) == ncclInvalidArgument, "NULL comm");
  CHECK(ncclCommInitRank(&comm, 0, id, 0) == ncclInvalidArgument, "no ranks");
  CHECK(ncclCommInitRank(&comm, 2, id, 2) == ncclInvalidArgument, "rank");
  CHECK(ncclCommInitRank(&comm, 1, junk, 0) == ncclInvalidArgument, "junk id");
  CHECK(ncclCommInitAll(&comm, 9, NULL) == ncclInvalidArgument && !comm, "nine devices");
  OK(ncclCommInitRank(&comm, 1, id, 0));
  CHECK(ncclAllReduce(x, x, 1, (ncclDataType_t)12, ncclSum, comm, NULL) == ncclInvalidArgument,
        "t");
  CHECK(ncclAllReduce(x, x, 1, ncclInt32, (ncclRedOp_t)5, comm, NULL) == ncclInvalidArgument, "op");
  CHECK(ncclAllReduce(NULL, x, 1, ncclInt32, ncclSum, comm, NULL) == ncclInvalidArgument, "NULL");
  CHECK(ncclAllReduce(x, x, SIZE_MAX, ncclInt32, ncclSum, comm, NULL) == ncclInvalidArgument, "n");
  CHECK(ncclSend(x, 1, ncclInt32, 1, comm, NULL) == ncclInvalidArgument, "peer");
  CHECK(ncclGroupEnd() == ncclInvalidUsage, "end without start");
  OK(ncclGroupStart());
  CHECK(ncclSend(x, 1, ncclInt32, 7, comm, NULL) == ncclInvalidArgument, "peer in a group");
  CHECK(ncclGroupEnd() == ncclInvalidArgument, "the group's end forgot the failure");
  x[0] = 5;
  OK(ncclGroupStart());
  OK(ncclSend(&x[0], 1, ncclInt32, 0, comm, NULL));
  OK(ncclRecv(&x[1], 1, ncclInt32, 0, comm, NULL));
  OK(ncclGroupEnd());
  CUDA_OK(cudaDeviceSynchronize());
  CHECK(x[1] == 5, "to itself: %d", x[1]);
  OK(ncclCommDestroy(comm));
  CHECK(ncclCommDestroy(comm) == ncclInvalidArgument, "destroyed twice");
}

static void churnBody(int rank, int numRanks, const ncclUniqueId *id, void *arg) {
  rank_t me;
  int sum = 1;
  (void)arg;
  openRank(&me, rank, numRanks, id);
  OK(ncclAllReduce(&sum, &sum, 1, ncclInt32, ncclSum, me.comm, me.stream));
  CUDA_OK(cudaStreamSynchronize(me.stream));
  CHECK(sum == numRanks, "sum %d", sum);
  closeRank(&me);
}

static int countFds(void) {
  int count = 0;
  for (int fd = 0; fd < 1024; fd++) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

TEST(communicators_come_and_go_without_leaks) {
  int before = 0;
  for (int round = 0; round < 400; round++) {
    runThreads(2, churnBody, NULL);
    if (round == 20) before = countFds();
  }
  CHECK(countFds() <= before, "%d descriptors, then %d", before, countFds());
}

TEST_MAIN()
