// High throughput when a rank does not come, or comes late.
//
//   ht_faults [--ranks R] [--gpus] [--only blocks] [--domains n]
//
// By default R virtual ranks share GPU 0; --gpus gives each its own. For each operation, layout and way of
// being absent: the victim leaves out Update, dispatch or combine. All other ranks must end within the
// time limit, with a record that names the operation, the victim and no other (of a dispatch also where no
// rows are due from the victim); what they launch after that must return at once; the process lives, and a
// fresh group on the same GPUs is exact again. And a rank that comes 20 ms late, which is within the limit,
// costs nothing but time. Nor does one that is ahead: without tokens or experts in use it waits for nobody,
// and is through with its combines before the others begin theirs. Where blocks of one rank's Update are
// missing, which its barrier then counts wrongly, that launch ends after twice the limit and names its own
// rank. --only blocks: this, and ranks that come late. --domains: NVLink domains of n ranks; no windows.
// There a rank may be named that the victim's rows come by, which waits for the victim itself.
#include "ht_case.cuh"

#include "kernels/ht/ht_control.cuh"

#include <chrono>

namespace {

constexpr uint64_t LIMIT_NS = 100000000, SLACK_NS = 4000000000,
                   LOST_NS = 20000000000; // a lost group's launches would wait so long

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int perDomain; // 0: one domain

Shape shapeOf(int R, bool expertMajor, int windows) {
  Shape s = {};
  s.R = R;
  s.E = 2 * R;
  s.K = 2 * R; // every token to all ranks: everybody waits for the victim
  s.L = 2;
  s.N = 12; // all chunks fit the FIFOs: nobody waits for credits
  s.steps = 1;
  s.passes = 1;
  s.numSms = perDomain ? EP_HT_FAR_LEAST_SMS : 3;
  s.perDomain = perDomain;
  s.ringSlots = perDomain ? 64 : 0;
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

// The same without rank `apart`: it has no tokens, and gets none.
Fill without(const Shape &s, int apart) {
  return [=](int step, int rank, StepRank &k) {
    everywhere(s)(step, rank, k);
    if (rank == apart) k.B = 0, k.topk.clear();
    for (int32_t &e : k.topk) {
      if (e >= 0 && e / s.L == apart) e = -1;
    }
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
  htDomains.update(k.update, q);
  if (last > 0) htDomains.dispatch(k.pass[0].dispatch, q);
  if (last > 1) htDomains.combine(k.pass[0].combine, q);
}

// Whether rank r may name rank `named` when the victim leaves out operation `what`: the victim, or a rank
// that the victim's rows come by, which waits itself. That is in dispatch the own node's on the victim's
// rail, in combine the victim's node's on the own rail.
bool mayName(int r, int named, int victim, int what) {
  if (named == victim) return true;
  if (!perDomain || !what || r / perDomain == victim / perDomain) return false;
  const int rail = what == 1 ? victim % perDomain : r % perDomain;
  return named == (what == 1 ? r : victim) / perDomain * perDomain + rail;
}

// The records of all ranks but the victim.
bool judge(const Ranks &w, const Records &records, int victim, int what) {
  static const unsigned kinds[] = {EP_HT_KIND_UPDATE, EP_HT_KIND_DISPATCH, EP_HT_KIND_COMBINE};
  bool ok = true;
  for (int r = 0; r < (int)w.ranks.size(); r++) {
    const ep_wait_record_t &n = *records.host[r];
    if (r == victim) continue;
    if (n.failed != 1 || n.state != 2 || n.kind != kinds[what] ||
        !mayName(r, n.rank, victim, what) || n.operation != 1 || n.nowNs - n.sinceNs < LIMIT_NS) {
      printf("  rank %d: failed %u state %u kind %u rank %d operation %llu after %.3f s\n", r,
             n.failed, n.state, n.kind, n.rank, (unsigned long long)n.operation,
             1e-9 * (double)(n.nowNs - n.sinceNs));
      ok = false;
    }
  }
  return ok;
}

void setLimits(std::vector<StepRank> &step, const Records &records, uint64_t limitNs = LIMIT_NS) {
  for (size_t r = 0; r < step.size(); r++) {
    StepRank &k = step[r];
    for (ep_ht_group_t *g :
         {&k.update.group, &k.pass[0].dispatch.group, &k.pass[0].combine.group}) {
      g->record = records.device[r];
      g->timeoutNs = limitNs;
    }
  }
}

// The victim launches what comes before operation `what`, the others everything. owes: rows are due from it
// and to it.
bool absent(Ranks &w, bool expertMajor, int windows, bool mixed, int victim, int what, bool owes) {
  Shape s = shapeOf((int)w.ranks.size(), expertMajor, windows);
  if (mixed) s.closed = 1 + (victim + 1) % s.R;
  Rng rng = {5};
  std::vector<std::vector<StepRank>> steps =
      makeSteps(w, rng, s, owes ? everywhere(s) : without(s, victim));
  const Records records(w);
  setLimits(steps[0], records);
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
  if (records.host[victim]->failed) printf("  the victim gave up\n"), ok = false;
  if (ended - start > 1e-9 * (double)(LIMIT_NS + SLACK_NS))
    printf("  it took %.1f s\n", ended - start), ok = false;
  setLimits(steps[0], records, LOST_NS);
  for (int r = 0; r < s.R; r++) { // a lost group returns at once
    CU(cudaSetDevice(w.ranks[r].device));
    if (r != victim) launch(steps[0][r], 2, w.ranks[r].stream);
  }
  w.sync();
  if (now() - ended > 1e-9 * LOST_NS)
    printf("  a lost group waited for another %.2f s\n", now() - ended), ok = false;
  w.free();
  return ok;
}

HtControl controlOf(const HtRank &k) {
  HtControl c;
  CU(cudaSetDevice(k.device));
  CU(cudaMemcpy(&c, k.control, sizeof c, cudaMemcpyDeviceToHost));
  return c;
}

void setBarrierCount(const HtRank &k, unsigned count) {
  CU(cudaSetDevice(k.device));
  CU(cudaMemcpy(k.control + offsetof(HtControl, barrierCount), &count, sizeof count,
                cudaMemcpyHostToDevice));
}

// The record of a rank whose Update, of so many blocks, could not pass its barrier.
bool isOfBlocks(const ep_wait_record_t &n, int rank, int blocks) {
  const uint64_t waited = n.nowNs - n.sinceNs;
  if (n.failed == 1 && n.numGaveUp == 1 && n.state == 2 && n.kind == EP_HT_KIND_UPDATE &&
      n.phase == EP_WAIT_BLOCKS && n.rank == rank && n.operation == 1 && n.expected == 1 &&
      n.received == 0 && n.item >= 0 && n.item < blocks && waited > 2 * LIMIT_NS &&
      waited < 2 * LIMIT_NS + SLACK_NS)
    return true;
  printf(
      "  rank %d: failed %u state %u kind %u phase %u rank %d operation %llu flag %u not %u block "
      "%lld of %d after %.3f s, %u given up\n",
      rank, n.failed, n.state, n.kind, n.phase, n.rank, (unsigned long long)n.operation, n.received,
      n.expected, (long long)n.item, blocks, 1e-9 * (double)waited, n.numGaveUp);
  return false;
}

// Every rank's Update has passed, except the victim's.
bool isUpdated(const Ranks &w, const Shape &s, const std::vector<StepRank> &step, int victim) {
  bool ok = true;
  for (int r = 0; r < s.R; r++) {
    const unsigned long long number = controlOf(w.ranks[r]).numbers[2];
    ep_ht_head_t head;
    CU(cudaMemcpy(&head, step[r].update.handle.memory, sizeof head, cudaMemcpyDeviceToHost));
    if (number == (r != victim) && (r == victim || head.flatTotal == (int64_t)s.R * s.N)) continue;
    printf("  rank %d: %llu Updates finished, %lld tokens come\n", r, number,
           (long long)head.flatTotal);
    ok = false;
  }
  return ok;
}

// The victim's barrier counts blocks that are none, so it is never full. The others' Updates pass, since what
// they need of the victim is sent before its barrier; their dispatches wait for it in vain.
bool blocked(Ranks &w, bool expertMajor, int victim, int blocks) {
  const Shape s = shapeOf((int)w.ranks.size(), expertMajor, false);
  Rng rng = {8};
  std::vector<std::vector<StepRank>> steps = makeSteps(w, rng, s, everywhere(s));
  const Records records(w);
  setLimits(steps[0], records);
  steps[0][victim].update.numSms = blocks;
  setBarrierCount(w.ranks[victim], 1u << 20);
  const double start = now();
  for (int r = 0; r < s.R; r++) {
    CU(cudaSetDevice(w.ranks[r].device));
    launch(steps[0][r], 2, w.ranks[r].stream);
  }
  w.sync();
  const double took = now() - start;
  bool ok = isOfBlocks(*records.host[victim], victim, blocks) & judge(w, records, victim, 1) &
            isUpdated(w, s, steps[0], victim);
  if (took > 1e-9 * (double)(2 * LIMIT_NS + SLACK_NS))
    printf("  it took %.1f s\n", took), ok = false;
  // The group is lost: a barrier that could be passed again does not bring it back.
  setBarrierCount(w.ranks[victim], 0);
  const ep_wait_record_t before = *records.host[victim];
  setLimits(steps[0], records, LOST_NS);
  const double again = now();
  CU(cudaSetDevice(w.ranks[victim].device));
  launch(steps[0][victim], 2, w.ranks[victim].stream);
  w.sync();
  if (now() - again > 1e-9 * LOST_NS)
    printf("  a lost group waited for another %.2f s\n", now() - again), ok = false;
  const HtControl c = controlOf(w.ranks[victim]);
  if (c.barrierCount || c.numbers[2] || !c.wait.failed ||
      memcmp(&before, records.host[victim], sizeof before) != 0) {
    printf("  a lost group's launch: barrier %u, %llu Updates finished, failed %u, %u given up\n",
           c.barrierCount, c.numbers[2], c.wait.failed, records.host[victim]->numGaveUp);
    ok = false;
  }
  w.free();
  return ok;
}

bool late(Ranks &w, bool expertMajor, int windows, int victim) {
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

bool ahead(Ranks &w, int windows, int victim) {
  Shape s = shapeOf((int)w.ranks.size(), false, windows);
  s.steps = 4;
  s.passes = 2;
  s.combines = 3;
  s.delays = true;
  s.closed = 1 + victim;
  Rng rng = {7};
  return runCase(w, rng, s, without(s, victim));
}

} // namespace

int main(int argc, char **argv) {
  beforeCuda();
  int R = 4;
  bool gpus = false, onlyBlocks = false;
  for (int i = 1; i < argc; i++) {
    const std::string o = argv[i];
    if (o == "--ranks") R = i + 1 < argc ? atoi(argv[++i]) : 0;
    if (o == "--domains") perDomain = i + 1 < argc ? atoi(argv[++i]) : 0;
    if (o == "--gpus") gpus = true;
    if (o == "--only") onlyBlocks = true;
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
  static const char *const places[] = {"", ", windows", "", ", windows of inputs"};
  for (int i = 0; i < 12; i++) {
    const bool em = i & 1;
    const int windows = i / 4 == 2 ? 3 : i / 4, victim = i & 2 ? R - 1 : 0;
    if (windows && perDomain) continue;
    const char *how = em ? "expert-major" : "flat", *where = places[windows];
    if (!windows) ran++;
    if (!windows && !blocked(w, em, victim, victim ? 1 : 3)) {
      failed++;
      printf("FAILED: rank %d of %d lacks blocks in Update, %s\n", victim, R, how);
    }
    for (int what = 0; what < 3 && !onlyBlocks; what++) {
      for (int mixed = 0; mixed <= (windows > 0); mixed++) {
        ran++;
        if (absent(w, em, windows, mixed, victim, what, true)) continue;
        failed++;
        printf("FAILED: rank %d of %d leaves out %s, %s%s%s\n", victim, R, names[what], how, where,
               mixed ? " on all ranks but the next" : "");
      }
    }
    if (!onlyBlocks && !perDomain) ran++;
    if (!onlyBlocks && !perDomain && !absent(w, em, windows, false, victim, 1, false)) {
      failed++;
      printf("FAILED: rank %d of %d, which owes nothing, leaves out dispatch, %s%s\n", victim, R,
             how, where);
    }
    if (onlyBlocks && windows) continue;
    if (!em && !onlyBlocks) ran++;
    if (!em && !onlyBlocks && !ahead(w, windows, victim)) {
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
