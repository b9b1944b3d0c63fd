// Rank-major dispatch by lines and straight into windows, side by side: whole, and its parts apart;
// for the benchmark. Every way is compared with the reference, into poisoned outputs, before it is
// timed.
#ifndef TREFOIL_TESTS_KERNELS_LL_WINDOW_CUH
#define TREFOIL_TESTS_KERNELS_LL_WINDOW_CUH

#include "ll_time.cuh"

namespace {

constexpr size_t WINDOW_EXCHANGE = (size_t)3 << 30; // 4096 tokens, top-8, 8 ranks

using Sets = std::vector<std::vector<StepRank>>; // [SETS][R]

Shape windowShape(int R, int B) {
  Shape s = benchShape(R, true, EP_LL_QUANT_NONE, EP_LL_SUM_RANKS);
  s.N = std::max(s.N, B);
  s.config.maxTokens = s.N;
  return s;
}

StepRank windowRank(World &w, const Shape &s, int r, int i, int B) {
  Rng rng = {(uint64_t)(B * 100 + r * 10 + i)};
  StepRank k = {};
  k.B = B;
  k.topk = randomRouting(rng, B, s.K, s.E, 0);
  k.tokens = finiteBf16(3000 + r * SETS + i, B * s.inputBytes());
  k.weights.resize((size_t)B * s.K);
  for (float &f : k.weights) f = (rng.below(100000) + 1) * 1e-5f;
  const std::vector<int64_t> topk64(k.topk.begin(), k.topk.end());
  ep_ll_dispatch_t &d = k.dispatch;
  d.group = w.group(r, s.config, GRID, 3000000000ull);
  d.handle = ep_ll_handle_t{
      w.upload(r, topk64), w.filled<char>(r, epLlHandleBytes(&s.config, s.K), 0), s.K, 1, 1, s.sum};
  d.tokens = w.upload(r, k.tokens);
  d.weights = w.upload(r, k.weights);
  d.outTokens = w.take<char>(r, s.slots() * s.tokenBytes());
  d.counters = w.take<int32_t>(r, s.R);
  d.outWeights = w.take<float>(r, s.slots() * s.K);
  d.outIdx = w.take<int32_t>(r, s.slots() * s.K);
  d.numTokens = B;
  d.tokenBytes = (int)s.tokenBytes();
  d.window = w.window(r, d.outTokens, d.outTokens, EP_LL_WAY_LINES);
  return k;
}

void poison(const Shape &s, const ep_ll_dispatch_t &d, cudaStream_t stream) {
  CU(cudaMemsetAsync(d.outTokens, POISON, s.slots() * s.tokenBytes(), stream));
  CU(cudaMemsetAsync(d.counters, POISON, s.R * 4, stream));
  CU(cudaMemsetAsync(d.outWeights, POISON, s.slots() * s.K * 4, stream));
  CU(cudaMemsetAsync(d.outIdx, POISON, s.slots() * s.K * 4, stream));
}

bool checkWay(Bench &b, const Shape &s, const Sets &sets, bool staged) {
  World &w = b.w;
  b.each([&](int r) {
    cudaStream_t stream = w.ranks[r].stream;
    for (const auto &set : sets) {
      const ep_ll_dispatch_t &d = set[r].dispatch;
      poison(s, d, stream);
      if (staged) {
        OK(epLlDispatch(&d, EP_LL_SEND, stream));
        OK(epLlDispatch(&d, EP_LL_RECV, stream));
      } else {
        OK(epLlDispatch(&d, EP_LL_BOTH, stream));
      }
    }
  });
  w.sync();
  std::vector<char> ok(b.R * SETS, 1);
  std::vector<std::thread> threads;
  for (int q = 0; q < b.R * SETS; q++) {
    threads.emplace_back([&, q] {
      const int r = q % b.R, i = q / b.R;
      CU(cudaSetDevice(w.ranks[r].device));
      ok[q] = checkDispatch(w, s, sets[i], i, r, nullptr);
    });
  }
  for (auto &t : threads) t.join();
  for (int r = 0; r < b.R; r++) ok[0] &= !w.ranks[r].record->failed;
  return *std::min_element(ok.begin(), ok.end());
}

enum Part { WHOLE, SENDING, COMPLETING };

// The other part of a staged dispatch runs untimed; before Complete all ranks meet again, with
// their rows under way or there.
Bench::Times timePart(Bench &b, const Sets &sets, Part part, std::pair<int, int> warps) {
  return b.time(
      [&](int r, int i, unsigned long long *stamps) {
        cudaStream_t stream = b.w.ranks[r].stream;
        ep_ll_dispatch_t plain = sets[i % SETS][r].dispatch, timed = plain;
        timed.group.stamps = (uint64_t *)stamps;
        if (part == WHOLE) {
          timed.sendWarps = warps.first;
          timed.recvWarps = warps.second;
          OK(epLlDispatch(&timed, EP_LL_BOTH, stream));
          return;
        }
        OK(epLlDispatch(part == SENDING ? &timed : &plain, EP_LL_SEND, stream));
        if (part == COMPLETING && stamps) lockstepKernel<<<1, 32, 0, stream>>>(b.barriers[r], 4000);
        OK(epLlDispatch(part == COMPLETING ? &timed : &plain, EP_LL_RECV, stream));
      },
      part != COMPLETING);
}

void benchWay(Bench &b, const Shape &s, Sets &sets, int B, ep_ll_way_t way, bool tune) {
  static const char *const names[2][3] = {
      {"dispatch rank-major, lines", "dispatch rank-major, lines, send",
       "dispatch rank-major, lines, Complete"},
      {"dispatch rank-major, window", "dispatch rank-major, window, send",
       "dispatch rank-major, window, Complete"}};
  const bool straight = way == EP_LL_WAY_STRAIGHT;
  for (auto &set : sets) {
    for (StepRank &k : set) k.dispatch.window.way = way;
  }
  for (int part = WHOLE; part <= COMPLETING; part++) {
    const unsigned parts = part == WHOLE ? EP_LL_BOTH : EP_LL_SEND;
    bool ok = checkWay(b, s, sets, part != WHOLE);
    ok &= epLlDispatchIsStraight(&sets[0][0].dispatch, parts) == straight;
    std::vector<std::pair<int, int>> warps = {{0, 0}};
    if (tune && straight && part == WHOLE) {
      warps = {{8, 8}, {4, 4}, {2, 4}, {4, 8}, {4, 12}, {8, 4}, {12, 4}};
    }
    for (auto p : warps) {
      const auto t = ok ? timePart(b, sets, (Part)part, p) : Bench::Times{};
      b.row(names[straight][part], B, s, false, busiestPort(s, sets, false), ok, t, p.first,
            p.second);
    }
  }
}

void benchWindow(Bench &b, int B, bool tune) {
  const Shape s = windowShape(b.R, B);
  b.w.reset(s.config, 0);
  Sets sets(SETS, std::vector<StepRank>(b.R));
  b.each([&](int r) {
    for (int i = 0; i < SETS; i++) sets[i][r] = windowRank(b.w, s, r, i, B);
  });
  b.w.sync();
  for (ep_ll_way_t way : {EP_LL_WAY_LINES, EP_LL_WAY_STRAIGHT}) {
    benchWay(b, s, sets, B, way, tune);
  }
}

} // namespace

#endif
