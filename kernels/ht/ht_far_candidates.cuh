// What forwarders and reducers work at: the chunks of tokens of the ranks on this rank's rail in other nodes,
// in the order (token, chunk, node). An item's entry 0 is none: it waits for the item's ring slot, which a
// forwarder reads and a reducer fills. The others are the token's hops in this node.
#ifndef TREFOIL_KERNELS_HT_FAR_CANDIDATES_CUH
#define TREFOIL_KERNELS_HT_FAR_CANDIDATES_CUH

#include "kernels/ht/ht_far_control.cuh"

// Of dispatch (kind 0) or combine (1), with its arguments.
template <int OF, class Args> struct HtFarCandidates {
  static constexpr bool SENDS = true, WATCH_ONE = false, FENCE = true, SIDE_DATA = false,
                        ZERO_ROW = false;
  const Args &a;
  const HtTables &t;
  const HtFarTables ft;
  const HtFar &far;
  const Divisor byChunks, byFar;

  EP_DEV HtFarCandidates(const Args &args, const HtTables &tables, const HtFar &at)
      : a(args), t(tables), ft(at.tables(args.op.handle)), far(at),
        byChunks(Divisor::of(args.row.numChunks)), byFar(Divisor::of(at.num)) {}

  EP_DEV const ep_ht_group_t &group() const { return far.g; }
  EP_DEV int lanes() const { return 4; }
  EP_DEV long long candidates() const {
    return (long long)t.head->mostTokens * far.num * a.row.numChunks;
  }
  EP_DEV void which(int c, HtItem &item) const { // source: a far node
    const int i = byFar.quotient(c);
    item.source = c - i * far.num;
    item.token = byChunks.quotient(i);
    item.chunk = i - item.token * a.row.numChunks;
  }
  EP_DEV int index(int c) const {
    HtItem item;
    which(c, item);
    return ft.landed[far.at(item.source, item.token)];
  }
  EP_DEV HtAhead ahead(int c, int l) const {
    HtItem item;
    which(c, item);
    return HtAhead{ft.landed[far.at(item.source, item.token)], load(item, l)};
  }
  EP_DEV int2 load(const HtItem &item, int i) const {
    if (i == 0 || i > ft.width) return make_int2(-1, 0);
    return ft.hops[far.at(item.source, item.token) * ft.width + i - 1];
  }
  EP_DEV int begin(int c, int index, HtItem &item) const {
    which(c, item);
    const auto &ring = far.c.rings[OF][item.source];
    const unsigned long long first = OF ? ring.sent : ring.received;
    const HtLocation u = far.ringSlotOf(
        OF, item.source, first + (unsigned long long)index * a.row.numChunks + item.chunk);
    item.index = index;
    item.code = u.code;
    item.epoch = u.epoch;
    return 1 + ft.width;
  }
  EP_DEV HtEntry slot(const HtItem &item) const {
    HtEntry e = {};
    e.location = HtLocation{item.code, item.epoch};
    e.watch = OF ? far.refillOf(OF, e.location) : far.landingOf(OF, e.location);
    return e;
  }
  // Rows of the item's source between this rank and one of this node (HtFar::streamOf).
  EP_DEV int streamTo(const HtItem &item, int rank) const {
    return far.nodeOf(item.source) * far.per + far.railOf(rank);
  }
  EP_DEV bool flags() const { return true; }
};

#endif
