// Low latency: from an operation to a launch. Checks what the kernels rely on, works out what all threads
// would work out alike, and chooses the roles of the warps.
#include "kernels/ll/dispatch_host.cuh"
#include "kernels/ll/ll_kernels.cuh"

extern "C" {
#include "plan/error.h"
}

#include <atomic>
#include <cuda_runtime.h>
#include <cstring>

namespace {

constexpr size_t MAX_SHARED = 200 * 1024; // of the 227 KB that a block can have

// cuLaunchKernel, which takes the host 0.2 to 0.4 us less than cudaLaunchKernel; found by epLlLoad.
using LaunchFn = int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                         unsigned, void *, void **, void **);
std::atomic<LaunchFn> driverLaunch;

// Tokens that the number of warps follows: a rank without own ones serves the others', of which the host
// has only the limit.
int tokensToServe(int own, const ep_ll_group_t &g) {
  return own > 0 ? own : g.maxTokens;
}

// Measured: few senders in dispatch, half of the warps in combine, small blocks
// for few tokens because large ones start slowly.
Roles rolesOf(int kind, int tokens, bool quantises, ep_ll_sum_t sum, unsigned parts) {
  int send, recv;
  if (kind == EP_LL_DISPATCH) {
    if (quantises) {
      send = tokens >= 32 ? 4 : 8;
      recv = tokens >= 32 ? 15 : 4;
    } else {
      send = 2;
      recv = tokens >= 32 ? 15 : tokens > 8 ? 8 : 4;
    }
  } else {
    const bool few = tokens < 32, ranks = sum == EP_LL_SUM_RANKS;
    send = few ? 4 : ranks ? 8 : 10;
    recv = few ? 4 : ranks ? 12 : 10;
    if (sum == EP_LL_SUM_PARTIAL && tokens > 4 && tokens <= 64) {
      send = 8;
      recv = few ? 6 : 8;
    }
  }
  if (parts == EP_LL_SEND) return Roles{send + recv, 0, parts};
  if (parts == EP_LL_RECV) return Roles{0, send + recv, parts};
  return Roles{send, recv, parts};
}

Roles fastRolesOf(const ep_ll_dispatch_t &op) {
  const int tokens = tokensToServe(op.numTokens, op.group);
  if (op.quant) return Roles{tokens > 64 ? 4 : 8, tokens > 64 ? 15 : 8, EP_LL_BOTH};
  const int send = op.handle.rankMajor ? (tokens > 32 ? 4 : 2) : tokens > 64 ? 3 : 2;
  return Roles{send, tokens > 32 ? 15 : tokens > 8 ? 8 : 4, EP_LL_BOTH};
}

int imin(int a, int b) {
  return a < b ? a : b;
}

bool aligned(const void *p) {
  return ((uintptr_t)p & 15) == 0;
}

bool areAligned(const ep_ll_dispatch_t &op) {
  return aligned(op.tokens) && aligned(op.outTokens) && (op.quant || aligned(op.scales));
}

trefoil_result_t checkGroup(const ep_ll_group_t &g, const ep_ll_handle_t &h, int numTokens,
                            unsigned parts) {
  EP_CHECK(parts >= 1 && parts <= 3, TREFOIL_INVALID_ARGUMENT, "parts is %u", parts);
  EP_CHECK(g.numSms >= 1 && g.numSms <= 1023, TREFOIL_INVALID_ARGUMENT,
           "numSms is %d, must be 1 to 1023", g.numSms);
  EP_CHECK(numTokens >= 0 && numTokens <= g.maxTokens, TREFOIL_INVALID_ARGUMENT,
           "%d tokens, at most %d were announced", numTokens, g.maxTokens);
  EP_CHECK(h.numTopk >= 1 && h.numTopk <= EP_LL_MAX_TOPK, TREFOIL_INVALID_ARGUMENT,
           "top-k is %d, must be 1 to %d", h.numTopk, EP_LL_MAX_TOPK);
  EP_CHECK(h.rankMajor == (h.sum == EP_LL_SUM_RANKS), TREFOIL_INVALID_ARGUMENT,
           "the sum of a %s handle does not fit its layout",
           h.rankMajor ? "rank-major" : "expert-major");
  return TREFOIL_OK;
}

trefoil_result_t checkDispatch(const ep_ll_dispatch_t &op, const DispatchArgs &a, unsigned parts) {
  EP_TRY(checkGroup(op.group, op.handle, op.numTokens, parts));
  EP_CHECK(op.tokenBytes >= 16 && op.tokenBytes % 16 == 0 && op.scaleBytes >= 0 &&
               op.scaleBytes % 16 == 0,
           TREFOIL_INVALID_ARGUMENT,
           "rows of %d token and %d scale bytes: both must be multiples of 16", op.tokenBytes,
           op.scaleBytes);
  EP_CHECK((size_t)a.wire.packets * 128 <= op.group.at.rowStride[0], TREFOIL_INVALID_ARGUMENT,
           "rows of %d bytes do not fit the group's max_token_bytes", a.wire.rowBytes);
  EP_CHECK(areAligned(op), TREFOIL_INVALID_ARGUMENT, "tokens and scales must be 16-byte aligned");
  EP_CHECK(!op.quant || (op.tokenBytes % 512 == 0 && op.scaleBytes == op.tokenBytes / 32),
           TREFOIL_INVALID_ARGUMENT, "E4M3 takes a hidden of a multiple of 512, not %d",
           op.tokenBytes);
  return TREFOIL_OK;
}

template <typename Args>
void keep(ep_ll_ready_t *out, const void *kernel, int blocks, int warps, size_t shared,
          const Args &args) {
  static_assert(sizeof args <= sizeof out->args && alignof(Args) <= 8, "EP_LL_ARGS_WORDS");
  out->kernel = kernel;
  cudaKernel_t known;
  out->driver = cudaGetKernel(&known, kernel) == cudaSuccess ? (void *)known : nullptr;
  out->shared = shared;
  out->blocks = blocks;
  out->warps = warps;
  memcpy(out->args, &args, sizeof args);
}

template <typename Args> Args &argsOf(ep_ll_ready_t *ready) {
  return *reinterpret_cast<Args *>(ready->args);
}

} // namespace

extern "C" void epLlControlInit(void *bytes, uint64_t firstOperation) {
  const uint64_t f = firstOperation;
  memset(bytes, 0, EP_LL_CONTROL_BYTES);
  Control *c = (Control *)bytes;
  for (int kind = 0; kind < 2; kind++) {
    c->kind[kind].clock = f << 16;
    c->kind[kind].done[f & 1] = c->kind[kind].acked[f & 1] = f;
    c->kind[kind].done[~f & 1] = c->kind[kind].acked[~f & 1] = f ? f - 1 : 0;
  }
}

extern "C" size_t epLlDispatchScratch(const ep_ll_group_t *group, const ep_ll_handle_t *handle,
                                      size_t rowBytes) {
  ep_ll_dispatch_t op = {};
  op.group = *group;
  op.handle = *handle;
  op.tokenBytes = (int)rowBytes;
  op.quant = EP_LL_QUANT_E4M3; // the larger need
  op.numTokens = group->maxTokens;
  DispatchArgs a = dispatchArgs(op, EP_LL_BOTH);
  return layOutShared(a, true) <= MAX_SHARED ? 0 : (size_t)a.bigBytes * group->numSms;
}

// The roles of the warps. Quantising, few warps store to peers, and slowly, as long as the block also polls.
static trefoil_result_t partitionWarps(DispatchArgs &a, bool fast) {
  const ep_ll_dispatch_t &op = a.op;
  Roles roles = fast ? fastRolesOf(op)
                     : rolesOf(EP_LL_DISPATCH, tokensToServe(op.numTokens, op.group),
                               op.quant != EP_LL_QUANT_NONE, op.handle.sum, a.parts);
  if (a.parts == EP_LL_BOTH && op.sendWarps > 0) {
    roles = Roles{op.sendWarps, op.recvWarps, a.parts};
  }
  a.numSend = roles.numSend;
  a.numRecv = roles.numRecv;
  a.numWire = a.numRecv ? 3 : a.numSend;
  a.pace = a.numRecv > 0;
  EP_CHECK(a.numSend + a.numRecv <= DISPATCH_THREADS / 32, TREFOIL_INVALID_ARGUMENT,
           "too many warps");
  return TREFOIL_OK;
}

static DispatchChoice choiceOf(const ep_ll_dispatch_t &op, const DispatchArgs &a, bool fast) {
  return DispatchChoice{!fast,
                        op.handle.rankMajor != 0,
                        op.quant != EP_LL_QUANT_NONE,
                        a.wire.rowBytes != op.tokenBytes,
                        op.group.bytes != nullptr,
                        !fast && op.scratch};
}

DispatchChoice epLlDispatchChoice(const ep_ll_dispatch_t &op, unsigned parts) {
  DispatchArgs a = dispatchArgs(op, parts);
  const bool fast = isFast(a, MAX_SHARED);
  return choiceOf(op, a, fast);
}

extern "C" trefoil_result_t epLlPrepareDispatch(const ep_ll_dispatch_t *op, unsigned parts,
                                                ep_ll_ready_t *out) {
  EP_CHECK(op, TREFOIL_INVALID_ARGUMENT, "op is NULL");
  DispatchArgs a = dispatchArgs(*op, parts);
  EP_TRY(checkDispatch(*op, a, parts));
  const bool fast = isFast(a, MAX_SHARED);
  const size_t all = layOutShared(a, !fast);
  EP_CHECK(fast || op->scratch || all <= MAX_SHARED, TREFOIL_INVALID_ARGUMENT,
           "this shape needs scratch memory (epLlDispatchScratch)");
  EP_TRY(partitionWarps(a, fast));
  const DispatchChoice choice = choiceOf(*op, a, fast);
  keep(out, epLlDispatchKernel(choice), op->group.numSms, a.numSend + a.numRecv,
       choice.scratch ? (size_t)a.bigAt : all, a);
  out->isFast = fast;
  return TREFOIL_OK;
}

static void moveDispatch(DispatchArgs &args, const ep_ll_dispatch_t &op) {
  ep_ll_dispatch_t &kept = args.op;
  kept.group.stamps = op.group.stamps;
  args.topkIdx = kept.handle.topkIdx = op.handle.topkIdx;
  args.tokens = (const char *)(kept.tokens = op.tokens);
  kept.scales = op.scales;
  kept.weights = op.weights;
  kept.outTokens = op.outTokens;
  kept.outScales = op.outScales;
  kept.outWeights = op.outWeights;
  kept.outIdx = op.outIdx;
  kept.counters = op.counters;
}

extern "C" int epLlReuseDispatch(ep_ll_ready_t *ready, const ep_ll_dispatch_t *op) {
  if (!ready->kernel) return 0;
  DispatchArgs &args = argsOf<DispatchArgs>(ready);
  const ep_ll_dispatch_t &kept = args.op;
  if (kept.numTokens != op->numTokens || kept.tokenBytes != op->tokenBytes ||
      kept.scaleBytes != op->scaleBytes || kept.quant != op->quant ||
      kept.globalIds != op->globalIds || kept.handle.idx64 != op->handle.idx64 ||
      kept.scratch != op->scratch || kept.sendWarps != op->sendWarps ||
      kept.recvWarps != op->recvWarps || kept.generic != op->generic || !areAligned(*op)) {
    return 0;
  }
  moveDispatch(args, *op);
  return 1;
}

extern "C" trefoil_result_t epLlDispatch(const ep_ll_dispatch_t *op, unsigned parts, void *stream) {
  ep_ll_ready_t ready;
  EP_TRY(epLlPrepareDispatch(op, parts, &ready));
  return epLlLaunch(&ready, stream);
}

extern "C" int epLlDispatchIsFast(const ep_ll_dispatch_t *op, unsigned parts) {
  DispatchArgs a = dispatchArgs(*op, parts);
  return isFast(a, MAX_SHARED);
}

extern "C" trefoil_result_t epLlPrepareCombine(const ep_ll_combine_t *op, unsigned parts,
                                               ep_ll_ready_t *out) {
  EP_CHECK(op, TREFOIL_INVALID_ARGUMENT, "op is NULL");
  EP_TRY(checkGroup(op->group, op->handle, op->numTokens, parts));
  const bool partial = op->handle.sum == EP_LL_SUM_PARTIAL;
  CombineArgs a = {};
  a.op = *op;
  a.wire = wireOf(op->rowBytes);
  a.roles =
      rolesOf(EP_LL_COMBINE, tokensToServe(op->numTokens, op->group), false, op->handle.sum, parts);
  if (parts == EP_LL_BOTH && op->sendWarps > 0)
    a.roles = Roles{op->sendWarps, op->recvWarps, parts};
  a.weightVectors = (op->handle.numTopk + 2) / 3;
  a.guesses = (size_t)op->group.numRanks * op->group.maxTokens * op->handle.numTopk >= 64;
  a.inFlight = op->numTokens > 64 ? 2 : 1;
  a.blocks = Divisor::of((unsigned)op->group.numSms);
  a.perRow = Divisor::of((unsigned)a.wire.steps);
  a.perToken = Divisor::of((unsigned)a.weightVectors);
  a.perRank = Divisor::of((unsigned)op->group.numLocal);
  // However the routing looks, a step of all rows of a batch fits a stage: 512 bytes a row.
  a.pairs = imin(PARTIAL_PAIRS, PARTIAL_ROWS / op->handle.numTopk);
  EP_CHECK(op->rowBytes >= 16 && op->rowBytes % 16 == 0, TREFOIL_INVALID_ARGUMENT,
           "rows of %d bytes: must be a multiple of 16", op->rowBytes);
  EP_CHECK((size_t)a.wire.steps * 512 <= op->group.at.rowStride[1], TREFOIL_INVALID_ARGUMENT,
           "rows of %d bytes do not fit the group's max_token_bytes", op->rowBytes);
  EP_CHECK(aligned(op->tokens) && aligned(op->out), TREFOIL_INVALID_ARGUMENT,
           "tokens must be 16-byte aligned");
  EP_CHECK(!partial || op->group.at.weights != op->group.at.rows[0], TREFOIL_INVALID_ARGUMENT,
           "the group's exchange memory has no room for weights (partial)");
  const int warps = a.roles.numSend + a.roles.numRecv;
  EP_CHECK(warps <= (partial ? PARTIAL_THREADS : COMBINE_THREADS) / 32, TREFOIL_INVALID_ARGUMENT,
           "too many warps");
  const size_t shared = partial ? PARTIAL_STAGES * PARTIAL_STAGE_BYTES : 0;
  const void *kernel =
      partial ? epLlPartialKernel(op->dtype) : epLlCombineKernel(op->dtype, op->handle.sum);
  EP_CHECK(kernel, TREFOIL_INVALID_ARGUMENT, "combine sums f32, f16 and bf16, not %d",
           (int)op->dtype);
  keep(out, kernel, op->group.numSms, warps, shared, a);
  out->isFast = 0;
  return TREFOIL_OK;
}

extern "C" int epLlReuseCombine(ep_ll_ready_t *ready, const ep_ll_combine_t *op) {
  if (!ready->kernel) return 0;
  ep_ll_combine_t &kept = argsOf<CombineArgs>(ready).op;
  if (kept.numTokens != op->numTokens || kept.rowBytes != op->rowBytes || kept.dtype != op->dtype ||
      kept.handle.idx64 != op->handle.idx64 || kept.sendWarps != op->sendWarps ||
      kept.recvWarps != op->recvWarps || !aligned(op->tokens) || !aligned(op->out)) {
    return 0;
  }
  kept.group.stamps = op->group.stamps;
  kept.handle.topkIdx = op->handle.topkIdx;
  kept.tokens = op->tokens;
  kept.weights = op->weights;
  kept.out = op->out;
  return 1;
}

extern "C" trefoil_result_t epLlCombine(const ep_ll_combine_t *op, unsigned parts, void *stream) {
  ep_ll_ready_t ready;
  EP_TRY(epLlPrepareCombine(op, parts, &ready));
  return epLlLaunch(&ready, stream);
}

extern "C" trefoil_result_t epLlLaunch(const ep_ll_ready_t *ready, void *stream) {
  void *params[] = {(void *)ready->args};
  const LaunchFn direct = driverLaunch.load(std::memory_order_acquire);
  const unsigned blocks = (unsigned)ready->blocks, threads = (unsigned)ready->warps * 32;
  cudaError_t e = cudaErrorUnknown;
  if (direct && ready->driver) { // the driver's codes are the runtime's
    e = (cudaError_t)direct(ready->driver, blocks, 1, 1, threads, 1, 1, (unsigned)ready->shared,
                            stream, params, nullptr);
  }
  if (e != cudaSuccess) { // also a thread that has no context yet: the runtime gives it one
    e = cudaLaunchKernel(ready->kernel, dim3(blocks), dim3(threads), params, ready->shared,
                         (cudaStream_t)stream);
  }
  EP_CHECK(e == cudaSuccess, TREFOIL_SYSTEM_ERROR, "the launch failed: %s", cudaGetErrorString(e));
  return TREFOIL_OK;
}

trefoil_result_t epLlLoadKernel(const void *kernel) {
  cudaFuncAttributes attributes;
  cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)MAX_SHARED);
  if (e == cudaSuccess) e = cudaFuncGetAttributes(&attributes, kernel);
  EP_CHECK(e == cudaSuccess, TREFOIL_SYSTEM_ERROR, "loading kernels: %s", cudaGetErrorString(e));
  return TREFOIL_OK;
}

extern "C" trefoil_result_t epLlLoad(void) {
  for (int q = 0; q < 20; q++) { // shapes by counts or scratch, by path
    const bool generic = q & 1, more = q & 2;
    const int shape = q / 4;
    EP_TRY(epLlLoadKernel(epLlDispatchKernel(
        DispatchChoice{generic, shape >= 3, shape == 2 || shape == 4, shape >= 1, more, more})));
  }
  for (const trefoil_dtype_t t : SUMMED) {
    EP_TRY(epLlLoadKernel(epLlCombineKernel(t, EP_LL_SUM_EXACT)));
    EP_TRY(epLlLoadKernel(epLlCombineKernel(t, EP_LL_SUM_RANKS)));
    EP_TRY(epLlLoadKernel(epLlPartialKernel(t)));
  }
  void *launch = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuLaunchKernel", &launch, 12000, cudaEnableDefault,
                                       &found) == cudaSuccess &&
      found == cudaDriverEntryPointSuccess) {
    driverLaunch.store((LaunchFn)launch, std::memory_order_release);
  }
  return TREFOIL_OK;
}
