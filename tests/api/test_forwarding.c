/* High throughput over two nodes: rows that the same-rail rank of the other node passes on. It may
 * announce a chunk only when all of it is there, and may not write the next dispatch's rows while
 * somebody still reads this one's.
 *
 * Ranks 0, 1 and 2, 3 are a node each; only rank 0 has tokens, so the others wait for nobody else:
 * rank 2 passes rows on to rank 3 as early as it may. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "team.h"
#include "test.h"

enum { R = 4, N = 192, WIDTH = 4096, ROUNDS = 8 }; /* of int64 the rows: 32 KiB */

typedef struct flow {
  int stride;       /* token t is rank 3's if t % stride is stride - 1, else rank 2's */
  useconds_t delay; /* of rank 3 before each dispatch */
} flow_t;

typedef struct tensors {
  size_t in[2], idx[2], weights[2], out[2], outIdx[2], outWeights[2];
  ncclEpTensor_t x, ids, w, y, outIds, outW;
} tensors_t;

static ncclEpTensor_t tensor(void *data, ncclDataType_t dtype, size_t *sizes, size_t a, size_t b) {
  sizes[0] = a;
  sizes[1] = b;
  return (ncclEpTensor_t){NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = dtype, .data = data,
                          .sizes = sizes};
}

static ncclEpGroupConfig_t configOf(void) {
  ncclEpGroupConfig_t g = NCCL_EP_GROUP_CONFIG_INIT;
  g.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  g.num_experts = R;
  g.max_dispatch_tokens_per_rank = N;
  g.max_recv_tokens_per_rank = N;
  g.max_token_bytes = WIDTH * sizeof(uint64_t);
  g.num_topk = 1;
  g.timeout_ns = 20000000000u;
  return g;
}

/* Every word of a row says which dispatch and which token it is of. */
static uint64_t wordOf(int round, int64_t token) {
  return 0x3FE0000000000000ull | (uint64_t)round << 32 | (uint64_t)token << 8 | 1;
}

static void fill(uint64_t *rows, int round) {
  for (int64_t i = 0; i < (int64_t)N * WIDTH; i++) rows[i] = wordOf(round, i / WIDTH);
}

/* Rank 3's rows: those of its tokens, in their order. */
static void compare(team_rank_t *r, const uint64_t *rows, int round, int stride) {
  for (int64_t slot = 0; slot < N / stride; slot++) {
    uint64_t want = wordOf(round, slot * stride + stride - 1);
    for (int64_t i = 0; i < WIDTH; i++) {
      uint64_t got = rows[slot * WIDTH + i];
      teamCheck(r, got == want, "dispatch %d, slot %lld, word %lld: %llx, not %llx", round,
                (long long)slot, (long long)i, (unsigned long long)got, (unsigned long long)want);
    }
  }
}

static void run(team_rank_t *r, ncclEpHandle_t h, uint64_t *memory) {
  const flow_t *f = r->user;
  static const float ones[N] = {1};
  const size_t each = (size_t)N * WIDTH, B = r->rank == 0 ? N : 0;
  int32_t ids[N];
  for (int t = 0; t < N; t++) ids[t] = t % f->stride == f->stride - 1 ? 3 : 2;
  float outWeights[N];
  int64_t outIds[N];
  teamPin(NULL, (void *)(uintptr_t)ones, sizeof ones);
  teamPin(r, ids, sizeof ids);
  teamPin(r, outWeights, sizeof outWeights);
  teamPin(r, outIds, sizeof outIds);
  teamPin(r, memory, (ROUNDS + 1) * each * sizeof *memory);
  tensors_t s;
  s.ids = tensor(ids, ncclInt32, s.idx, B, 1);
  s.w = tensor((void *)(uintptr_t)ones, ncclFloat32, s.weights, B, 1);
  s.outW = tensor(outWeights, ncclFloat32, s.outWeights, N, 1);
  s.outIds = tensor(outIds, ncclInt64, s.outIdx, N, 1);
  teamOk(r, ncclEpUpdateHandle(h, &s.ids, NULL, r->stream));
  cudaStreamSynchronize(r->stream);
  teamBarrier(r);
  for (int round = 0; round < ROUNDS; round++) {
    uint64_t *rows = memory + (size_t)round * each; /* rank 0's input, the others' output */
    s.x = tensor(rows, ncclFloat32, s.in, B, WIDTH * 2);
    s.y = tensor(r->rank == 0 ? memory + ROUNDS * each : rows, ncclFloat32, s.out, N, WIDTH * 2);
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    inputs.tokens = &s.x;
    inputs.topk_weights = &s.w;
    outputs.tokens = &s.y;
    outputs.topk_weights = &s.outW;
    outputs.topk_idx = &s.outIds;
    if (r->rank == 3) usleep(f->delay);
    teamOk(r, ncclEpDispatch(h, &inputs, &outputs, NULL, NULL, r->stream));
    if (r->rank == 3) cudaStreamSynchronize(r->stream);
  }
  cudaStreamSynchronize(r->stream);
  for (int round = 0; round < ROUNDS && r->rank == 3; round++) {
    compare(r, memory + (size_t)round * each, round, f->stride);
  }
}

static void body(team_rank_t *r) {
  const size_t each = (size_t)N * WIDTH;
  ncclEpGroupConfig_t config = configOf();
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  uint64_t *memory = calloc((ROUNDS + 1) * each, sizeof *memory);
  teamCheck(r, memory, "out of memory");
  for (int round = 0; round < ROUNDS && r->rank == 0; round++) fill(memory + round * each, round);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, NCCL_EP_LAYOUT_FLAT, NULL, 1, NULL));
  run(r, h, memory);
  int failed = 0;
  teamOk(r, ncclEpGetAsyncError(group, &failed));
  teamCheck(r, !failed, "async error");
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  free(memory);
}

static void check(const flow_t *flow) {
  setenv("NCCL_LSA_TEAM_SIZE", "2", 1);
  const char *error = teamThreads(R, body, (void *)(uintptr_t)flow);
  unsetenv("NCCL_LSA_TEAM_SIZE");
  CHECK(!*error, "%s", error);
}

/* Rank 3 wants the last row of each chunk alone: it reads it as soon as the chunk is announced, when
 * rank 2 has 63 other rows to copy before. */
TEST(a_chunk_is_announced_when_it_is_there) {
  check(&(flow_t){.stride = 64});
}

/* Rank 3 comes late to each dispatch; rank 0 and rank 2 could be far ahead. */
TEST(rows_stay_until_they_are_read) {
  check(&(flow_t){.stride = 1, .delay = 10000});
}

TEST_MAIN()
