// High throughput when a rank does not come, or comes late.
//
//   ht_faults [--ranks R] [--gpus]
//
// By default R virtual ranks share GPU 0; --gpus gives each its own. For each operation, layout and way of
// being absent: the victim leaves out Update, dispatch or combine. All other ranks must end within the
// time limit, with a record that names the operation, the victim and no other; what they launch after that
// must return at once; the process lives, and a fresh group on the same GPUs is exact again. And a rank
// that comes 20 ms late, which is within the limit, costs nothing but time. Nor does one that is ahead:
// without tokens or experts in use it waits for nobody, and is through with its combines before the others
// begin theirs.
#include "ht_case.cuh"

#include <chrono>

namespace {

constexpr uint64_t LIMIT_NS = 100000000, SLACK_NS = 4000000000;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Shape shapeOf(int R, bool expertMajor, bool windows) {
  Shape s = {};
  s.R = R;
  s.E = 2 * R;
  s.K = 2 * R; // every token to all ranks: everybody waits for the victim
  s.L = 2;
  s.N = 12; // all chunks fit the FIFOs: nobody waits for credits
  s.steps = 1;
  s.passes = 1;
  s.numSms = 3;
  s.expertMajor = expertMajor;
  s.alignment = 1;
  s.dtype = s.combineDtype = TREFOIL_BF16;
  s.width = s.combineWidth = 512;
  s.finite = true;
  s.windows = windows;
  s.config = ep_ht_config_t{R, s.E, s.K, s.N, (size_t)s.tokenBytes(), 64};
  return s;
}

Fill everywhere(const Shape &s) {
  return [=](int, int rank, StepRank &k) {
    Rng rng = {(uint64_t)rank + 1};
    k.B = s.N;
    k.topk = randomRouting(rng, s.N, s.K, s.E, 0);
  };
}

struct Records {
  std::vector<ep_wait_record_t *> host, device;

  explicit Records(const Ranks &w) {
    for (const HtRank &k : w.ranks) {
      ep_wait_record_t *h, *d;
      CU(cudaSetDevice(k.device));
      CU(cudaHostAlloc(&h, sizeof *h, cudaHostAllocMapped | cudaHostAllocPortable));
      CU(cudaHostGetDevicePointer(&d, h, 0));
      memset(h, 0, sizeof *h);
      host.push_back(h);
      device.push_back(d);
    }
  }
  ~Records() {
    for (ep_wait_record_t *h : host) CU(cudaFreeHost(h));
  }
};

// All of a step that the rank launches: up to `last` (0 Update, 1 dispatch, 2 combine).
void launch(StepRank &k, int last, cudaStream_t q) {
  OK(epHtUpdate(&k.update, q));
  if (last > 0) OK(epHtDispatch(&k.pass[0].dispatch, q));
  if (last > 1) OK(epHtCombine(&k.pass[0].combine, q));
}

bool judge(const Ranks &w, const Records &records, int victim, int what) {
  static const unsigned kinds[] = {EP_HT_KIND_UPDATE, EP_HT_KIND_DISPATCH, EP_HT_KIND_COMBINE};
  bool ok = true;
  for (int r = 0; r < (int)w.ranks.size(); r++) {
    const ep_wait_record_t &n = *records.host[r];
    if (r == victim) {
      if (n.failed) printf("  the victim gave up\n"), ok = false;
      continue;
    }
    if (n.failed != 1 || n.state != 2 || n.kind != kinds[what] || n.rank != victim ||
        n.operation != 1 || n.nowNs - n.sinceNs < LIMIT_NS) {
      printf("  rank %d: failed %u state %u kind %u rank %d operation %llu after %.3f s\n", r,
             n.failed, n.state, n.kind, n.rank, (unsigned long long)n.operation,
             1e-9 * (double)(n.nowNs - n.sinceNs));
      ok = false;
    }
  }
  return ok;
}

// The victim launches what comes before operation `what`, the others everything.
bool absent(Ranks &w, bool expertMajor, bool windows, bool mixed, int victim, int what) {
  Shape s = shapeOf((int)w.ranks.size(), expertMajor, windows);
  if (mixed) s.closed = 1 + (victim + 1) % s.R;
  Rng rng = {5};
  std::vector<std::vector<StepRank>> steps = makeSteps(w, rng, s, everywhere(s));
  const Records records(w);
  for (int r = 0; r < s.R; r++) {
    StepRank &k = steps[0][r];
    for (ep_ht_group_t *g :
         {&k.update.group, &k.pass[0].dispatch.group, &k.pass[0].combine.group}) {
      g->record = records.device[r];
      g->timeoutNs = LIMIT_NS;
    }
  }
  const double start = now();
  for (int r = 0; r < s.R; r++) {
    CU(cudaSetDevice(w.ranks[r].device));
    if (r != victim)
      launch(steps[0][r], 2, w.ranks[r].stream);
    else if (what > 0)
      launch(steps[0][r], what - 1, w.ranks[r].stream);
  }
  w.sync();
  const double ended = now();
  bool ok = judge(w, records, victim, what);
  if (ended - start > 1e-9 * (double)(LIMIT_NS + SLACK_NS))
    printf("  it took %.1f s\n", ended - start), ok = false;
  for (int r = 0; r < s.R; r++) { // a lost group returns at once
    CU(cudaSetDevice(w.ranks[r].device));
    if (r != victim) launch(steps[0][r], 2, w.ranks[r].stream);
  }
  w.sync();
  if (now() - ended > 1e-9 * (double)LIMIT_NS)
    printf("  a lost group waited for another %.2f s\n", now() - ended), ok = false;
  w.free();
  return ok;
}

bool late(Ranks &w, bool expertMajor, bool windows, int victim) {
  Shape s = shapeOf((int)w.ranks.size(), expertMajor, windows);
  s.steps = 3;
  s.passes = 2;
  const Around around = {[&] {
                           CU(cudaSetDevice(w.ranks[victim].device));
                           CU(epStart(delayKernel, 1, 1, w.ranks[victim].stream, 20000000));
                         },
                         nullptr};
  Rng rng = {6};
  return runCase(w, rng, s, everywhere(s), around);
}

bool ahead(Ranks &w, bool windows, int victim) {
  Shape s = shapeOf((int)w.ranks.size(), false, windows);
  s.steps = 4;
  s.passes = 2;
  s.combines = 3;
  s.delays = true;
  s.closed = 1 + victim;
  Rng rng = {7};
  return runCase(w, rng, s, [&](int step, int rank, StepRank &k) {
    everywhere(s)(step, rank, k);
    if (rank == victim) k.B = 0;
    for (int32_t &e : k.topk) {
      if (e >= 0 && e / s.L == victim) e = -1;
    }
    if (rank == victim) k.topk.clear();
  });
}

} // namespace

int main(int argc, char **argv) {
  beforeCuda();
  int R = 4;
  bool gpus = false;
  for (int i = 1; i < argc; i++) {
    const std::string o = argv[i];
    if (o == "--ranks") R = i + 1 < argc ? atoi(argv[++i]) : 0;
    if (o == "--gpus") gpus = true;
  }
  int devices = 0;
  if (R < 2 || cudaGetDeviceCount(&devices) != cudaSuccess || devices < (gpus ? R : 1)) {
    printf("skipped: needs 2 ranks and %d GPUs, found %d\n", gpus ? R : 1, devices);
    return 77;
  }
  static const char *const names[] = {"Update", "dispatch", "combine"};
  Ranks w;
  w.open(R, !gpus);
  int failed = 0, ran = 0;
  for (int i = 0; i < 8; i++) {
    const bool em = i & 1, windows = i & 2;
    const int victim = i & 4 ? R - 1 : 0;
    const char *how = em ? "expert-major" : "flat", *where = windows ? ", windows" : "";
    for (int what = 0; what < 3; what++) {
      for (int mixed = 0; mixed <= windows; mixed++) {
        ran++;
        if (absent(w, em, windows, mixed, victim, what)) continue;
        failed++;
        printf("FAILED: rank %d of %d leaves out %s, %s%s%s\n", victim, R, names[what], how, where,
               mixed ? " on all ranks but the next" : "");
      }
    }
    if (!em) ran++;
    if (!em && !ahead(w, windows, victim)) {
      failed++;
      printf("FAILED: rank %d of %d is ahead, flat%s\n", victim, R, where);
    }
    ran++;
    if (late(w, em, windows, victim)) continue;
    failed++;
    printf("FAILED: rank %d of %d is late, %s%s\n", victim, R, how, where);
  }
  printf("%d ranks on %s: %d faults, %d failed\n", R, gpus ? "GPUs" : "one GPU", ran, failed);
  return failed ? 1 : 0;
}
