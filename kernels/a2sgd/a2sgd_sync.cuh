// The synchronisation of parameters (docs/spec.md, A7, A17): they become the mean over the ranks, in place.
//
// Chunks of the parameters go round the channels. Of a chunk a rank copies its own elements into its exchange
// memory, waits until all have, sums its slice of the chunk out of all ranks' memory, and copies the other
// slices of the mean from the ranks that summed them. A channel's chunks are numbered through all
// synchronisations; buffers and words have two places by the number's parity. A rank's word of chunk q + 1
// implies that it has finished q, so what it waits for before it sums q + 1 lets it write over q with q + 2.
//
// With masks the mean is over the ranks that this rank regards as active. A slice of the mean comes with the
// ranks that it is over; where these are others than this rank's, or no rank has summed it, this rank sums it
// itself. A rank that goes on without this one may write over what is read here: before it does, it stores
// the chunk's number as its stamp, and readers look at the stamp afterwards.
#ifndef TREFOIL_KERNELS_A2SGD_A2SGD_SYNC_CUH
#define TREFOIL_KERNELS_A2SGD_A2SGD_SYNC_CUH

#include "kernels/a2sgd/a2sgd_exchange.cuh"
#include "kernels/a2sgd/a2sgd_move.cuh"

typedef unsigned long long RankSet; // a bit a rank

enum class SyncWord { STAGED, MEAN };

struct Chunk {
  int channel;
  unsigned long long number, sync; // of the channel's chunks, of synchronisations, both from 1
  int64_t first;                   // element
  int count, vectors, each;        // elements, 16-byte vectors of all, of a rank's slice

  EP_DEV bool hasSlice(int rank) const { return rank * each < vectors; }
};

EP_DEV Chunk chunkOf(const ep_a2sgd_step_t &s, int channel, unsigned long long number,
                     unsigned long long sync, int64_t idx) {
  Chunk k = {channel, number, sync, idx * s.at.chunkElements, 0, 0, 0};
  k.count = (int)min(s.at.chunkElements, s.at.elements - k.first);
  const int perVector = (int)(s.at.chunkElements * 16 / s.at.chunkBytes);
  k.vectors = (k.count + perVector - 1) / perVector;
  k.each = (k.vectors + s.at.numRanks - 1) / s.at.numRanks;
  return k;
}

// ---- Places in a rank's exchange memory

EP_DEV char *stampAt(const ep_a2sgd_step_t &s, int rank, const Chunk &k) {
  return s.peers[rank] + s.at.sync + (size_t)k.channel * s.at.channelBytes;
}
EP_DEV char *wordAt(const ep_a2sgd_step_t &s, int to, const Chunk &k, SyncWord word, int from) {
  const int idx = ((int)(k.number & 1) * 2 + (int)word) * s.at.numRanks + from;
  return stampAt(s, to, k) + 16 + (size_t)idx * 16;
}
EP_DEV char *stageAt(const ep_a2sgd_step_t &s, int rank, const Chunk &k) {
  return stampAt(s, rank, k) + s.at.stages + (size_t)(k.number & 1) * s.at.chunkBytes;
}
EP_DEV char *meanAt(const ep_a2sgd_step_t &s, int rank, const Chunk &k) {
  return stampAt(s, rank, k) + s.at.stages + 2 * (size_t)s.at.chunkBytes +
         (size_t)(k.number & 1) * s.at.sliceBytes;
}

// ---- Vector v of a chunk of this rank's parameters

template <Elem T> EP_DEV uint4 loadParams(const ep_a2sgd_step_t &s, const Chunk &k, int v) {
  constexpr int N = Vec<T>::N;
  const int64_t i = k.first + (int64_t)v * N;
  const char *p = (const char *)s.params + i * ELEM_BYTES<T>;
  const int left = k.count - v * N;
  if (left >= N && ((uintptr_t)p & 15) == 0) return loadStream(p);
  return loadVectorPart<T>(s.params, i, left);
}

template <Elem T>
EP_DEV void storeParams(const ep_a2sgd_step_t &s, const Chunk &k, int v, uint4 x) {
  constexpr int N = Vec<T>::N, PER = 4 / ELEM_BYTES<T>;
  const int64_t i = k.first + (int64_t)v * N;
  char *p = (char *)s.params + i * ELEM_BYTES<T>;
  const int left = k.count - v * N;
  if (left >= N && ((uintptr_t)p & 15) == 0) return storeStream(p, x);
  const unsigned w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int j = 0; j < N; j++) {
    if (j < left) storeBits<T>(s.params, i + j, w[j / PER] >> j % PER * 16);
  }
}

// ---- Words. All of these are for all threads of a block.

// The ranks whose thread has `is` set.
EP_DEV RankSet ranksWhere(bool is) {
  EP_SHARED_ARRAY(unsigned, halves, 2);
  static_assert(EP_KERNEL_MAX_RANKS == 64 && EP_A2SGD_THREADS >= 64, "two words of a warp");
  __syncthreads();
  if (threadIdx.x < 64) {
    const unsigned half = __ballot_sync(FULL_WARP, is);
    if (threadIdx.x % 32 == 0) halves[threadIdx.x / 32] = half;
  }
  __syncthreads();
  return halves[0] | (RankSet)halves[1] << 32;
}

EP_DEV RankSet activeRanks(const ep_a2sgd_step_t &s) {
  const int r = (int)threadIdx.x;
  return ranksWhere(r < s.at.numRanks && isActive(s, r));
}

EP_DEV bool hasFailed(const ep_a2sgd_step_t &s) {
  return __syncthreads_or(loadVolatile(&controlOf(s).wait.failed) != 0);
}

EP_DEV uint4 wordOf(unsigned long long number, RankSet ranks) {
  return make_uint4((unsigned)ranks, (unsigned)(ranks >> 32), (unsigned)number,
                    (unsigned)(number >> 32));
}

// What the block wrote before is there when the word is.
EP_DEV void postWord(const ep_a2sgd_step_t &s, const Chunk &k, SyncWord word, RankSet ranks) {
  const int to = (int)threadIdx.x;
  __syncthreads();
  if (to >= s.at.numRanks || !isActive(s, to)) return;
  __threadfence_system();
  storeSys(wordAt(s, to, k, word, s.rank), wordOf(k.number, ranks));
}

// Each thread waits for its rank's word, where it is wanted. False: a rank was lost, and all leave.
EP_DEV bool awaitWords(const ep_a2sgd_step_t &s, const Chunk &k, SyncWord word, bool isWanted,
                       uint64_t limitNs) {
  const int r = (int)threadIdx.x;
  if (isWanted && r < s.at.numRanks && isActive(s, r))
    awaitWord(s, wordAt(s, s.rank, k, word, r),
              Awaited{EP_A2SGD_KIND_SYNC, EP_WAIT_PARAMS, r, 0, k.first},
              Expected{k.number, k.sync, limitNs});
  __threadfence_system();
  return !hasFailed(s);
}

// Whether one of these ranks has gone on without this one, and may have written over what was read since:
// it is given up. Without masks no rank can.
EP_DEV bool isLeftBehind(const ep_a2sgd_step_t &s, const Chunk &k, RankSet by) {
  if (!s.enableMask) return false;
  const int r = (int)threadIdx.x;
  bool isBehind = false;
  __syncthreads();
  if (r < s.at.numRanks && r != s.rank && by >> r & 1) {
    __threadfence_system();
    const unsigned long long stamp = epochOf(loadSys(stampAt(s, r, k)));
    isBehind = stamp > k.number + 1;
    const uint64_t now = clockNs();
    if (isBehind)
      giveUp(s, Awaited{EP_A2SGD_KIND_SYNC, EP_WAIT_PARAMS, r, (unsigned)stamp, k.first},
             Expected{k.number, k.sync, 0}, now, now);
  }
  return __syncthreads_or(isBehind);
}

// ---- Slices

// Own elements into exchange memory.
template <Elem T> EP_DEV void stageChunk(const ep_a2sgd_step_t &s, const Chunk &k) {
  if (threadIdx.x == 0) {
    storeSys(stampAt(s, s.rank, k), wordOf(k.number, 0));
    __threadfence_system();
  }
  __syncthreads();
  char *to = stageAt(s, s.rank, k);
  for (int v = (int)threadIdx.x; v < k.vectors; v += EP_A2SGD_THREADS)
    storeStream(to + (size_t)v * 16, loadParams<T>(s, k, v));
}

// The mean of a vector, in f64 in order of rank (A2).
template <Elem T>
EP_DEV uint4 meanOf(const ep_a2sgd_step_t &s, const Chunk &k, int v, RankSet ranks) {
  constexpr int N = Vec<T>::N, PER = Sum<T>::PER, AT_ONCE = 4;
  double sum[N] = {};
  for (int r0 = 0; r0 < s.at.numRanks; r0 += AT_ONCE) {
    uint4 x[AT_ONCE];
    bool isIn[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int r = min(r0 + i, s.at.numRanks - 1);
      isIn[i] = r == r0 + i && (ranks >> r & 1);
      x[i] = make_uint4(0, 0, 0, 0);
      loadSysIf(x[i], stageAt(s, r, k) + (size_t)v * 16, isIn[i]);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (!isIn[i]) continue;
      const unsigned w[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float e[2];
        widenWord<T>(w[j], e);
#pragma unroll
        for (int p = 0; p < PER; p++) sum[j * PER + p] += e[p];
      }
    }
  }
  const double n = __popcll(ranks);
  Sum<T> mean;
#pragma unroll
  for (int i = 0; i < N; i++) mean.acc[i] = (float)(sum[i] / n);
  return mean.round();
}

// Sums a rank's slice of the mean over the active ranks, which are returned; where it is this rank's own,
// also for the others.
template <Elem T> EP_DEV RankSet sumSlice(const ep_a2sgd_step_t &s, const Chunk &k, int slice) {
  const int from = slice * k.each, to = min(from + k.each, k.vectors);
  RankSet ranks;
  do {
    ranks = activeRanks(s);
    for (int v = from + (int)threadIdx.x; v < to; v += EP_A2SGD_THREADS) {
      const uint4 mean = meanOf<T>(s, k, v, ranks);
      if (slice == s.rank) storeStream(meanAt(s, s.rank, k) + (size_t)(v - from) * 16, mean);
      storeParams<T>(s, k, v, mean);
    }
  } while (isLeftBehind(s, k, ranks));
  return ranks;
}

// The ranks whose slice has come, and is the mean over the ranks that are active here.
EP_DEV RankSet goodSlices(const ep_a2sgd_step_t &s, const Chunk &k) {
  const RankSet active = activeRanks(s);
  const int r = (int)threadIdx.x;
  bool isGood = r < s.at.numRanks && r != s.rank && k.hasSlice(r) && (active >> r & 1);
  if (isGood) {
    const uint4 word = loadSys(wordAt(s, s.rank, k, SyncWord::MEAN, r));
    isGood = epochOf(word) == k.number && (word.x | (RankSet)word.y << 32) == active;
  }
  return ranksWhere(isGood);
}

// Each rank begins with the slice after its own.
template <Elem T> EP_DEV void takeSlices(const ep_a2sgd_step_t &s, const Chunk &k, RankSet of) {
  constexpr int AT_ONCE = 4;
  const int all = k.each * (s.at.numRanks - 1);
  for (int u0 = (int)threadIdx.x; u0 < all; u0 += AT_ONCE * EP_A2SGD_THREADS) {
    uint4 x[AT_ONCE];
    int at[AT_ONCE]; // vector of the chunk, -1: none
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int u = min(u0 + i * EP_A2SGD_THREADS, all - 1);
      const int r = (s.rank + 1 + u / k.each) % s.at.numRanks, v = u % k.each;
      const bool isTaken = u == u0 + i * EP_A2SGD_THREADS && (of >> r & 1);
      at[i] = isTaken && r * k.each + v < k.vectors ? r * k.each + v : -1;
      x[i] = make_uint4(0, 0, 0, 0);
      loadSysIf(x[i], meanAt(s, r, k) + (size_t)v * 16, at[i] >= 0);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (at[i] >= 0) storeParams<T>(s, k, at[i], x[i]);
  }
}

// ---- A chunk, a channel. False: a rank was lost.

// The rank that sums a slice may itself wait for a rank until the limit, hence twice as long for its word.
template <Elem T> EP_DEV bool averageChunk(const ep_a2sgd_step_t &s, const Chunk &k) {
  const int r = (int)threadIdx.x;
  stageChunk<T>(s, k);
  postWord(s, k, SyncWord::STAGED, 0);
  if (!awaitWords(s, k, SyncWord::STAGED, true, s.timeoutNs)) return false;
  postWord(s, k, SyncWord::MEAN, sumSlice<T>(s, k, s.rank));
  if (!awaitWords(s, k, SyncWord::MEAN, r != s.rank && k.hasSlice(r), 2 * s.timeoutNs))
    return false;
  RankSet taken = goodSlices(s, k);
  takeSlices<T>(s, k, taken);
  while (isLeftBehind(s, k, taken)) taken &= activeRanks(s);
  for (int slice = 0; slice < s.at.numRanks && k.hasSlice(slice); slice++) {
    if (slice != s.rank && !(taken >> slice & 1)) sumSlice<T>(s, k, slice);
  }
  return true;
}

template <Elem T>
EP_DEV bool averageChannel(const ep_a2sgd_step_t &s, int channel, unsigned long long sync) {
  const int64_t chunks = (s.at.elements + s.at.chunkElements - 1) / s.at.chunkElements;
  const int64_t own = (chunks - channel + s.at.channels - 1) / s.at.channels; // of this channel
  for (int64_t i = 0; i < own; i++) {
    const unsigned long long number = (sync - 1) * own + i + 1;
    if (!averageChunk<T>(s, chunkOf(s, channel, number, sync, channel + i * s.at.channels)))
      return false;
  }
  return true;
}

// In order, so that the least channel that is not through has its block on every rank.
EP_DEV int takeChannel(const ep_a2sgd_step_t &s) {
  EP_SHARED(int, channel);
  __syncthreads();
  if (threadIdx.x == 0) channel = (int)atomicAdd(&controlOf(s).nextChannel, 1u);
  __syncthreads();
  return channel;
}

#endif
