// A case of the tests of high throughput: a group of ranks is made anew, all its steps are launched back to
// back without the host waiting in between, and at the end everything is compared with the reference; the
// tokens that a dispatch has put out also as they were when it ended.
#ifndef TREFOIL_TESTS_KERNELS_HT_CASE_CUH
#define TREFOIL_TESTS_KERNELS_HT_CASE_CUH

#include "ht_domains.cuh"

#include <functional>

namespace {

// How many tokens a rank has in a step, and their experts: B and topk.
using Fill = std::function<void(int step, int rank, StepRank &k)>;

// What is done before the first launch and after the last one has been queued; false fails the case.
struct Around {
  std::function<void()> before;
  std::function<bool()> after;
};

// A fresh group, and all steps' data.
std::vector<std::vector<StepRank>> makeSteps(Ranks &w, Rng &rng, const Shape &s, const Fill &fill) {
  ep_ht_layout_t at;
  OK(epHtLayout(&s.config, &at));
  char control[EP_HT_CONTROL_BYTES];
  epHtControlInit(control);
  for (int r = 0; r < s.R; r++) {
    HtRank &k = w.ranks[r];
    k.exchange = w.take(r, at.bytes, 0);
    k.control = w.take(r, sizeof control, 0);
    k.scratch = w.take(
        r, s.perDomain ? epHtFarScratchBytes(&s.config, s.perDomain) : epHtScratchBytes(&s.config),
        0);
    k.bytes = (uint64_t *)w.take(r, 16 * s.R, 0);
    k.status = (ep_ht_status_t *)w.take(r, sizeof *k.status, 0);
    CU(cudaMemcpy(k.control, control, sizeof control, cudaMemcpyHostToDevice));
  }
  htDomains.reset(w, s);
  std::vector<std::vector<StepRank>> steps(s.steps, std::vector<StepRank>(s.R));
  std::vector<char *> handles(s.R);
  const size_t handleBytes = s.perDomain ? epHtFarHandleBytes(&s.config, s.perDomain, s.K)
                                         : epHtHandleBytes(&s.config, s.K);
  for (int r = 0; r < s.R; r++) handles[r] = w.take(r, handleBytes, POISON);
  for (int i = 0; i < s.steps; i++) {
    std::vector<StepRank> &step = steps[i];
    for (int r = 0; r < s.R; r++) {
      step[r] = StepRank{};
      fill(i, r, step[r]);
    }
    std::vector<int64_t> tokens;
    std::vector<const int32_t *> topk;
    const trefoil_case_t c = caseOf(s, step, tokens, topk);
    for (int r = 0; r < s.R; r++) {
      const ep_ht_handle_t h = {handles[r],   s.K,         s.expertMajor, s.drop,
                                s.zeroCopyOn, s.alignment, s.maxRecv};
      makeRank(w, rng, s, c, step[r], r, groupOf(w, s, at, r), h);
      for (int back = 0; back < s.passes; back++) {
        step[r].pass[back].seen = w.take(r, step[r].rows * s.tokenBytes(), POISON);
      }
    }
    openWindows(rng, s, step);
  }
  w.sync();
  return steps;
}

void printShape(const Shape &s) {
  printf("  R %d E %d K %d N %d %s align %ld maxRecv %ld drop %d zc %d width %d (%d B) scales %d "
         "combine %d B, fifo %d, sms %d, steps %d, windows %d, crowd %d, combines %d, domains %d, "
         "ring %d\n",
         s.R, s.E, s.K, s.N, s.expertMajor ? "expert-major" : "flat", (long)s.alignment,
         (long)s.maxRecv, s.drop, s.zeroCopyOn, s.width, s.tokenBytes(), s.scaleBytes,
         s.combineBytes(), s.config.fifoSlots, s.numSms, s.steps, s.windows, s.crowd, s.combines,
         s.perDomain, s.ringSlots);
  fflush(stdout);
}

// Not a cudaMemcpyAsync: compute-sanitizer's initcheck makes the host wait for those, and the ranks that
// are not launched yet are waited for.
__global__ void copyVectors(uint4 *to, const uint4 *from, size_t n) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    to[i] = from[i];
}

bool runCase(Ranks &w, Rng &rng, const Shape &s, const Fill &fill, const Around &around = {}) {
  std::vector<std::vector<StepRank>> steps = makeSteps(w, rng, s, fill);
  if (around.before) around.before();
  for (auto &step : steps) {
    for (int r = 0; r < s.R; r++) {
      CU(cudaSetDevice(w.ranks[r].device));
      cudaStream_t q = w.ranks[r].stream;
      if (s.delays && rng.one(3)) CU(epStart(delayKernel, 1, 1, q, rng.below(300000)));
      htDomains.update(step[r].update, q);
      for (Pass &p : step[r].pass) {
        if (s.delays && rng.one(3)) CU(epStart(delayKernel, 1, 1, q, rng.below(300000)));
        htDomains.dispatch(p.dispatch, q);
        CU(epStart(copyVectors, 4, 256, q, (uint4 *)p.seen, (const uint4 *)p.dispatch.outTokens,
                   (size_t)(step[r].rows * s.tokenBytes() / 16)));
        if (s.delays && rng.one(3)) CU(epStart(delayKernel, 1, 1, q, rng.below(300000)));
        for (int n = 0; n < std::max(s.combines, 1); n++) htDomains.combine(p.combine, q);
      }
    }
  }
  bool ok = !around.after || around.after();
  w.sync();
  ok &= checkBytes(w, s, steps) & checkRecords(w, s, steps);
  for (int i = 0; i < s.steps; i++) {
    for (int r = 0; r < s.R; r++) ok &= checkRank(s, steps[i], i, r);
  }
  if (!ok) printShape(s);
  w.free();
  return ok;
}

} // namespace

#endif
