// High-throughput Update across NVLink domains: a rank stores its ids to its own domain, and puts them, in
// one message, to the rank on its rail in each other domain, which stores them to its domain in the source's
// name. So all ranks find the ids of all in their own memory, as in one domain.
//
// Messages of Update e lie in buffer e mod 2, with a signal each whose value is the number of the Update. A
// rank that posts e + 2 has the words of e + 1 of all ranks, sent after they had finished e: the message of
// e has been put and passed on.
#ifndef TREFOIL_KERNELS_HT_FAR_UPDATE_CUH
#define TREFOIL_KERNELS_HT_FAR_UPDATE_CUH

#include "kernels/ht/ht_far_control.cuh"
#include "kernels/ht/ht_update.cuh"
#include "kernels/net/net.cuh"

template <class Network> struct FarDomains;

template <class Network> struct FarReach {
  const HtFar far;

  EP_DEV FarReach(const ep_ht_group_t &g, const FarDomains<Network> &how) : far(g, how.args) {}

  // Sets: of streams, then own tokens to each far node, then of the rail's rank there to this node.
  EP_DEV int outSet(int i) const { return far.g.numRanks + i; }
  EP_DEV int inSet(int i) const { return far.g.numRanks + far.num + i; }

  template <class F> EP_DEV void eachSet(const UpdateArgs &a, int src, int expert, F f) const {
    if (far.railOf(src) != far.rail) return;
    const int rank = expert / a.op.group.numLocal;
    const bool isHere = far.isNear(rank);
    if (isHere) f(src / far.per * far.per + far.railOf(rank));
    if (src == a.op.group.rank) {
      if (!isHere) f(outSet(far.farOf(rank / far.per)));
    } else if (isHere) {
      f(inSet(far.farOf(src / far.per)));
    }
  }

  // Ranks of the own domain that a token of node `node` goes to.
  template <class F>
  EP_DEV void eachHop(const UpdateArgs &a, const UpdateShared &s, int node, F f) const {
    for (int l = 0; l < far.per; l++) {
      const int n = numberIn(s, a.op.group.numLocal + 1 + node * far.per + l);
      if (n >= 0) f(make_int2(far.near(l), n));
    }
  }
  EP_DEV void listDests(const UpdateArgs &a, const UpdateShared &s, const HtTables &tables,
                        int t) const {
    int n = 0;
    int2 *dests = tables.dests + (size_t)t * tables.width;
    for (int node = 0; node <= far.num; node++) {
      if (node == far.own) {
        eachHop(a, s, node, [&](int2 hop) { dests[n++] = hop; });
        continue;
      }
      const int i = far.farOf(node), ordinal = numberIn(s, a.op.group.numLocal + 1 + outSet(i));
      if (ordinal >= 0) dests[n++] = make_int2(HT_RING_PEER + i, ordinal);
    }
    for (; n < tables.width; n++) dests[n] = make_int2(-1, 0);
  }

  EP_DEV void fillMore(const UpdateArgs &a, const UpdateShared &s, const HtTables &, const Look &l,
                       unsigned long long number) const {
    if (l.t >= far.g.maxTokens || far.railOf(l.src) != far.rail || l.src == far.g.rank) return;
    const HtFarTables t = far.tables(a.op.handle);
    const int node = l.src / far.per, i = far.farOf(node), K = a.op.handle.numTopk;
    const size_t at = far.at(i, l.t);
    t.landed[at] = l.is ? numberIn(s, far.g.numLocal + 1 + inSet(i)) : -1;
    if (!l.is) return;
    forIds(a, l, number, [&](int k, int e) { t.ids[at * K + k] = e; });
    int n = 0;
    int2 *hops = t.hops + at * t.width;
    eachHop(a, s, node, [&](int2 hop) { hops[n++] = hop; });
    for (; n < t.width; n++) hops[n] = make_int2(-1, 0);
  }
  EP_DEV void reportMore(const UpdateArgs &a, const UpdateShared &s, const HtTables &) const {
    const HtFarTables t = far.tables(a.op.handle);
    for (int i = threadIdx.x; i < far.num; i += HT_TILE) {
      t.counts[0][i] = s.total[far.g.numLocal + 1 + outSet(i)];
      t.counts[1][i] = s.total[far.g.numLocal + 1 + inSet(i)];
    }
  }

  // A message: {tokens, 0}, words of ids.
  EP_DEV size_t message(bool in, int i, int buf) const {
    const ep_ht_far_layout_t &l = far.f.far.at;
    return l.ids[in] + ((size_t)buf * (in ? far.num : 1) + (in ? i : 0)) * l.idsBytes;
  }
  EP_DEV int signalOf(int node, int buf) const { return (4 + buf) * (far.num + 1) + node; }

  EP_DEV void exchange(const UpdateArgs &a, unsigned long long number) const {
    storeIds(a, number);
    if (endsStores()) post(a, number);
    for (int i = 0; i < far.num; i++) {
      if (!waitIds(i, number)) return;
      passOn(a, i, number);
    }
    waitNear(number);
  }

private:
  EP_DEV void storeIds(const UpdateArgs &a, unsigned long long number) const {
    const ep_ht_group_t &g = far.g;
    const int V = g.at.idVectors, buf = (int)(number & 1);
    const long long words = (long long)a.op.numTokens * V;
    char *out = far.window(message(false, 0, buf));
    if (blockIdx.x == 0 && threadIdx.x < far.per) {
      storeSys(headerAt(g, far.near(threadIdx.x), g.rank, buf),
               packFlagged(a.op.numTokens, number));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *(unsigned long long *)out = a.op.numTokens;
    for (long long i = (long long)blockIdx.x * HT_TILE + threadIdx.x; i < words * (far.per + 1);
         i += (long long)gridDim.x * HT_TILE) {
      const int l = (int)(i / words);
      const long long word = i - l * words, t = word / V;
      const int d = l < far.per ? far.near(l) : -1;
      const unsigned long long data = packIds(a, t, (int)(word - t * V), d);
      if (d < 0)
        ((unsigned long long *)(out + 16))[word] = data;
      else
        storeSys(wordAt(g, d, g.rank, t, buf) + (word - t * V) * 16, packFlagged(data, number));
    }
  }

  // All threads: whether this block is the last to have stored.
  EP_DEV bool endsStores() const {
    int last = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence_system();
      last = atomicAdd(&far.c.idsSent, 1u) == gridDim.x - 1;
      if (last) far.c.idsSent = 0;
      __threadfence_system();
    }
    return __syncthreads_or(last);
  }

  // All threads of a block: one warp posts, and what it lacks to the number of the Update is added.
  EP_DEV void post(const UpdateArgs &a, unsigned long long number) const {
    if (threadIdx.x >= 32) return;
    const Net<Network> net(far.f.far.port);
    const int buf = (int)(number & 1);
    const uint64_t base = far.f.far.port.scratch + 128,
                   bytes = 16 + 8ull * a.op.numTokens * far.g.at.idVectors;
    for (int i = 0; i < far.num; i++) {
      unsigned long long &sum = far.c.signalled[buf][i];
      const unsigned long long add = number - sum;
      // At the other end this node has a number among the far ones of that.
      const int there = far.own < far.nodeOf(i) ? far.own : far.own - 1;
      const uint64_t to = base + messageAt(there, buf), from = base + message(false, 0, buf);
      Spin spin;
      int goesOn = 1;
      __syncwarp();
      while (goesOn && !net.template putSignal<NetSignal::WEAK>(far.railRank(i), to, from, bytes,
                                                                signalOf(far.own, buf), add)) {
        const Awaited w = {EP_HT_KIND_UPDATE, EP_WAIT_POST, far.railRank(i), 0, -1};
        if (threadIdx.x == 0) goesOn = htKeepWaiting(far.g, w, 0, spin);
        goesOn = __shfl_sync(FULL_WARP, goesOn, 0);
      }
      if (!goesOn) return;
      if (threadIdx.x > 0) continue;
      sum = number;
      net.count(EP_NET_FOR_IDS, far.railRank(i));
    }
  }
  EP_DEV size_t messageAt(int there, int buf) const { return message(true, there, buf); }

  // All threads: whether the message has come.
  EP_DEV bool waitIds(int i, unsigned long long number) const {
    int there = 0;
    if (threadIdx.x == 0) {
      const Net<Network> net(far.f.far.port);
      Spin spin;
      for (;;) {
        const uint64_t seen = net.readSignal(signalOf(far.nodeOf(i), (int)(number & 1)));
        there = seen >= number;
        const Awaited w = {EP_HT_KIND_UPDATE, EP_WAIT_ROUTING, far.railRank(i), (unsigned)seen, -1};
        if (there || !htKeepWaiting(far.g, w, (unsigned)number, spin)) break;
      }
      __threadfence_system();
    }
    return __syncthreads_or(there);
  }

  // All threads: a near rank that is missing is named before the far ones whose ids it would pass on.
  EP_DEV void waitNear(unsigned long long number) const {
    if ((int)threadIdx.x >= far.per) return;
    const int r = far.near(threadIdx.x);
    unsigned long long ignored;
    waitFlagged(far.g, headerAt(far.g, far.g.rank, r, (int)(number & 1)), number,
                awaited(EP_WAIT_ANNOUNCE, r, -1), ignored);
  }

  EP_DEV void passOn(const UpdateArgs &a, int i, unsigned long long number) const {
    const ep_ht_group_t &g = far.g;
    const int V = g.at.idVectors, buf = (int)(number & 1), src = far.railRank(i);
    const char *in = far.window(message(true, i, buf));
    const long long tokens = min((long long)loadSys(in).x, (long long)g.maxTokens);
    const long long words = tokens * V;
    if (blockIdx.x == 0 && threadIdx.x < far.per) {
      storeSys(headerAt(g, far.near(threadIdx.x), src, buf), packFlagged(tokens, number));
    }
    for (long long w = (long long)blockIdx.x * HT_TILE + threadIdx.x; w < words;
         w += (long long)gridDim.x * HT_TILE) {
      const long long t = w / V;
      const uint4 q = packFlagged(loadVolatile((const unsigned long long *)(in + 16) + w), number);
      for (int l = 0; l < far.per; l++) {
        storeSys(wordAt(g, far.near(l), src, t, buf) + (w - t * V) * 16, q);
      }
    }
  }
};

template <class Network> struct FarDomains {
  using Reach = FarReach<Network>;
  HtFarArgs args;
};

#endif
