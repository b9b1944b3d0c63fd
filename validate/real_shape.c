/* A real shape: the ranks' life, phase by phase, with a barrier between phases. A rank that fails says
 * so and goes on to the barriers; the others' calls time out. */
#include "validate/real_work.h"

#include "plan/error.h"
#include "validate/check_case.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TRY_EP(rank, call)                                                                         \
  do {                                                                                             \
    ncclResult_t epRc_ = (call);                                                                   \
    if (epRc_ != ncclSuccess)                                                                      \
      return epFail(TREFOIL_REMOTE_ERROR, "%s: %s", (rank)->doing,                                 \
                    epLibraryError(&(rank)->run->lib, epRc_));                                     \
  } while (0)
#define TRY_CUDA(rank, call)                                                                       \
  do {                                                                                             \
    cudaError_t epRc_ = (call);                                                                    \
    if (epRc_ != cudaSuccess)                                                                      \
      return epFail(TREFOIL_SYSTEM_ERROR, "%s: %s", (rank)->doing,                                 \
                    (rank)->run->lib.cudaGetErrorString(epRc_));                                   \
  } while (0)

void epRealFail(real_t *run, const char *format, ...) {
  pthread_mutex_lock(&run->mutex);
  if (!atomic_load(&run->failed)) {
    va_list ap;
    va_start(ap, format);
    vsnprintf(run->result->difference, sizeof run->result->difference, format, ap);
    va_end(ap);
    atomic_store(&run->failed, 1);
  }
  pthread_mutex_unlock(&run->mutex);
}

trefoil_tier_t epTierOf(const trefoil_shape_t *shape, int src, int dst) {
  if (src == dst) return TREFOIL_TIER_SELF;
  return trefoilNodeOf(shape, src) == trefoilNodeOf(shape, dst) ? TREFOIL_TIER_NVLINK
                                                                : TREFOIL_TIER_NET;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- What all ranks know ---- */

static trefoil_result_t makeRouting(real_t *run) {
  const ep_real_options_t *o = run->options;
  const trefoil_shape_t *s = &o->shape;
  size_t n = (size_t)(s->maxTokens * s->topk);
  for (int r = 0; r < s->numRanks; r++) {
    ep_rng_t rng = epRng(o->seed, 3, (uint64_t)r);
    int32_t *ids = run->ids[r] = malloc(sizeof *ids * n);
    float *weights = run->weights[r] = malloc(sizeof *weights * n);
    size_t rowBytes = 2 * (size_t)o->hidden;
    run->tokens[r] = malloc(rowBytes * (size_t)s->maxTokens);
    EP_CHECK(ids && weights && run->tokens[r], TREFOIL_SYSTEM_ERROR,
             "out of memory for the inputs");
    run->counts[r] = s->maxTokens;
    for (int64_t t = 0; t < s->maxTokens; t++) {
      for (int k = 0; k < s->topk; k++) {
        int32_t pick;
        int again;
        do {
          pick = (int32_t)epBelow(&rng, s->numExperts);
          again = 0;
          for (int j = 0; j < k; j++) again |= ids[t * s->topk + j] == pick;
        } while (again);
        ids[t * s->topk + k] = pick;
        weights[t * s->topk + k] = (float)epRange(&rng, 1, 1 << 20) * 0x1p-20f;
      }
      epFillPayload(EP_PAYLOAD_FINITE, TREFOIL_BF16,
                    o->seed + (uint64_t)r * 1000003 + (uint64_t)t * 7919, o->hidden,
                    run->tokens[r] + (size_t)t * rowBytes);
    }
  }
  run->rc = (trefoil_case_t){
      .routing = {*s, run->counts, (const int32_t *const *)run->ids},
      .mode = o->mode,
      .width = o->hidden,
      .dtype = TREFOIL_BF16,
  };
  return trefoilCaseCheck(&run->rc);
}

/* Rows received, and bytes by the plan, which must be what the reference counts. */
static trefoil_result_t countTraffic(real_t *run) {
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
  int64_t *rows = malloc(sizeof *rows * (size_t)(R * R));
  EP_CHECK(rows, TREFOIL_SYSTEM_ERROR, "out of memory for the traffic table");
  size_t rowBytes = 2 * (size_t)run->options->hidden;
  for (int op = 0; op < 2; op++) {
    uint64_t *bytes = op ? result->combineBytes : result->dispatchBytes;
    trefoil_plan_config_t config = {
        .mode = run->rc.mode, .op = (trefoil_op_t)op, .rowBytes = rowBytes};
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
  return TREFOIL_OK;
}

/* ---- A rank's tensors ---- */

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
  rank->doing = "cudaMalloc";
  TRY_CUDA(rank, rank->run->lib.cudaMalloc(&t->data, t->bytes + 256));
  TRY_CUDA(rank,
           rank->run->lib.cudaMemsetAsync(t->data, EP_REAL_NOISE, t->bytes + 256, rank->stream));
  t->t.data = t->data;
  return TREFOIL_OK;
}

static trefoil_result_t upload(real_rank_t *rank, real_tensor_t *t, const void *from) {
  rank->doing = "cudaMemcpyAsync";
  TRY_CUDA(rank, rank->run->lib.cudaMemcpyAsync(t->data, from, t->bytes, cudaMemcpyHostToDevice,
                                                rank->stream));
  return TREFOIL_OK;
}

static trefoil_result_t makeTensors(real_rank_t *rank) {
  real_t *run = rank->run;
  const trefoil_shape_t *s = &run->options->shape;
  int64_t B = s->maxTokens, H = run->options->hidden, K = s->topk, R = s->numRanks;
  int64_t L = trefoilExpertsPerRank(s);
  trefoil_mode_t mode = run->rc.mode;
  EP_TRY(newTensor(rank, &rank->ids, TREFOIL_INT32, 2, (int64_t[]){B, K}));
  EP_TRY(newTensor(rank, &rank->tokens, TREFOIL_BF16, 2, (int64_t[]){B, H}));
  EP_TRY(newTensor(rank, &rank->weights, TREFOIL_F32, 2, (int64_t[]){B, K}));
  EP_TRY(newTensor(rank, &rank->combined, TREFOIL_BF16, 2, (int64_t[]){B, H}));
  EP_TRY(upload(rank, &rank->ids, run->ids[rank->rank]));
  EP_TRY(upload(rank, &rank->tokens, run->tokens[rank->rank]));
  EP_TRY(upload(rank, &rank->weights, run->weights[rank->rank]));
  if (mode == TREFOIL_LL_EXPERT_MAJOR) {
    EP_TRY(newTensor(rank, &rank->received, TREFOIL_BF16, 3, (int64_t[]){L, R * B, H}));
    EP_TRY(newTensor(rank, &rank->counters, TREFOIL_INT32, 1, (int64_t[]){L}));
  } else if (mode == TREFOIL_LL_RANK_MAJOR) {
    EP_TRY(newTensor(rank, &rank->received, TREFOIL_BF16, 3, (int64_t[]){R, B, H}));
    EP_TRY(newTensor(rank, &rank->receivedWeights, TREFOIL_F32, 3, (int64_t[]){R, B, K}));
    EP_TRY(newTensor(rank, &rank->receivedIds, TREFOIL_INT32, 3, (int64_t[]){R, B, K}));
    EP_TRY(newTensor(rank, &rank->counters, TREFOIL_INT32, 1, (int64_t[]){R}));
  } else {
    EP_TRY(newTensor(rank, &rank->received, TREFOIL_BF16, 2, (int64_t[]){run->maxRows, H}));
    EP_TRY(newTensor(rank, &rank->counters, TREFOIL_INT64, 1, (int64_t[]){L}));
    if (mode == TREFOIL_HT_FLAT) {
      EP_TRY(newTensor(rank, &rank->receivedWeights, TREFOIL_F32, 2, (int64_t[]){run->maxRows, K}));
      EP_TRY(newTensor(rank, &rank->receivedIds, TREFOIL_INT64, 2, (int64_t[]){run->maxRows, K}));
    } else {
      EP_TRY(newTensor(rank, &rank->receivedWeights, TREFOIL_F32, 1, (int64_t[]){run->maxRows}));
    }
  }
  rank->doing = "cudaStreamSynchronize";
  TRY_CUDA(rank, run->lib.cudaStreamSynchronize(rank->stream));
  return TREFOIL_OK;
}

/* ---- Phases ---- */

static trefoil_result_t openRank(real_rank_t *rank) {
  real_t *run = rank->run;
  const ep_real_options_t *o = run->options;
  int devices = 1, ht = run->rc.mode >= TREFOIL_HT_FLAT;
  rank->doing = "cudaSetDevice";
  TRY_CUDA(rank, run->lib.cudaGetDeviceCount(&devices));
  TRY_CUDA(rank, run->lib.cudaSetDevice(rank->rank % (devices > 0 ? devices : 1)));
  rank->doing = "ncclCommInitRank";
  ncclResult_t rc = run->lib.ncclCommInitRank(&rank->comm, o->shape.numRanks, run->id, rank->rank);
  EP_CHECK(rc == ncclSuccess, TREFOIL_REMOTE_ERROR, "ncclCommInitRank: %s",
           epNcclError(&run->lib, NULL, rc));
  rank->doing = "cudaStreamCreateWithFlags";
  TRY_CUDA(rank, run->lib.cudaStreamCreateWithFlags(&rank->stream, cudaStreamNonBlocking));
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = ht ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
  config.num_experts = (unsigned)o->shape.numExperts;
  config.max_dispatch_tokens_per_rank = (unsigned)o->shape.maxTokens;
  config.max_recv_tokens_per_rank = ht ? (unsigned)run->maxRows : 0;
  config.max_token_bytes = (unsigned)((2 * o->hidden + 15) / 16 * 16);
  config.timeout_ns = o->timeoutNs;
  rank->doing = "ncclEpCreateGroup";
  TRY_EP(rank, run->lib.ncclEpCreateGroup(&rank->group, rank->comm, &config));
  rank->doing = "ncclEpInitHandle";
  ncclEpLayout_t layout = run->rc.mode == TREFOIL_LL_RANK_MAJOR ? NCCL_EP_LAYOUT_RANK_MAJOR
                          : run->rc.mode == TREFOIL_HT_FLAT     ? NCCL_EP_LAYOUT_FLAT
                                                                : NCCL_EP_LAYOUT_EXPERT_MAJOR;
  TRY_EP(rank,
         run->lib.ncclEpInitHandle(&rank->handle, rank->group, layout, NULL, o->shape.topk, NULL));
  return makeTensors(rank);
}

static trefoil_result_t syncRank(real_rank_t *rank) {
  rank->doing = "cudaStreamSynchronize";
  TRY_CUDA(rank, rank->run->lib.cudaStreamSynchronize(rank->stream));
  return TREFOIL_OK;
}

static trefoil_result_t updateRank(real_rank_t *rank) {
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  info.expert_counters = &rank->counters.t;
  int ht = rank->run->rc.mode >= TREFOIL_HT_FLAT;
  rank->doing = "ncclEpUpdateHandle";
  TRY_EP(rank, rank->run->lib.ncclEpUpdateHandle(rank->handle, &rank->ids.t, ht ? &info : NULL,
                                                 rank->stream));
  return syncRank(rank);
}

static trefoil_result_t dispatchRank(real_rank_t *rank) {
  trefoil_mode_t mode = rank->run->rc.mode;
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  in.tokens = &rank->tokens.t;
  out.tokens = &rank->received.t;
  if (mode != TREFOIL_LL_EXPERT_MAJOR) {
    in.topk_weights = &rank->weights.t;
    out.topk_weights = &rank->receivedWeights.t;
  }
  if (rank->receivedIds.data) out.topk_idx = &rank->receivedIds.t;
  if (mode == TREFOIL_LL_EXPERT_MAJOR) info.expert_counters = &rank->counters.t;
  if (mode == TREFOIL_LL_RANK_MAJOR) info.src_rank_counters = &rank->counters.t;
  rank->doing = "ncclEpDispatch";
  TRY_EP(rank,
         rank->run->lib.ncclEpDispatch(rank->handle, &in, &out,
                                       mode < TREFOIL_HT_FLAT ? &info : NULL, NULL, rank->stream));
  return syncRank(rank);
}

static trefoil_result_t combineRank(real_rank_t *rank) {
  ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
  in.tokens = &rank->received.t;
  out.tokens = &rank->combined.t;
  if (rank->run->rc.mode == TREFOIL_LL_EXPERT_MAJOR) out.topk_weights = &rank->weights.t;
  rank->doing = "ncclEpCombine";
  TRY_EP(rank, rank->run->lib.ncclEpCombine(rank->handle, &in, &out, NULL, rank->stream));
  return syncRank(rank);
}

static trefoil_result_t closeRank(real_rank_t *rank) {
  const ep_library_t *lib = &rank->run->lib;
  rank->doing = "ncclEpHandleDestroy";
  TRY_EP(rank, lib->ncclEpHandleDestroy(rank->handle));
  rank->doing = "ncclEpGroupDestroy";
  TRY_EP(rank, lib->ncclEpGroupDestroy(rank->group));
  rank->doing = "ncclCommDestroy";
  TRY_EP(rank, lib->ncclCommDestroy(rank->comm));
  return TREFOIL_OK;
}

/* Plain copies by all ranks at once: what memory here can do. */
static trefoil_result_t copyRank(real_rank_t *rank) {
  const ep_library_t *lib = &rank->run->lib;
  size_t bytes = rank->tokens.bytes;
  rank->doing = "cudaMemcpyAsync";
  for (size_t at = 0; at + bytes <= rank->received.bytes && at < 8 * bytes; at += bytes)
    TRY_CUDA(rank, lib->cudaMemcpyAsync((uint8_t *)rank->received.data + at, rank->tokens.data,
                                        bytes, cudaMemcpyDeviceToDevice, rank->stream));
  return syncRank(rank);
}

static uint64_t copyBytes(const real_rank_t *rank) {
  size_t n = rank->received.bytes / rank->tokens.bytes;
  return (uint64_t)rank->tokens.bytes * (n > 8 ? 8 : n);
}

typedef trefoil_result_t (*phase_t)(real_rank_t *rank);

/* Runs a phase on all ranks between barriers; on every rank the seconds of the slowest. */
static double runPhase(real_rank_t *rank, phase_t phase, const char *name) {
  real_t *run = rank->run;
  int R = run->options->shape.numRanks;
  pthread_barrier_wait(&run->barrier);
  run->started[rank->rank] = now();
  if (!atomic_load(&run->failed) && phase(rank) != TREFOIL_OK)
    epRealFail(run, "rank %d, %s: %s", rank->rank, name, trefoilLastError());
  run->ended[rank->rank] = now();
  atomic_fetch_add(&run->numDone, 1);
  pthread_barrier_wait(&run->barrier);
  double first = run->started[0], last = run->ended[0];
  for (int r = 1; r < R; r++) {
    if (run->started[r] < first) first = run->started[r];
    if (run->ended[r] > last) last = run->ended[r];
  }
  pthread_barrier_wait(&run->barrier);
  return last - first;
}

static void timeAgain(real_rank_t *rank) {
  real_t *run = rank->run;
  ep_real_result_t *result = run->result;
  int first = rank->rank == 0;
  double best = 0;
  for (int i = 0; i < 5; i++) {
    double s = runPhase(rank, copyRank, "copy");
    double rate = s > 0 ? (double)copyBytes(rank) * run->options->shape.numRanks / s : 0;
    if (rate > best) best = rate;
  }
  if (first) result->copyRate = best;
  for (int i = 0; i < run->options->repeats && i < EP_REAL_MAX_REPEATS; i++) {
    double d = runPhase(rank, dispatchRank, "dispatch");
    double c = runPhase(rank, combineRank, "combine");
    if (atomic_load(&run->failed)) return;
    if (!first) continue;
    result->dispatchTimes[i] = d;
    result->combineTimes[i] = c;
    result->numRepeats = i + 1;
  }
}

static void *rankMain(void *argument) {
  real_rank_t *rank = argument;
  ep_real_result_t *result = rank->run->result;
  double s[6];
  runPhase(rank, openRank, "set-up");
  s[0] = runPhase(rank, updateRank, "Update");
  s[1] = runPhase(rank, dispatchRank, "Dispatch");
  s[2] = runPhase(rank, epRealCompareDispatch, "comparing the dispatch");
  s[3] = runPhase(rank, combineRank, "Combine");
  s[4] = runPhase(rank, epRealCompareCombine, "comparing the combine");
  if (rank->rank == 0) {
    result->updateS = s[0];
    result->dispatchS = s[1];
    result->combineS = s[3];
    result->referenceS = s[2] + s[4];
  }
  if (rank->run->options->repeats > 0 && !atomic_load(&rank->run->failed)) timeAgain(rank);
  runPhase(rank, closeRank, "closing");
  return NULL;
}

static trefoil_result_t runRanks(real_t *run) {
  int R = run->options->shape.numRanks;
  EP_TRY(epLibraryLoad(&run->lib, &run->options->paths));
  EP_TRY(makeRouting(run));
  EP_TRY(countTraffic(run));
  EP_CHECK(run->lib.ncclGetUniqueId(&run->id) == ncclSuccess, TREFOIL_SYSTEM_ERROR,
           "ncclGetUniqueId failed");
  real_rank_t *ranks = calloc((size_t)R, sizeof *ranks);
  pthread_t threads[EP_REAL_MAX_RANKS];
  EP_CHECK(ranks, TREFOIL_SYSTEM_ERROR, "out of memory for the ranks");
  pthread_barrier_init(&run->barrier, NULL, (unsigned)R);
  pthread_cond_init(&run->turn, NULL);
  run->maxComparing = 2;
  for (int r = 0; r < R; r++) {
    ranks[r] = (real_rank_t){.run = run, .rank = r};
    EP_CHECK(!pthread_create(&threads[r], NULL, rankMain, &ranks[r]), TREFOIL_SYSTEM_ERROR,
             "a thread could not be started");
  }
  for (int r = 0; r < R; r++) pthread_join(threads[r], NULL);
  run->result->ok = !atomic_load(&run->failed);
  run->result->bytesCompared = atomic_load(&run->compared);
  return TREFOIL_OK;
}

/* What the child shares with its parent. */
typedef struct shared {
  real_t run;
  ep_real_result_t result;
} shared_t;

static int childMain(shared_t *shared) {
  char number[16];
  const trefoil_shape_t *s = &shared->run.options->shape;
  snprintf(number, sizeof number, "%d", s->ranksPerNode);
  if (s->ranksPerNode < s->numRanks)
    setenv("NCCL_LSA_TEAM_SIZE", number, 1);
  else
    unsetenv("NCCL_LSA_TEAM_SIZE");
  unsetenv("NCCL_EP_LL_COMBINE");
  snprintf(number, sizeof number, "%d", s->numRanks);
  setenv("TREFOIL_HOST_DEVICES", number, 0);
  pthread_mutex_init(&shared->run.mutex, NULL);
  if (runRanks(&shared->run) == TREFOIL_OK) return 0;
  snprintf(shared->result.difference, sizeof shared->result.difference, "%s", trefoilLastError());
  return 1;
}

trefoil_result_t epRealRun(const ep_real_options_t *options, ep_real_result_t *result) {
  int R = options->shape.numRanks;
  EP_CHECK(R <= EP_REAL_MAX_RANKS, TREFOIL_INVALID_ARGUMENT, "%d ranks: at most %d in one process",
           R, EP_REAL_MAX_RANKS);
  EP_CHECK(options->repeats <= EP_REAL_MAX_REPEATS, TREFOIL_INVALID_ARGUMENT,
           "%d repeats: at most %d", options->repeats, EP_REAL_MAX_REPEATS);
  EP_CHECK(options->shape.topk <= options->shape.numExperts, TREFOIL_INVALID_ARGUMENT,
           "top-%d of %d experts: an expert can be used once a token", options->shape.topk,
           options->shape.numExperts);
  EP_TRY(trefoilShapeCheck(&options->shape));
  shared_t *shared =
      mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EP_CHECK(shared != MAP_FAILED, TREFOIL_SYSTEM_ERROR, "out of memory");
  shared->run.options = options;
  shared->run.result = &shared->result;
  pid_t pid = fork();
  if (pid == 0) _exit(childMain(shared));
  int status = 1;
  uint64_t total = (uint64_t)R * (7 + (options->repeats ? 5 + 2 * (uint64_t)options->repeats : 0));
  while (pid > 0 && waitpid(pid, &status, WNOHANG) == 0) {
    struct timespec pause = {0, 20000000};
    nanosleep(&pause, NULL);
    if (options->progress)
      options->progress(options->context, trefoilModeName(options->mode),
                        atomic_load(&shared->run.numDone), total);
  }
  *result = shared->result;
  munmap(shared, sizeof *shared);
  EP_CHECK(pid > 0, TREFOIL_SYSTEM_ERROR, "a process could not be started");
  EP_CHECK(!WIFSIGNALED(status), TREFOIL_SYSTEM_ERROR, "the run was ended by signal %d (%s)",
           WTERMSIG(status), strsignal(WTERMSIG(status)));
  EP_CHECK(WEXITSTATUS(status) == 0, TREFOIL_SYSTEM_ERROR, "%s", result->difference);
  return TREFOIL_OK;
}
