// Operation numbers, flags, buffers and the words between ranks. docs/kernels.md has the argument why
// no signal is lost and no buffer is overwritten too early.
//
// Per kind of operation (dispatch, combine) a rank's control memory counts operations e = 1, 2, ... in
// `clock`, on the device, so that replays of a graph count too: every block adds 1 at its end and block
// 0 what is missing to 65536, so clock >> 16 is the number of finished sends and no block needs to be
// last. The flag of e is a 32-bit number with e's parity that is never 0; it repeats after 2^32 - 2
// operations. Each 2^30 operations both buffers are cleared once, so no flag survives long enough to
// be taken for a new one.
//
// Buffers alternate by parity. `done[p]` is the last operation that this rank has received out of
// buffer p, `acked[p]` the least that all peers have acknowledged out of theirs. A sender of e
// needs acked[p] >= e - 2; announcements carry it along, and receive-only launches post it in the peers'
// `free` words.
#ifndef TREFOIL_KERNELS_LL_SIGNAL_CUH
#define TREFOIL_KERNELS_LL_SIGNAL_CUH

#include "kernels/common/wait_record.cuh"
#include "kernels/ll/mirror.cuh"
#include "kernels/common/protocol.h"

struct alignas(16) KindControl {
  unsigned long long clock; // finished sends << 16 | arrivals
  unsigned arrived;         // blocks at the end of a launch that needs a last one
  unsigned pad;
  unsigned long long done[2];  // by parity
  unsigned long long acked[2]; // by parity
  unsigned long long more[10]; // a line of its own
};
static_assert(sizeof(KindControl) == 128, "loadControl reads whole vectors");
struct Control {
  KindControl kind[2];
  WaitControl wait;
};
static_assert(sizeof(Control) <= EP_LL_CONTROL_BYTES, "control memory");

EP_DEV unsigned flagOf(unsigned long long e) {
  return epLlFlag(e, EP_LL_FLAGS);
}

// Head of a handle's memory; the tables follow (slots.cuh).
struct HandleHead {
  unsigned long long sent[2]; // operation that the handle's last send was, per kind
  unsigned long long reached; // ranks that the last dispatch regarded as active, as bits
  int numReturns;
  int pad;
};

struct Op {
  unsigned long long number;
  unsigned flag;
  int buf;
  bool isFree; // every peer is known to have received operation number - 2
  unsigned
      ackDistance; // to the last receive out of the other buffer, at most EP_LL_MAX_ACK_DISTANCE
};

EP_DEV Control &controlOf(const ep_ll_group_t &g) {
  return *(Control *)g.control;
}
EP_DEV HandleHead &headOf(const ep_ll_handle_t &h) {
  return *(HandleHead *)h.memory;
}

// The words of control memory that an operation begins with, loaded at once: the first loads are a good
// part of the time of a small operation, so a caller has its own in flight before it looks at these. They
// go through L1, since all warps read them and none changes before the launch ends: thousands of loads
// past L1 would queue up at the one slice of L2 that has the line.
struct ControlWords {
  unsigned long long clock, acked0, acked1, done0, done1;
};

EP_DEV ControlWords loadControl(const KindControl &c) {
  const uint4 clock = loadEarly(&c.clock), done = loadEarly(c.done), acked = loadEarly(c.acked);
  return ControlWords{
      clock.x | (unsigned long long)clock.y << 32, acked.x | (unsigned long long)acked.y << 32,
      acked.z | (unsigned long long)acked.w << 32, done.x | (unsigned long long)done.y << 32,
      done.z | (unsigned long long)done.w << 32};
}

EP_DEV Op opOf(const ControlWords &c, unsigned long long n) {
  return Op{n, flagOf(n), (int)(n & 1), epLlIsFree(n, n & 1 ? c.acked1 : c.acked0) != 0,
            epLlAckDistance(n, n & 1 ? c.done0 : c.done1)};
}

EP_DEV Op nextOp(const ControlWords &c) {
  return opOf(c, epLlNumSent(c.clock) + 1);
}

// Any thread, any time before its block's finish.
EP_DEV Op currentOp(const ep_ll_group_t &g, const ep_ll_handle_t &h, int kind, unsigned parts) {
  const ControlWords c = loadControl(controlOf(g).kind[kind]);
  return parts & EP_LL_SEND ? nextOp(c) : opOf(c, headOf(h).sent[kind]);
}

// All lanes of a warp: ranks that this rank regards as active.
EP_DEV unsigned long long activeRanks(const ep_ll_group_t &g, int lane) {
  const unsigned long long all = g.numRanks == 64 ? ~0ull : (1ull << g.numRanks) - 1;
  if (!g.enableMask) return all;
  const bool lo = lane < g.numRanks && g.mask[lane] != 0;
  const bool hi = lane + 32 < g.numRanks && g.mask[lane + 32] != 0;
  const unsigned a = __ballot_sync(FULL_WARP, lo), b = __ballot_sync(FULL_WARP, hi);
  return a | (unsigned long long)b << 32 | 1ull << g.rank;
}

EP_DEV char *announceAt(const ep_ll_group_t &g, int at, int from, int buf) {
  return g.peers[at] + g.at.announce + (size_t)(buf * g.numRanks + from) * 16;
}
EP_DEV char *freeAt(const ep_ll_group_t &g, int kind, int at, int from, int buf) {
  return g.peers[at] + g.at.free[kind] + (size_t)(buf * g.numRanks + from) * 16;
}
// One warp of a combine: the announcement to every rank. (In a dispatch the routing words do the same.)
template <bool FAR>
EP_DEV void sendAnnounce(const ep_ll_group_t &g, const Op &op, unsigned long long active,
                         int lane) {
  for (int r = lane; r < g.numRanks; r += 32) {
    if (active >> r & 1) {
      storeSys(announceAt(g, r, sourceAt<FAR>(g, r), op.buf),
               make_uint4(op.ackDistance, 0, 0, op.flag));
    }
  }
}

#endif
