// The exchange of two means a group: words with the epoch in them, stored into every rank's memory.
//
// A word of epoch e takes the place of that of e - 2, which its owner has read: this rank has received the
// owner's means of e - 1, which the owner sent after its step e - 2.
// With masks that holds between active ranks; a rank that finds a later epoch was left behind by its peer.
#ifndef TREFOIL_KERNELS_A2SGD_A2SGD_EXCHANGE_CUH
#define TREFOIL_KERNELS_A2SGD_A2SGD_EXCHANGE_CUH

#include "kernels/a2sgd/a2sgd_sum.cuh"

EP_DEV unsigned meanBits(float sum, unsigned long long count) {
  if (count == 0) return 0;
  const float mean = __fdiv_rn(sum, (float)count);
  return mean != mean ? 0x7FFFFFFFu : __float_as_uint(mean);
}

// The threads of a block.
EP_DEV void sendMeans(const ep_a2sgd_step_t &s, unsigned long long epoch, int group, int64_t count,
                      const Sums &sums) {
  const int to = (int)threadIdx.x;
  if (to >= s.at.numRanks || !isActive(s, to)) return;
  storeSys(meansAt(s, to, epoch, group, s.rank),
           make_uint4(meanBits(sums.plus, count - sums.numNegative),
                      meanBits(sums.minus, sums.numNegative), (unsigned)epoch,
                      (unsigned)(epoch >> 32)));
}

EP_DEV unsigned long long epochOf(uint4 word) {
  return word.z | (unsigned long long)word.w << 32;
}

// A wait for a word that carries a number.
struct Expected {
  unsigned long long number, operation;
  uint64_t limitNs;
};

EP_DEV int *maskOrNull(const ep_a2sgd_step_t &s) {
  return s.enableMask ? maskOf(s) : nullptr;
}

// One thread: gives up `w.rank`.
EP_DEV void giveUp(const ep_a2sgd_step_t &s, const Awaited &w, const Expected &e, uint64_t since,
                   uint64_t now) {
  giveUp(controlOf(s).wait, maskOrNull(s), w.rank,
         [&] { writeRecord(s.record, w, e.operation, (unsigned)e.number, since, now, true); });
}

// One thread, seldom: false when the wait must end.
static __device__ __noinline__ bool keepWaiting(const ep_a2sgd_step_t &s, const Awaited &w,
                                                const Expected &e, Spin &spin) {
  return checkWait(controlOf(s).wait, maskOrNull(s), w.rank, e.limitNs, spin.since,
                   [&](uint64_t now, bool gaveUp) {
                     writeRecord(s.record, w, e.operation, (unsigned)e.number, spin.since, now,
                                 gaveUp);
                   });
}

// One thread: waits for a word, and returns the last one that it found; `w` has its rank.
EP_DEV uint4 awaitWord(const ep_a2sgd_step_t &s, const char *at, Awaited w, const Expected &e) {
  Spin spin;
  for (;;) {
    const uint4 word = loadSys(at);
    const unsigned long long found = epochOf(word);
    if (found == e.number) return word;
    w.received = (unsigned)found;
    if (found > e.number) {
      const uint64_t now = clockNs();
      giveUp(s, w, e, spin.since ? spin.since : now, now);
      return word;
    }
    if ((++spin.polls & 255) == 0 && !keepWaiting(s, w, e, spin)) return word;
  }
}

// One thread: waits for a rank's means of a group.
EP_DEV uint4 awaitMeans(const ep_a2sgd_step_t &s, unsigned long long epoch, int group, int rank) {
  return awaitWord(s, meansAt(s, s.rank, epoch, group, rank),
                   Awaited{EP_A2SGD_KIND_STEP, EP_WAIT_MEANS, rank, 0, group},
                   Expected{epoch, epoch, s.timeoutNs});
}

// One thread: the means over the active ranks in f64 in order of rank, less this rank's own.
// wordOf(rank): a rank's.
template <class F> EP_DEV float2 moveOf(const ep_a2sgd_step_t &s, F wordOf) {
  double plus = 0, minus = 0;
  float2 own = make_float2(0, 0);
  int n = 0;
  for (int r0 = 0; r0 < s.at.numRanks; r0 += 4) {
    uint4 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = wordOf(min(r0 + i, s.at.numRanks - 1));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = r0 + i;
      if (r >= s.at.numRanks || !isActive(s, r)) continue;
      const float2 means = make_float2(__uint_as_float(words[i].x), __uint_as_float(words[i].y));
      if (r == s.rank) own = means;
      plus += means.x;
      minus += means.y;
      n++;
    }
  }
  return make_float2((float)(plus / n) - own.x, (float)(minus / n) - own.y);
}

// The last block of a launch, all of its threads: waits for all ranks, and notes each group's move.
EP_DEV void receiveMeans(const ep_a2sgd_step_t &s, unsigned long long epoch) {
  EP_SHARED_ARRAY(uint4, kept, EP_A2SGD_THREADS);
  const int R = s.at.numRanks, G = s.at.numGroups;
  const long long num = (long long)G * R;
  const bool keeps = num <= EP_A2SGD_THREADS;
  for (long long i = threadIdx.x; i < num; i += blockDim.x) {
    const int group = (int)(i / R), rank = (int)(i % R);
    if (isEmpty(s, group) || !isActive(s, rank)) continue;
    const uint4 word = awaitMeans(s, epoch, group, rank);
    if (keeps) kept[i] = word;
  }
  __syncthreads();
  if (loadVolatile(&controlOf(s).wait.failed)) return;
  for (int group = (int)threadIdx.x; group < G; group += blockDim.x) {
    if (isEmpty(s, group)) continue;
    movesOf(s)[group] = moveOf(s, [&](int rank) {
      return keeps ? kept[group * R + rank] : loadSys(meansAt(s, s.rank, epoch, group, rank));
    });
  }
}

#endif
