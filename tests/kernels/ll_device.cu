// The low-latency kernels against the reference, bit for bit, on random shapes.
//
//   ll_device [--ranks R] [--gpus] [--cases n] [--seed s] [--case i] [--blocks b] [--style s]
//             [--faults | --masks] [--generic 1 | 2] [--long] [--twice] [--domains n [--rails]]
//
// By default R virtual ranks share GPU 0; --gpus gives each its own. Every case draws a shape, a
// mode and a number of steps; each step has new routing and new data, all steps are launched back
// to back without the host waiting in between, with ranks delayed at random, into poisoned outputs.
// Operation numbers start near the places where flags wrap and buffers are cleared. Payloads are
// random bits in which words that equal flags are sown. Each rank draws whether it runs the fast
// dispatch (--generic 1: never, 2: wherever it can). Outputs may be one
// for all steps, which its owner's stream still reads when peers go on. --long: few experts and
// thousands of tokens. --twice: tokens that name an expert more than once.
// --faults: every other case, a rank that never launches or ends in the midst of a combine. --masks: ranks
// that take others for lost (ll_masks.cuh). --domains: domains of n ranks, with relays over plain copies;
// --rails: dispatch by rails. The bytes that ranks count are then the reference's.
// A failure prints the command that repeats it.
#include "ll_masks.cuh"

namespace {

// What rank r has counted, of both kinds, against the reference's rows.
bool checkBytes(World &w, const Shape &s, const std::vector<std::vector<StepRank>> &steps, int r) {
  std::vector<uint64_t> want(2 * s.R, 0);
  std::vector<int64_t> tokens, rows(s.R * s.R);
  std::vector<const int32_t *> topk;
  const uint64_t times = s.style == GRAPH ? 2 : 1;
  for (int i = 0; i < s.steps; i++) {
    for (int kind = 0; kind < (isAlone(s, i) ? 1 : 2); kind++) {
      trefoil_case_t c = caseOf(s, steps[i], tokens, topk, kind != 0);
      c.routing.shape.ranksPerNode = domains.perDomain;
      c.rails = domains.at.rails;
      OK(trefoilRefTraffic(&c, kind, rows.data()));
      const size_t bytes = kind ? s.combineBytes() : s.tokenBytes() + s.scaleBytesOut;
      for (int q = 0; q < s.R; q++) want[kind * s.R + q] += times * rows[r * s.R + q] * bytes;
    }
  }
  const auto got = w.download(r, steps[0][r].dispatch.group.bytes, want.size());
  return equal("bytes", r, 0, got.data(), want.data(), want.size() * 8, 8);
}

bool runCase(World &w, uint64_t seed, const Options &o) {
  Rng rng = {seed};
  Shape s = randomShape(rng, w.size(), o);
  if (o.style >= 0) s.style = (Style)o.style;
  if (s.style == TWO_IN_FLIGHT) s.reuses = false;
  if (o.verbose) printShape(s);
  auto steps = makeSteps(w, rng, s, rng.one(3), 4000000000ull, o);
  launchAll(w, s, steps, rng);
  bool ok = true;
  for (int r = 0; r < s.R; r++) {
    const ep_wait_record_t *q = w.ranks[r].record;
    if (q->failed) {
      printf("  rank %d gave up: kind %u phase %u on rank %d, operation %llu, flag %u not %u, item "
             "%lld\n",
             r, q->kind, q->phase, q->rank, (unsigned long long)q->operation, q->received,
             q->expected, (long long)q->item);
      ok = false;
    }
  }
  for (int i = 0; ok && i < s.steps; i++) {
    for (int r = 0; r < s.R; r++) {
      ok &= checkDispatch(w, s, steps[i], i, r, nullptr);
      if (!isAlone(s, i)) ok &= checkCombine(w, s, steps[i], i, r, nullptr);
    }
  }
  for (int r = 0; ok && domains.perDomain && r < s.R; r++) ok &= domains.checkGuard(w, r);
  for (int r = 0; ok && domains.perDomain && !o.twice && r < s.R; r++)
    ok &= checkBytes(w, s, steps, r);
  if (!ok) printShape(s);
  return ok;
}

__global__ void storeWord(char *to, uint4 word) {
  storeSys(to, word);
}

// The dispatch of step 0, and of its combine only the announcement: as a process leaves it that is killed
// between its announcement and its rows. Ranks that get no row from it are through with that combine
// before those that do.
void launchBeginning(World &w, const Shape &s, StepRank &k, int r) {
  const uint64_t number = s.first + 1;
  const uint4 announce = make_uint4(1, 0, 0, epLlFlag(number, EP_LL_FLAGS));
  CU(cudaSetDevice(w.ranks[r].device));
  OK(domains.dispatch(k.dispatch, EP_LL_BOTH, w.ranks[r].stream));
  for (int q = 0; q < s.R; q++) {
    char *to = w.ranks[q].exchange + w.at.announce + ((number & 1) * s.R + r) * 16;
    CU(epStart(storeWord, 1, 1, w.ranks[r].stream, to, announce));
  }
}

// Whether the record of rank r names the dead rank, or by rails may mean it as the one that forwards; with
// hops, whether a rank so named does.
bool leadsTo(const World &w, int r, int dead, int hops) {
  const ep_wait_record_t &q = *w.ranks[r].record;
  const bool forwarded = domains.perDomain && domains.at.rails && q.kind == EP_LL_DISPATCH;
  const int via = forwarded ? epLlRailVia(domains.perDomain, r, q.rank) : -1;
  if (!q.failed) return false;
  if (q.rank == dead || via == dead) return true;
  if (!hops) return false;
  return leadsTo(w, q.rank, dead, hops - 1) || (via >= 0 && leadsTo(w, via, dead, hops - 1));
}

// Whether the record of rank r names the dead rank and none but it was given up, in its first operation if it
// never launched. Without masks who needs nothing of it may name a rank that names it.
bool namesDead(const World &w, const Shape &s, int r, int dead, bool isBegun, bool masks) {
  const ep_wait_record_t &q = *w.ranks[r].record;
  const bool first =
      q.phase == EP_WAIT_ANNOUNCE && q.kind == EP_LL_DISPATCH && q.operation == s.first + 1;
  const bool named = leadsTo(w, r, dead, masks || !isBegun ? 0 : s.R);
  if (q.state == 2 && named && q.numGaveUp == 1 && (isBegun || first)) return true;
  printf("  rank %d: dead rank %d not named: failed %u state %u rank %d phase %u kind %u operation "
         "%llu, %u given up\n",
         r, dead, q.failed, q.state, q.rank, q.phase, q.kind, (unsigned long long)q.operation,
         q.numGaveUp);
  return false;
}

// One rank never launches, or ends in the midst of the first combine: with masks the others go on without it
// and match the reference, without masks they end; the record names it.
bool runFault(World &w, uint64_t seed, const Options &o) {
  Rng rng = {seed};
  Shape s = randomShape(rng, w.size(), o);
  s.style = FUSED;
  s.delays = false;
  const int R = s.R, dead = rng.below(R);
  // Across domains a rank that waits looks like one that is missing, and is masked, too.
  const bool masks = rng.one(2) && !domains.perDomain, isBegun = rng.one(2);
  auto steps = makeSteps(w, rng, s, masks, 20000000ull, o);
  for (int r = 0; r < R; r++) {
    if (r == dead) continue;
    CU(cudaSetDevice(w.ranks[r].device));
    enqueue(s, steps, r, w.ranks[r].stream, rng);
  }
  if (isBegun) launchBeginning(w, s, steps[0][dead], dead);
  w.sync();
  std::vector<uint8_t> all(R * R, 1), active(R * R, 1);
  for (int r = 0; r < R; r++) active[r * R + dead] = 0;
  bool ok = true;
  for (int r = 0; r < R; r++) {
    if (r == dead) continue;
    ok &= namesDead(w, s, r, dead, isBegun, masks);
    for (int i = 0; masks && ok && i < s.steps; i++) {
      const uint8_t *reached = isBegun && i == 0 ? all.data() : active.data();
      ok &= checkDispatch(w, s, steps[i], i, r, reached);
      ok &= checkCombine(w, s, steps[i], i, r, reached, active.data());
    }
  }
  return ok;
}

} // namespace

int main(int argc, char **argv) {
  int R = 4, cases = 200, only = -1, perDomain = 0;
  uint64_t seed = 1;
  bool gpus = false, faults = false, masks = false;
  Options o = {0, -1, 0, false, false, false};
  for (int i = 1; i < argc; i++) {
    auto value = [&] { return i + 1 < argc ? strtoull(argv[++i], nullptr, 0) : 0ull; };
    if (!strcmp(argv[i], "--ranks"))
      R = (int)value();
    else if (!strcmp(argv[i], "--gpus"))
      gpus = true;
    else if (!strcmp(argv[i], "--cases"))
      cases = (int)value();
    else if (!strcmp(argv[i], "--seed"))
      seed = value();
    else if (!strcmp(argv[i], "--case"))
      only = (int)value();
    else if (!strcmp(argv[i], "--blocks"))
      o.maxBlocks = (int)value();
    else if (!strcmp(argv[i], "--style"))
      o.style = (int)value();
    else if (!strcmp(argv[i], "--faults"))
      faults = true;
    else if (!strcmp(argv[i], "--masks"))
      masks = true;
    else if (!strcmp(argv[i], "--generic"))
      o.generic = (int)value();
    else if (!strcmp(argv[i], "--long"))
      o.isLong = true;
    else if (!strcmp(argv[i], "--twice"))
      o.twice = true;
    else if (!strcmp(argv[i], "--domains"))
      perDomain = (int)value();
    else if (!strcmp(argv[i], "--rails"))
      domains.rails = true;
    else if (!strcmp(argv[i], "--verbose"))
      o.verbose = true;
    else {
      fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  int devices = 0;
  const int needed = World::gpusFor(R, !gpus);
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < needed) {
    printf("skipped: %d GPUs here, %d needed\n", devices, needed);
    return 77;
  }
  const int relays = perDomain ? 6 : 0; // most blocks of a relay at so few ranks
  if (!o.maxBlocks) o.maxBlocks = gpus ? 132 : std::max(1, 128 / R - relays);
  World w;
  w.open(R, !gpus, 384u << 20, 768u << 20);
  domains.open(w, perDomain);
  int failed = 0, ran = 0;
  for (int i = 0; i < cases; i++) {
    if (only >= 0 && i != only) continue;
    const uint64_t s = seed * 1000003ull + i * 7919ull;
    const bool ok = masks             ? runMasked(w, s, o)
                    : faults && i % 2 ? runFault(w, s, o)
                                      : runCase(w, s, o);
    ran++;
    if (ok) continue;
    failed++;
    printf(
        "FAILED: ll_device --ranks %d --domains %d%s%s%s%s%s%s --blocks %d --seed %llu --case %d "
        "--verbose\n",
        R, perDomain, domains.rails ? " --rails" : "", gpus ? " --gpus" : "",
        faults ? " --faults" : "", masks ? " --masks" : "", o.isLong ? " --long" : "",
        o.twice ? " --twice" : "", o.maxBlocks, (unsigned long long)seed, i);
    fflush(stdout);
    if (failed == 5) break;
  }
  printf("%d ranks on %s: %d cases, %d failed; of %ld dispatches %ld took the fast path, %ld used "
         "scratch\n",
         R, needed > 1 ? "GPUs" : "one GPU", ran, failed, numDispatches, numFast, numScratch);
  return failed ? 1 : 0;
}
