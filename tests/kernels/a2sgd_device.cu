// The A2SGD kernels against the reference, bit for bit, on random models.
//
//   a2sgd_device [--ranks R] [--gpus] [--cases n] [--seed s] [--case i] [--sms n] [--most n]
//                [--faults] [--large] [--verbose]
//
// By default R virtual ranks share GPU 0; --gpus gives each its own. A case draws tensors of up to --most
// elements, values, where arrays begin, and steps: launched back to back on ranks that are delayed at
// random, or captured once and replayed, out of place or in place. Some cases mask a rank. --faults: a
// rank never comes. --large: a model with more parts than a block adds at once.
// A failure prints the command that repeats it.
#include "a2sgd_main.cuh"

namespace {

struct Case {
  Model model;
  int R, sms, layoutSms, steps;
  bool inPlace, isReplayed, delays;
  size_t pastGrad, pastUpdate; // bytes past a multiple of 16
  uint64_t active;
  ep_grad_values_t values;
};

Case randomCase(Rng &rng, int R, const Options &o) {
  Case c = {};
  ep_grad_run_t run;
  c.R = R;
  epDrawGradModel(rng.next(), o.most, &c.model);
  epDrawGradRun(rng.next(), &run);
  if (o.isLarge) setSizes(c.model, {40000000 + rng.below(1000), 5, 20000000});
  c.sms = 1 + rng.below(o.maxSms);
  c.layoutSms = o.isLarge ? 400 : rng.one(2) ? 1 : c.sms;
  c.steps = run.numSteps;
  c.inPlace = run.inPlace;
  c.isReplayed = run.isReplayed;
  c.delays = rng.one(2);
  const size_t each = elemBytes(c.model);
  c.pastGrad = rng.one(2) ? 0 : rng.below((int)(16 / each)) * each;
  c.pastUpdate = rng.one(2) ? c.pastGrad : rng.below((int)(16 / each)) * each;
  c.active = (1ull << R) - 1;
  if (R > 1 && rng.one(4)) c.active &= ~(1ull << rng.below(R));
  c.values = run.values;
  return c;
}

void printCase(const Case &c) {
  printf("  %s %s, %d SMs, layout of %d, %d steps%s%s%s, past %zu and %zu, active %llx, values %s, "
         "sizes",
         trefoilDtypeName(c.model.dtype), c.model.scope ? "whole model" : "per tensor", c.sms,
         c.layoutSms, c.steps, c.inPlace ? ", in place" : "", c.isReplayed ? ", replayed" : "",
         c.delays ? ", delays" : "", c.pastGrad, c.pastUpdate, (unsigned long long)c.active,
         epGradValuesName(c.values));
  for (int t = 0; t < c.model.numTensors && t < 12; t++)
    printf(" %lld", (long long)c.model.sizes[t]);
  printf("\n");
}

// What the ranks have before and after the steps. Replayed steps have one pair of arrays.
struct Run {
  Group group;
  std::vector<Gradients> before, after;                 // [arrays][rank]
  std::vector<std::vector<DeviceArray>> grads, updates; // likewise
  std::vector<cudaGraphExec_t> replayed;

  bool isActive(const Case &c, int r) const { return c.active >> r & 1; }
  int arrays(const Case &c) const { return c.isReplayed ? 1 : c.steps; }

  void open(World &w, const Case &c, Rng &rng, uint64_t timeoutNs) {
    group.open(w, c.model, c.layoutSms, c.sms, timeoutNs);
    if (c.active != (1ull << c.R) - 1) group.mask(w, c.active);
    const size_t bytes = gradBytes(c.model);
    for (int i = 0; i < arrays(c); i++) {
      before.emplace_back();
      grads.emplace_back(c.R);
      updates.emplace_back(c.R);
      for (int r = 0; r < c.R; r++) {
        CU(cudaSetDevice(w.ranks[r].device));
        before[i].push_back(gradientOf(rng, c.model, c.values));
        grads[i][r].open(w, r, bytes, c.pastGrad);
        grads[i][r].put(w, r, before[i][r]);
        updates[i][r] = grads[i][r];
        if (!c.inPlace) updates[i][r].open(w, r, bytes, c.pastUpdate);
      }
      after.push_back(before[i]);
      for (int n = 0; n < (c.isReplayed && c.inPlace ? c.steps : 1); n++)
        after[i] = referenceStep(c.model, after[i], c.active);
    }
    w.sync();
  }

  void launch(World &w, const Case &c, int i, int r) {
    ep_a2sgd_step_t s = group.steps[r];
    s.grad = grads[i][r].data;
    s.update = updates[i][r].data;
    OK(epA2sgdStep(&s, w.ranks[r].stream));
  }

  void replay(World &w, const Case &c, int r) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CU(cudaStreamBeginCapture(w.ranks[r].stream, cudaStreamCaptureModeRelaxed));
    launch(w, c, 0, r);
    CU(cudaStreamEndCapture(w.ranks[r].stream, &graph));
    CU(cudaGraphInstantiate(&exec, graph, 0));
    for (int n = 0; n < c.steps; n++) CU(cudaGraphLaunch(exec, w.ranks[r].stream));
    CU(cudaGraphDestroy(graph));
    replayed.push_back(exec);
  }

  void start(World &w, const Case &c, Rng &rng, uint64_t absent) {
    for (int r = 0; r < c.R; r++) {
      if (!isActive(c, r) || absent >> r & 1) continue;
      CU(cudaSetDevice(w.ranks[r].device));
      if (c.isReplayed) {
        replay(w, c, r);
        continue;
      }
      for (int i = 0; i < c.steps; i++) {
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
      const std::vector<char> untouched(updates[i][r].bytes, (char)UNWRITTEN);
      const bool isWritten = &want == &after;
      const auto &expected = isWritten || c.inPlace ? want[i][r] : untouched;
      const int64_t at = updates[i][r].difference(w, r, expected);
      const int64_t in = c.inPlace ? -1 : grads[i][r].difference(w, r, before[i][r]);
      if (at == -1 && in == -1) continue;
      printf("  rank %d, arrays %d: %s differs at byte %lld of %zu\n", r, i,
             at != -1 ? "the update" : "the gradient", (long long)(at != -1 ? at : in),
             updates[i][r].bytes);
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
    if (!run.isActive(c, r)) continue;
    const ep_wait_record_t &q = *w.ranks[r].record;
    if (q.failed)
      printf("  rank %d gave up rank %d in step %llu\n", r, q.rank,
             (unsigned long long)q.operation);
    ok &= !q.failed && run.checkRank(w, c, r, run.after);
  }
  if (!ok) printCase(c);
  return ok;
}

// A rank that never comes: without masks the others' records name it and nothing is written, in that step
// and later ones; with masks they go on without it.
bool runFault(World &w, uint64_t seed, const Options &o) {
  Rng rng = {seed};
  Case c = randomCase(rng, w.size(), o);
  c.active = (1ull << c.R) - 1;
  c.isReplayed = c.delays = false;
  if (!gradBytes(c.model)) setSizes(c.model, {5});
  const int dead = rng.below(c.R);
  const bool masks = rng.one(2);
  Run run;
  run.open(w, c, rng, 20000000ull);
  if (masks) run.group.mask(w, c.active);
  run.start(w, c, rng, 1ull << dead);
  if (masks)
    for (int i = 0; i < run.arrays(c); i++)
      run.after[i] = referenceStep(c.model, run.before[i], c.active & ~(1ull << dead));
  bool ok = true;
  for (int r = 0; r < c.R; r++) {
    if (r == dead) continue;
    const ep_wait_record_t &q = *w.ranks[r].record;
    const bool isNamed = q.failed && q.state == 2 && q.rank == dead && q.numGaveUp == 1 &&
                         q.kind == EP_A2SGD_KIND_STEP && q.phase == EP_WAIT_MEANS &&
                         q.operation == 1 && q.expected == 1 && q.received == 0;
    if (!isNamed)
      printf(
          "  rank %d: dead rank %d not named: failed %u state %u rank %d step %llu, %u given up\n",
          r, dead, q.failed, q.state, q.rank, (unsigned long long)q.operation, q.numGaveUp);
    ok &= isNamed && run.checkRank(w, c, r, masks ? run.after : run.before);
  }
  if (!ok) printCase(c);
  return ok;
}

// A rank that its peer has left behind: it finds a later epoch, and gives that peer up at once.
bool runLeftBehind(World &w, uint64_t seed, const Options &o) {
  Rng rng = {seed};
  Case c = randomCase(rng, w.size(), o);
  setSizes(c.model, {100});
  c.model.scope = TREFOIL_GRAD_PER_TENSOR;
  c.steps = 3;
  c.isReplayed = c.delays = false;
  c.active = (1ull << c.R) - 1;
  Run run;
  run.open(w, c, rng, 20000000ull);
  run.group.mask(w, c.active);
  const uint64_t late = 1ull << (c.R - 1);
  for (int i = 0; i < 2; i++) { // the others mask it in step 1, and again in step 4
    run.start(w, c, rng, late);
    run.group.mask(w, c.active);
  }
  run.start(w, c, rng, ~late);
  const ep_wait_record_t &q = *w.ranks[c.R - 1].record;
  if (q.failed && q.numGaveUp == (unsigned)c.R - 1 && q.operation == 2 && q.received == 4)
    return true;
  printf("  the rank left behind: failed %u in step %llu, found %u, %u given up\n", q.failed,
         (unsigned long long)q.operation, q.received, q.numGaveUp);
  return false;
}

size_t bytesOf(const Options &o) {
  const size_t largest = o.isLarge ? 64000000 : std::max<int64_t>(8 * o.most, 1000000);
  return largest * 4 * (o.isLarge ? 8 : 4) + (16u << 20);
}

} // namespace

int main(int argc, char **argv) {
  return runProgram(argc, argv,
                    {"a2sgd_device", runCase, runFault, runLeftBehind, bytesOf, 40000, 0});
}
