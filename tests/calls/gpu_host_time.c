/* Host time of each call of a low-latency step: what the calling thread spends in it. Prints one JSON line.
 *
 * Ranks are threads of one process, or processes, a GPU each. Calls are timed one by one, with the queue
 * short (the stream is waited for every tenth step): on one stream; on two by turns; on one again in a
 * group with a second handle, which makes the library record an event with each launch. For comparison the
 * time of the smallest launch there is: ncclEpMaskUpdate, one kernel of 64 threads. Times are [10 %, median,
 * 99 %]. argv: tokens a rank, ranks, "processes". */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "team.h"

enum { STEPS = 400, WARM = 40, KINDS = 4, WAYS = 3, H = 7168, K = 8, E = 256 };
static const char *const names[KINDS] = {"update", "dispatch", "combine", "complete"};
static int tokens = 128;
static const char *const ways[WAYS] = {"one_stream", "two_streams", "two_handles"};
static double took[WAYS][KINDS][STEPS];
static double mean[WAYS], smallest[STEPS];

static double nowUs(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

typedef struct tensors {
  ncclEpTensor_t in, out, back, idx, weights, counters;
  size_t sizes[6][3];
} tensors_t;

static ncclEpTensor_t make(size_t *sizes, ncclDataType_t type, unsigned ndim, size_t a, size_t b,
                           size_t c) {
  size_t bytes = (a * b * (ndim == 3 ? c : 1)) * 8;
  ncclEpTensor_t t = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = ndim, .datatype = type, .sizes = sizes};
  sizes[0] = a;
  sizes[1] = b;
  sizes[2] = c;
  if (ndim == 1) bytes = a * 8;
  if (cudaMalloc(&t.data, bytes) || cudaMemset(t.data, 0, bytes)) t.data = NULL;
  return t;
}

static int makeAll(tensors_t *t, int rank, int R) {
  size_t B = (size_t)tokens, N = B, L = (size_t)(E / R);
  int32_t *ids = malloc(B * K * sizeof *ids);
  t->in = make(t->sizes[0], ncclBfloat16, 2, B, H, 0);
  t->out = make(t->sizes[1], ncclBfloat16, 3, L, (size_t)R * N, H / 4);
  t->sizes[1][2] = H;
  t->back = make(t->sizes[2], ncclBfloat16, 2, B, H, 0);
  t->idx = make(t->sizes[3], ncclInt32, 2, B, K, 0);
  t->weights = make(t->sizes[4], ncclFloat32, 2, B, K, 0);
  t->counters = make(t->sizes[5], ncclInt32, 1, L, 0, 0);
  for (size_t i = 0; i < B * K; i++) {
    ids[i] = (int32_t)((i % K * (E / K) + i / K * 7 + (size_t)rank * 3) % E);
  }
  int ok = t->in.data && t->out.data && t->back.data && t->idx.data && t->weights.data &&
           t->counters.data &&
           !cudaMemcpy(t->idx.data, ids, B * K * sizeof *ids, cudaMemcpyHostToDevice);
  free(ids);
  return ok;
}

static void freeAll(tensors_t *t) {
  cudaFree(t->in.data);
  cudaFree(t->out.data);
  cudaFree(t->back.data);
  cudaFree(t->idx.data);
  cudaFree(t->weights.data);
  cudaFree(t->counters.data);
}

static void runSteps(team_rank_t *r, ncclEpHandle_t h, tensors_t *t, int way, cudaStream_t *s) {
  cudaStream_t combines = s[way == 1];
  ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  ncclEpCombineInputs_t from = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t to = NCCL_EP_COMBINE_OUTPUTS_INIT;
  in.tokens = &t->in;
  out.tokens = from.tokens = &t->out;
  info.expert_counters = &t->counters;
  to.tokens = &t->back;
  to.topk_weights = &t->weights;
  double begin = 0;
  for (int i = -WARM; i < STEPS; i++) {
    if (i == 0) begin = nowUs();
    double at[KINDS + 1];
    at[0] = nowUs();
    teamOk(r, ncclEpUpdateHandle(h, &t->idx, NULL, s[0]));
    at[1] = nowUs();
    teamOk(r, ncclEpDispatch(h, &in, &out, &info, NULL, s[0]));
    at[2] = nowUs();
    teamOk(r, ncclEpCombine(h, &from, &to, NULL, combines));
    at[3] = nowUs();
    teamOk(r, ncclEpComplete(h, NULL, combines));
    at[4] = nowUs();
    for (int k = 0; k < KINDS && i >= 0 && r->rank == 0; k++) took[way][k][i] = at[k + 1] - at[k];
    if (i % 10 == 9) cudaStreamSynchronize(combines);
  }
  cudaStreamSynchronize(combines);
  if (r->rank == 0) mean[way] = (nowUs() - begin) / STEPS;
}

static void runSmallest(team_rank_t *r, ncclEpGroupConfig_t config) {
  ncclEpGroup_t group;
  int mask[64];
  for (int i = 0; i < 64; i++) mask[i] = 1;
  config.enable_mask = 1;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  for (int i = -WARM; i < STEPS; i++) {
    double at = nowUs();
    teamOk(r, ncclEpMaskUpdate(group, mask, r->stream));
    if (i >= 0 && r->rank == 0) smallest[i] = nowUs() - at;
    if (i % 10 == 9) cudaStreamSynchronize(r->stream);
  }
  teamOk(r, ncclEpGroupDestroy(group));
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void printTimes(const char *name, double *v) {
  qsort(v, STEPS, sizeof *v, compare);
  printf(", \"%s\": [%.2f, %.2f, %.2f]", name, v[STEPS / 10], v[STEPS / 2], v[STEPS * 99 / 100]);
}

static void report(const team_rank_t *r) {
  printf("{\"ranks\": %d, \"as\": \"%s\", \"tokens\": %d, \"unit\": \"us\"", r->numRanks,
         r->processes ? "processes" : "threads", tokens);
  for (int way = 0; way < WAYS; way++) {
    printf(", \"%s\": {\"step\": %.2f", ways[way], mean[way]);
    for (int k = 0; k < KINDS; k++) printTimes(names[k], took[way][k]);
    printf("}");
  }
  printTimes("smallest_launch", smallest);
  printf("}\n");
  fflush(stdout);
}

static void run(team_rank_t *r) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.num_experts = E;
  config.max_dispatch_tokens_per_rank = (unsigned)tokens;
  config.max_token_bytes = H * 2;
  config.timeout_ns = 10000000000u;
  ncclEpGroup_t group;
  ncclEpHandle_t h, second = NULL;
  tensors_t t;
  cudaStream_t s[2];
  for (int i = 0; i < 2; i++) {
    teamCheck(r, !cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking), "stream");
  }
  teamCheck(r, makeAll(&t, r->rank, r->numRanks), "device memory");
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, K, NULL));
  for (int way = 0; way < WAYS && !r->error[0]; way++) {
    if (way == 2) {
      teamOk(r, ncclEpInitHandle(&second, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, K, NULL));
    }
    teamBarrier(r);
    runSteps(r, h, &t, way, s);
  }
  if (r->error[0]) return;
  teamOk(r, ncclEpHandleDestroy(second));
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  runSmallest(r, config);
  if (r->rank == 0) report(r);
  freeAll(&t);
  for (int i = 0; i < 2; i++) cudaStreamDestroy(s[i]);
}

int main(int argc, char **argv) {
  int n = argc > 2 ? atoi(argv[2]) : 4;
  if (argc > 1) tokens = atoi(argv[1]);
  if (access("/dev/nvidia0", F_OK)) { /* without touching CUDA: the ranks may be children of fork */
    printf("skipped: needs a GPU\n");
    return 77;
  }
  int processes = argc > 3 && !strcmp(argv[3], "processes");
  const char *error = processes ? teamProcesses(n, run, NULL, 0) : teamThreads(n, run, NULL);
  if (!*error) return 0;
  fprintf(stderr, "%s\n", error);
  return 1;
}
