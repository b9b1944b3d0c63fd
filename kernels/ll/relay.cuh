// The relay of low latency across NVLink domains (relay.h): from mirrors to messages, from messages to
// exchange memory. Over any Wire of kernels/net (Network here).
//
// A warp has a role, a far rank, and a slice of that rank's rows. A message is contiguous, one put:
//
//     head, 128 bytes | dispatch: routing words of B tokens | records of 128 bytes and a row each
//
// A record has in its first word the row's number: the token; in combine the entry as in the return list, and
// in the next two, as bits, all k of the token that get the row.
// A message is to one rank, or by rails (relay.h) to all ranks of its domain: then it has the routing words
// of one rank behind those of another, and a record of a row has bits for those it is for.
// Records are in the order in which warps found their rows, which no result depends on.
//
//   SEND   waits for the launch's packets in the mirrors (mirror.cuh), or takes whole rows of a combine
//          out of the caller's tensor; the last warp of a message puts it
//   LAND   waits for the far rank's signal, then stores words and packets into the own exchange memory; by
//          rails into that of all ranks of the domain, in the far rank's name
//
// A wait ends when the launch's other blocks gave up or finished without what it is for: they have the limit.
#ifndef TREFOIL_KERNELS_LL_RELAY_CUH
#define TREFOIL_KERNELS_LL_RELAY_CUH

#include "kernels/ll/args.cuh"
#include "kernels/ll/combine_packet.cuh"
#include "kernels/ll/relay_control.h"
#include "kernels/net/net.cuh"

enum class RelayRole { SEND, LAND, SEND_WEIGHTS, LAND_WEIGHTS };

struct RelayHead {
  unsigned ackDistance;
  int count; // dispatch: tokens with routing words, at least one
  int records;
  unsigned pad[29];
};
static_assert(sizeof(RelayHead) == 128, "a message begins with whole packets");

// Puts are counted by message.
static_assert((int)EP_LL_MESSAGE_DISPATCH == EP_NET_FOR_DISPATCH &&
                  (int)EP_LL_MESSAGE_COMBINE == EP_NET_FOR_COMBINE &&
                  (int)EP_LL_MESSAGE_WEIGHTS == EP_NET_FOR_WEIGHTS,
              "the same order");

// The launch that a relay is in.
struct RelayedOp {
  ep_ll_group_t group;
  ep_ll_handle_t handle;
  ep_ll_kind_t kind;
  unsigned parts;
  int numTokens; // B
  const char *tokens;
  int rowBytes; // dispatch: of a row as it is counted
};

struct RelayArgs {
  RelayedOp op;
  ep_ll_relay_t relay;
  int roles, numRoles, slices;                // of a launch; warps for each role and far rank
  int far, idVectors, weightVectors, packets; // other ends; of a token's words, of a row
  int rails;
  Wire wire;
};

// PARTIAL: of a combine by partial sums.
template <class Network, ep_ll_kind_t KIND, bool PARTIAL> class Relay {
  static constexpr bool IS_DISPATCH = KIND == EP_LL_DISPATCH;

public:
  EP_DEV Relay(const RelayArgs &args, unsigned long long n, int farAt, int sliceAt)
      : a(args), g(args.op.group), c(*(ep_ll_relay_control_t *)args.relay.control),
        net(args.relay.port), number(n), flag(flagOf(n)), buf((int)(n & 1)), slice(sliceAt),
        peer(peerOf(args, farAt)), lane((int)threadIdx.x % 32), began(clockNs()),
        numHere(IS_DISPATCH && args.rails ? args.relay.at.ranksPerDomain : 1),
        here(args.op.group.rank / numHere * numHere), there(peer / numHere * numHere) {}

  EP_DEV void run(RelayRole role) {
    goesOn = __shfl_sync(FULL_WARP, isActive(), 0); // the mask may change under way
    constexpr int rows = IS_DISPATCH ? EP_LL_MESSAGE_DISPATCH : EP_LL_MESSAGE_COMBINE;
    if (role == RelayRole::SEND || role == RelayRole::SEND_WEIGHTS) {
      const int message = !PARTIAL || role == RelayRole::SEND ? rows : EP_LL_MESSAGE_WEIGHTS;
      RelayHead head = {};
      int numTokens = 0;
      if (goesOn && readFirst(head, numTokens)) {
        if (IS_DISPATCH) {
          packTokens(head.count, numTokens);
        } else if (!PARTIAL || message == EP_LL_MESSAGE_COMBINE) {
          packReturns();
        } else {
          packWeights();
        }
      }
      post(message, head);
    } else {
      const int message = !PARTIAL || role == RelayRole::LAND ? rows : EP_LL_MESSAGE_WEIGHTS;
      if (goesOn && awaitMessage(message)) land(message);
      if (role == RelayRole::LAND && a.op.parts == EP_LL_RECV && isLastLanded(message)) passFree();
    }
  }

private:
  EP_DEV static int peerOf(const RelayArgs &a, int i) {
    const int perDomain = a.relay.at.ranksPerDomain, rank = a.op.group.rank;
    return IS_DISPATCH && a.rails ? epLlRailRank(perDomain, rank, i)
                                  : epLlFarRank(perDomain, rank, i);
  }

  // Where things lie.
  EP_DEV char *mirror() const { return g.peers[peer]; } // of all far ranks
  EP_DEV char *mine() const { return g.peers[g.rank]; }
  EP_DEV size_t bufferOf(int message, bool in, int parity, int rank, int other) const {
    const ep_ll_relay_layout_t &at = a.relay.at;
    const size_t n = at.numPeers[message];
    const int i = IS_DISPATCH && a.rails ? epLlRailIndex(at.ranksPerDomain, rank, other)
                                         : epLlFarIndex(at.ranksPerDomain, rank, other);
    return a.relay.port.scratch + 128 + at.at[message] +
           ((in * 2 + parity) * n + i) * at.message[message];
  }
  EP_DEV size_t buffer(int message, bool in, int rank, int other) const {
    return bufferOf(message, in, buf, rank, other);
  }
  EP_DEV size_t routing(int from, int t) const {
    const size_t half = (g.at.weights - g.at.routing) / 2;
    return g.at.routing + buf * half + ((size_t)from * g.maxTokens + t) * a.idVectors * 16;
  }
  EP_DEV size_t weights(int from, int t) const {
    return g.at.weights + buf * ((g.at.rows[0] - g.at.weights) / 2) +
           ((size_t)from * g.maxTokens + t) * a.weightVectors * 16;
  }
  EP_DEV size_t tokenRow(int from, int t) const {
    return g.at.rows[0] + buf * g.at.half[0] + ((size_t)from * g.maxTokens + t) * g.at.rowStride[0];
  }
  EP_DEV size_t returnRow(unsigned from) const {
    const ReturnEntry e = {0, from};
    return g.at.rows[1] + buf * g.at.half[1] +
           ((size_t)e.token() * a.op.handle.numTopk + e.k()) * g.at.rowStride[1];
  }
  EP_DEV size_t announcement(int from) const {
    return g.at.announce + (size_t)(buf * g.numRanks + from) * 16;
  }
  EP_DEV size_t freeWord(int from, int parity) const {
    return g.at.free[KIND] + (size_t)(parity * g.numRanks + from) * 16;
  }
  EP_DEV size_t recordBytes(int message) const {
    return message == EP_LL_MESSAGE_WEIGHTS ? (size_t)(16 + a.weightVectors * 16 + 127) / 128 * 128
                                            : (size_t)(1 + a.packets) * 128;
  }
  EP_DEV size_t recordAt(int count, int message, int i) const {
    return 128 + ((size_t)count * numHere * a.idVectors * 16 + 127) / 128 * 128 +
           i * recordBytes(message);
  }
  EP_DEV int signalId(int what, int parity, int rank) const {
    return (what * 2 + parity) * g.numRanks + rank;
  }

  // Waits.
  EP_DEV bool isActive() const { return !g.enableMask || loadVolatile(g.mask + peer) != 0; }
  EP_DEV bool isSent() const {
    return epLlNumSent(loadVolatile(&controlOf(g).kind[KIND].clock)) >= number;
  }
  // One thread: whether the wait has lost its purpose. What a launch has sent was there before its clock
  // moved, so `sending` is read before the last look at it.
  EP_DEV bool isOver(bool sending) const {
    if (loadVolatile(&controlOf(g).wait.failed) || !isActive()) return true;
    return sending || clockNs() - began > 4 * g.timeoutNs;
  }
  // All lanes, after a look at what is waited for: look again?
  EP_DEV bool lookAgain(unsigned &polls, bool &isLast, bool sends) {
    if (isLast) return goesOn = false;
    if (++polls & 63) return true;
    const int over = lane == 0 && isOver(sends && isSent());
    isLast = __shfl_sync(FULL_WARP, over, 0);
    return true;
  }

  // All lanes of a warp: `packets` packets as they come; to another place. STEPS steps are in flight.
  EP_DEV void movePackets(const char *from, char *to, bool isFlagged) {
    constexpr int STEPS = 10;
#pragma unroll 1
    for (int s = lane >> 3; __any_sync(FULL_WARP, s < a.packets) && goesOn; s += STEPS * 4) {
      const size_t at = (size_t)s * 128 + (lane & 7) * 16;
      uint4 v[STEPS];
      unsigned pending = (1u << STEPS) - 1, polls = 0;
      bool isLast = false;
      do {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
          if (pending >> j & 1 && s + j * 4 < a.packets) v[j] = loadSys(from + at + j * 512);
        }
        unsigned missing = 0;
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
          const bool is = isFlagged && isFlagLane(lane) && s + j * 4 < a.packets;
          missing |= is && v[j].w != flag ? 1u << j : 0u;
        }
        pending = __reduce_or_sync(FULL_WARP, missing & pending);
      } while (pending && lookAgain(polls, isLast, true));
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
        if (goesOn && s + j * 4 < a.packets) storeSys(to + at + j * 512, v[j]);
      }
    }
  }

  // All lanes of a warp: n words, one a lane, whose last part is the flag. The lane's word.
  EP_DEV uint4 readWords(const char *from, int n) {
    uint4 v = make_uint4(0, 0, 0, flag);
    unsigned polls = 0;
    bool isLast = false, missing;
    do {
      if (lane < n) v = loadSys(from + lane * 16);
      missing = __any_sync(FULL_WARP, v.w != flag);
    } while (missing && lookAgain(polls, isLast, true));
    return v;
  }

  // The first word of the operation in the mirror: every launch stores it once it may store to the
  // far rank's buffers. A peer's word that it has received all may be what the launch waits for.
  EP_DEV bool readFirst(RelayHead &head, int &numTokens) {
    landFree();
    const size_t at = IS_DISPATCH ? routing(peer, 0) : announcement(peer);
    const uint4 v = readWords(mirror() + at, 1);
    const unsigned x = __shfl_sync(FULL_WARP, v.x, 0);
    head.ackDistance = IS_DISPATCH ? x >> EP_LL_ACK_DISTANCE_SHIFT : x;
    numTokens = IS_DISPATCH ? (int)(x & EP_LL_COUNT_MASK) : 0;
    head.count = IS_DISPATCH ? max(1, numTokens) : 0;
    return goesOn;
  }

  // The first slice: a launch may wait until the far rank has received the operation before the last one. Its
  // receive-only launches signal that; the head of its next message has it, too, but may not have landed.
  EP_DEV void landFree() {
    if (slice || number < 3) return;
    const char *first = mirror() + (IS_DISPATCH ? routing(peer, 0) : announcement(peer));
    unsigned polls = 0;
    bool isLast = false;
    for (;;) {
      const unsigned long long received = __shfl_sync(FULL_WARP, lane ? 0 : readReceived(), 0);
      if (received + 2 >= number) {
        if (lane == 0) storeFree(buf, received);
        return;
      }
      if (loadUniform(first).w == flag) return; // the launch did not wait
      if (!lookAgain(polls, isLast, true)) return;
    }
  }
  // One thread.
  EP_DEV unsigned long long readReceived() const {
    const int message = IS_DISPATCH ? EP_LL_MESSAGE_DISPATCH : EP_LL_MESSAGE_COMBINE;
    if (net.readSignal(signalId(message, buf ^ 1, peer)) >= number - 1) {
      const uint4 head = loadSys(a.relay.window + bufferOf(message, true, buf ^ 1, g.rank, peer));
      if (head.x == 1) return number - 2;
    }
    return net.readSignal(signalId(EP_LL_RELAY_FREE + KIND, buf, peer));
  }
  // All lanes: the same word, which may change.
  EP_DEV uint4 loadUniform(const char *at) const {
    const uint4 v = loadSys(at);
    return make_uint4(__shfl_sync(FULL_WARP, v.x, 0), __shfl_sync(FULL_WARP, v.y, 0),
                      __shfl_sync(FULL_WARP, v.z, 0), __shfl_sync(FULL_WARP, v.w, 0));
  }
  EP_DEV static uint4 freeOf(unsigned long long n) {
    return make_uint4((unsigned)n, (unsigned)(n >> 32), flagOf(n), 0);
  }

  // One thread: that the peer has received this operation. By rails all ranks here receive
  // this, too: a rank that learns it from the peer's message alone may not have landed that yet.
  EP_DEV void storeFree(int parity, unsigned long long received) const {
    for (int d = here; d < here + numHere; d++) {
      storeSys(g.peers[d] + freeWord(peer, parity), freeOf(received));
    }
  }

  // Room for a record, with its word and, as bits, the ranks of the peer's domain that it is for.
  EP_DEV char *takeRecord(int message, int count, unsigned word, unsigned long long to) {
    int i = 0;
    if (lane == 0) i = (int)atomicAdd(&counter(message).records, 1u);
    i = __shfl_sync(FULL_WARP, i, 0);
    char *at = a.relay.window + buffer(message, false, g.rank, peer) + recordAt(count, message, i);
    if (lane == 0) storeSys(at, make_uint4(word, (unsigned)to, (unsigned)(to >> 32), 0));
    return at;
  }
  EP_DEV ep_ll_relay_count_t &counter(int message) const {
    return c.counts[message][peer];
  }

  template <class F> EP_DEV void eachOwn(int n, F f) {
#pragma unroll 1
    for (int i = slice; i < n && goesOn; i += a.slices) f(i);
  }

  EP_DEV void packTokens(int count, int numTokens) {
    char *out = a.relay.window + buffer(EP_LL_MESSAGE_DISPATCH, false, g.rank, peer);
    eachOwn(count, [&](int t) {
      unsigned long long to = 0;
#pragma unroll 1
      for (int d = 0; d < numHere && goesOn; d++) {
        const uint4 w = readWords(mirror() + routing(there + d, t), a.idVectors);
        const size_t at = 128 + (((size_t)d * count + t) * a.idVectors + lane) * 16;
        if (lane < a.idVectors) storeSys(out + at, w);
        const bool has = lane < a.idVectors && ((lane && w.x != ~0u) || w.y != ~0u || w.z != ~0u);
        if (__any_sync(FULL_WARP, has)) to |= 1ull << d;
      }
      if (t >= numTokens || !to || !goesOn) return;
      char *at = takeRecord(EP_LL_MESSAGE_DISPATCH, count, (unsigned)t, to);
      movePackets(mirror() + mirroredRow(g, t, buf), at + 128, true);
      if (a.rails && lane == 0) moveCounts(to);
    });
  }

  // One thread: the launch has counted a row to each of the ranks; the peer gets one.
  EP_DEV void moveCounts(unsigned long long to) const {
    for (; to; to &= to - 1) {
      countBytes(g, EP_LL_DISPATCH, there + __ffsll((long long)to) - 1, -a.op.rowBytes);
    }
    countBytes(g, EP_LL_DISPATCH, peer, a.op.rowBytes);
  }

  // The k, as bits, of the entries that share the row of entry i, as a token may name an expert more than
  // once. 0: the row is an earlier entry's. A token's entries lie side by side.
  EP_DEV unsigned long long sharersOf(const ReturnEntry *list, int n, int i) const {
    const ReturnEntry e = list[i];
    const auto isSame = [&](int j) {
      return list[j].source() == e.source() && list[j].token() == e.token();
    };
#pragma unroll 1
    for (int j = i - 1; j >= 0 && isSame(j); j--) {
      if (list[j].slot == e.slot) return 0;
    }
    unsigned long long ks = 0;
#pragma unroll 1
    for (int j = i; j < n && isSame(j); j++) {
      if (list[j].slot == e.slot) ks |= 1ull << list[j].k();
    }
    return ks;
  }

  EP_DEV void packReturns() {
    const ReturnEntry *list = returnsOf(a.op.handle);
    const int n = headOf(a.op.handle).numReturns;
    eachOwn(n, [&](int i) {
      const ReturnEntry e = list[i];
      const unsigned long long ks = e.source() == peer ? sharersOf(list, n, i) : 0;
      if (!ks) return;
      char *to = takeRecord(EP_LL_MESSAGE_COMBINE, 0, e.from, ks) + 128;
      if constexpr (PARTIAL) {
        movePackets(mirror() + mirroredSum(g, peer, e.token(), buf), to, true);
      } else {
        packRow(a.op.tokens + (size_t)e.slot * a.op.rowBytes, to);
      }
    });
  }

  // All lanes: a row of the caller's tensor, as the launch would send it.
  EP_DEV void packRow(const char *row, char *to) const {
    constexpr int STEPS = 8;
    const Lane part = laneOf(a.wire, lane);
#pragma unroll 1
    for (int s = 0; s < a.wire.steps; s += STEPS) {
      uint4 v[STEPS];
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
        if (s + j < a.wire.steps) v[j] = readRow(row, part, s + j);
      }
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
        if (s + j < a.wire.steps) storeStep(to, part, s + j, toWire(v[j], part, flag));
      }
    }
  }

  EP_DEV void packWeights() {
    eachOwn(a.op.numTokens, [&](int t) {
      bool is = false;
      for (int k = lane; k < a.op.handle.numTopk; k += 32) {
        const size_t i = (size_t)t * a.op.handle.numTopk + k;
        const int e = a.op.handle.idx64 ? (int)((const long long *)a.op.handle.topkIdx)[i]
                                        : ((const int *)a.op.handle.topkIdx)[i];
        is = is || (isExpert(g, e) && e / g.numLocal == peer);
      }
      if (!__any_sync(FULL_WARP, is)) return;
      const uint4 v = readWords(mirror() + weights(peer, t), a.weightVectors);
      char *to = takeRecord(EP_LL_MESSAGE_WEIGHTS, 0, (unsigned)t, 1);
      if (lane < a.weightVectors) storeSys(to + 16 + lane * 16, v);
    });
  }

  // The last warp of a message puts it.
  EP_DEV void post(int message, RelayHead head) {
    ep_ll_relay_count_t &n = counter(message);
    int isLast = 0;
    __threadfence_system();
    __syncwarp();
    if (lane == 0) {
      if (!goesOn) atomicExch(&n.abandoned, 1u);
      __threadfence_system();
      isLast = atomicAdd(&n.arrived, 1u) == (unsigned)a.slices - 1;
    }
    if (!__shfl_sync(FULL_WARP, isLast, 0)) return;
    __threadfence_system();
    head.records = (int)loadVolatile(&n.records);
    const bool goes = !loadVolatile(&n.abandoned);
    __syncwarp();
    if (lane == 0) n.records = n.arrived = n.abandoned = 0;
    if (epLlClears(number, EP_LL_CLEAR_PERIOD)) clearMirrors();
    if (!goes) return;
    const size_t from = buffer(message, false, g.rank, peer),
                 to = buffer(message, true, peer, g.rank);
    if (lane == 0) *(RelayHead *)(a.relay.window + from) = head;
    __threadfence_system();
    __syncwarp();
    const size_t bytes = recordAt(head.count, message, head.records);
    send(message, buf, [&](uint64_t add, int id) {
      return net.template putSignal<NetSignal::WEAK>(peer, to, from, bytes, id, add);
    });
  }

  // What the signal lacks to the operation's number is added.
  template <class F> EP_DEV void send(int what, int parity, F put) {
    unsigned long long &sum = c.signalled[what][parity][peer];
    const unsigned long long add = number - sum;
    const Op op = {number, flag, buf, true, 0};
    const Awaited w = {(unsigned)KIND, EP_WAIT_POST, peer, 0u, -1};
    Spin spin;
    __syncwarp();
    while (!put(add, signalId(what, parity, g.rank))) {
      if (!keepWarpWaiting(g, op, w, spin, lane)) return;
    }
    if (lane) return;
    sum = number;
    if (what < EP_LL_MESSAGES) net.count(what, peer);
  }

  // Whether all `messages` messages that share a part of the mirrors are packed: it is read no more.
  EP_DEV bool isAllPacked(unsigned &packed, int messages) const {
    unsigned before = 0;
    if (lane == 0) before = atomicAdd(&packed, 1u);
    before = __shfl_sync(FULL_WARP, before, 0);
    if ((int)before < messages - 1) return false;
    if (lane == 0) packed = 0;
    return true;
  }

  // Seldom, by the last warp of a message: as the launch clears what it receives into, so that no flag lasts
  // for ever. Before the message is posted, without which the far rank cannot receive the operation.
  EP_DEV void clearMirrors() const {
    const auto clear = [&](size_t at, size_t bytes) {
      for (size_t i = lane * 16; i < bytes; i += 32 * 16) {
        storeSys(mirror() + at + i, make_uint4(0, 0, 0, 0));
      }
    };
    const size_t N = g.maxTokens;
    if (IS_DISPATCH) {
      for (int d = there; d < there + numHere; d++) clear(routing(d, 0), N * a.idVectors * 16);
      if (isAllPacked(c.counts[EP_LL_MESSAGE_DISPATCH][0].packed, a.far))
        clear(mirroredRow(g, 0, buf), N * g.at.rowStride[0]);
      return;
    }
    if (!isAllPacked(counter(EP_LL_MESSAGE_COMBINE).packed, PARTIAL ? 2 : 1)) return;
    clear(announcement(peer), 16);
    if (!PARTIAL) return;
    clear(mirroredSum(g, peer, 0, buf), N * g.at.rowStride[1]);
    clear(weights(peer, 0), N * a.weightVectors * 16);
  }

  // False if it does not come.
  EP_DEV bool awaitMessage(int message) {
    // Weights are for what this launch sends, all else for what it receives.
    const bool sends = message == EP_LL_MESSAGE_WEIGHTS ? (a.op.parts & EP_LL_SEND) != 0
                                                        : a.op.parts == EP_LL_BOTH;
    bool isLast = false;
    unsigned polls = 0;
    for (;;) {
      const int there = lane == 0 && net.readSignal(signalId(message, buf, peer)) >= number;
      if (__shfl_sync(FULL_WARP, there, 0)) break;
      if (!lookAgain(polls, isLast, sends)) break;
    }
    __syncwarp(); // what lane 0 has acquired
    return goesOn;
  }

  EP_DEV void land(int message) {
    const char *in = a.relay.window + buffer(message, true, g.rank, peer);
    const uint4 head = loadSys(in); // RelayHead
    const unsigned ackDistance = head.x;
    const int count = (int)head.y, records = (int)head.z;
    if (message != EP_LL_MESSAGE_WEIGHTS && slice == 0 && lane == 0 && ackDistance == 1) {
      storeFree(buf ^ 1, number - 1);
    }
    if (message == EP_LL_MESSAGE_COMBINE && slice == 0 && lane == 0) {
      storeSys(mine() + announcement(peer), make_uint4(ackDistance, 0, 0, flag));
    }
    if (IS_DISPATCH) landWords(in, count);
    eachOwn(records, [&](int i) {
      const char *at = in + recordAt(count, message, i);
      const uint4 record = loadUniform(at);
      const unsigned word = record.x;
      if (PARTIAL && message == EP_LL_MESSAGE_WEIGHTS) {
        if (lane < a.weightVectors) {
          storeSys(mine() + weights(peer, (int)word) + lane * 16, loadSys(at + 16 + lane * 16));
        }
      } else if (IS_DISPATCH) {
        landRow(at + 128, (int)word, record.y | (unsigned long long)record.z << 32);
      } else {
        landReturn(at + 128, word, record.y | (unsigned long long)record.z << 32);
      }
    });
  }

  // All lanes: to the ranks here whose bits are set. The row is read anew for each: it is near, they are not.
  EP_DEV void landRow(const char *from, int token, unsigned long long to) {
#pragma unroll 1
    for (; to && goesOn; to &= to - 1) {
      const int rank = here + __ffsll((long long)to) - 1;
      movePackets(from, g.peers[rank] + tokenRow(peer, token), false);
      if (a.rails && lane == 0) countBytes(g, EP_LL_DISPATCH, rank, a.op.rowBytes);
    }
  }

  // All lanes: to the entries of a token whose k are set.
  EP_DEV void landReturn(const char *from, unsigned entry, unsigned long long ks) {
#pragma unroll 1
    for (; ks && goesOn; ks &= ks - 1) {
      const int k = __ffsll((long long)ks) - 1;
      movePackets(from, mine() + returnRow((entry & ~(63u << 20)) | (unsigned)k << 20), false);
    }
  }

  EP_DEV void landWords(const char *in, int count) const {
    const int n = count * a.idVectors;
    for (int i = slice * 32 + lane; i < n * numHere; i += a.slices * 32) {
      const int d = i / n;
      storeSys(g.peers[here + d] + routing(peer, 0) + (size_t)(i - d * n) * 16,
               loadSys(in + 128 + (size_t)i * 16));
    }
  }

  // All lanes: the last warp of a message, all of which looked for it and landed what there was. From then
  // on the far rank may send its next message into the buffer.
  EP_DEV bool isLastLanded(int message) {
    ep_ll_relay_count_t &n = counter(message);
    unsigned before = 0;
    if (lane == 0) {
      if (!goesOn) atomicExch(&n.missed, 1u);
      __threadfence();
      before = atomicAdd(&n.landed, 1u);
    }
    if (__shfl_sync(FULL_WARP, before, 0) != (unsigned)a.slices - 1) return false;
    __threadfence();
    const int missed = loadVolatile(&n.missed) != 0;
    __syncwarp();
    if (lane == 0) n.landed = n.missed = 0;
    return !missed;
  }

  // The launch only received: at its end a word in the mirror says so, which is sent to the far rank.
  EP_DEV void passFree() {
    bool isLast = false;
    unsigned polls = 0;
    const char *at = mirror() + freeWord(peer, buf);
    for (;;) {
      if (numberOf(loadUniform(at)) == number) break;
      if (!lookAgain(polls, isLast, false)) return;
    }
    send(EP_LL_RELAY_FREE + KIND, buf,
         [&](uint64_t add, int id) { return net.template signal<NetSignal::WEAK>(peer, id, add); });
  }

  const RelayArgs &a;
  const ep_ll_group_t &g;
  ep_ll_relay_control_t &c;
  const Net<Network> net;
  const unsigned long long number;
  const unsigned flag;
  const int buf, slice, peer, lane;
  const uint64_t began;
  // Of a message: ranks that it is to, and the first of them of this rank's domain, of the peer's.
  const int numHere, here, there;
  bool goesOn = true;
};

// Roles of a launch, in the order of its blocks.
static inline int relayRoles(const RelayedOp &op, RelayRole *roles) {
  const bool partial = op.kind == EP_LL_COMBINE && op.handle.sum == EP_LL_SUM_PARTIAL;
  int n = 0;
  if (op.parts & EP_LL_SEND) roles[n++] = RelayRole::SEND;
  if (op.parts & EP_LL_SEND && partial) roles[n++] = RelayRole::SEND_WEIGHTS;
  if (op.parts & EP_LL_SEND && partial) roles[n++] = RelayRole::LAND_WEIGHTS;
  if (op.parts & EP_LL_RECV) roles[n++] = RelayRole::LAND;
  return n;
}

// All threads of a block that relays, one of numBlocks.
template <class Network, ep_ll_kind_t KIND, bool PARTIAL>
EP_DEV void runRelay(const RelayArgs &a, int block, int numBlocks) {
  ep_ll_relay_control_t &c = *(ep_ll_relay_control_t *)a.relay.control;
  const bool sends = a.op.parts & EP_LL_SEND;
  const unsigned long long number =
      sends ? loadVolatile(&c.numbers[KIND]) + 1 : headOf(a.op.handle).sent[KIND];
  // A message's warps lie in different blocks, as far as there are blocks.
  const int warp = (int)(threadIdx.x / 32) * numBlocks + block, slice = warp / a.numRoles / a.far,
            i = warp - slice * a.numRoles * a.far, role = i / a.far;
  if (slice < a.slices) {
    Relay<Network, KIND, PARTIAL>(a, number, i - role * a.far, slice)
        .run((RelayRole)(a.roles >> role * 4 & 15));
  }
  __syncthreads();
  if (threadIdx.x != 0 || !sends) return;
  __threadfence();
  if ((int)atomicAdd(&c.blocks[KIND], 1u) != numBlocks - 1) return;
  c.blocks[KIND] = 0;
  c.numbers[KIND] = number;
}

// What the host works out for a relay in a launch of `warps` warps a block, of which it adds numBlocks. Host.
static inline RelayArgs relayArgs(const RelayedOp &op, const ep_ll_relay_t &relay, const Wire &wire,
                                  int warps, int *numBlocks) {
  RelayArgs a = {};
  RelayRole roles[4];
  const int n = relayRoles(op, roles), idBytes = op.group.numLocal < 0xff ? 1 : 2;
  a.op = op;
  a.relay = relay;
  for (int i = 0; i < n; i++) a.roles |= (int)roles[i] << i * 4;
  a.numRoles = n;
  a.far =
      relay.at.numPeers[op.kind == EP_LL_DISPATCH ? EP_LL_MESSAGE_DISPATCH : EP_LL_MESSAGE_COMBINE];
  a.rails = op.kind == EP_LL_DISPATCH && relay.at.rails;
  const int perSlice = n * a.far, least = (perSlice + warps - 1) / warps;
  *numBlocks = relay.blocks > least ? relay.blocks : least;
  a.slices = *numBlocks * warps / perSlice;
  a.idVectors = (4 + op.handle.numTopk * idBytes + 11) / 12;
  a.weightVectors = (op.handle.numTopk + 2) / 3;
  a.wire = wire;
  a.packets = op.kind == EP_LL_DISPATCH ? wire.packets : wire.steps * 4;
  return a;
}

#endif
