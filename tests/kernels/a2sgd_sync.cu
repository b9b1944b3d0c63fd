// The synchronisation of parameters by A2SGD's kernels against the reference, bit for bit, on random models.
//
//   a2sgd_sync [--ranks R] [--gpus] [--cases n] [--seed s] [--case i] [--sms n] [--most n]
//              [--faults] [--large] [--verbose]
//
// By default R virtual ranks share GPU 0; --gpus gives each its own. A case draws a model of up to --most
// elements a tensor, chunks and channels, where arrays begin, and rounds: a synchronisation, behind a step or
// not, launched back to back on ranks that are delayed at random, or captured once and replayed. Some cases
// have ranks that do not regard one another as active. --faults: a rank never comes, or has gone on without
// the others. --large: chunks and channels are the library's.
// A failure prints the command that repeats it.
#include "a2sgd_main.cuh"

#include "kernels/a2sgd/a2sgd_sync.cuh"

namespace {

struct Case {
  Model model;
  int R, sms, rounds, period, channels;
  uint32_t chunkBytes;
  bool isReplayed, delays, hasSteps;
  size_t past; // bytes past a multiple of 16
  std::vector<uint64_t>
      views; // of each rank: the ranks that it regards as active; none: it stays away
  ep_grad_values_t values;

  bool isMasked() const {
    for (uint64_t view : views)
      if (view != (1ull << R) - 1) return true;
    return false;
  }
  bool isDue(int round) const { return !hasSteps || (round + 1) % period == 0; }
};

// One rank stays away; or any two do not regard each other as active.
std::vector<uint64_t> randomViews(Rng &rng, int R) {
  std::vector<uint64_t> views(R, (1ull << R) - 1);
  const int kind = rng.below(5), away = rng.below(R);
  for (int r = 0; r < R; r++) {
    for (int q = 0; q < r; q++) {
      if (kind == 0 ? r != away && q != away : kind > 1 || rng.one(2)) continue;
      views[r] &= ~(1ull << q);
      views[q] &= ~(1ull << r);
    }
  }
  if (kind == 0 && R > 1) views[away] = 0;
  return views;
}

Case randomCase(Rng &rng, int R, const Options &o) {
  static const uint32_t chunks[] = {16, 48, 256, 1024, 4096};
  Case c = {};
  c.R = R;
  epDrawGradModel(rng.next(), o.most, &c.model);
  c.channels = o.isLarge ? EP_A2SGD_CHANNELS : 1 + rng.below(4);
  c.chunkBytes = o.isLarge ? EP_A2SGD_CHUNK_BYTES : chunks[rng.below(5)];
  c.sms = 1 + rng.below(o.maxSms);
  c.rounds = 1 + rng.below(4);
  c.period = 1 + rng.below(3);
  c.hasSteps = rng.one(2);
  c.isReplayed = rng.one(4);
  c.delays = rng.one(2);
  c.past = rng.one(2) ? 0 : rng.below((int)(16 / elemBytes(c.model))) * elemBytes(c.model);
  c.views = randomViews(rng, R);
  c.values = (ep_grad_values_t)rng.below(EP_GRAD_NUM_VALUES);
  return c;
}

void printCase(const Case &c) {
  printf("  %s, %d SMs, %d channels, chunks of %u bytes, %d rounds%s, period %d%s%s, past %zu, "
         "values %s, sizes",
         trefoilDtypeName(c.model.dtype), c.sms, c.channels, c.chunkBytes, c.rounds,
         c.hasSteps ? " with steps" : "", c.period, c.isReplayed ? ", replayed" : "",
         c.delays ? ", delays" : "", c.past, epGradValuesName(c.values));
  for (int t = 0; t < c.model.numTensors && t < 12; t++)
    printf(" %lld", (long long)c.model.sizes[t]);
  printf(", views");
  for (uint64_t view : c.views) printf(" %llx", (unsigned long long)view);
  printf("\n");
}

// What the ranks have before and after the rounds. Replayed rounds have one array.
struct Run {
  Group group;
  std::vector<Gradients> before, after;         // [arrays][rank]
  std::vector<std::vector<DeviceArray>> params; // likewise
  std::vector<DeviceArray> grads;               // [rank], of the steps
  std::vector<cudaGraphExec_t> replayed;

  int arrays(const Case &c) const { return c.isReplayed ? 1 : c.rounds; }

  void open(World &w, const Case &c, Rng &rng, uint64_t timeoutNs) {
    group.channels = c.channels;
    group.chunkBytes = c.chunkBytes;
    group.open(w, c.model, c.sms, c.sms, timeoutNs);
    if (c.isMasked())
      for (int r = 0; r < c.R; r++) group.maskOf(group.steps[r], c.views[r]);
    grads.resize(c.R);
    for (int i = 0; i < arrays(c); i++) {
      before.emplace_back();
      params.emplace_back(c.R);
      for (int r = 0; r < c.R; r++) {
        CU(cudaSetDevice(w.ranks[r].device));
        before[i].push_back(gradientOf(rng, c.model, c.values));
        params[i][r].open(w, r, gradBytes(c.model), c.past);
        params[i][r].put(w, r, before[i][r]);
        if (i == 0) grads[r].open(w, r, gradBytes(c.model), 0);
      }
      after.push_back(before[i]);
      for (int round = i; round < (c.isReplayed ? c.rounds : i + 1); round++)
        if (c.isDue(round)) after[i] = referenceSync(c.model, after[i], c.views);
    }
    w.sync();
  }

  void launch(World &w, const Case &c, int i, int r) {
    ep_a2sgd_step_t s = group.steps[r];
    s.grad = s.update = grads[r].data;
    s.params = params[i][r].data;
    s.syncPeriod = c.hasSteps ? c.period : 0;
    if (c.hasSteps) OK(epA2sgdStep(&s, w.ranks[r].stream));
    OK(epA2sgdSync(&s, w.ranks[r].stream));
  }

  void replay(World &w, const Case &c, int r) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CU(cudaStreamBeginCapture(w.ranks[r].stream, cudaStreamCaptureModeRelaxed));
    launch(w, c, 0, r);
    CU(cudaStreamEndCapture(w.ranks[r].stream, &graph));
    CU(cudaGraphInstantiate(&exec, graph, 0));
    for (int n = 0; n < c.rounds; n++) CU(cudaGraphLaunch(exec, w.ranks[r].stream));
    CU(cudaGraphDestroy(graph));
    replayed.push_back(exec);
  }

  void start(World &w, const Case &c, Rng &rng, uint64_t absent) {
    for (int r = 0; r < c.R; r++) {
      if (!c.views[r] || absent >> r & 1) continue;
      CU(cudaSetDevice(w.ranks[r].device));
      if (c.isReplayed) {
        replay(w, c, r);
        continue;
      }
      for (int i = 0; i < c.rounds; i++) {
        if (c.delays && rng.one(2))
          CU(epStart(delayKernel, 1, 1, w.ranks[r].stream, 1000ull * rng.below(60)));
        launch(w, c, i, r);
      }
    }
    w.sync();
    for (cudaGraphExec_t exec : replayed) CU(cudaGraphExecDestroy(exec));
    replayed.clear();
  }

  bool checkRank(World &w, const Case &c, int r, const std::vector<Gradients> &want) {
    CU(cudaSetDevice(w.ranks[r].device));
    for (int i = 0; i < arrays(c); i++) {
      const int64_t at = params[i][r].difference(w, r, want[i][r]);
      if (at == -1) continue;
      printf("  rank %d, array %d: the parameters differ at byte %lld of %zu\n", r, i,
             (long long)at, params[i][r].bytes);
      return false;
    }
    return true;
  }
};

bool runCase(World &w, uint64_t seed, const Options &o) {
  Rng rng = {seed};
  const Case c = randomCase(rng, w.size(), o);
  if (o.verbose) printCase(c);
  Run run;
  run.open(w, c, rng, 4000000000ull);
  run.start(w, c, rng, 0);
  bool ok = true;
  for (int r = 0; r < c.R; r++) {
    if (!c.views[r]) continue;
    const ep_wait_record_t &q = *w.ranks[r].record;
    if (q.failed)
      printf("  rank %d gave up rank %d in %llu, kind %u\n", r, q.rank,
             (unsigned long long)q.operation, q.kind);
    ok &= !q.failed && run.checkRank(w, c, r, run.after);
  }
  if (!ok) printCase(c);
  return ok;
}

// A case without a step before the synchronisations, in which all ranks regard one another as active.
Case faultCase(Rng &rng, int R, const Options &o) {
  Case c = randomCase(rng, R, o);
  c.views.assign(R, (1ull << R) - 1);
  c.isReplayed = c.delays = c.hasSteps = false;
  if (!gradBytes(c.model)) setSizes(c.model, {5});
  return c;
}

std::vector<uint64_t> viewsWithout(int R, int lost) {
  std::vector<uint64_t> views(R, ((1ull << R) - 1) & ~(1ull << lost));
  views[lost] = 1ull << lost;
  return views;
}

// A rank that never comes: without masks the others' records name it and nothing is written, in that
// synchronisation and later ones; with masks they go on without it.
bool runFault(World &w, uint64_t seed, const Options &o) {
  Rng rng = {seed};
  Case c = faultCase(rng, w.size(), o);
  const int dead = rng.below(c.R);
  const bool masks = rng.one(2);
  Run run;
  run.open(w, c, rng, 20000000ull);
  if (masks) run.group.mask(w, c.views[0]);
  run.start(w, c, rng, 1ull << dead);
  for (int i = 0; masks && i < run.arrays(c); i++)
    run.after[i] = referenceSync(c.model, run.before[i], viewsWithout(c.R, dead));
  bool ok = true;
  for (int r = 0; r < c.R; r++) {
    if (r == dead) continue;
    const ep_wait_record_t &q = *w.ranks[r].record;
    const bool isNamed = q.failed && q.state == 2 && q.rank == dead && q.numGaveUp == 1 &&
                         q.kind == EP_A2SGD_KIND_SYNC && q.phase == EP_WAIT_PARAMS &&
                         q.operation == 1 && q.expected == 1 && q.received == 0;
    if (!isNamed)
      printf("  rank %d: dead rank %d not named: failed %u state %u rank %d in %llu, expected %u, "
             "received %u, %u given up\n",
             r, dead, q.failed, q.state, q.rank, (unsigned long long)q.operation, q.expected,
             q.received, q.numGaveUp);
    ok &= isNamed && run.checkRank(w, c, r, masks ? run.after : run.before);
  }
  if (!ok) printCase(c);
  return ok;
}

// Word and stamp of a rank that has sent chunk 1 to the others, and then went on without them.
static __global__ void forgeKernel(const __grid_constant__ ep_a2sgd_step_t s) {
  const Chunk k = chunkOf(s, 0, 1, 1, 0);
  for (int to = 0; to < s.at.numRanks; to++)
    storeSys(wordAt(s, to, k, SyncWord::STAGED, s.rank), wordOf(1, 0));
  storeSys(stampAt(s, s.rank, k), wordOf(3, 0));
}

// A rank that has written over what the others read: they take nothing from it.
bool runLeftBehind(World &w, uint64_t seed, const Options &o) {
  Rng rng = {seed};
  Case c = faultCase(rng, w.size(), o);
  const int ahead = rng.below(c.R);
  c.rounds = c.channels = 1;
  c.chunkBytes = 4096;
  setSizes(c.model, {1 + rng.below(900)});
  Run run;
  run.open(w, c, rng, 20000000ull);
  run.group.mask(w, c.views[0]);
  CU(cudaSetDevice(w.ranks[ahead].device));
  CU(epStart(forgeKernel, 1, 1, w.ranks[ahead].stream, run.group.steps[ahead]));
  w.sync();
  run.start(w, c, rng, 1ull << ahead);
  run.after[0] = referenceSync(c.model, run.before[0], viewsWithout(c.R, ahead));
  bool ok = true;
  for (int r = 0; r < c.R; r++) {
    if (r == ahead) continue;
    const ep_wait_record_t &q = *w.ranks[r].record;
    const bool isNamed = q.failed && q.rank == ahead && q.numGaveUp == 1 && q.received == 3;
    if (!isNamed)
      printf("  rank %d: failed %u rank %d received %u\n", r, q.failed, q.rank, q.received);
    ok &= isNamed && run.checkRank(w, c, r, run.after);
  }
  if (!ok) printCase(c);
  return ok;
}

size_t bytesOf(const Options &o) {
  const size_t largest = std::max<int64_t>(8 * o.most, 1000000);
  return largest * 4 * 6 + (o.isLarge ? 32u << 20 : 4u << 20);
}

} // namespace

// Blocks that wait for those of other ranks fit beside one another: 128 SMs of a GPU.
int main(int argc, char **argv) {
  return runProgram(argc, argv,
                    {"a2sgd_sync", runCase, runFault, runLeftBehind, bytesOf, 3000, 128});
}
