// Speed of the A2SGD kernels against plain memory accesses in the same run, and the time of the exchange.
//
//   a2sgd_bench [--mi n]... [--dtype bf16 | f16 | f32] [--iterations n] [--json FILE]
//   a2sgd_bench --exchange [--ranks R] [--gpus] [--groups n] [--iterations n] [--json FILE]
//
// First form, one rank: gradients of n * 2^20 elements (default 64 and 1024), each dtype. The first kernel
// beside the fastest of several plain reads of the same array, the second, in place, beside the fastest
// plain read and write of it; another array is written before each launch, so that caches hold none of it.
// Second form: groups of 8 elements, so a step is launches and exchange. A rank's exchange is from its own
// means sent to all received, with the ranks set off together within about a microsecond; "last" is the
// rank that was sent last, "first" the one that waited longest.
// What differs from the reference is not timed. Exit code 1: a check failed.
#include "a2sgd_case.cuh"
#include "ll_time.cuh"

namespace {

struct BenchOptions {
  std::vector<int64_t> sizes; // in 2^20 elements
  std::vector<trefoil_dtype_t> dtypes;
  int iterations = 30, ranks = 4, groups = 1;
  bool exchange = false, gpus = false;
  FILE *json = nullptr;
  bool firstRow = true;
};

struct Spread { // microseconds
  double p50, p99, min;
};

Spread spreadOf(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return Spread{v[v.size() / 2], v[v.size() * 99 / 100], v[0]};
}

// Bits of normal numbers of both signs, of exponents near 1.
__global__ void fillKernel(unsigned *words, size_t n, int isF32) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
       i += (size_t)gridDim.x * blockDim.x) {
    unsigned h = (unsigned)i * 2654435761u ^ (unsigned)(i >> 32) * 40503u;
    h = (h ^ h >> 15) * 2246822519u;
    h ^= h >> 13;
    words[i] = isF32 ? (h & 0x83FFFFFFu) | 0x3C000000u : (h & 0x83FF83FFu) | 0x38003800u;
  }
}

template <int N, bool WRITES> __global__ void plainKernel(uint4 *p, size_t vectors, uint4 *sink) {
  uint4 any = make_uint4(0, 0, 0, 0);
  const size_t stride = (size_t)gridDim.x * blockDim.x * N;
  for (size_t i = (size_t)blockIdx.x * blockDim.x * N + threadIdx.x; i < vectors; i += stride) {
    uint4 v[N];
#pragma unroll
    for (int k = 0; k < N; k++)
      v[k] = i + k * blockDim.x < vectors ? loadStream(p + i + k * blockDim.x) : any;
#pragma unroll
    for (int k = 0; k < N; k++) {
      if (WRITES) {
        v[k].x ^= 1;
        if (i + k * blockDim.x < vectors) storeStream(p + i + k * blockDim.x, v[k]);
      } else {
        any.x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
      }
    }
  }
  if (!WRITES && any.x == 0x12345678u) *sink = any;
}

struct PlainVariant {
  void (*read)(uint4 *, size_t, uint4 *), (*write)(uint4 *, size_t, uint4 *);
  int blocksPerSm;
};
const PlainVariant variants[] = {{plainKernel<4, false>, plainKernel<4, true>, 8},
                                 {plainKernel<8, false>, plainKernel<8, true>, 4},
                                 {plainKernel<4, false>, plainKernel<4, true>, 4},
                                 {plainKernel<2, false>, plainKernel<2, true>, 8},
                                 {plainKernel<4, false>, plainKernel<4, true>, 64}};
constexpr int NUM_VARIANTS = sizeof variants / sizeof variants[0];

// One launch between two events, after other memory was written.
struct Stopwatch {
  cudaEvent_t begin, end;
  char *other;
  size_t otherBytes;

  double time(cudaStream_t q, const std::function<void()> &launch) {
    CU(cudaMemsetAsync(other, 1, otherBytes, q));
    CU(cudaEventRecord(begin, q));
    launch();
    CU(cudaEventRecord(end, q));
    CU(cudaEventSynchronize(end));
    float ms;
    CU(cudaEventElapsedTime(&ms, begin, end));
    return ms * 1e3;
  }
};

bool checkOnce(World &w, const Model &m, const ep_a2sgd_step_t &s, char *grad) {
  const size_t bytes = gradBytes(m);
  const Gradients before = {w.download(0, grad, bytes)};
  OK(epA2sgdStep(&s, w.ranks[0].stream));
  w.sync();
  return w.download(0, grad, bytes) == referenceStep(m, before, 1)[0];
}

void printRates(BenchOptions &o, const char *name, const Model &m, double bytes, const Spread &ours,
                const Spread &plain) {
  const double ratio = plain.p50 / ours.p50;
  printf("%-4s %5lld Mi  %-10s %9.2f us p99 %9.2f %7.0f GB/s   plain %9.2f us %7.0f GB/s   ratio "
         "%.3f\n",
         trefoilDtypeName(m.dtype), (long long)(epGradModelElements(&m) >> 20), name, ours.p50,
         ours.p99, bytes / ours.p50 * 1e-3, plain.p50, bytes / plain.p50 * 1e-3, ratio);
  fflush(stdout);
  if (!o.json) return;
  fprintf(o.json,
          "%s\n    {\"operation\": \"%s\", \"dtype\": \"%s\", \"elements\": %lld, \"us\": %.3f, "
          "\"p99_us\": %.3f, \"plain_us\": %.3f, \"bytes\": %.0f, \"ratio\": %.4f}",
          o.firstRow ? "" : ",", name, trefoilDtypeName(m.dtype),
          (long long)epGradModelElements(&m), ours.p50, ours.p99, plain.p50, bytes, ratio);
  o.firstRow = false;
}

// The fastest plain variant, by its median.
Spread fastest(const std::vector<std::vector<double>> &times) {
  Spread best = spreadOf(times[0]);
  for (const auto &t : times) {
    const Spread s = spreadOf(t);
    if (s.p50 < best.p50) best = s;
  }
  return best;
}

bool rates(BenchOptions &o, trefoil_dtype_t dtype, int64_t mi) {
  const Model m = {dtype, TREFOIL_GRAD_WHOLE_MODEL, 1, {mi << 20}};
  const size_t bytes = gradBytes(m), otherBytes = 256u << 20;
  int sms = 0;
  CU(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  World w;
  w.open(1, true, 4096, bytes + otherBytes + (64u << 20));
  Group group;
  group.open(w, m, sms, sms, 4000000000ull);
  ep_a2sgd_step_t s = group.steps[0];
  char *grad = w.take<char>(0, bytes);
  uint4 *vectors = (uint4 *)grad, *sink = w.take<uint4>(0, 1);
  Stopwatch watch = {nullptr, nullptr, w.take<char>(0, otherBytes), otherBytes};
  CU(cudaEventCreate(&watch.begin));
  CU(cudaEventCreate(&watch.end));
  cudaStream_t q = w.ranks[0].stream;
  s.grad = s.update = grad;
  CU(epStart(fillKernel, 1024, 256, q, (unsigned *)grad, bytes / 4, (int)(dtype == TREFOIL_F32)));
  const bool ok = checkOnce(w, m, s, grad);
  std::vector<double> means, move;
  std::vector<std::vector<double>> reads(NUM_VARIANTS), writes(NUM_VARIANTS);
  for (int i = -3; ok && i < o.iterations; i++) {
    for (int v = 0; v < NUM_VARIANTS; v++) {
      const unsigned blocks = sms * variants[v].blocksPerSm;
      const double read = watch.time(
          q, [&] { CU(epStart(variants[v].read, blocks, 256, q, vectors, bytes / 16, sink)); });
      const double write = watch.time(
          q, [&] { CU(epStart(variants[v].write, blocks, 256, q, vectors, bytes / 16, sink)); });
      if (i < 0) continue;
      reads[v].push_back(read);
      writes[v].push_back(write);
    }
    const double first = watch.time(q, [&] { OK(epA2sgdMeans(&s, q)); });
    const double second = watch.time(q, [&] { OK(epA2sgdMove(&s, q)); });
    if (i < 0) continue;
    means.push_back(first);
    move.push_back(second);
  }
  if (ok) {
    printRates(o, "means", m, (double)bytes, spreadOf(means), fastest(reads));
    printRates(o, "move", m, 2.0 * bytes, spreadOf(move), fastest(writes));
  } else {
    printf("%s %lld Mi: FAILED against the reference\n", trefoilDtypeName(dtype), (long long)mi);
  }
  CU(cudaFree(w.ranks[0].exchange));
  return ok;
}

// Steps in lockstep on all ranks: per iteration the shortest and the longest exchange of a rank.
bool exchangeTimes(BenchOptions &o) {
  const int R = o.ranks, n = o.iterations;
  Model m = {TREFOIL_F32, TREFOIL_GRAD_PER_TENSOR, 0, {}};
  setSizes(m, std::vector<int64_t>(o.groups, 8));
  Bench b; // its ranks and barriers
  b.open(R, !o.gpus, 64u << 20);
  Group group;
  group.open(b.w, m, 132 / (o.gpus ? 1 : R), 132 / (o.gpus ? 1 : R), 4000000000ull);
  std::vector<uint64_t *> stamps(R);
  Gradients before;
  std::vector<char *> grads(R);
  Rng rng = {11};
  for (int r = 0; r < R; r++) {
    CU(cudaSetDevice(b.w.ranks[r].device));
    before.push_back(gradientOf(rng, m, EP_GRAD_MIXED));
    grads[r] = b.w.upload(r, before[r]);
    stamps[r] = b.w.filled<uint64_t>(r, 2 * n, 0);
  }
  b.w.sync();
  const auto launch = [&](int r, uint64_t *at) {
    ep_a2sgd_step_t s = group.steps[r];
    s.grad = grads[r];
    s.update = grads[r];
    s.stamps = at;
    OK(epA2sgdStep(&s, b.w.ranks[r].stream));
  };
  for (int r = 0; r < R; r++) {
    CU(cudaSetDevice(b.w.ranks[r].device));
    launch(r, nullptr);
  }
  b.w.sync();
  const Gradients want = referenceStep(m, before, (1ull << R) - 1);
  for (int r = 0; r < R; r++) {
    if (b.w.download(r, grads[r], want[r].size()) == want[r]) continue;
    printf("exchange: FAILED against the reference on rank %d\n", r);
    return false;
  }
  for (int i = 0; i < n; i++) {
    for (int r = 0; r < R; r++) {
      CU(cudaSetDevice(b.w.ranks[r].device));
      lockstepKernel<<<1, 32, 0, b.w.ranks[r].stream>>>(b.barriers[r], 20000);
      launch(r, stamps[r] + 2 * i);
    }
  }
  b.w.sync();
  std::vector<double> shortest(n, 1e9), longest(n, 0);
  for (int r = 0; r < R; r++) {
    CU(cudaSetDevice(b.w.ranks[r].device));
    const auto h = b.w.download(r, stamps[r], 2 * n);
    for (int i = 0; i < n; i++) {
      const double us = (h[2 * i + 1] - h[2 * i]) * 1e-3;
      shortest[i] = std::min(shortest[i], us);
      longest[i] = std::max(longest[i], us);
    }
  }
  const Spread s = spreadOf(shortest), l = spreadOf(longest);
  printf(
      "exchange of %d groups, %d ranks on %s: last rank %.2f us p99 %.2f, first rank %.2f us p99 "
      "%.2f\n",
      o.groups, R, o.gpus ? "GPUs" : "one GPU", s.p50, s.p99, l.p50, l.p99);
  if (o.json)
    fprintf(o.json,
            "%s\n    {\"operation\": \"exchange\", \"ranks\": %d, \"gpus\": %d, \"groups\": %d, "
            "\"last_us\": %.3f, \"last_p99_us\": %.3f, \"first_us\": %.3f, \"first_p99_us\": %.3f}",
            o.firstRow ? "" : ",", R, o.gpus ? R : 1, o.groups, s.p50, s.p99, l.p50, l.p99);
  o.firstRow = false;
  return true;
}

bool parse(int argc, char **argv, BenchOptions &o) {
  static const trefoil_dtype_t all[] = {TREFOIL_BF16, TREFOIL_F16, TREFOIL_F32};
  for (int i = 1; i < argc; i++) {
    auto text = [&] { return i + 1 < argc ? argv[++i] : ""; };
    if (!strcmp(argv[i], "--mi"))
      o.sizes.push_back(atoll(text()));
    else if (!strcmp(argv[i], "--dtype")) {
      const char *name = text();
      for (trefoil_dtype_t d : all)
        if (!strcmp(trefoilDtypeName(d), name)) o.dtypes.push_back(d);
    } else if (!strcmp(argv[i], "--iterations"))
      o.iterations = std::max(1, atoi(text()));
    else if (!strcmp(argv[i], "--ranks"))
      o.ranks = std::min(8, std::max(1, atoi(text())));
    else if (!strcmp(argv[i], "--groups"))
      o.groups = std::min(std::max(1, atoi(text())), (int)EP_GRAD_MAX_TENSORS);
    else if (!strcmp(argv[i], "--exchange"))
      o.exchange = true;
    else if (!strcmp(argv[i], "--gpus"))
      o.gpus = true;
    else if (!strcmp(argv[i], "--json"))
      o.json = fopen(text(), "w");
    else {
      fprintf(stderr, "unknown argument %s\n", argv[i]);
      return false;
    }
  }
  if (o.sizes.empty()) o.sizes = {64, 1024};
  if (o.dtypes.empty()) o.dtypes.assign(all, all + 3);
  return true;
}

} // namespace

int main(int argc, char **argv) {
  BenchOptions o;
  if (!parse(argc, argv, o)) return 2;
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  int devices = 0;
  const int needed = o.exchange && o.gpus ? o.ranks : 1;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < needed) {
    printf("skipped: %d GPUs here, %d needed\n", devices, needed);
    return 77;
  }
  OK(epA2sgdLoad());
  if (o.json) fprintf(o.json, "{\"rows\": [");
  bool ok = true;
  if (o.exchange) {
    ok = exchangeTimes(o);
  } else {
    for (trefoil_dtype_t dtype : o.dtypes)
      for (int64_t mi : o.sizes) ok &= rates(o, dtype, mi);
  }
  if (o.json) {
    fprintf(o.json, "\n]}\n");
    fclose(o.json);
  }
  return ok ? 0 : 1;
}
