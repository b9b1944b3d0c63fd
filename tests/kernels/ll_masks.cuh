// Ranks that take others for lost while all are alive: nothing travels between two of which one does, in
// either direction, and nobody waits.
//
// Before each dispatch and each combine of a case some pairs are lost, for good: both ranks' masks say so in
// time. Before the last combine also pairs of which only one rank knows: the other waits for it until its
// time limit and then names it. (Not with partial sums: who waits for weights keeps others waiting.)
// Compared with the reference, which is told who regards whom as alive; and no rank that has lost another may
// send it a row.
#ifndef TREFOIL_TESTS_KERNELS_LL_MASKS_CUH
#define TREFOIL_TESTS_KERNELS_LL_MASKS_CUH

#include "kernels/common/protocol.h"
#include "ll_case.cuh"

namespace {

// Of one step: who regards whom as alive, [R][R], in its dispatch and its combine.
struct Regard {
  std::vector<uint8_t> dispatch, combine;
};

void losePairs(Rng &rng, int R, std::vector<uint8_t> &alive, bool oneSided) {
  for (int p = 0; p < R; p++) {
    for (int q = 0; q < p; q++) {
      if (!alive[p * R + q] || !alive[q * R + p] || !rng.one(R + 2)) continue;
      const bool one = oneSided && rng.one(2), turned = rng.one(2);
      if (!one || turned) alive[p * R + q] = 0;
      if (!one || !turned) alive[q * R + p] = 0;
    }
  }
}

std::vector<Regard> drawRegards(Rng &rng, const Shape &s) {
  std::vector<uint8_t> alive(s.R * s.R, 1);
  std::vector<Regard> regards(s.steps);
  for (int i = 0; i < s.steps; i++) {
    losePairs(rng, s.R, alive, false);
    regards[i].dispatch = alive;
    losePairs(rng, s.R, alive, i == s.steps - 1 && s.sum != EP_LL_SUM_PARTIAL);
    regards[i].combine = alive;
  }
  return regards;
}

// The ranks that rank r regards as alive and that do not regard it so.
int numDeaf(const std::vector<uint8_t> &alive, int R, int r) {
  int n = 0;
  for (int q = 0; q < R; q++) n += alive[r * R + q] && !alive[q * R + r];
  return n;
}

// Puts rank r's row of `alive` into its mask, on its stream.
void setMask(World &w, int r, const std::vector<uint8_t> &alive, std::vector<int> &host) {
  const int R = w.size();
  host.assign(&alive[r * R], &alive[r * R] + R);
  CU(cudaMemcpyAsync(w.ranks[r].mask, host.data(), R * sizeof(int), cudaMemcpyHostToDevice,
                     w.ranks[r].stream));
}

// Rows of the last combine at rank r from ranks that have lost it.
int numStray(World &w, const Shape &s, const StepRank &k, int r,
             const std::vector<uint8_t> &alive) {
  const uint64_t number = s.first + s.steps;
  const ep_ll_layout_t &at = w.at;
  const char *slots = w.ranks[r].exchange + at.rows[1] + (number & 1) * at.half[1];
  int stray = 0;
  for (int64_t i = 0; i < k.B * s.K; i++) {
    const int q = k.topk[i] < 0 ? r : k.topk[i] / s.L;
    if (alive[q * s.R + r]) continue;
    const std::vector<uint32_t> packet =
        w.download(r, (const uint32_t *)(slots + i * at.rowStride[1]), 32);
    stray += packet[31] == epLlFlag(number, EP_LL_FLAGS);
  }
  if (stray) printf("  rank %d: %d rows of ranks that are lost\n", r, stray);
  return stray;
}

bool runMasked(World &w, uint64_t seed, const Options &o) {
  Rng rng = {seed};
  Shape s = randomShape(rng, w.size(), o);
  const bool staged = rng.one(2);
  const std::vector<Regard> regards = drawRegards(rng, s);
  auto steps = makeSteps(w, rng, s, 1, 4000000000ull, o);
  std::vector<std::vector<int>> host(2 * s.R * s.steps);
  for (int r = 0; r < s.R; r++) {
    CU(cudaSetDevice(w.ranks[r].device));
    cudaStream_t stream = w.ranks[r].stream;
    for (int i = 0; i < s.steps; i++) {
      StepRank &k = steps[i][r];
      const bool last = i == s.steps - 1;
      if (!last) maybeDelay(s, rng, stream);
      setMask(w, r, regards[i].dispatch, host[(r * s.steps + i) * 2]);
      for (const int part : {EP_LL_SEND, EP_LL_RECV}) {
        if (staged) OK(domains.dispatch(k.dispatch, part, stream));
      }
      if (!staged) OK(domains.dispatch(k.dispatch, EP_LL_BOTH, stream));
      keepOutputs(s, k, rng, stream);
      setMask(w, r, regards[i].combine, host[(r * s.steps + i) * 2 + 1]);
      if (last) k.combine.group.timeoutNs = 20000000;
      for (const int part : {EP_LL_SEND, EP_LL_RECV}) {
        if (staged) OK(domains.combine(k.combine, part, stream));
      }
      if (!staged) OK(domains.combine(k.combine, EP_LL_BOTH, stream));
    }
  }
  w.sync();
  bool ok = true;
  const std::vector<uint8_t> &alive = regards.back().combine;
  for (int r = 0; r < s.R; r++) {
    const ep_wait_record_t *q = w.ranks[r].record;
    const int deaf = numDeaf(alive, s.R, r);
    if ((int)q->numGaveUp != deaf) {
      printf("  rank %d gave up on %u ranks (kind %u phase %u rank %d), not %d\n", r, q->numGaveUp,
             q->kind, q->phase, q->rank, deaf);
      ok = false;
    }
    for (int i = 0; ok && i < s.steps; i++) {
      ok &= checkDispatch(w, s, steps[i], i, r, regards[i].dispatch.data());
      ok &=
          checkCombine(w, s, steps[i], i, r, regards[i].dispatch.data(), regards[i].combine.data());
    }
    ok &= numStray(w, s, steps.back()[r], r, alive) == 0;
  }
  if (!ok) printShape(s);
  return ok;
}

} // namespace

#endif
