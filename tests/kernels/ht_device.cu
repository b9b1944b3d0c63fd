// The high-throughput kernels against the reference, bit for bit, on random shapes.
//
//   ht_device [--ranks R] [--gpus] [--cases n] [--seed s] [--case i] [--big] [--verbose] [--tokens n]
//             [--domains n]
//
// By default R virtual ranks share GPU 0; --gpus gives each its own. A case draws a shape and a number of
// steps; each step is Update, dispatch, combine, dispatch and combine of gradients, with new routing and new
// data, all launched back to back without the host waiting in between, with ranks delayed at random, into
// poisoned outputs, through FIFOs that wrap often or pushed into windows, on all ranks or some. In some
// cases there are many experts, everybody sends to the same few, or more comes than maxRecv. --big: few
// cases of training size. --tokens: no rank has more. --domains: NVLink domains of n ranks, over a network of
// plain copies, with rings of 1 to 64 units. A failure prints the command that repeats it.
#include "ht_case.cuh"

namespace {

Shape randomShape(Rng &rng, int R, bool big, int maxTokens, int perDomain) {
  Shape s = {};
  s.R = R;
  s.E = big ? R * 16 : rng.one(4) ? 1 + rng.below(R * 3) : R * (1 + rng.below(6));
  s.K = big ? 8 : rng.one(8) ? 1 + rng.below(64) : 1 + rng.below(10);
  s.N = big ? 1024 : rng.one(4) ? 1 + rng.below(900) : 1 + rng.below(60);
  const bool many = !big && rng.one(6);
  if (many) {
    s.E = R * (rng.one(5) ? 250 + rng.below(200) : 20 + rng.below(60));
    s.N = 1 + rng.below(60);
  }
  const bool crowd = !big && rng.one(4);
  if (crowd && !many) { // most tokens at places before maxRecv of one zone, and past it of another
    s.E = R * (4 + rng.below(5));
    s.K = 1 + rng.below(4);
  }
  s.N = std::min(s.N, maxTokens);
  s.L = (s.E + R - 1) / R;
  s.crowd = crowd ? std::max(1, std::min(s.L, s.E) - rng.below(3)) : 0;
  s.expertMajor = rng.one(2);
  static const trefoil_dtype_t wide[] = {TREFOIL_BF16, TREFOIL_F16, TREFOIL_F32};
  s.dtype = wide[rng.below(3)];
  s.combineDtype = wide[rng.below(3)];
  const int most = big ? 900 : rng.one(6) && !many ? 3000 : 40;
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
  s.alignment = s.expertMajor && !rng.one(3) ? 1 << rng.below(many ? 4 : 8) : rng.below(2);
  if (rng.one(3) || (s.crowd && !rng.one(4))) {
    s.drop = s.crowd ? !rng.one(4) : rng.one(2);
    s.zeroCopyOn = s.drop && s.expertMajor && rng.one(2);
    s.maxRecv = s.N + rng.below((s.crowd ? 1 : s.R) * s.N);
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
  s.sowsBad = rng.one(3);
  s.spare = s.E % 3 * 7;
  s.windows = rng.below(4);
  s.combines = rng.one(3) ? 3 : 1;
  s.config = ep_ht_config_t{R,
                            s.E,
                            s.K + (s.K < 60 ? rng.below(4) : 0),
                            s.N,
                            (size_t)std::max(s.tokenBytes() + s.scaleBytes, s.combineBytes()) +
                                16 * rng.below(3),
                            big ? 0 : 1 << rng.below(8)};
  if (perDomain) {
    s.perDomain = perDomain;
    s.ringSlots = big ? 0 : 1 << rng.below(7);
    s.numSms = std::max(s.numSms, EP_HT_FAR_LEAST_SMS + rng.below(3));
    s.windows = 0;
  }
  return s;
}

void randomStep(Rng &rng, const Shape &s, StepRank &k) {
  k.B = rng.one(5) ? 0 : rng.one(3) || s.crowd ? s.N : rng.below(s.N + 1);
  k.topk = randomRouting(rng, (int)k.B, s.K, s.crowd ? s.crowd : s.E, s.holes);
}

} // namespace

int main(int argc, char **argv) {
  beforeCuda();
  int R = 4, cases = 100, only = -1, tokens = INT32_MAX, perDomain = 0;
  unsigned long long seed = 1;
  bool gpus = false, big = false, verbose = false;
  for (int i = 1; i < argc; i++) {
    const std::string o = argv[i];
    auto next = [&] { return i + 1 < argc ? argv[++i] : "0"; };
    if (o == "--ranks") R = atoi(next());
    if (o == "--cases") cases = atoi(next());
    if (o == "--seed") seed = strtoull(next(), nullptr, 10);
    if (o == "--case") only = atoi(next());
    if (o == "--tokens") tokens = atoi(next());
    if (o == "--domains") perDomain = atoi(next());
    if (o == "--gpus") gpus = true;
    if (o == "--big") big = true;
    if (o == "--verbose") verbose = true;
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
    const Shape s = randomShape(rng, R, big, tokens, perDomain);
    if (verbose) printShape(s);
    if (runCase(w, rng, s, [&](int, int, StepRank &k) { randomStep(rng, s, k); })) continue;
    failed++;
    printf("FAILED: ht_device --ranks %d --domains %d%s%s --tokens %d --seed %llu --case %d\n", R,
           perDomain, gpus ? " --gpus" : "", big ? " --big" : "", tokens, seed, i);
    fflush(stdout);
    if (failed >= 5) break;
  }
  printf("%d ranks on %s: %d cases, %d failed\n", R, gpus ? "GPUs" : "one GPU", ran, failed);
  return failed ? 1 : 0;
}
