/* A real shape: what all ranks know of it, a rank's tensors, and its calls of the API. */
#include "validate/real_work.h"

#include "plan/error.h"
#include "validate/check_case.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void epRealFail(real_t *run, const char *format, ...) {
  pthread_mutex_lock(&run->mutex);
  if (!atomic_load(&run->failed)) {
    va_list ap;
    va_start(ap, format);
    vsnprintf(run->result->difference, sizeof run->result->difference, format, ap);
    va_end(ap);
    atomic_store(&run->failed, 1);
    atomic_store(run->told, 1);
  }
  pthread_mutex_unlock(&run->mutex);
}

trefoil_tier_t epTierOf(const trefoil_shape_t *shape, int src, int dst) {
  if (src == dst) return TREFOIL_TIER_SELF;
  return trefoilNodeOf(shape, src) == trefoilNodeOf(shape, dst) ? TREFOIL_TIER_NVLINK
                                                                : TREFOIL_TIER_NET;
}

int epRealHasCombine(const ep_real_options_t *o) {
  return !o->toE4m3 && !o->fp8;
}

/* ---- What all ranks know ---- */

/* Ids as trefoil trace and the simulator make them: seed and options alone fix them. */
static trefoil_result_t makeIds(real_t *run) {
  const ep_real_options_t *o = run->options;
  const trefoil_shape_t *s = &o->shape;
  trefoil_trace_spec_t spec = {.shape = *s,
                               .numSteps = 1,
                               .seed = o->seed,
                               .popularity = o->popularity,
                               .skew = o->skew,
                               .ragged = o->ragged,
                               .numEmptyRanks = o->numEmptyRanks};
  const trefoil_trace_t *trace;
  trefoil_routing_t routing;
  EP_TRY(trefoilTraceGenerate(&trace, &spec));
  trefoil_result_t rc = trefoilTraceRouting(trace, 0, &routing);
  for (int r = 0; rc == TREFOIL_OK && r < s->numRanks; r++) {
    run->counts[r] = routing.numTokens[r];
    size_t bytes = sizeof *run->ids[r] * (size_t)(run->counts[r] * s->topk);
    run->ids[r] = malloc(bytes + 1);
    if (run->ids[r])
      memcpy(run->ids[r], routing.topkIdx[r], bytes);
    else
      rc = epFail(TREFOIL_SYSTEM_ERROR, "out of memory for the routing");
  }
  trefoilTraceDestroy(trace);
  return rc;
}

/* One rank's rows, their scales and weights. */
static trefoil_result_t makeInputs(real_t *run, int r) {
  const ep_real_options_t *o = run->options;
  int64_t B = run->counts[r], numWeights = B * o->shape.topk;
  ep_rng_t rng = epRng(o->seed, 3, (uint64_t)r);
  trefoil_dtype_t dtype = o->fp8 ? TREFOIL_E4M3 : TREFOIL_BF16;
  size_t rowBytes = trefoilDtypeBytes(dtype) * (size_t)o->hidden, scaleBytes = run->rc.scaleBytes;
  float *weights = run->weights[r] = malloc(sizeof *weights * (size_t)(numWeights + 1));
  run->tokens[r] = malloc(rowBytes * (size_t)B + 1);
  run->scales[r] = malloc(scaleBytes * (size_t)B + 1);
  EP_CHECK(weights && run->tokens[r] && run->scales[r], TREFOIL_SYSTEM_ERROR,
           "out of memory for the inputs");
  for (int64_t i = 0; i < numWeights; i++) weights[i] = (float)epRange(&rng, 1, 1 << 20) * 0x1p-20f;
  for (int64_t t = 0; t < B; t++) {
    uint64_t key = o->seed + (uint64_t)r * 1000003 + (uint64_t)t * 7919;
    epFillPayload(EP_PAYLOAD_FINITE, dtype, key, o->hidden, run->tokens[r] + (size_t)t * rowBytes);
    if (o->fp8)
      epFillPayload(EP_PAYLOAD_FINITE, TREFOIL_F32, key + 1, (int64_t)scaleBytes / 4,
                    run->scales[r] + (size_t)t * scaleBytes);
  }
  return TREFOIL_OK;
}

trefoil_result_t epRealRouting(real_t *run) {
  const ep_real_options_t *o = run->options;
  run->rc = (trefoil_case_t){
      .routing = {o->shape, run->counts, (const int32_t *const *)run->ids},
      .mode = o->mode,
      .width = o->hidden,
      .dtype = o->fp8 ? TREFOIL_E4M3 : TREFOIL_BF16,
      .quant = o->toE4m3 ? TREFOIL_QUANT_E4M3
               : o->fp8  ? TREFOIL_QUANT_CALLER
                         : TREFOIL_QUANT_NONE,
      .scaleBytes = o->fp8 ? (size_t)o->hidden / 32 : 0,
      .backward = o->backward,
      .combinePartial = o->partial,
  };
  EP_TRY(makeIds(run));
  for (int r = 0; r < o->shape.numRanks; r++) EP_TRY(makeInputs(run, r));
  return trefoilCaseCheck(&run->rc);
}

/* Libraries that leave order open may number slots otherwise: room for every row there can be. */
static void leaveRoom(real_t *run) {
  const trefoil_shape_t *s = &run->options->shape;
  int64_t copies = s->topk < trefoilExpertsPerRank(s) ? s->topk : trefoilExpertsPerRank(s);
  int64_t most = s->numRanks * s->maxTokens * (run->rc.mode == TREFOIL_HT_FLAT ? 1 : copies);
  if (run->maxRows < most) run->maxRows = most;
}

/* Rows received, and bytes by the plan, which must be what the reference counts. */
/* Of an operation each. */
static void needPuts(real_t *run) {
  const ep_real_result_t *result = run->result;
  const trefoil_shape_t *s = &run->options->shape;
  ep_puts_t *of = run->puts;
  int isHt = run->rc.mode >= TREFOIL_HT_FLAT, hasCombine = epRealHasCombine(run->options);
  epPutsNeed(s, result->dispatchBytes, NCCL_EP_PUT_DISPATCH, !isHt && epIsByRails(), of);
  if (isHt) epPutsNeed(s, result->dispatchBytes, NCCL_EP_PUT_IDS, 0, of);
  if (hasCombine) epPutsNeed(s, result->combineBytes, NCCL_EP_PUT_COMBINE, 0, of);
  if (hasCombine && run->rc.combinePartial)
    epPutsNeed(s, result->combineBytes, NCCL_EP_PUT_WEIGHTS, 0, of);
}

trefoil_result_t epRealTraffic(real_t *run) {
  ep_real_result_t *result = run->result;
  int R = run->options->shape.numRanks;
  for (int r = 0; r < R; r++) {
    result->receivedRows[r] = trefoilRefNumSlots(&run->rc, r);
    if (run->rc.mode < TREFOIL_HT_FLAT) {
      trefoil_slot_t *slots = malloc(sizeof *slots * (size_t)(result->receivedRows[r] + 1));
      EP_CHECK(slots, TREFOIL_SYSTEM_ERROR, "out of memory for slots");
      trefoil_result_t rc = trefoilRefSlots(&run->rc, r, slots);
      int64_t used = 0;
      for (int64_t i = 0; rc == TREFOIL_OK && i < result->receivedRows[r]; i++)
        used += slots[i].src >= 0;
      free(slots);
      EP_TRY(rc);
      result->receivedRows[r] = used;
    }
    if (result->receivedRows[r] > run->maxRows) run->maxRows = result->receivedRows[r];
  }
  if (run->maxRows < run->options->shape.maxTokens) run->maxRows = run->options->shape.maxTokens;
  if (run->options->open) leaveRoom(run);
  int64_t *rows = malloc(sizeof *rows * (size_t)(R * R));
  EP_CHECK(rows, TREFOIL_SYSTEM_ERROR, "out of memory for the traffic table");
  size_t hidden = (size_t)run->options->hidden;
  for (int op = 0; op < 2; op++) {
    int isShort = !epRealHasCombine(run->options) && op == 0;
    size_t rowBytes = isShort ? hidden + hidden / 32 : 2 * hidden;
    uint64_t *bytes = op ? result->combineBytes : result->dispatchBytes;
    trefoil_plan_config_t config = {.mode = run->rc.mode,
                                    .op = (trefoil_op_t)op,
                                    .rowBytes = rowBytes,
                                    .combinePartial = run->rc.combinePartial};
    trefoil_plan_t *plan = NULL;
    trefoil_result_t rc = trefoilPlanCreate(&plan, &run->rc.routing, &config);
    if (rc == TREFOIL_OK) rc = trefoilPlanTraffic(plan, -1, bytes);
    if (rc == TREFOIL_OK) rc = trefoilRefTraffic(&run->rc, op, rows);
    for (int i = 0; rc == TREFOIL_OK && i < R * R; i++)
      if (bytes[i] != (uint64_t)rows[i] * rowBytes)
        epRealFail(run,
                   "the plan moves %llu bytes from rank %d to rank %d in %s, the reference %llu",
                   (unsigned long long)bytes[i], i / R, i % R, op ? "combine" : "dispatch",
                   (unsigned long long)((uint64_t)rows[i] * rowBytes));
    trefoilPlanDestroy(plan);
    if (rc != TREFOIL_OK) {
      free(rows);
      return rc;
    }
  }
  free(rows);
  needPuts(run);
  return TREFOIL_OK;
}

/* ---- A rank's tensors ---- */

/* Windows are as large on every rank. */
static trefoil_result_t takeMemory(real_rank_t *rank, real_tensor_t *t, int isWindow) {
  const ep_library_t *lib = &rank->run->lib;
  size_t most = t->rowBytes * (size_t)rank->run->options->shape.maxTokens;
  size_t bytes = (isWindow && most > t->bytes ? most : t->bytes) + 256;
  rank->doing = isWindow ? "ncclMemAlloc" : "cudaMalloc";
  if (isWindow) {
    EP_REAL_NCCL(rank, lib->ncclMemAlloc(&t->data, bytes));
    rank->doing = "ncclCommWindowRegister";
    EP_REAL_NCCL(rank, lib->ncclCommWindowRegister(rank->comm, t->data, bytes, &t->window,
                                                   lib->windowFlags));
    t->t.win_hdl = t->window;
  } else {
    EP_REAL_CUDA(rank, lib->cudaMalloc(&t->data, bytes));
  }
  EP_REAL_CUDA(rank, lib->cudaMemsetAsync(t->data, EP_REAL_NOISE, bytes, rank->stream));
  t->t.data = t->data;
  return TREFOIL_OK;
}

static trefoil_result_t giveBack(real_rank_t *rank, real_tensor_t *t) {
  const ep_library_t *lib = &rank->run->lib;
  if (!t->data) return TREFOIL_OK;
  if (t->window) {
    rank->doing = "ncclCommWindowDeregister";
    EP_REAL_NCCL(rank, lib->ncclCommWindowDeregister(rank->comm, t->window));
    rank->doing = "ncclMemFree";
    EP_REAL_NCCL(rank, lib->ncclMemFree(t->data));
    return TREFOIL_OK;
  }
  rank->doing = "cudaFree";
  EP_REAL_CUDA(rank, lib->cudaFree(t->data));
  return TREFOIL_OK;
}

static trefoil_result_t newTensor(real_rank_t *rank, real_tensor_t *t, trefoil_dtype_t dtype,
                                  unsigned ndim, const int64_t *sizes) {
  t->t = NCCL_EP_TENSOR_INIT;
  t->t.ndim = ndim;
  t->t.datatype = (ncclDataType_t)dtype;
  t->t.sizes = t->sizes;
  t->bytes = trefoilDtypeBytes(dtype);
  for (unsigned i = 0; i < ndim; i++) {
    t->sizes[i] = (size_t)sizes[i];
    t->bytes *= t->sizes[i];
  }
  t->rowBytes = trefoilDtypeBytes(dtype) * t->sizes[ndim - 1];
  int isRows = t == &rank->received || t == &rank->receivedScales || t == &rank->tokens ||
               t == &rank->scales;
  return takeMemory(rank, t, isRows && rank->run->options->window);
}

static trefoil_result_t upload(real_rank_t *rank, real_tensor_t *t, const void *from) {
  rank->doing = "cudaMemcpyAsync";
  EP_REAL_CUDA(rank, rank->run->lib.cudaMemcpyAsync(t->data, from, t->bytes, cudaMemcpyHostToDevice,
                                                    rank->stream));
  return TREFOIL_OK;
}

static trefoil_result_t makeTensors(real_rank_t *rank) {
  real_t *run = rank->run;
  const trefoil_shape_t *s = &run->options->shape;
  int64_t N = s->maxTokens, B = run->counts[rank->rank], H = run->options->hidden;
  int64_t K = s->topk, R = s->numRanks, S = H / 128;
  int64_t L = trefoilExpertsPerRank(s);
  trefoil_mode_t mode = run->rc.mode;
  EP_TRY(newTensor(rank, &rank->ids, TREFOIL_INT32, 2, (int64_t[]){B, K}));
  EP_TRY(newTensor(rank, &rank->tokens, run->rc.dtype, 2, (int64_t[]){B, H}));
  EP_TRY(newTensor(rank, &rank->weights, TREFOIL_F32, 2, (int64_t[]){B, K}));
  EP_TRY(newTensor(rank, &rank->combined, TREFOIL_BF16, 2, (int64_t[]){B, H}));
  EP_TRY(upload(rank, &rank->ids, run->ids[rank->rank]));
  EP_TRY(upload(rank, &rank->tokens, run->tokens[rank->rank]));
  EP_TRY(upload(rank, &rank->weights, run->weights[rank->rank]));
  trefoil_dtype_t wire = epRealHasCombine(run->options) ? TREFOIL_BF16 : TREFOIL_E4M3;
  if (run->options->backward)
    EP_TRY(newTensor(rank, &rank->combinedWeights, TREFOIL_F32, 2, (int64_t[]){B, K}));
  if (run->options->fp8) {
    EP_TRY(newTensor(rank, &rank->scales, TREFOIL_F32, 2, (int64_t[]){B, S}));
    EP_TRY(upload(rank, &rank->scales, run->scales[rank->rank]));
  }
  if (wire == TREFOIL_E4M3 && mode >= TREFOIL_HT_FLAT) {
    EP_TRY(newTensor(rank, &rank->receivedScales, TREFOIL_F32, 2, (int64_t[]){run->maxRows, S}));
  } else if (wire == TREFOIL_E4M3) {
    int64_t sizes[] = {L, R * N, S};
    if (mode == TREFOIL_LL_RANK_MAJOR) sizes[0] = R, sizes[1] = N;
    EP_TRY(newTensor(rank, &rank->receivedScales, TREFOIL_F32, 3, sizes));
  }
  if (mode == TREFOIL_LL_EXPERT_MAJOR) {
    EP_TRY(newTensor(rank, &rank->received, wire, 3, (int64_t[]){L, R * N, H}));
    EP_TRY(newTensor(rank, &rank->counters, TREFOIL_INT32, 1, (int64_t[]){L}));
  } else if (mode == TREFOIL_LL_RANK_MAJOR) {
    EP_TRY(newTensor(rank, &rank->received, wire, 3, (int64_t[]){R, N, H}));
    EP_TRY(newTensor(rank, &rank->receivedWeights, TREFOIL_F32, 3, (int64_t[]){R, N, K}));
    EP_TRY(newTensor(rank, &rank->receivedIds, TREFOIL_INT32, 3, (int64_t[]){R, N, K}));
    EP_TRY(newTensor(rank, &rank->counters, TREFOIL_INT32, 1, (int64_t[]){R}));
  } else {
    EP_TRY(newTensor(rank, &rank->received, wire, 2, (int64_t[]){run->maxRows, H}));
    trefoil_dtype_t counted =
        mode == TREFOIL_HT_FLAT ? TREFOIL_INT32 : TREFOIL_INT64; /* both kinds */
    EP_TRY(newTensor(rank, &rank->counters, counted, 1, (int64_t[]){L}));
    if (mode == TREFOIL_HT_FLAT) {
      EP_TRY(newTensor(rank, &rank->receivedWeights, TREFOIL_F32, 2, (int64_t[]){run->maxRows, K}));
      if (!run->options->backward)
        EP_TRY(newTensor(rank, &rank->receivedIds, TREFOIL_INT64, 2, (int64_t[]){run->maxRows, K}));
    } else {
      EP_TRY(newTensor(rank, &rank->receivedWeights, TREFOIL_F32, 1, (int64_t[]){run->maxRows}));
    }
  }
  rank->doing = "cudaStreamSynchronize";
  EP_REAL_CUDA(rank, run->lib.cudaStreamSynchronize(rank->stream));
  return TREFOIL_OK;
}

/* Where low latency takes zero_copy ON. Of its own accord it would go by the number of tokens, and
 * a point with windows is to be compared with one without. */
static int mayForceZeroCopy(const ep_real_options_t *o) {
  return o->mode == TREFOIL_LL_RANK_MAJOR && !o->toE4m3 &&
         o->shape.ranksPerNode == o->shape.numRanks;
}

/* ---- Calls ---- */

trefoil_result_t epRealOpen(real_rank_t *rank) {
  real_t *run = rank->run;
  const ep_real_options_t *o = run->options;
  int ht = run->rc.mode >= TREFOIL_HT_FLAT;
  rank->doing = "cudaSetDevice";
  EP_REAL_CUDA(rank, run->lib.cudaSetDevice(rank->rank));
  if (!run->comms[rank->rank]) {
    rank->doing = "ncclCommInitRank";
    EP_REAL_NCCL(rank, run->lib.ncclCommInitRank(&run->comms[rank->rank], o->shape.numRanks,
                                                 run->id, rank->rank));
  }
  rank->comm = run->comms[rank->rank];
  rank->doing = "cudaStreamCreateWithFlags";
  EP_REAL_CUDA(rank, run->lib.cudaStreamCreateWithFlags(&rank->stream, cudaStreamNonBlocking));
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = ht ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
  config.num_experts = (unsigned)o->shape.numExperts;
  config.max_dispatch_tokens_per_rank = (unsigned)o->shape.maxTokens;
  config.max_recv_tokens_per_rank = ht ? (unsigned)run->maxRows : 0;
  config.max_token_bytes = (unsigned)((2 * o->hidden + 15) / 16 * 16);
  config.timeout_ns = o->timeoutNs;
  config.max_num_sms = o->maxSms;
  if (o->window && mayForceZeroCopy(o)) config.zero_copy = NCCL_EP_ZERO_COPY_ON;
  rank->doing = "ncclEpCreateGroup";
  EP_REAL_EP(rank, run->lib.ncclEpCreateGroup(&rank->group, rank->comm, &config));
  rank->doing = "ncclEpInitHandle";
  ncclEpLayout_t layout = run->rc.mode == TREFOIL_LL_RANK_MAJOR ? NCCL_EP_LAYOUT_RANK_MAJOR
                          : run->rc.mode == TREFOIL_HT_FLAT     ? NCCL_EP_LAYOUT_FLAT
                                                                : NCCL_EP_LAYOUT_EXPERT_MAJOR;
  EP_REAL_EP(rank, run->lib.ncclEpInitHandle(&rank->handle, rank->group, layout, NULL,
                                             o->shape.topk, NULL));
  return makeTensors(rank);
}

trefoil_result_t epRealSync(real_rank_t *rank) {
  rank->doing = "cudaStreamSynchronize";
  EP_REAL_CUDA(rank, rank->run->lib.cudaStreamSynchronize(rank->stream));
  return TREFOIL_OK;
}

trefoil_result_t epRealUpdate(real_rank_t *rank) {
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  info.expert_counters = &rank->counters.t;
  int ht = rank->run->rc.mode >= TREFOIL_HT_FLAT;
  rank->doing = "ncclEpUpdateHandle";
  EP_REAL_EP(rank, rank->run->lib.ncclEpUpdateHandle(rank->handle, &rank->ids.t, ht ? &info : NULL,
                                                     rank->stream));
  return epRealSync(rank);
}

trefoil_result_t epRealDispatch(real_rank_t *rank) {
  trefoil_mode_t mode = rank->run->rc.mode;
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  in.tokens = &rank->tokens.t;
  out.tokens = &rank->received.t;
  if (mode != TREFOIL_LL_EXPERT_MAJOR && !rank->run->options->backward) {
    in.topk_weights = &rank->weights.t;
    out.topk_weights = &rank->receivedWeights.t;
  }
  if (rank->receivedIds.data) out.topk_idx = &rank->receivedIds.t;
  if (mode == TREFOIL_LL_EXPERT_MAJOR) info.expert_counters = &rank->counters.t;
  if (mode == TREFOIL_LL_RANK_MAJOR) info.src_rank_counters = &rank->counters.t;
  ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
  if (rank->run->options->toE4m3) {
    config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
    out.scales = &rank->receivedScales.t;
  } else if (rank->run->options->fp8) {
    config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    in.scales = &rank->scales.t;
    out.scales = &rank->receivedScales.t;
  }
  if (rank->run->options->backward) config.pass_direction = NCCL_EP_BWD_PASS;
  int isPlain = !out.scales && !rank->run->options->backward;
  rank->doing = "ncclEpDispatch";
  EP_REAL_EP(rank, rank->run->lib.ncclEpDispatch(rank->handle, &in, &out,
                                                 mode < TREFOIL_HT_FLAT ? &info : NULL,
                                                 isPlain ? NULL : &config, rank->stream));
  return TREFOIL_OK;
}

trefoil_result_t epRealCombine(real_rank_t *rank) {
  ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
  in.tokens = &rank->received.t;
  out.tokens = &rank->combined.t;
  if (rank->run->rc.mode == TREFOIL_LL_EXPERT_MAJOR) out.topk_weights = &rank->weights.t;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  int backward = rank->run->options->backward;
  if (backward) {
    config.pass_direction = NCCL_EP_BWD_PASS;
    in.topk_weights = &rank->receivedWeights.t;
    out.topk_weights = &rank->combinedWeights.t;
  }
  rank->doing = "ncclEpCombine";
  EP_REAL_EP(rank, rank->run->lib.ncclEpCombine(rank->handle, &in, &out, backward ? &config : NULL,
                                                rank->stream));
  return TREFOIL_OK;
}

trefoil_result_t epRealClose(real_rank_t *rank) {
  const ep_library_t *lib = &rank->run->lib;
  real_tensor_t *const all[] = {&rank->ids,
                                &rank->tokens,
                                &rank->weights,
                                &rank->received,
                                &rank->receivedWeights,
                                &rank->receivedIds,
                                &rank->scales,
                                &rank->receivedScales,
                                &rank->combined,
                                &rank->combinedWeights,
                                &rank->counters};
  rank->doing = "ncclEpHandleDestroy";
  EP_REAL_EP(rank, lib->ncclEpHandleDestroy(rank->handle));
  rank->doing = "ncclEpGroupDestroy";
  EP_REAL_EP(rank, lib->ncclEpGroupDestroy(rank->group));
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) EP_TRY(giveBack(rank, all[i]));
  rank->doing = "cudaStreamDestroy";
  EP_REAL_CUDA(rank, lib->cudaStreamDestroy(rank->stream));
  if (!rank->run->isLast) return TREFOIL_OK;
  rank->doing = "ncclCommDestroy";
  EP_REAL_NCCL(rank, lib->ncclCommDestroy(rank->comm));
  return TREFOIL_OK;
}
