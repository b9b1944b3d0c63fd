// Tokens that say which they are, and what must become of them: the data, the expectations and the comparing
// kernels of ht_flow.cu.
//
// Elements are whole numbers of -7 to 7 made of rank, round, token and column, so every sum of up to 36 of
// them is exact in bf16. Where rows must lie comes from trefoil/layout.h, what comes back from the routing.
#ifndef TREFOIL_TESTS_KERNELS_HT_FLOW_CUH
#define TREFOIL_TESTS_KERNELS_HT_FLOW_CUH

#include "ht_check.cuh"

#include "trefoil/layout.h"

namespace {

struct Flow {
  std::string name;
  int R, E, K, N, width, numSms;
  int rounds;      // at least, ...
  long long total; // ... and until so many tokens have gone out
  bool random, flatOnly;
  int windows; // of outputs: 0 never, 1 always, 2 every other pair of rounds; of inputs too, now and then
  int64_t alignment;
  int L() const { return (E + R - 1) / R; }
};

// What row `slot` must be: `times` the token `token` of rank `source`.
struct Expected {
  int source, token, slot, times;
};

struct Found { // on the device
  unsigned long long wrong, wrongWeights;
  long long sum;
  unsigned long long
      notFirst; // of the wrong ones: the complement of the least slot << 32 | element
};

__host__ __device__ inline int valueOf(int source, int round, int token, long long element) {
  return (int)((source * 131 + round * 17ll + token * 7ll + element * 3) % 15) - 7;
}
__host__ __device__ inline float weightOf(int source, int round, int token, int k) {
  return (float)((source * 31 + round * 3 + token * 13 + k * 5) % 1021);
}
// Of a whole number of at most 8 bits.
__device__ inline unsigned bf16Of(int v) {
  union {
    float f;
    unsigned u;
  } x = {(float)v};
  return x.u >> 16;
}
__device__ inline int wholeOf(unsigned bits) {
  union {
    unsigned u;
    float f;
  } x = {bits << 16};
  return (int)x.f;
}

struct Tokens {
  unsigned *rows; // two elements a word
  float *weights; // or NULL
  int source, round, numTokens, words, topk;
};

__global__ void makeKernel(const Tokens a) {
  const long long step = (long long)gridDim.x * blockDim.x;
  const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (long long i = at; i < (long long)a.numTokens * a.words; i += step) {
    const int t = (int)(i / a.words);
    const long long j = i % a.words * 2;
    a.rows[i] = bf16Of(valueOf(a.source, a.round, t, j)) |
                bf16Of(valueOf(a.source, a.round, t, j + 1)) << 16;
  }
  for (long long i = at; a.weights && i < (long long)a.numTokens * a.topk; i += step)
    a.weights[i] = weightOf(a.source, a.round, (int)(i / a.topk), (int)(i % a.topk));
}

struct Look {
  const unsigned *rows;
  const Expected *expected;
  Found *found;
  long long numRows;
  int round, words;
  bool sums;
};

__global__ void lookKernel(const Look a) {
  const long long step = (long long)gridDim.x * blockDim.x;
  unsigned long long wrong = 0;
  long long sum = 0;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < a.numRows * a.words;
       i += step) {
    const Expected e = a.expected[i / a.words];
    const long long word = i % a.words;
    const unsigned got = a.rows[(long long)e.slot * a.words + word];
    unsigned want = 0;
    if (e.times)
      want = bf16Of(e.times * valueOf(e.source, a.round, e.token, 2 * word)) |
             bf16Of(e.times * valueOf(e.source, a.round, e.token, 2 * word + 1)) << 16;
    if (got != want) {
      wrong++;
      atomicMax(&a.found->notFirst, ~((unsigned long long)e.slot << 32 | (unsigned)(2 * word)));
    }
    sum += wholeOf(got & 0xffff) + wholeOf(got >> 16);
  }
  if (wrong) atomicAdd(&a.found->wrong, wrong);
  if (a.sums) atomicAdd((unsigned long long *)&a.found->sum, (unsigned long long)sum);
}

struct LookWeights {
  const float *weights;
  Found *found;
  int source, round, numTokens, topk;
};

__global__ void lookWeightsKernel(const LookWeights a) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
       i < (long long)a.numTokens * a.topk; i += step) {
    if (a.weights[i] != weightOf(a.source, a.round, (int)(i / a.topk), (int)(i % a.topk)))
      atomicAdd(&a.found->wrongWeights, 1ull);
  }
}

// A round on a rank: its own numbers, on the host and on its device.
struct Turn {
  int B;
  std::vector<int32_t> topk;
  std::vector<Expected> slots, back;
  int32_t *topkOnDevice;
  Expected *slotsOnDevice, *backOnDevice;
};

bool isExpertMajor(const Flow &f, int round) {
  return !f.flatOnly && round % 2;
}

// Rounds in which all tokens of one rank go to the next rank's experts, and the others have one token: who
// leaves an operation without waiting for its readers leaves long before they are through.
bool isLopsided(const Flow &f, int round) {
  return f.random && f.K <= f.L() && round / 2 % 6 == 1;
}

void makeRouting(const Flow &f, int round, int rank, Turn &t) {
  Rng rng = {(uint64_t)(round * 64 + rank + 1)};
  t.B = f.random ? f.N - rng.below(f.N / 8 + 1) : f.N;
  if (isLopsided(f, round)) {
    if (rank != round % f.R) t.B = 1;
    for (int i = 0; i < t.B * f.K; i++) t.topk.push_back((rank + 1) % f.R * f.L() + i % f.K);
    return;
  }
  if (f.random) {
    t.topk = randomRouting(rng, t.B, f.K, f.E, 0);
    return;
  }
  t.topk.resize((size_t)t.B * f.K);
  for (size_t i = 0; i < t.topk.size(); i++)
    t.topk[i] = (int)((i / f.K * 5 + rank + i % f.K) % f.E);
}

// Every slot of every rank, and what comes back to every token.
void expect(const Flow &f, int round, std::vector<Turn> &turns) {
  const bool em = isExpertMajor(f, round);
  std::vector<int64_t> tokens;
  std::vector<const int32_t *> topk;
  for (const Turn &t : turns) tokens.push_back(t.B), topk.push_back(t.topk.data());
  const trefoil_routing_t routing = {trefoil_shape_t{f.R, f.R, f.E, f.K, f.N}, tokens.data(),
                                     topk.data()};
  trefoil_layout_config_t config = {};
  config.mode = em ? TREFOIL_HT_EXPERT_MAJOR : TREFOIL_HT_FLAT;
  config.alignment = em ? f.alignment : 1;
  trefoil_layout_t layout = {};
  OK(trefoilLayoutCompute(&layout, &routing, &config));
  for (int r = 0; r < f.R; r++) {
    Turn &own = turns[r];
    for (int t = 0; t < own.B; t++) {
      int times = 0;
      for (int k = 0; k < f.K; k++) {
        const size_t i = (size_t)t * f.K + k;
        const int rank = own.topk[i] / f.L(), slot = (int)layout.slotOf[r][i];
        bool again = false;
        for (int j = 0; j < k && !em; j++) again |= own.topk[i - 1 - j] / f.L() == rank;
        if (again) continue;
        times++;
        turns[rank].slots.push_back(Expected{r, t, slot, 1});
      }
      own.back.push_back(Expected{r, t, t, times});
    }
    for (int e = 0; e < f.L() && em; e++) { // padding
      const size_t i = (size_t)r * f.L() + e;
      for (int64_t s = layout.expertFilled[i]; s < layout.expertPadded[i]; s++)
        own.slots.push_back(Expected{0, 0, (int)(layout.zoneOffset[i] + s), 0});
    }
  }
  trefoilLayoutFree(&layout);
}

// Of all elements that come back, by the routing alone.
long long sumOf(const Flow &f, int round, const std::vector<Turn> &turns) {
  long long rowSum[15] = {}, sum = 0;
  for (int c = 0; c < 15; c++) { // a row's elements repeat every 5
    for (int j = 0; j < 5; j++) rowSum[c] += ((c + 3 * j) % 15 - 7) * (long long)(f.width / 5);
    for (int j = 0; j < f.width % 5; j++) rowSum[c] += (c + 3 * j) % 15 - 7;
  }
  for (const Turn &turn : turns)
    for (const Expected &e : turn.back)
      sum += e.times * rowSum[valueOf(e.source, round, e.token, 0) + 7];
  return sum;
}

} // namespace

#endif
