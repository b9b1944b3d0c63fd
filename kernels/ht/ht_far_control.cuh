// High throughput across NVLink domains: ranks and domains, a handle's further tables, the rings.
#ifndef TREFOIL_KERNELS_HT_FAR_CONTROL_CUH
#define TREFOIL_KERNELS_HT_FAR_CONTROL_CUH

#include "kernels/ht/ht_far_control.h"
#include "kernels/ht/ht_far_stamps.cuh"
#include "kernels/ht/ht_producer.cuh"

struct HtFarArgs {
  ep_ht_far_t far;
  HtShape middle;       // of forwarders, reducers
  int split, endMiddle; // blocks below send first, blocks below that forward or reduce first
  int slotBits[2];      // log2 of ringSlots
#ifdef TREFOIL_HT_FAR_STAMPS
  HtStampFile *stamps; // NULL: none
#endif
};

// The words of a ring's slots, all in this rank's memory: {epoch << 1 | it stands for nothing}.
enum HtRingWord {
  HT_FILLED,   // out: may be put
  HT_REFILL,   // out: may be filled again
  HT_LANDED,   // in: may be read
  HT_CONSUMED, // in: has been read
};

// Locations (ht_fifo.cuh) of ring slot: peers past those of FIFOs, by far node.
constexpr int HT_RING_PEER = 65;
EP_DEV bool isRingSlot(int code) {
  return code >= HT_RING_PEER << 24;
}
EP_DEV int ringOf(int code) {
  return fifoRank(code) - HT_RING_PEER;
}

// The tables behind those of ht_control.cuh; H = min(ranks of a domain, K). There, `dests` of an own token
// are ranks of the own node and, as HT_RING_PEER + far node, other nodes with the ordinal among own tokens
// to that node; ascending by node. head->sendCount is by stream: [node][rank of the own node], tokens of the
// node's rank on this rail that go to that rank.
//   counts  [out, in][R] by far node: own tokens to it, tokens of the rail's rank there that come here
//   hops    [far][N][H] their tokens: {rank of the own node, ordinal among the source's to it}; rank -1 ends
//   landed  [far][N] ordinal among the source's tokens to this node; -1: it does not come here
//   ids     [far][N][K] experts, -1 = none
struct HtFarTables {
  int *counts[2];
  int2 *hops;
  int *landed, *ids;
  int width; // H
};

struct HtFar {
  const ep_ht_group_t &g;
  const HtFarArgs &f;
  ep_ht_far_control_t &c;
  int per, own, rail, num; // ranks of a domain; the own domain, the rank in it; other domains

  EP_DEV HtFar(const ep_ht_group_t &group, const HtFarArgs &args)
      : g(group), f(args), c(*(ep_ht_far_control_t *)args.far.control),
        per(args.far.at.ranksPerDomain), own(group.rank / per), rail(group.rank - own * per),
        num(args.far.at.numFar) {}

  EP_DEV int nodeOf(int i) const { return i < own ? i : i + 1; }
  EP_DEV int farOf(int node) const { return node < own ? node : node - 1; }
  EP_DEV int railRank(int i) const { return nodeOf(i) * per + rail; }
  EP_DEV int near(int l) const { return own * per + l; } // the l-th rank of the own domain
  EP_DEV bool isNear(int rank) const { return rank / per == own; }
  EP_DEV int railOf(int rank) const { return rank % per; }
  // The rank of the own domain that rows from or to rank o go by: o itself if it is near.
  EP_DEV int via(int o) const { return near(railOf(o)); }
  // Between this rank and via(o), rows of o's tokens are a stream of their own. Its number at via(o):
  EP_DEV int streamOf(int o) const { return o / per * per + rail; }

  EP_DEV HtFarTables tables(const ep_ht_handle_t &h) const {
    const size_t N = g.maxTokens;
    char *p = (char *)htTables(g, h).pads + htAlign((size_t)(g.numLocal + 1) * 4);
    HtFarTables t;
    t.width = min(per, h.numTopk);
    t.counts[0] = (int *)p;
    t.counts[1] = t.counts[0] + EP_HT_MAX_RANKS;
    p += htAlign(2 * 4 * EP_HT_MAX_RANKS);
    t.hops = (int2 *)p;
    p += htAlign(num * N * t.width * 8);
    t.landed = (int *)p;
    p += htAlign(num * N * 4);
    t.ids = (int *)p;
    return t;
  }
  EP_DEV size_t at(int i, int token) const { return (size_t)i * g.maxTokens + token; }

  EP_DEV char *window(size_t offset) const {
    return f.far.window + f.far.port.scratch + 128 + offset;
  }
  EP_DEV HtLocation ringSlotOf(int kind, int i, unsigned long long q) const {
    return fifoSlotOf(HT_RING_PEER + i, q, f.slotBits[kind]);
  }
  EP_DEV size_t ringSlotOffset(int kind, bool in, int code) const {
    const ep_ht_far_layout_t &l = f.far.at;
    return l.rings[kind][in] +
           ((size_t)ringOf(code) * l.ringSlots[kind] + (code & 0xffffff)) * l.slotBytes;
  }
  EP_DEV char *ringSlotAt(int kind, bool in, int code) const {
    return window(ringSlotOffset(kind, in, code));
  }
  EP_DEV uint32_t *wordAt(int kind, HtRingWord what, int code) const {
    const ep_ht_far_layout_t &l = f.far.at;
    return (uint32_t *)((char *)f.far.words + l.words[kind]) +
           ((size_t)what * num + ringOf(code)) * l.ringSlots[kind] + (code & 0xffffff);
  }
  EP_DEV void setWord(int kind, HtRingWord what, const HtLocation &u, bool isVoid) const {
    storeRelaxed(wordAt(kind, what, u.code), (uint32_t)u.epoch << 1 | (uint32_t)isVoid);
  }
  // A slot to be filled waits for this, one to be read for that.
  EP_DEV HtWatch refillOf(int kind, const HtLocation &u) const {
    return HtWatch{wordAt(kind, HT_REFILL, u.code), (u.epoch - 1) & 0x7fffffff,
                   railRank(ringOf(u.code))};
  }
  EP_DEV HtWatch landingOf(int kind, const HtLocation &u) const {
    return HtWatch{wordAt(kind, HT_LANDED, u.code), u.epoch, railRank(ringOf(u.code))};
  }

  // What a wait for a near rank (`missing`, if it is not in the operation at all) or for a far one is for.
  EP_DEV void nameCulprit(int missing, ep_wait_phase_t ofFar, Awaited &w,
                          unsigned &expected) const {
    if (missing >= 0) {
      w = Awaited{w.kind, EP_WAIT_ANNOUNCE, missing, 0, -1};
      expected = 0;
    } else if (!isNear(w.rank)) {
      w.phase = ofFar;
    }
  }

  // One block at the end of an operation.
  EP_DEV void countRingSlots(int kind, const HtFarTables &t, int numChunks) const {
    for (int i = threadIdx.x; i < num; i += blockDim.x) {
      const bool back = kind == 1; // rows go where they came from
      c.rings[kind][i].sent += (unsigned long long)t.counts[back][i] * numChunks;
      c.rings[kind][i].received += (unsigned long long)t.counts[!back][i] * numChunks;
    }
    if (threadIdx.x == 0) c.work[kind] = 0;
  }
};

#endif
