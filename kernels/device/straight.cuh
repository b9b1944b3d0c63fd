// Rank-major dispatch straight into the receivers' outputs: which pairs of ranks do it, where their
// rows belong, and when all are there.
//
//   start  every rank that goes straight says so in its routing words and tells each peer in one
//          more word how far from its exchange memory its output lies (sayHello). A pair goes
//          straight if both have; any other pair of the operation uses lines. Who has said it has
//          finished what its stream did with the output before, so it may be written.
//   rows   go into slots that the sender counts from its own routing alone. Their weights travel as
//          lines, in the slots where the whole row would: so K weights cost one line, and no word
//          is new.
//   end    a block that has stored its last row adds to the peers' `dones`; what the blocks of a
//          launch add up to does not depend on their number (as in ht_direct.cuh). One warp of the
//          receiver waits for that.
//
// Hellos and dones of dispatch e lie in buffer e mod 2, as its routing words do, and are free when
// those are. A counter is never set back: what it starts from is looked up before the hello is
// said, and all of e - 2 had been counted before e - 2 was received.
//
// Memory order: rows are ordinary stores; the storing warps meet at a barrier, one warp runs a
// system fence, which covers what the barrier ordered before it, then adds. The receiver's load of
// the counter acquires, and what its stream runs later reads the rows.
//
// Not with masks: a rank that was given up has been told where the output lies, and would store
// there when it comes late, into a later operation's.
#ifndef TREFOIL_KERNELS_DEVICE_STRAIGHT_CUH
#define TREFOIL_KERNELS_DEVICE_STRAIGHT_CUH

#include "kernels/device/args.cuh"
#include "kernels/device/bulk.cuh"
#include "kernels/device/rows.cuh"

struct StraightArgs {
  DispatchArgs d;
  Wire weights;   // of a row's weights alone
  int rowSteps;   // of 512 bytes without marks: tokens, then scales
  Divisor perRow; // d.wire.steps
  int pairsAt;    // shared memory, bytes
};

// What a block knows of its peers, in shared memory; the counts of its warps follow.
struct StraightPairs {
  char *tokens[EP_LL_MAX_RANKS], *scales[EP_LL_MAX_RANKS]; // where this rank's rows begin at rank r
  unsigned long long set;                                  // ranks that are stored to, this one too
};

EP_DEV unsigned *doneAt(const ep_ll_group_t &g, int at, int from, int buf) {
  return (unsigned *)(g.peers[at] + g.at.dones + (size_t)(buf * g.numRanks + from) * 32);
}

// Two distances in units of 16 bytes, 48 bits each.
EP_DEV uint4 packHello(long long tokens, long long scales, unsigned mark) {
  const long long t = tokens >> 4, s = scales >> 4;
  return make_uint4((unsigned)t, (unsigned)s,
                    (unsigned)(t >> 32 & 0xffff) | (unsigned)(s >> 32 & 0xffff) << 16, mark);
}
EP_DEV long long helloTokens(uint4 q) {
  return (long long)((unsigned long long)q.x << 16 | (unsigned long long)q.z << 48) >> 12;
}
EP_DEV long long helloScales(uint4 q) {
  return (long long)((unsigned long long)q.y << 16 | (unsigned long long)(q.z >> 16) << 48) >> 12;
}

// One warp of the first block, before it knows which operation this is: the counters of the first 32
// ranks, of either parity.
EP_DEV void lookAtDones(const ep_ll_group_t &g, unsigned (&dones)[2], int lane) {
  if (lane >= g.numRanks) return;
  dones[0] = loadVolatile(doneAt(g, g.rank, lane, 0));
  dones[1] = loadVolatile(doneAt(g, g.rank, lane, 1));
}

// The same warp, when the peers' memory is free. No peer adds to a counter before it has the hello, which
// is stored when the counter's value is here.
EP_DEV void sayHello(const StraightArgs &s, const Op &op, unsigned dones, int lane) {
  const ep_ll_group_t &g = s.d.op.group;
  const ep_ll_window_t &w = s.d.op.window;
  for (int r = lane; r < g.numRanks; r += 32) {
    if (r == g.rank) continue;
    if (r >= 32) dones = loadVolatile(doneAt(g, g.rank, r, op.buf));
    settle(dones);
    controlOf(g).doneBefore[op.buf][r] = dones;
    storeSys(helloAt(g, EP_LL_DISPATCH, r, g.rank, op.buf), packHello(w.tokens, w.scales, op.mark));
  }
}

// One lane a rank: whether it goes straight, and if so its word. The word of a rank's token 0 always
// comes. The lanes go round together.
EP_DEV uint4 hearOne(const DispatchArgs &a, const Op &op, int r, bool &straight) {
  const ep_ll_group_t &g = a.op.group;
  bool pending = r < g.numRanks && r != g.rank;
  uint4 hello = make_uint4(0, 0, 0, 0);
  straight = false;
  Spin spin;
  while (__any_sync(FULL_WARP, pending)) {
    if (!pending) continue;
    const uint4 word = loadSys(routingAt(a, g.rank, r, 0, op.buf));
    hello = loadSys(helloAt(g, EP_LL_DISPATCH, g.rank, r, op.buf));
    straight = hello.w == op.mark;
    pending = !straight && (word.w != op.mark || (word.x & EP_LL_STRAIGHT)) &&
              keepWaiting(g, op, Awaited{EP_LL_DISPATCH, EP_LL_PHASE_HELLO, r, word.w, 0}, spin);
  }
  __syncwarp();
  return hello;
}

// One warp of a block.
static __device__ __noinline__ void hearPeers(const StraightArgs &s, Op op, StraightPairs &pairs,
                                              int lane) {
  const ep_ll_dispatch_t &o = s.d.op;
  const ep_ll_group_t &g = o.group;
  const size_t before = (size_t)g.rank * g.maxTokens; // rows of lower sources
  unsigned long long set = 0;
  for (int r0 = 0; r0 < g.numRanks; r0 += 32) {
    const int r = r0 + lane;
    bool straight;
    const uint4 hello = hearOne(s.d, op, r, straight);
    char *tokens = (char *)o.outTokens, *scales = (char *)o.outScales;
    if (straight) {
      tokens = g.peers[r] + helloTokens(hello);
      scales = g.peers[r] + helloScales(hello);
    }
    straight |= r == g.rank;
    if (r < g.numRanks) {
      pairs.tokens[r] = tokens + before * o.tokenBytes;
      pairs.scales[r] = scales + before * o.scaleBytes;
    }
    set |= (unsigned long long)__ballot_sync(FULL_WARP, straight) << r0;
  }
  if (lane == 0) pairs.set = set;
}

// Blocks that add to `dones`: all that have rows, or one.
EP_DEV int numStorers(const StraightArgs &s) {
  return max(1, min((int)gridDim.x, s.d.op.numTokens * s.d.wire.steps));
}

// One warp, after all that store have met.
EP_DEV void tellDone(const StraightArgs &s, const Op &op, unsigned long long set, int lane) {
  const ep_ll_group_t &g = s.d.op.group;
  const int blocks = numStorers(s);
  if ((int)blockIdx.x >= blocks) return;
  for (int r = lane; r < g.numRanks; r += 32) {
    if (r == g.rank || !(set >> r & 1)) continue;
    __threadfence_system();
    addRelaxed(doneAt(g, r, g.rank, op.buf), (unsigned)epLlTick(blockIdx.x, blocks));
  }
}

// One warp of the launch that receives.
EP_DEV void awaitDone(const StraightArgs &s, const Op &op, unsigned long long set, int lane) {
  const ep_ll_group_t &g = s.d.op.group;
  for (int r = lane; r < g.numRanks; r += 32) {
    if (r == g.rank || !(set >> r & 1)) continue;
    const unsigned before = loadVolatile(&controlOf(g).doneBefore[op.buf][r]);
    const Awaited w = {EP_LL_DISPATCH, EP_LL_PHASE_ROWS, r, 0u, -1};
    Spin spin;
    while (loadAcquire(doneAt(g, g.rank, r, op.buf)) - before != EP_LL_DONE) {
      if (!keepWaiting(g, op, w, spin)) break;
    }
  }
  __syncwarp();
}

#endif
