// Operations beside products of matrices: how much each slows the other, against the share of the SMs that
// the operation takes.
//
// Three loads on a stream of the lowest priority, the operations on one of the highest:
//   own         the product of validate/gpu_background.cu, one block on each SM that the operation leaves
//   cublas      cuBLAS, told to use as many SMs as the operation leaves
//   cublas all  cuBLAS on all SMs, whose blocks make room for the operation's as they end
// Each rank queues many products with an event after every fourth, then the operations between two events.
// What counts of the products are those that began and ended while operations ran. cuBLAS is looked for
// when the program runs (libcublas.so.13 or .12): nothing is linked.
#ifndef TREFOIL_TESTS_KERNELS_HT_BACKGROUND_CUH
#define TREFOIL_TESTS_KERNELS_HT_BACKGROUND_CUH

#include "ht_work.cuh"

#include "validate/gpu_tools.h"

#include <dlfcn.h>

namespace {

// The few calls of cublas_api.h and library_types.h that are needed; values as in CUDA 12 and 13.
struct Cublas {
  using Handle = void *;
  static constexpr int OP_N = 0, OP_T = 1, R_16BF = 14, COMPUTE_32F = 68, GEMM_DEFAULT = -1;
  int (*create)(Handle *) = nullptr;
  int (*setStream)(Handle, cudaStream_t) = nullptr;
  int (*setWorkspace)(Handle, void *, size_t) = nullptr;
  int (*setSms)(Handle, int) = nullptr;
  int (*gemm)(Handle, int, int, int, int, int, const void *, const void *, int, int, const void *,
              int, int, const void *, void *, int, int, int, int) = nullptr;

  bool load() {
    void *lib = nullptr;
    for (const char *name :
         {"libcublas.so.13", "/usr/local/cuda/lib64/libcublas.so.13", "libcublas.so.12"}) {
      if (!lib) lib = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (!lib) return false;
    *(void **)&create = dlsym(lib, "cublasCreate_v2");
    *(void **)&setStream = dlsym(lib, "cublasSetStream_v2");
    *(void **)&setWorkspace = dlsym(lib, "cublasSetWorkspace_v2");
    *(void **)&setSms = dlsym(lib, "cublasSetSmCountTarget");
    *(void **)&gemm = dlsym(lib, "cublasGemmEx");
    return create && setStream && setWorkspace && setSms && gemm;
  }
};

enum Load { OWN, CUBLAS_LEFT, CUBLAS_ALL, NUM_LOADS };
const char *const LOADS[] = {"own", "cublas", "cublas all"};

struct Background {
  static constexpr int SIZE = 4096, OPERATIONS = 48;
  static constexpr int EVENTS = 150, EACH = 4; // products: so many events, one after each four
  static constexpr size_t WORKSPACE = 64 << 20;
  Rows *rows;
  Cublas cublas;
  bool hasCublas = false;
  struct Rank {
    cudaStream_t low, high;
    char *a, *b, *c, *workspace;
    Cublas::Handle handle;
    std::vector<cudaEvent_t> done;
    cudaEvent_t base, begin, end;
  };
  std::vector<Rank> ranks;

  struct Figures { // microseconds of the slowest rank; 0: not asked for
    double operation, product;
    bool covered; // operations ran beside products from the first to the last
  };

  void open(Rows &r);
  void close();
  void product(int r, Load load, int sms);
  Figures run(const Work &work, bool combine, const Sms &n, int load, bool operates);
  void measure(const Work &work, bool combine, const Sms &n);
};

void Background::open(Rows &r) {
  rows = &r;
  hasCublas = cublas.load();
  if (!hasCublas) printf("no cuBLAS here: beside products of our own only\n");
  const Ranks &w = *r.clock.w;
  ranks.resize(w.ranks.size());
  for (size_t i = 0; i < ranks.size(); i++) {
    Rank &k = ranks[i];
    int least, most;
    CU(cudaSetDevice(w.ranks[i].device));
    CU(cudaDeviceGetStreamPriorityRange(&least, &most));
    CU(cudaStreamCreateWithPriority(&k.low, cudaStreamNonBlocking, least));
    CU(cudaStreamCreateWithPriority(&k.high, cudaStreamNonBlocking, most));
    const size_t bytes = std::max((size_t)2 * SIZE * SIZE, epGpuProductBytes());
    for (char **m : {&k.a, &k.b, &k.c}) {
      CU(cudaMalloc(m, bytes));
      CU(cudaMemset(*m, 0x3c, bytes)); // bf16 0.0115
    }
    CU(cudaMalloc(&k.workspace, WORKSPACE));
    for (cudaEvent_t *e : {&k.base, &k.begin, &k.end}) CU(cudaEventCreate(e));
    k.done.resize(EVENTS);
    for (cudaEvent_t &e : k.done) CU(cudaEventCreate(&e));
    if (!hasCublas) continue;
    if (cublas.create(&k.handle) || cublas.setStream(k.handle, k.low) ||
        cublas.setWorkspace(k.handle, k.workspace, WORKSPACE)) {
      printf("cuBLAS cannot be opened: beside products of our own only\n");
      hasCublas = false;
    }
  }
}

void Background::close() {
  for (Rank &k : ranks) {
    for (char *m : {k.a, k.b, k.c, k.workspace}) CU(cudaFree(m));
    for (cudaEvent_t e : k.done) CU(cudaEventDestroy(e));
  }
  ranks.clear();
}

void Background::product(int r, Load load, int sms) {
  Rank &k = ranks[r];
  if (load == OWN) {
    OK(epGpuProduct(k.a, sms, k.low));
    return;
  }
  const float one = 1, zero = 0;
  const int rc = cublas.gemm(k.handle, Cublas::OP_T, Cublas::OP_N, SIZE, SIZE, SIZE, &one, k.a,
                             Cublas::R_16BF, SIZE, k.b, Cublas::R_16BF, SIZE, &zero, k.c,
                             Cublas::R_16BF, SIZE, Cublas::COMPUTE_32F, Cublas::GEMM_DEFAULT);
  if (rc) fprintf(stderr, "cublasGemmEx returned %d\n", rc), exit(3);
}

double elapsedUs(cudaEvent_t from, cudaEvent_t to) {
  float ms;
  CU(cudaEventElapsedTime(&ms, from, to));
  return ms * 1e3;
}

// load -1: none.
Background::Figures Background::run(const Work &work, bool combine, const Sms &n, int load,
                                    bool operates) {
  const Ranks &w = *work.w;
  const int left = GRID - n.sms;
  for (int r = 0; r < work.s.R; r++) {
    Rank &k = ranks[r];
    CU(cudaSetDevice(w.ranks[r].device));
    if (load >= CUBLAS_LEFT) cublas.setSms(k.handle, load == CUBLAS_LEFT ? left : 0);
    CU(cudaEventRecord(k.base, k.low));
    for (int i = 0; load >= 0 && i < EVENTS; i++) {
      for (int j = 0; j < EACH; j++) product(r, (Load)load, left);
      CU(cudaEventRecord(k.done[i], k.low));
    }
  }
  for (int r = 0; operates && r < work.s.R; r++) {
    CU(cudaSetDevice(w.ranks[r].device));
    CU(epStart(gateKernel, 1, 32, ranks[r].high, rows->clock.gates[r]));
    CU(cudaEventRecord(ranks[r].begin, ranks[r].high));
  }
  for (int i = 0; operates && i < OPERATIONS; i++) {
    for (int r = 0; r < work.s.R; r++) {
      CU(cudaSetDevice(w.ranks[r].device));
      work.operate(combine, n, r, i, nullptr, ranks[r].high);
      if (i == OPERATIONS - 1) CU(cudaEventRecord(ranks[r].end, ranks[r].high));
    }
  }
  work.w->sync();
  Figures f = {0, 0, true};
  for (int r = 0; r < work.s.R; r++) {
    Rank &k = ranks[r];
    CU(cudaSetDevice(w.ranks[r].device));
    double from = 0, to = 1e30;
    if (operates) {
      f.operation = std::max(f.operation, elapsedUs(k.begin, k.end) / OPERATIONS);
      if (load >= 0) from = elapsedUs(k.base, k.begin), to = elapsedUs(k.base, k.end);
    }
    if (load < 0) continue;
    double first = -1, last = -1;
    int counted = 0;
    for (int i = 0; i < EVENTS; i++) {
      const double t = elapsedUs(k.base, k.done[i]);
      if (t < from || t > to) continue;
      if (first < 0) first = t;
      last = t;
      counted++;
    }
    f.covered &= counted > 4 && (!operates || elapsedUs(k.base, k.done[EVENTS - 1]) > to);
    if (counted > 1) f.product = std::max(f.product, (last - first) / (counted - 1) / EACH);
  }
  return f;
}

void Background::measure(const Work &work, bool combine, const Sms &n) {
  const std::string name = work.name(combine ? "combine" : "dispatch");
  const double share = (double)GRID / (GRID - n.sms);
  run(work, combine, n, -1, true); // warms up
  const Figures alone = run(work, combine, n, -1, true);
  for (int load = 0; load < (hasCublas ? NUM_LOADS : CUBLAS_LEFT); load++) {
    run(work, combine, n, load, false);
    const Figures without = run(work, combine, n, load, false);
    const Figures both = run(work, combine, n, load, true);
    if (!both.covered || work.failed()) {
      printf("%s beside %s: NOT MEASURED, %s\n", name.c_str(), LOADS[load],
             work.failed() ? "an operation gave up" : "the products were over too soon");
      rows->failed = true;
      continue;
    }
    const double opSlower = both.operation / alone.operation;
    const double productSlower = both.product / without.product;
    printf("%-24s [%3d] beside %-10s  %8.2f us, alone %8.2f: x %.3f   product %8.2f us, alone "
           "%8.2f: x %.3f (its SMs: x %.3f)\n",
           name.c_str(), n.sms, LOADS[load], both.operation, alone.operation, opSlower,
           both.product, without.product, productSlower, load == CUBLAS_ALL ? share : 1.0);
    fflush(stdout);
    if (!rows->json) continue;
    rows->next();
    fprintf(
        rows->json,
        "{\"operation\": \"%s background\", \"check\": \"ok\", \"load\": \"%s\", \"sms\": %d, "
        "\"senders\": %d, \"ranks\": %d, \"tokens\": %d, \"topk\": %d, \"experts\": %d, "
        "\"hidden\": %d, \"alone_us\": %.2f, \"background_us\": %.2f, \"product_alone_us\": %.2f, "
        "\"product_background_us\": %.2f, \"slower\": %.4f, \"product_slower\": %.4f, "
        "\"product_share\": %.4f}",
        name.c_str(), LOADS[load], n.sms, n.senders, work.s.R, work.s.N, work.s.K, work.s.E,
        work.s.width, alone.operation, both.operation, without.product, both.product, opSlower,
        productSlower, load == CUBLAS_ALL ? share : 1.0);
  }
}

} // namespace

#endif
