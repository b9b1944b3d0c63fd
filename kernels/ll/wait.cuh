// Waiting: every spin has a time limit, and records the rank waited for.
//
// Limit and record are common/wait_record.cuh's. With the record a wait keeps a word in exchange memory
// current that shows the peers that this rank waits. A wait that must end returns false and its caller goes
// on without that rank.
//
// With masks, a wait for a rank that itself waits lasts up to twice the limit: that rank will mask the one
// it waits for at its own limit and go on. The word is valid until it has ended two more operations
// of that kind; a rank that dies before costs the others twice the limit, too.
#ifndef TREFOIL_KERNELS_LL_WAIT_CUH
#define TREFOIL_KERNELS_LL_WAIT_CUH

#include "kernels/ll/signal.cuh"

// The words about waits in a rank's exchange memory: the operation of its last long wait {number, number,
// kind, 1}, and per kind the last operation that it has ended {number, number, 0, 0}.
EP_DEV char *waitAt(const ep_ll_group_t &g, int rank) {
  return g.peers[rank] + g.at.wait;
}
EP_DEV char *endedAt(const ep_ll_group_t &g, int rank, unsigned kind) {
  return waitAt(g, rank) + 16 + kind * 16;
}

EP_DEV unsigned long long numberOf(uint4 word) {
  return word.x | (unsigned long long)word.y << 32;
}

// Whether `rank` waits for some rank, or did until a moment ago: it is late, not missing.
__device__ inline bool isWaiting(const ep_ll_group_t &g, int rank) {
  const uint4 wait = loadSys(waitAt(g, rank));
  const uint4 ended = loadSys(endedAt(g, rank, wait.z));
  return wait.w && numberOf(ended) <= numberOf(wait) + 1;
}

// One thread, seldom. Returns when the wait began, or 0 if it must end. It is checkWait
// (common/wait_record.cuh) with a second limit, written out: with that limit as an argument of checkWait,
// registers are allocated otherwise, and dispatch takes up to 2.5 % longer.
//
// For its own rows a rank waits as long as for a rank that itself waits: what they wait for is at its limit
// first, and is the one to name.
static __device__ __noinline__ uint64_t checkLimit(const ep_ll_group_t &g,
                                                   unsigned long long number, Awaited w,
                                                   uint64_t since) {
  WaitControl &c = controlOf(g).wait;
  if (loadVolatile(&c.failed)) return 0;
  if (g.enableMask && loadVolatile(g.mask + w.rank) == 0) return 0;
  const uint64_t t = clockNs();
  if (!since) since = t;
  const uint64_t waited = t - since;
  if (waited < (w.rank == g.rank ? 2 * g.timeoutNs : g.timeoutNs)) {
    recordWait(c, waited, t, [&] {
      writeRecord(g.record, w, number, flagOf(number), since, t, false);
      storeSys(waitAt(g, g.rank),
               make_uint4((unsigned)number, (unsigned)(number >> 32), w.kind, 1));
    });
    return since;
  }
  if (g.enableMask && waited < 2 * g.timeoutNs && isWaiting(g, w.rank)) return since;
  giveUp(c, g.enableMask ? g.mask : nullptr, w.rank,
         [&] { writeRecord(g.record, w, number, flagOf(number), since, t, true); });
  return 0;
}

// One thread: true to poll again.
EP_DEV bool keepWaiting(const ep_ll_group_t &g, const Op &op, const Awaited &w, Spin &s) {
  if (++s.polls & 255) return true;
  s.since = checkLimit(g, op.number, w, s.since);
  return s.since != 0;
}

// All lanes of a warp with equal arguments.
EP_DEV bool keepWarpWaiting(const ep_ll_group_t &g, const Op &op, const Awaited &w, Spin &s,
                            int lane) {
  if (++s.polls & 255) return true;
  if (lane == 0) s.since = checkLimit(g, op.number, w, s.since);
  return __shfl_sync(FULL_WARP, s.since != 0, 0);
}

// All lanes of a warp, before its first store to a peer's buffer: waits until every peer has received
// operation e - 2. Without send-only launches that is always known already.
// The lanes go round together, because packets are stored next, and a packet is stored in one piece.
static __device__ __noinline__ void pollFree(const ep_ll_group_t &g, int kind, Op op,
                                             unsigned long long active, int lane) {
  for (int r0 = 0; r0 < g.numRanks; r0 += 32) {
    const int r = r0 + lane;
    bool pending = r < g.numRanks && r != g.rank && active >> r & 1;
    Spin s;
    while (__any_sync(FULL_WARP, pending)) {
      if (!pending) continue;
      const uint4 v = loadSys(freeAt(g, kind, g.rank, r, op.buf));
      const Awaited w = {(unsigned)kind, EP_WAIT_BUFFER, r, v.z, -1};
      pending =
          !epLlIsFree(op.number, v.x | (unsigned long long)v.y << 32) && keepWaiting(g, op, w, s);
    }
  }
  __syncwarp();
}

// One warp of block 0 of a launch that sends e: acknowledges e - 1 to the peers, if this rank has received
// it. A rank with two operations in flight relies on it.
template <bool FAR>
EP_DEV void sendAcks(const ep_ll_group_t &g, int kind, const Op &op, unsigned long long active,
                     int lane) {
  if (op.ackDistance != 1) return;
  const unsigned long long n = op.number - 1;
  const uint4 word = make_uint4((unsigned)n, (unsigned)(n >> 32), flagOf(n), 0);
  for (int r = lane; r < g.numRanks; r += 32) {
    if (active >> r & 1 && r != g.rank)
      storeSys(freeAt(g, kind, r, sourceAt<FAR>(g, r), op.buf ^ 1), word);
  }
}

EP_DEV void waitFree(const ep_ll_group_t &g, int kind, const Op &op, unsigned long long active,
                     int lane) {
  if (!op.isFree) pollFree(g, kind, op, active, lane);
}

// All lanes of a warp: the announcement of every active rank; returns the greatest ack distance that peers
// reported.
EP_DEV unsigned waitAnnounces(const ep_ll_group_t &g, const Op &op, unsigned long long active,
                              int lane) {
  unsigned ackDistance = 0;
  for (int r = lane; r < g.numRanks; r += 32) {
    if (!(active >> r & 1)) continue;
    Spin s;
    for (;;) {
      const uint4 v = loadSys(announceAt(g, g.rank, r, op.buf));
      if (v.w == op.flag) {
        ackDistance = max(ackDistance, v.x);
        break;
      }
      const Awaited w = {EP_LL_COMBINE, EP_WAIT_ANNOUNCE, r, v.w, -1};
      if (!keepWaiting(g, op, w, s)) break;
    }
  }
  return __reduce_max_sync(FULL_WARP, ackDistance);
}

// One thread of the launch, after all announcements: what is acknowledged now, for later launches.
EP_DEV void recordAcks(const ep_ll_group_t &g, int kind, const Op &op, unsigned ackDistance) {
  KindControl &c = controlOf(g).kind[kind];
  c.done[op.buf] = op.number;
  c.acked[op.buf ^ 1] = epLlAcked(op.number, ackDistance);
}

// One block: zeroes what peers have written into one buffer of a kind.
__device__ inline void clearBytes(char *p, size_t bytes) {
  for (size_t i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) {
    storeSys(p + i, make_uint4(0, 0, 0, 0));
  }
}

static __device__ __noinline__ void clearBuffer(const ep_ll_group_t &g, int kind, int buf) {
  char *mine = g.peers[g.rank];
  const size_t R = g.numRanks;
  if (kind == EP_LL_COMBINE) clearBytes(mine + g.at.announce + buf * R * 16, R * 16);
  clearBytes(mine + g.at.rows[kind] + buf * g.at.half[kind], g.at.half[kind]);
  // The words of both buffers lie together in one block each: routing and weights by halves too.
  const size_t from = kind == EP_LL_DISPATCH ? g.at.routing : g.at.weights;
  const size_t to = kind == EP_LL_DISPATCH ? g.at.weights : g.at.rows[0];
  const size_t half = (to - from) / 2 & ~(size_t)127;
  clearBytes(mine + from + buf * half, half);
}

// One thread of every block, at the end of a launch that sends.
EP_DEV void countSend(KindControl &c, int numBlocks) {
  atomicAdd(&c.clock, (unsigned long long)epBlockTick(blockIdx.x, (unsigned)numBlocks));
}

EP_DEV void stampBlock(const ep_ll_group_t &g, uint64_t began) {
  if (!g.stamps) return;
  g.stamps[blockIdx.x * 2] = began;
  g.stamps[blockIdx.x * 2 + 1] = clockNs();
}

// All threads of all blocks, at the end of a launch.
template <bool FAR = false>
EP_DEV void finishLaunch(const ep_ll_group_t &g, const ep_ll_handle_t &h, int kind, const Op &op,
                         unsigned parts, uint64_t began) {
  KindControl &c = controlOf(g).kind[kind];
  __syncthreads();
  const bool clears = (parts & EP_LL_RECV) && epLlClears(op.number, EP_LL_CLEAR_PERIOD);
  if (parts == EP_LL_RECV || clears) {
    EP_SHARED(int, isLast);
    if (threadIdx.x == 0) {
      __threadfence();
      isLast = (int)atomicAdd(&c.arrived, 1u) == g.numSms - 1;
    }
    __syncthreads();
    if (isLast) {
      if (clears) clearBuffer(g, kind, op.buf);
      __threadfence_system();
      __syncthreads();
      if (threadIdx.x == 0) c.arrived = 0;
      if (parts == EP_LL_RECV && threadIdx.x < g.numRanks) {
        const uint4 word = make_uint4((unsigned)op.number, (unsigned)(op.number >> 32), op.flag, 0);
        const int to = (int)threadIdx.x;
        storeSys(freeAt(g, kind, to, sourceAt<FAR>(g, to), op.buf), word);
      }
    }
  }
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0 && parts & EP_LL_RECV) {
      storeSys(endedAt(g, g.rank, kind),
               make_uint4((unsigned)op.number, (unsigned)(op.number >> 32), 0, 0));
    }
    if (parts & EP_LL_SEND) {
      if (blockIdx.x == 0) headOf(h).sent[kind] = op.number;
      countSend(c, g.numSms);
    }
    stampBlock(g, began);
  }
}

#endif
