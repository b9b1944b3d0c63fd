/* Gradient averaging: the invariants of A2SGD, Top-K's errors, QSGD's levels, and bad input. */
#include "test.h"

#include "trefoil/a2sgd.h"
#include "trefoil/numerics.h"

#include "plan/philox.h"

#include <math.h>
#include <stdbool.h>

#define N               100
#define WORKERS         3
#define INVALID         TREFOIL_INVALID_ARGUMENT
#define GOOD(x)         CHECK((x) == TREFOIL_OK, "%s", trefoilLastError())
#define SAME(a, b, ...) CHECK(memcmp(a, b, sizeof(a)) == 0, __VA_ARGS__)
#define BAD(call, word)                                                                            \
  do {                                                                                             \
    CHECK((call) == INVALID, "%s was accepted", word);                                             \
    CHECK(strstr(trefoilLastError(), word), "\"%s\" does not name %s", trefoilLastError(), word);  \
  } while (0)

typedef struct setup {
  trefoil_grad_config_t c;
  int64_t sizes[2];
  float grad[WORKERS][N], state[WORKERS][N], update[WORKERS][N];
  const void *grads[WORKERS];
  float *states[WORKERS];
  void *updates[WORKERS];
  trefoil_grad_workers_t workers;
} setup_t;

static float numberOf(uint32_t i) {
  ep_philox_t x = epPhilox(1, i, 0, 0, 0);
  return ((float)(x.word[0] >> 8) * 0x1p-23f - 1) * (float)(1 + x.word[1] % 7);
}

/* Two tensors of 40 and 60 elements, f32, random gradients. */
static void make(setup_t *s, trefoil_grad_method_t method) {
  *s = (setup_t){
      .c = {method, TREFOIL_F32, WORKERS, 2, NULL, .topkPerMillion = 100000, .qsgdBits = 4},
      .sizes = {40, 60}};
  s->c.sizes = s->sizes;
  s->workers = (trefoil_grad_workers_t){s->grads, s->states, s->updates};
  for (int w = 0; w < WORKERS; w++) {
    s->grads[w] = s->grad[w];
    s->states[w] = s->state[w];
    s->updates[w] = s->update[w];
    for (int i = 0; i < N; i++) s->grad[w][i] = numberOf((uint32_t)(w * N + i));
  }
}

static void step(setup_t *s, int64_t number) {
  GOOD(trefoilGradStep(&s->c, number, &s->workers));
}

TEST(dense_is_the_mean) {
  setup_t s;
  make(&s, TREFOIL_GRAD_DENSE);
  step(&s, 0);
  for (int i = 0; i < N; i++) {
    double sum = (double)s.grad[0][i] + (double)s.grad[1][i] + (double)s.grad[2][i];
    CHECK(s.update[2][i] == (float)(sum / 3), "element %d", i);
  }
  SAME(s.update[0], s.update[1], "workers differ");
}

TEST(formats) {
  const float in[2][2] = {{1, 3.0e38f}, {1.0078125f, 3.0e38f}};
  const trefoil_dtype_t dtypes[] = {TREFOIL_F16, TREFOIL_BF16};
  for (int d = 0; d < 2; d++) {
    uint16_t grad[2][2], update[2][2];
    for (int w = 0; w < 2; w++) GOOD(trefoilNarrow(dtypes[d], in[w], 2, grad[w]));
    const int64_t sizes[] = {2};
    trefoil_grad_config_t c = {TREFOIL_GRAD_DENSE, dtypes[d], 2, 1, sizes, .seed = 0};
    GOOD(trefoilGradStep(&c, 0,
                         &(trefoil_grad_workers_t){(const void *[]){grad[0], grad[1]}, NULL,
                                                   (void *[]){update[0], update[1]}}));
    float out[2];
    GOOD(trefoilWiden(dtypes[d], update[0], 2, out));
    CHECK(out[0] == (d ? 1.0f : 1.00390625f), "%g",
          (double)out[0]); /* a tie in bf16 goes to even */
    CHECK(d ? out[1] < INFINITY : isinf(out[1]), "%g", (double)out[1]);
  }
}

TEST(empty_tensors) {
  for (int method = 0; method < TREFOIL_GRAD_NUM_METHODS; method++) {
    setup_t s, split;
    make(&s, method);
    make(&split, method);
    const int64_t sizes[] = {0, 40, 0, 0, 60, 0};
    split.c.sizes = sizes;
    split.c.numTensors = 6;
    step(&s, 0);
    step(&split, 0);
    SAME(s.update, split.update, "method %d", method);
    split.c.numTensors = 1; /* no element at all */
    GOOD(trefoilGradStep(&split.c, 0, &(trefoil_grad_workers_t){NULL, NULL, NULL}));
    split.c.numTensors = 0;
    split.c.sizes = NULL;
    split.c.scope = TREFOIL_GRAD_WHOLE_MODEL;
    GOOD(trefoilGradStep(&split.c, 0, &(trefoil_grad_workers_t){NULL, NULL, NULL}));
    SAME(s.update, split.update, "method %d: an empty model", method);
  }
}

static trefoil_grad_sizes_t sizesOf(const trefoil_grad_config_t *c) {
  trefoil_grad_sizes_t sizes = {0};
  GOOD(trefoilGradSizes(c, &sizes));
  return sizes;
}

TEST(huge_sizes) {
  const int64_t n = ((int64_t)1 << 33) + 1, one[] = {n};
  trefoil_grad_config_t c = {TREFOIL_GRAD_DENSE, TREFOIL_BF16, 8, 1, one, .seed = 0};
  c.topkPerMillion = 1000000;
  c.qsgdBits = 3;
  CHECK(sizesOf(&c).sentBytes == 2 * n, "dense");
  c.method = TREFOIL_GRAD_A2SGD;
  CHECK(sizesOf(&c).sentBytes == 8 && sizesOf(&c).stateBytes == 0, "A2SGD");
  c.method = TREFOIL_GRAD_TOPK;
  CHECK(sizesOf(&c).sentBytes == 10 * n && sizesOf(&c).stateBytes == 4 * n, "Top-K");
  c.method = TREFOIL_GRAD_QSGD;
  CHECK(sizesOf(&c).sentBytes == n / 512 * (4 + 192) + 4 + 1, "QSGD");
  c.qsgdBucket = INT64_MAX;
  CHECK(sizesOf(&c).sentBytes == 4 + (n * 3 + 7) / 8, "QSGD, one bucket");
  const int64_t most[] = {(int64_t)1 << 40, 0, 1};
  c.sizes = most;
  c.numTensors = 2;
  CHECK(sizesOf(&c).elements == most[0], "the largest model");
  c.numTensors = 3;
  BAD(trefoilGradCheck(&c), "sizes[2]");
}

TEST(bytes_sent) {
  setup_t s;
  make(&s, TREFOIL_GRAD_DENSE);
  CHECK(sizesOf(&s.c).sentBytes == 4 * N, "dense");
  s.c.method = TREFOIL_GRAD_A2SGD;
  CHECK(sizesOf(&s.c).sentBytes == 16 && sizesOf(&s.c).groups == 2, "a tensor each");
  CHECK(sizesOf(&s.c).syncBytes == 0, "no synchronisation");
  s.c.scope = TREFOIL_GRAD_WHOLE_MODEL;
  s.c.syncPeriod = 5;
  CHECK(sizesOf(&s.c).sentBytes == 8 && sizesOf(&s.c).groups == 1, "the whole model");
  CHECK(sizesOf(&s.c).syncBytes == 4 * N, "a synchronisation");
  s.c.method = TREFOIL_GRAD_TOPK;
  CHECK(sizesOf(&s.c).sentBytes == 10 * 8 && sizesOf(&s.c).syncBytes == 0, "Top-K");
  s.c.topkPerMillion = 100001;
  CHECK(sizesOf(&s.c).sentBytes == 11 * 8, "Top-K rounds up");
  s.c.method = TREFOIL_GRAD_QSGD;
  s.c.qsgdBucket = 30;
  CHECK(sizesOf(&s.c).sentBytes == 3 * (4 + 15) + 4 + 5, "QSGD");
}

/* 1 + 2^-24 is 1: which sums survive tells the order. */
TEST(sum_order) {
  const float tiny = 0x1p-24f;
  float grad[24] = {0}, means[2];
  const int64_t sizes[] = {24};
  trefoil_grad_config_t c = {TREFOIL_GRAD_A2SGD, TREFOIL_F32, 1, 1, sizes, .seed = 0};
  grad[0] = 1;
  grad[1] = grad[2] = tiny; /* one run: each is lost */
  GOOD(trefoilGradTwoMeans(&c, grad, means));
  CHECK(means[0] == 1 / 24.0f, "left to right in a run: %a", (double)means[0]);
  grad[1] = grad[2] = 0;
  grad[8] = grad[9] = tiny; /* another run: they meet first */
  GOOD(trefoilGradTwoMeans(&c, grad, means));
  CHECK(means[0] == (1 + 2 * tiny) / 24, "runs of 8: %a", (double)means[0]);
  grad[9] = 0;
  grad[16] = tiny; /* the first two runs are a pair */
  GOOD(trefoilGradTwoMeans(&c, grad, means));
  CHECK(means[0] == 1 / 24.0f, "adjacent pairs: %a", (double)means[0]);
}

TEST(two_means) {
  const float grad[] = {1, -2, 3, -6, 0, -0.0f, 5, -1};
  const int64_t sizes[] = {5, 3};
  float means[4];
  trefoil_grad_config_t c = {TREFOIL_GRAD_A2SGD, TREFOIL_F32, 1, 2, sizes, .seed = 0};
  GOOD(trefoilGradTwoMeans(&c, grad, means));
  const float byTensor[] = {4 / 3.0f, 4, 2.5f, 1};
  SAME(byTensor, means, "per tensor: %g %g %g %g", (double)means[0], (double)means[1],
       (double)means[2], (double)means[3]);
  c.scope = TREFOIL_GRAD_WHOLE_MODEL;
  GOOD(trefoilGradTwoMeans(&c, grad, means));
  CHECK(means[0] == 9 / 5.0f && means[1] == 3, "%g %g", (double)means[0], (double)means[1]);
}

TEST(from_means) {
  setup_t s;
  make(&s, TREFOIL_GRAD_A2SGD);
  float means[WORKERS][4], update[N];
  step(&s, 0);
  for (int w = 0; w < WORKERS; w++) GOOD(trefoilGradTwoMeans(&s.c, s.grad[w], means[w]));
  for (int w = 0; w < WORKERS; w++) {
    GOOD(trefoilGradFromMeans(&s.c, w, means[0], s.grad[w], update));
    SAME(update, s.update[w], "worker %d", w);
  }
  BAD(trefoilGradFromMeans(&s.c, WORKERS, means[0], s.grad[0], update), "worker is 3");
  BAD(trefoilGradFromMeans(&s.c, 0, NULL, s.grad[0], update), "means");
  BAD(trefoilGradFromMeans(&s.c, 0, means[0], s.grad[0], NULL), "update");
}

TEST(one_sign_and_zeros) {
  float grad[2][4] = {{1, 2, 3, 2}, {0, -0.0f, 0, 0}}, update[2][4], means[2];
  const int64_t sizes[] = {4};
  trefoil_grad_config_t c = {TREFOIL_GRAD_A2SGD, TREFOIL_F32, 2, 1, sizes, .seed = 0};
  GOOD(trefoilGradTwoMeans(&c, grad[0], means));
  CHECK(means[0] == 2 && means[1] == 0 && !signbit(means[1]), "all positive");
  GOOD(trefoilGradTwoMeans(&c, grad[1], means));
  CHECK(means[0] == 0 && means[1] == 0, "all zero");
  const trefoil_grad_workers_t workers = {(const void *[]){grad[0], grad[1]}, NULL,
                                          (void *[]){update[0], update[1]}};
  GOOD(trefoilGradStep(&c, 0, &workers));
  const float want[2][4] = {{0, 1, 2, 1}, {1, 1, 1, 1}};
  SAME(want, update, "positive and zero gradients");
  for (int i = 0; i < 4; i++) grad[0][i] = -grad[0][i];
  GOOD(trefoilGradTwoMeans(&c, grad[0], means));
  CHECK(means[0] == 0 && means[1] == 2, "all negative");
}

TEST(one_worker_is_dense) {
  setup_t s, dense;
  for (int scope = 0; scope < 2; scope++) {
    make(&s, TREFOIL_GRAD_A2SGD);
    make(&dense, TREFOIL_GRAD_DENSE);
    s.c.numWorkers = dense.c.numWorkers = 1;
    s.c.scope = scope;
    step(&s, 0);
    step(&dense, 0);
    SAME(s.update[0], s.grad[0], "A2SGD, scope %d", scope);
    SAME(dense.update[0], s.grad[0], "dense");
  }
}

TEST(equal_gradients) {
  setup_t s;
  make(&s, TREFOIL_GRAD_A2SGD);
  for (int w = 1; w < WORKERS; w++) memcpy(s.grad[w], s.grad[0], sizeof s.grad[0]);
  step(&s, 0);
  for (int w = 0; w < WORKERS; w++) SAME(s.update[w], s.grad[0], "worker %d", w);
}

/* The sum of g - enc(g) over each set is 0 up to rounding, so updates of a set add up to its count
 * times the global mean. */
TEST(errors_add_up_to_zero) {
  setup_t s;
  make(&s, TREFOIL_GRAD_A2SGD);
  s.c.scope = TREFOIL_GRAD_WHOLE_MODEL;
  float means[WORKERS][2];
  for (int w = 0; w < WORKERS; w++) GOOD(trefoilGradTwoMeans(&s.c, s.grad[w], means[w]));
  step(&s, 0);
  for (int w = 0; w < WORKERS; w++) {
    double error[2] = {0}, update[2] = {0}, count[2] = {0};
    for (int i = 0; i < N; i++) {
      int side = s.grad[w][i] < 0;
      error[side] += fabs((double)s.grad[w][i]) - (double)means[w][side];
      update[side] += (double)s.update[w][i] * (side ? -1 : 1);
      count[side]++;
    }
    for (int k = 0; k < 2; k++) {
      double all = ((double)means[0][k] + (double)means[1][k] + (double)means[2][k]) / 3;
      CHECK(fabs(error[k]) < 1e-4, "worker %d, set %d: %g", w, k, error[k]);
      CHECK(fabs(update[k] - count[k] * all) < 1e-3, "worker %d, set %d", w, k);
    }
  }
}

/* Element 0 of worker 1 is positive and spoils only what its rule says. */
TEST(not_finite) {
  const float bad[] = {NAN, INFINITY};
  for (int b = 0; b < 4; b++) {
    setup_t s, good;
    make(&good, b < 2 ? TREFOIL_GRAD_A2SGD : TREFOIL_GRAD_QSGD);
    good.c.qsgdBucket = 20;
    make(&s, good.c.method);
    s.c.qsgdBucket = 20;
    s.grad[1][0] = bad[b % 2];
    good.grad[1][0] = 1;
    step(&s, 0);
    step(&good, 0);
    for (int w = 0; w < WORKERS; w++) {
      for (int i = 0; i < N; i++) {
        bool isHit = b < 2 ? i < 40 && !(s.grad[w][i] < 0) : i < 20;
        float u = s.update[w][i];
        if (!isHit)
          CHECK(u == good.update[w][i], "case %d: element %d of %d changed", b, i, w);
        else if (w == 1 || b != 1)
          CHECK(isnan(u), "case %d: element %d of %d is %g", b, i, w, (double)u);
        else
          CHECK(isinf(u), "case %d: element %d of %d is %g", b, i, w, (double)u);
      }
    }
  }
}

TEST(sync_period) {
  setup_t s;
  make(&s, TREFOIL_GRAD_A2SGD);
  s.c.syncPeriod = 4;
  float before[WORKERS][N];
  memcpy(before, s.grad, sizeof before);
  void *params[] = {s.grad[0], s.grad[1], s.grad[2]};
  for (int t = 0; t < 3; t++) GOOD(trefoilGradSync(&s.c, t, params));
  SAME(before, s.grad, "averaged too early");
  GOOD(trefoilGradSync(&s.c, 3, params));
  SAME(s.grad[0], s.grad[2], "not averaged");
  double sum = (double)before[0][5] + (double)before[1][5] + (double)before[2][5];
  CHECK(s.grad[1][5] == (float)(sum / 3), "not the mean");
  memcpy(s.grad, before, sizeof before);
  s.c.syncPeriod = 0;
  GOOD(trefoilGradSync(&s.c, 3, params));
  s.c.method = TREFOIL_GRAD_DENSE;
  s.c.syncPeriod = 1;
  GOOD(trefoilGradSync(&s.c, 3, params));
  SAME(before, s.grad, "averaged without being asked");
}

static void topkOnce(const float *grad, int n, int share, float *state, float *update) {
  const int64_t sizes[] = {n};
  trefoil_grad_config_t c = {TREFOIL_GRAD_TOPK, TREFOIL_F32, 1, 1, sizes, .seed = 0};
  c.topkPerMillion = share;
  GOOD(trefoilGradStep(
      &c, 0, &(trefoil_grad_workers_t){(const void *[]){grad}, &state, (void *[]){update}}));
}

TEST(topk_selects) {
  const float grad[] = {2, -3, 1, 3, -3, 0.5f}, want[] = {0, -3, 0, 3, 0, 0};
  float state[6] = {0}, update[6];
  topkOnce(grad, 6, 333333, state, update); /* 2 of 6; three are equal */
  SAME(want, update, "the largest, the first of equal ones");
  const float left[] = {2, 0, 1, 0, -3, 0.5f};
  SAME(left, state, "what is not sent stays");
}

/* What was sent and what is left is what came in, over many steps; everything is sent some day. */
TEST(topk_keeps_errors) {
  setup_t s;
  make(&s, TREFOIL_GRAD_TOPK);
  double sent[N] = {0}, given[N] = {0};
  for (int t = 0; t < 50; t++) {
    for (int w = 0; w < WORKERS; w++) {
      for (int i = 0; i < N; i++) {
        s.grad[w][i] = roundf(64 * numberOf((uint32_t)((t * WORKERS + w) * N + i))) / 64;
        given[i] += (double)s.grad[w][i];
      }
    }
    step(&s, t);
    int numSent = 0;
    for (int i = 0; i < N; i++) {
      sent[i] += 3 * (double)s.update[0][i];
      numSent += s.update[0][i] != 0;
    }
    CHECK(numSent >= 4 && numSent <= 30, "%d elements of step %d", numSent, t);
  }
  for (int i = 0; i < N; i++) {
    double left = (double)s.state[0][i] + (double)s.state[1][i] + (double)s.state[2][i];
    CHECK(fabs(sent[i] + left - given[i]) < 1e-3, "element %d: %g lost", i, given[i] - sent[i]);
    CHECK(sent[i] != 0, "element %d was never sent", i);
  }
}

TEST(topk_not_finite) {
  const float grad[] = {1, INFINITY, NAN, 2};
  float state[4] = {0}, update[4];
  topkOnce(grad, 4, 250000, state, update);
  CHECK(update[1] == 0 && isnan(update[2]), "NaN is the largest");
  const float left[] = {1, INFINITY, 0, 2}, zeros[4] = {0};
  SAME(left, state, "NaN leaves no error");
  topkOnce(zeros, 4, 250000, state, update);
  CHECK(isinf(update[1]) && state[1] == 0, "infinity is next, and leaves no error");
  topkOnce(zeros, 4, 250000, state, update);
  CHECK(update[3] == 2 && update[1] == 0 && update[2] == 0, "then numbers are as before");
}

TEST(qsgd_levels) {
  setup_t s;
  make(&s, TREFOIL_GRAD_QSGD);
  s.c.numWorkers = 1;
  for (int bits = 2; bits <= 8; bits++) {
    s.c.qsgdBits = bits;
    s.c.qsgdBucket = 7;
    step(&s, bits);
    float levels = (float)((1 << (bits - 1)) - 1);
    for (int first = 0; first < N; first += first == 35 ? 5 : 7) { /* 40 = 5 * 7 + 5 */
      float max = 0;
      int end = first == 35 ? 40 : first + 7 < N ? first + 7 : N;
      for (int i = first; i < end; i++) max = fmaxf(max, fabsf(s.grad[0][i]));
      for (int i = first; i < end; i++) {
        float u = s.update[0][i], g = s.grad[0][i], level = roundf(fabsf(u) / max * levels);
        CHECK(fabsf(u) == level / levels * max, "element %d of %d bits is no level", i, bits);
        CHECK(fabsf(u - g) < max / levels * 1.0001f, "element %d of %d bits: %g", i, bits,
              (double)g);
        CHECK(u == 0 || signbit(u) == signbit(g), "element %d of %d bits: sign", i, bits);
        CHECK(fabsf(g) < max || u == g, "the maximum of a bucket is exact");
      }
    }
  }
}

TEST(qsgd_is_unbiased) {
  setup_t s;
  make(&s, TREFOIL_GRAD_QSGD);
  double sum[N] = {0};
  for (int t = 0; t < 4000; t++) {
    step(&s, t);
    for (int i = 0; i < N; i++) sum[i] += (double)s.update[0][i];
  }
  for (int i = 0; i < N; i++) {
    double mean = ((double)s.grad[0][i] + (double)s.grad[1][i] + (double)s.grad[2][i]) / 3;
    CHECK(fabs(sum[i] / 4000 - mean) < 0.03, "element %d: %g, not %g", i, sum[i] / 4000, mean);
  }
}

/* With one level an element becomes 0 or the maximum: the draw decides, here against 1/2. */
TEST(qsgd_draws) {
  float grad[8] = {1, .5f, .5f, .5f, .5f, .5f, .5f, .5f}, update[8];
  const int64_t sizes[] = {1, 7};
  trefoil_grad_config_t c = {TREFOIL_GRAD_QSGD, TREFOIL_F32, 1, 2, sizes, .seed = 0};
  c.scope = TREFOIL_GRAD_WHOLE_MODEL;
  c.qsgdBits = 2;
  for (uint64_t seed = 0; seed < 8; seed++) {
    c.seed = seed << 40 | 5;
    GOOD(trefoilGradStep(
        &c, 9, &(trefoil_grad_workers_t){(const void *[]){grad}, NULL, (void *[]){update}}));
    for (uint32_t i = 1; i < 8; i++) {
      bool isUp = !(epPhilox(c.seed, i / 4, 0, 9, 0).word[i % 4] >> 31);
      CHECK(update[i] == (isUp ? 1 : 0), "element %u, seed %d", i, (int)seed);
    }
  }
}

TEST(in_place) {
  for (int method = 0; method < TREFOIL_GRAD_NUM_METHODS; method++) {
    setup_t s, same;
    make(&s, method);
    make(&same, method);
    for (int w = 0; w < WORKERS; w++) same.updates[w] = same.grad[w];
    for (int t = 0; t < 2; t++) {
      step(&s, t);
      step(&same, t);
      SAME(s.update, same.grad, "method %d, step %d", method, t);
      memcpy(s.grad, s.update, sizeof s.grad);
    }
    SAME(s.state, same.state, "method %d: errors", method);
  }
}

TEST(bad_configs) {
  setup_t s;
#define BAD_FIELD(method, field, value, word)                                                      \
  make(&s, method);                                                                                \
  s.c.field = value;                                                                               \
  BAD(trefoilGradCheck(&s.c), word)
  BAD(trefoilGradCheck(NULL), "NULL");
  BAD_FIELD(TREFOIL_GRAD_DENSE, method, 4, "method");
  BAD_FIELD(TREFOIL_GRAD_DENSE, dtype, TREFOIL_F64, "f64");
  BAD_FIELD(TREFOIL_GRAD_DENSE, numWorkers, 0, "numWorkers");
  BAD_FIELD(TREFOIL_GRAD_DENSE, numWorkers, TREFOIL_GRAD_MAX_WORKERS + 1, "4096");
  BAD_FIELD(TREFOIL_GRAD_DENSE, numTensors, -1, "numTensors");
  BAD_FIELD(TREFOIL_GRAD_DENSE, sizes, NULL, "sizes is NULL");
  BAD_FIELD(TREFOIL_GRAD_DENSE, scope, 2, "scope");
  BAD_FIELD(TREFOIL_GRAD_DENSE, sizes, ((const int64_t[]){1, -1}), "sizes[1] is -1");
  BAD_FIELD(TREFOIL_GRAD_A2SGD, syncPeriod, -1, "syncPeriod");
  BAD_FIELD(TREFOIL_GRAD_TOPK, topkPerMillion, 0, "topkPerMillion");
  BAD_FIELD(TREFOIL_GRAD_TOPK, topkPerMillion, 1000001, "topkPerMillion");
  BAD_FIELD(TREFOIL_GRAD_QSGD, qsgdBits, 1, "qsgdBits");
  BAD_FIELD(TREFOIL_GRAD_QSGD, qsgdBits, 9, "qsgdBits");
  BAD_FIELD(TREFOIL_GRAD_QSGD, qsgdBucket, -1, "qsgdBucket");
}

TEST(bad_arguments) {
  setup_t s, before;
  make(&s, TREFOIL_GRAD_TOPK);
  make(&before, TREFOIL_GRAD_TOPK);
  BAD(trefoilGradStep(&s.c, -1, &s.workers), "step is -1");
  BAD(trefoilGradStep(&s.c, (int64_t)1 << 32, &s.workers), "step");
  BAD(trefoilGradStep(&s.c, 0, NULL), "workers");
  s.grads[2] = NULL;
  BAD(trefoilGradStep(&s.c, 0, &s.workers), "grads[2]");
  s.grads[2] = s.grad[2];
  s.updates[1] = NULL;
  BAD(trefoilGradStep(&s.c, 0, &s.workers), "updates[1]");
  s.updates[1] = s.update[1];
  s.workers.states = NULL;
  BAD(trefoilGradStep(&s.c, 0, &s.workers), "states");
  BAD(trefoilGradSync(&s.c, 0, NULL), "params");
  BAD(trefoilGradSync(&s.c, -1, s.updates), "step");
  BAD(trefoilGradTwoMeans(&s.c, NULL, s.update[0]), "grad");
  BAD(trefoilGradTwoMeans(&s.c, s.grad[0], NULL), "means");
  BAD(trefoilGradSizes(&s.c, NULL), "out");
  SAME(s.update, before.update, "updates were written");
  SAME(s.state, before.state, "errors were written");
}

TEST_MAIN()
