// The high-throughput kernels against the reference, bit for bit, on random shapes.
//
//   ht_device [--ranks R] [--gpus] [--cases n] [--seed s] [--case i] [--big]
//
// By default R virtual ranks share GPU 0; --gpus gives each its own. A case draws a shape and a number of
// steps; each step is Update, dispatch, combine, dispatch and combine of gradients, with new routing and new
// data, all launched back to back without the host waiting in between, with ranks delayed at random, into
// poisoned outputs, through rings that wrap often. --big: few cases of training size. A failure prints the
// command that repeats it.
#include "ht_check.cuh"

namespace {

Shape randomShape(Rng &rng, int R, bool big) {
  Shape s = {};
  s.R = R;
  s.E = big ? R * 16 : rng.one(4) ? 1 + rng.below(R * 3) : R * (1 + rng.below(6));
  s.K = big ? 8 : rng.one(8) ? 1 + rng.below(64) : 1 + rng.below(10);
  s.N = big ? 1024 : rng.one(4) ? 1 + rng.below(900) : 1 + rng.below(60);
  s.L = (s.E + R - 1) / R;
  s.expertMajor = rng.one(2);
  static const trefoil_dtype_t wide[] = {TREFOIL_BF16, TREFOIL_F16, TREFOIL_F32};
  s.dtype = wide[rng.below(3)];
  s.combineDtype = wide[rng.below(3)];
  const int most = big ? 900 : rng.one(6) ? 3000 : 40;
  s.width = 16 / (int)trefoilDtypeBytes(s.dtype) * (1 + rng.below(most));
  s.combineWidth = 16 / (int)trefoilDtypeBytes(s.combineDtype) * (1 + rng.below(most));
  if (rng.one(3)) {
    static const trefoil_dtype_t any[] = {TREFOIL_E4M3, TREFOIL_E5M2, TREFOIL_FP4X2, TREFOIL_BF16};
    s.dtype = any[rng.below(4)];
    s.width = 16 * (1 + rng.below(most));
    s.scaleBytes = 16 * (1 + rng.below(12));
  }
  while ((double)s.R * s.N * std::min(s.K, s.L) *
             std::max(s.tokenBytes() + s.scaleBytes, s.combineBytes()) >
         (big ? 1e9 : 1.2e7)) {
    if (s.N > 64) {
      s.N /= 2;
    } else if (s.width > 64 && s.combineWidth > 64) {
      s.width = s.width / 2 / 16 * 16;
      s.combineWidth = s.combineWidth / 2 / 16 * 16;
    } else {
      s.N = std::max(1, s.N / 2);
    }
    if (s.N == 1 && s.width <= 64) break;
  }
  s.alignment = s.expertMajor && !rng.one(3) ? 1 << rng.below(8) : rng.below(2);
  if (rng.one(3)) {
    s.drop = rng.one(2);
    s.zeroCopyOn = s.drop && s.expertMajor && rng.one(2);
    s.maxRecv = s.N + rng.below(s.R * s.N);
  } else if (rng.one(2)) {
    s.maxRecv =
        (int64_t)s.R * s.N * (s.expertMajor ? s.K : 1) + s.L * std::max(s.alignment, (int64_t)1);
  }
  s.passes = 2;
  s.steps = big ? 2 : 1 + rng.below(4);
  s.numSms = big ? 8 + rng.below(16) : 1 + rng.below(5);
  s.idx64 = rng.one(2);
  s.count64 = rng.one(2);
  s.globalIds = rng.one(3);
  s.finite = rng.one(2);
  s.delays = rng.one(2);
  s.holes = rng.one(2) ? 2 + rng.below(6) : 0;
  s.config = ep_ht_config_t{R,
                            s.E,
                            s.K + (s.K < 60 ? rng.below(4) : 0),
                            s.N,
                            (size_t)std::max(s.tokenBytes() + s.scaleBytes, s.combineBytes()) +
                                16 * rng.below(3),
                            big ? 0 : 1 << rng.below(8)};
  return s;
}

bool runCase(Ranks &w, Rng &rng, bool big) {
  const Shape s = randomShape(rng, (int)w.ranks.size(), big);
  ep_ht_layout_t at;
  OK(epHtLayout(&s.config, &at));
  char control[EP_HT_CONTROL_BYTES];
  epHtControlInit(control);
  for (int r = 0; r < s.R; r++) {
    HtRank &k = w.ranks[r];
    k.exchange = w.take(r, at.bytes, 0);
    k.control = w.take(r, sizeof control, 0);
    k.scratch = w.take(r, epHtScratchBytes(&s.config), 0);
    CU(cudaMemcpy(k.control, control, sizeof control, cudaMemcpyHostToDevice));
  }
  std::vector<std::vector<StepRank>> steps(s.steps, std::vector<StepRank>(s.R));
  std::vector<char *> handles(s.R);
  for (int r = 0; r < s.R; r++) handles[r] = w.take(r, epHtHandleBytes(&s.config, s.K), POISON);
  for (auto &step : steps) {
    for (StepRank &k : step) {
      k = StepRank{};
      k.B = rng.one(5) ? 0 : rng.one(3) ? s.N : rng.below(s.N + 1);
      k.topk = randomRouting(rng, (int)k.B, s.K, s.E, s.holes);
    }
    std::vector<int64_t> tokens;
    std::vector<const int32_t *> topk;
    const trefoil_case_t c = caseOf(s, step, tokens, topk);
    for (int r = 0; r < s.R; r++) {
      const ep_ht_handle_t h = {handles[r],   s.K,         s.expertMajor, s.drop,
                                s.zeroCopyOn, s.alignment, s.maxRecv};
      makeRank(w, rng, s, c, step[r], r, groupOf(w, s, at, r), h);
    }
  }
  w.sync();
  for (auto &step : steps) {
    for (int r = 0; r < s.R; r++) {
      CU(cudaSetDevice(w.ranks[r].device));
      cudaStream_t q = w.ranks[r].stream;
      if (s.delays && rng.one(3)) delayKernel<<<1, 1, 0, q>>>(rng.below(300000));
      OK(epHtUpdate(&step[r].update, q));
      for (Pass &p : step[r].pass) {
        if (s.delays && rng.one(3)) delayKernel<<<1, 1, 0, q>>>(rng.below(300000));
        OK(epHtDispatch(&p.dispatch, q));
        if (s.delays && rng.one(3)) delayKernel<<<1, 1, 0, q>>>(rng.below(300000));
        OK(epHtCombine(&p.combine, q));
      }
    }
  }
  w.sync();
  bool ok = true;
  for (int i = 0; i < s.steps; i++) {
    for (int r = 0; r < s.R; r++) ok &= checkRank(s, steps[i], i, r);
  }
  if (!ok) {
    printf("  R %d E %d K %d N %d %s align %ld maxRecv %ld drop %d zc %d width %d (%d B) scales %d "
           "combine %d B, "
           "ring %d, sms %d, steps %d\n",
           s.R, s.E, s.K, s.N, s.expertMajor ? "expert-major" : "flat", (long)s.alignment,
           (long)s.maxRecv, s.drop, s.zeroCopyOn, s.width, s.tokenBytes(), s.scaleBytes,
           s.combineBytes(), at.ringUnits, s.numSms, s.steps);
  }
  w.free();
  return ok;
}

} // namespace

int main(int argc, char **argv) {
  int R = 4, cases = 100, only = -1;
  unsigned long long seed = 1;
  bool gpus = false, big = false;
  for (int i = 1; i < argc; i++) {
    const std::string o = argv[i];
    auto next = [&] { return i + 1 < argc ? argv[++i] : "0"; };
    if (o == "--ranks") R = atoi(next());
    if (o == "--cases") cases = atoi(next());
    if (o == "--seed") seed = strtoull(next(), nullptr, 10);
    if (o == "--case") only = atoi(next());
    if (o == "--gpus") gpus = true;
    if (o == "--big") big = true;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < (gpus ? R : 1)) {
    printf("skipped: needs %d GPUs, found %d\n", gpus ? R : 1, devices);
    return 77;
  }
  Ranks w;
  w.open(R, !gpus);
  int failed = 0, ran = 0;
  for (int i = 0; i < cases; i++) {
    if (only >= 0 && i != only) continue;
    Rng rng = {seed * 1000003ull + i};
    ran++;
    if (runCase(w, rng, big)) continue;
    failed++;
    printf("FAILED: ht_device --ranks %d%s%s --seed %llu --case %d\n", R, gpus ? " --gpus" : "",
           big ? " --big" : "", seed, i);
    fflush(stdout);
    if (failed >= 5) break;
  }
  printf("%d ranks on %s: %d cases, %d failed\n", R, gpus ? "GPUs" : "one GPU", ran, failed);
  return failed ? 1 : 0;
}
