// High throughput: from an operation to a launch. Checks what the kernels rely on, cuts rows into chunks,
// partitions shared memory, and chooses how many blocks send and how many receive.
#include "kernels/ht/ht_kernels.cuh"

#include "kernels/ht/ht_pipe.cuh"

extern "C" {
#include "plan/error.h"
}

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

namespace {

constexpr int MAX_SHARED = 232448 - 512; // of a block on sm_90, less what the kernels have by name
constexpr int SEND_STAGES = 8;           // a sender's queue is short on purpose

int roundUp(int n, int to) {
  return (n + to - 1) / to * to;
}

int log2Of(int n) {
  int b = 0;
  while (1 << b < n) b++;
  return b;
}

HtRow rowShape(int tokenBytes, int scaleBytes, const ep_ht_layout_t &at) {
  HtRow r = {tokenBytes, scaleBytes, tokenBytes + scaleBytes, 0, 0};
  r.numChunks = (r.rowBytes + (int)at.fifoSlotBytes - 1) / (int)at.fifoSlotBytes;
  r.chunkBytes = roundUp((r.rowBytes + r.numChunks - 1) / r.numChunks, 16);
  return r;
}

// Stages as shared memory allows; more than 60 bring nothing. `spare` bytes are left behind them. Sets the
// shapes of both roles, room and stride in a kernel's arguments; returns a block's need without the spare.
template <class Args>
size_t partitionShared(Args &a, int sendEntries, int receiveEntries, int spare) {
  a.stageStride = roundUp(a.row.chunkBytes, 128);
  a.sender.descInts = HT_DESC_HEAD + 2 * sendEntries;
  a.receiver.descInts = HT_DESC_HEAD + 2 * receiveEntries;
  const int most =
      a.sender.descInts > a.receiver.descInts ? a.sender.descInts : a.receiver.descInts;
  const int fixed = (int)sizeof(HtProgress) + HT_DESCS * (most * 4 + 8);
  a.room = (MAX_SHARED - fixed - spare) / (a.stageStride + 2 * 8);
  if (a.room > 60) a.room = 60;
  a.sender.stages = a.receiver.stages = a.room;
  return (size_t)a.room * (a.stageStride + 2 * 8) + fixed;
}

// Of a pipeline that gathers (rowBlockOf): a ring a reducing warp, fewer where descriptions are long.
// Returns what a block needs, without the spare.
size_t sizeRings(HtShape &shape, int spare) {
  const int ring = HT_ROW_RING + 2 * 8;
  const int fixed = (int)sizeof(HtProgress) + HT_DESCS * (shape.descInts * 4 + 8);
  shape.stages = (MAX_SHARED - fixed - spare) / ring;
  if (shape.stages > HT_ROW_WARPS) shape.stages = HT_ROW_WARPS;
  return (size_t)shape.stages * ring + fixed;
}

// Candidates taken at a time: about `items` that are items.
int takeOf(int items, int ranks, int topk) {
  const int real = ranks < topk ? ranks : topk, n = (items * ranks + real - 1) / real;
  return n > 32 ? 32 : n;
}

bool aligned(const void *p) {
  return ((uintptr_t)p & 15) == 0;
}

trefoil_result_t checkGroup(const ep_ht_group_t &g, const ep_ht_handle_t &h, int numSms) {
  EP_CHECK(h.numTopk >= 1 && h.numTopk <= EP_HT_MAX_TOPK, TREFOIL_INVALID_ARGUMENT,
           "top-k is %d, must be 1 to %d", h.numTopk, EP_HT_MAX_TOPK);
  EP_CHECK(((uintptr_t)h.memory & 255) == 0 && h.memory, TREFOIL_INVALID_ARGUMENT,
           "a handle's memory must be 256-byte aligned");
  EP_CHECK(numSms >= 1, TREFOIL_INVALID_ARGUMENT, "numSms is %d", numSms);
  EP_CHECK(g.control && g.scratch, TREFOIL_INVALID_ARGUMENT, "control or scratch is NULL");
  EP_CHECK(h.maxRecv >= 0 && h.maxRecv < INT32_MAX, TREFOIL_INVALID_ARGUMENT,
           "maxRecv is %lld, must be below 2^31", (long long)h.maxRecv);
  return TREFOIL_OK;
}

trefoil_result_t checkRow(const HtRow &row, const ep_ht_group_t &g) {
  EP_CHECK(row.tokenBytes >= 16 && row.tokenBytes % 16 == 0 && row.scaleBytes >= 0 &&
               row.scaleBytes % 16 == 0,
           TREFOIL_INVALID_ARGUMENT,
           "rows of %d token and %d scale bytes: both must be multiples of 16", row.tokenBytes,
           row.scaleBytes);
  EP_CHECK(row.numChunks <= g.at.rowChunks, TREFOIL_INVALID_ARGUMENT,
           "rows of %d bytes do not fit the group's max_token_bytes", row.rowBytes);
  return TREFOIL_OK;
}

HtWay wayOf(const ep_ht_dispatch_t &op) {
  return op.input.is ? HT_PULL : op.window.is ? HT_PUSH : HT_FIFOS;
}

// How many blocks send, by what both sides take for a token (10 ns, H200); at most as many as fill the wire.
// Expert-major dispatch rounds up, as a sender too few costs more than one too many. At least one block
// must receive from the start, or full FIFOs would stop all senders.
struct Split {
  double sender, receiver, rounding;
  int most;
  int of(int blocks, int senders) const {
    const int share = (int)(blocks * sender / (sender + receiver) + rounding);
    const int n = senders > 0 ? senders : share < 1 ? 1 : share > most ? most : share;
    return n > blocks - 1 ? blocks - 1 : n;
  }
};

// Rows of a token, one a rank, under uniform routing.
double rowsOf(int ranks, int topk) {
  return ranks * epHtShareOf(ranks, topk);
}

// A sender stores a row to each rank of the token; receivers of an expert-major dispatch store all its rows.
Split dispatchSplit(bool expertMajor, bool push, int ranks, int topk, int blocks) {
  if (!expertMajor)
    return ranks > 2 ? Split{1, 1, 0, 9} : Split{7, 9, 0.5, std::min(blocks / 4 + 3, 10)};
  const double rows = rowsOf(ranks, topk);
  return push ? Split{23 * rows, 7 * rows + 19 * topk, 0.999, 9}
              : Split{25 * rows, 15 * rows + 19 * topk, 0.999, 9};
}

// The queue of a flat push. Blocks that could store more than the link takes get unequal shares of it, and
// what a block has queued no other one takes over: with that many blocks, queues are short. Measured on two
// H200: an SM takes 49 ns and 1 ns for 61 bytes to store a chunk, a link 1 ns for 365 bytes.
void sizeQueue(HtShape &push, int stageBytes, int blocks, int ranks, bool expertMajor) {
  push.take = push.batch = 8;
  if (ranks < 2 || expertMajor) return;
  const double fill = (49 + stageBytes / 61.0) * ranks / ((ranks - 1) * stageBytes / 365.0);
  if (blocks < 1.08 * fill) return;
  const bool many = blocks > 1.3 * fill;
  const auto chunks = [&](int largest) { // as long as so many of the largest
    return (largest * EP_HT_CHUNK_BYTES + stageBytes - 1) / stageBytes;
  };
  push.stages = std::min(push.stages, chunks(many ? 6 : 8));
  push.take = push.batch = std::min(many ? chunks(2) : 4, 8);
}

// Own tokens that receivers copy while the first rows of peers are under way, about 10 us: a block stores 55
// GB/s (H200). At most 30 MB, or full FIFOs hold up the senders.
int leadOf(const HtRow &row, bool expertMajor, int receivers, int ranks, int topk) {
  const double rows = expertMajor && topk > ranks ? (double)topk / ranks : 1; // of an own token
  return (int)(std::min(receivers * 550e3, 30e6) / (rows * row.rowBytes));
}

// Expert-major receivers: a scheduler's round takes some microseconds, longer than the copies of few short
// items. So the shorter these are, the fewer lanes describe one, and the more a round describes, at most
// those of its candidates that are items. Else, and in groups of few tokens, whose candidates all blocks
// share, rounds are short. Limits by measurement (H200); of pushed rows one is there already.
void sizeRound(HtShape &receiver, const HtRow &row, bool push, int ranks, int topk,
               double candidates) { // of a block, at most
  const double stored = topk / rowsOf(ranks, topk) * std::min(row.rowBytes, row.chunkBytes);
  const double few = push ? 22e3 : 10e3; // bytes of an item
  receiver.lanes = candidates < 128 || stored > 2 * few ? 4 : stored > few ? 2 : 1;
  receiver.batch = 32 / receiver.lanes;
}

Split combineSplit(bool expertMajor, int ranks, int topk, int blocks) {
  const double rows = ranks < topk ? ranks : topk; // of a token, at most
  return expertMajor ? Split{25 * rows + 23 * topk, 30 + 9 * rows, 0.2, ranks > 2 ? 21 : blocks}
                     : Split{45 * rows * (ranks - 1) / ranks, 18 + 14 * rows, 0.5, 11};
}

} // namespace

double epHtShareOf(int of, int topk) {
  return 1 - pow(1 - 1.0 / of, topk);
}

trefoil_result_t epHtStart(const void *kernel, const HtLaunch &l, void **params, void *stream) {
  const cudaError_t e = cudaLaunchKernel(kernel, dim3(l.blocks), dim3(l.threads), params, l.shared,
                                         (cudaStream_t)stream);
  EP_CHECK(e == cudaSuccess, TREFOIL_SYSTEM_ERROR, "the launch failed: %s", cudaGetErrorString(e));
  return TREFOIL_OK;
}

trefoil_result_t epHtLoadKernel(const void *kernel) {
  cudaFuncAttributes attributes;
  cudaError_t e = cudaFuncGetAttributes(&attributes, kernel);
  if (e == cudaSuccess) {
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MAX_SHARED);
  }
  EP_CHECK(e == cudaSuccess, TREFOIL_SYSTEM_ERROR, "loading kernels: %s", cudaGetErrorString(e));
  return TREFOIL_OK;
}

trefoil_result_t epHtPrepareUpdate(const ep_ht_update_t &op, int moreSets, UpdateArgs *args,
                                   HtLaunch *l) {
  const ep_ht_group_t &g = op.group;
  EP_TRY(checkGroup(g, op.handle, op.numSms));
  EP_CHECK(op.numTokens >= 0 && op.numTokens <= g.maxTokens, TREFOIL_INVALID_ARGUMENT,
           "%d tokens, at most %d were announced", op.numTokens, g.maxTokens);
  UpdateArgs &a = *args;
  a = UpdateArgs{};
  a.op = op;
  a.sets = g.numLocal + 1 + g.numRanks + moreSets;
  a.perSource = (g.maxTokens + 255) / 256;
  a.tiles = a.perSource * g.numRanks;
  a.perWord = g.numExperts < 0xffff ? 4 : 2;
  a.idBits = 64 / a.perWord;
  char *scratch = (char *)g.scratch + EP_HT_CHUNK_BYTES;
  a.keptOf = (int *)scratch;
  a.counts = (int *)(scratch + roundUp(g.numLocal * 4, 256));
  const int wanted = a.tiles + 1; // a block a tile, and one that reports meanwhile
  const int blocks = wanted < op.numSms ? wanted : op.numSms;
  *l = HtLaunch{blocks, 256, epHtUpdateShared(a.sets, g.numLocal)};
  return TREFOIL_OK;
}

extern "C" trefoil_result_t epHtUpdate(const ep_ht_update_t *op, void *stream) {
  EP_CHECK(op, TREFOIL_INVALID_ARGUMENT, "op is NULL");
  UpdateArgs a;
  HtLaunch l;
  EP_TRY(epHtPrepareUpdate(*op, 0, &a, &l));
  char none = 0; // OneDomain, which is empty
  void *params[] = {&a, &none};
  return epHtStart(epHtUpdateKernel(), l, params, stream);
}

trefoil_result_t epHtPrepareDispatch(const ep_ht_dispatch_t &op, HtDispatchArgs *args,
                                     HtLaunch *l) {
  const ep_ht_group_t &g = op.group;
  const int R = g.numRanks, K = op.handle.numTopk;
  EP_TRY(checkGroup(g, op.handle, op.numSms));
  HtDispatchArgs &a = *args;
  a = HtDispatchArgs{};
  a.op = op;
  a.row = rowShape(op.tokenBytes, op.scaleBytes, g.at);
  EP_TRY(checkRow(a.row, g));
  EP_CHECK(aligned(op.tokens) && aligned(op.outTokens) && aligned(op.scales) &&
               aligned(op.outScales),
           TREFOIL_INVALID_ARGUMENT, "tokens and scales must be 16-byte aligned");
  EP_CHECK(((op.window.tokensOffset | op.window.scalesOffset) & 15) == 0, TREFOIL_INVALID_ARGUMENT,
           "tokens and scales must be 16-byte aligned");
  EP_CHECK(((op.input.tokens | op.input.scales) & 15) == 0, TREFOIL_INVALID_ARGUMENT,
           "tokens and scales must be 16-byte aligned");
  const HtWay way = wayOf(op);
  const int spare = way == HT_FIFOS ? 0 : HT_PAIRS_BYTES;
  size_t shared = partitionShared(a, R < K ? R : K, K > 8 ? K : 8, spare);
  const size_t rings = sizeRings(a.receiver, spare);
  if (shared < rings) shared = rings;
  a.pairsAt = (int)shared;
  a.push = a.sender;
  if (a.sender.stages > SEND_STAGES) a.sender.stages = SEND_STAGES;
  a.sender.take = a.sender.batch = 8;
  a.zeros = (const char *)g.scratch;
  a.fifoBits = log2Of(g.at.fifoSlots[0]);
  const int blocks = op.numSms < 2 ? 2 : op.numSms;
  const bool em = op.handle.expertMajor;
  a.receiver.batch = 12;
  if (em) {
    sizeRound(a.receiver, a.row, way == HT_PUSH, R, K,
              (double)g.maxTokens * a.row.numChunks * R / blocks);
  }
  a.receiver.take = takeOf(a.receiver.batch, R, K);
  a.split = dispatchSplit(em, false, R, K, blocks).of(blocks, op.numSenders);
  a.pushSplit = way == HT_PULL ? 0
                : em           ? dispatchSplit(em, true, R, K, blocks).of(blocks, op.numSenders)
                               : blocks;
  sizeQueue(a.push, a.stageStride, blocks, R, em);
  a.lead = leadOf(a.row, em, blocks - (way == HT_PUSH ? a.pushSplit : a.split), R, K);
  *l = HtLaunch{blocks, htDispatchThreads(way), shared + spare};
  return TREFOIL_OK;
}

extern "C" trefoil_result_t epHtDispatch(const ep_ht_dispatch_t *op, void *stream) {
  EP_CHECK(op, TREFOIL_INVALID_ARGUMENT, "op is NULL");
  HtDispatchArgs a;
  HtLaunch l;
  EP_TRY(epHtPrepareDispatch(*op, &a, &l));
  void *params[] = {&a};
  return epHtStart(epHtDispatchKernel(op->handle.expertMajor, wayOf(*op)), l, params, stream);
}

trefoil_result_t epHtPrepareCombine(const ep_ht_combine_t &op, HtCombineArgs *args, HtLaunch *l) {
  const ep_ht_group_t &g = op.group;
  const int R = g.numRanks, K = op.handle.numTopk;
  const bool expertMajor = op.handle.expertMajor;
  EP_TRY(checkGroup(g, op.handle, op.numSms));
  EP_CHECK(epHtCombineKernel(op.dtype, false, false), TREFOIL_INVALID_ARGUMENT,
           "combine sums f32, f16 and bf16, not %d", (int)op.dtype);
  HtCombineArgs &a = *args;
  a = HtCombineArgs{};
  a.op = op;
  a.row = rowShape(op.rowBytes, 0, g.at);
  EP_TRY(checkRow(a.row, g));
  EP_CHECK(aligned(op.tokens) && aligned(op.out) && (op.input.tokens & 15) == 0,
           TREFOIL_INVALID_ARGUMENT, "tokens must be 16-byte aligned");
  const bool pulls = op.input.is && !expertMajor;
  const int spare = pulls ? HT_PULL_SOURCES_BYTES : 0;
  size_t shared = partitionShared(a, expertMajor ? K : 1, R < K ? R : K, spare);
  size_t rings = sizeRings(a.receiver, spare);
  if (shared < rings) shared = rings;
  if (expertMajor && shared < (rings = sizeRings(a.sender, spare))) shared = rings;
  a.sourcesAt = (int)shared;
  if (!expertMajor && a.sender.stages > SEND_STAGES) a.sender.stages = SEND_STAGES;
  a.sender.batch = expertMajor ? 8 : 6;
  a.sender.take = takeOf(a.sender.batch, R, K);
  a.receiver.take = a.receiver.batch = 8;
  a.fifoBits = log2Of(g.at.fifoSlots[1]);
  const int blocks = op.numSms < 2 ? 2 : op.numSms;
  a.split = combineSplit(expertMajor, R, K, blocks).of(blocks, op.numSenders);
  *l = HtLaunch{blocks, HT_PIPE_THREADS, shared + spare};
  return TREFOIL_OK;
}

extern "C" trefoil_result_t epHtCombine(const ep_ht_combine_t *op, void *stream) {
  EP_CHECK(op, TREFOIL_INVALID_ARGUMENT, "op is NULL");
  HtCombineArgs a;
  HtLaunch l;
  EP_TRY(epHtPrepareCombine(*op, &a, &l));
  const bool pulls = op->input.is && !op->handle.expertMajor;
  void *params[] = {&a};
  return epHtStart(epHtCombineKernel(op->dtype, op->handle.expertMajor, pulls), l, params, stream);
}

extern "C" trefoil_result_t epHtLoad(void) {
  const void *kernels[7 + 3 * NUM_SUMMED];
  int n = 0;
  kernels[n++] = epHtUpdateKernel();
  for (const HtWay way : {HT_FIFOS, HT_PUSH, HT_PULL}) {
    for (const bool em : {false, true}) kernels[n++] = epHtDispatchKernel(em, way);
  }
  for (const trefoil_dtype_t t : SUMMED) {
    kernels[n++] = epHtCombineKernel(t, false, false);
    kernels[n++] = epHtCombineKernel(t, false, true);
    kernels[n++] = epHtCombineKernel(t, true, false);
  }
  for (int i = 0; i < n; i++) EP_TRY(epHtLoadKernel(kernels[i]));
  return TREFOIL_OK;
}
