// What the benchmark of high throughput runs: a shape with its data on all ranks, checked against the
// reference before it is timed, and the rows that come out.
#ifndef TREFOIL_TESTS_KERNELS_HT_WORK_CUH
#define TREFOIL_TESTS_KERNELS_HT_WORK_CUH

#include "ht_time.cuh"

#include "kernels/ht/ht_control.cuh"
#include "trefoil/trace.h"

namespace {

struct Routing {
  trefoil_popularity_t popularity;
  double skew;
  const char *name; // in the operation's name; "" = uniform
};
const Routing UNIFORM = {TREFOIL_POPULARITY_UNIFORM, 0, ""};

struct Sms { // blocks, and how many of them send first
  int sms, senders;
};

// A shape and its data sets, which launches go round.
struct Work {
  Ranks *w;
  Shape s;
  Routing routing;
  ep_ht_layout_t at;
  std::vector<std::vector<StepRank>> sets;
  double port[2]; // bytes through the busiest port: dispatch, combine; mean of the sets
  int pass = 0;   // 1: gradients

  void make(Ranks &ranks, const Shape &shape, const Routing &how, int numSets);
  bool check(const Sms &dispatch, const Sms &combine);
  bool failed() const; // a launch gave up
  std::string name(const char *operation) const;

  void update(int r, int i, uint64_t *stamps, cudaStream_t q) const {
    ep_ht_update_t o = sets[i % sets.size()][r].update;
    o.group.stamps = stamps;
    OK(epHtUpdate(&o, q));
  }
  void operate(bool combine, const Sms &n, int r, int i, uint64_t *stamps, cudaStream_t q) const {
    const Pass &p = sets[i % sets.size()][r].pass[pass];
    if (combine) {
      ep_ht_combine_t o = p.combine;
      o.group.stamps = stamps;
      o.numSms = n.sms;
      o.numSenders = n.senders;
      OK(epHtCombine(&o, q));
    } else {
      ep_ht_dispatch_t o = p.dispatch;
      o.group.stamps = stamps;
      o.numSms = n.sms;
      o.numSenders = n.senders;
      OK(epHtDispatch(&o, q));
    }
  }
};

// The rows of `trefoil trace generate` with the same shape, seed, kind and skew.
std::vector<std::vector<int32_t>> routingOf(const Shape &s, const Routing &how, uint64_t seed) {
  trefoil_trace_spec_t spec = {};
  spec.shape = trefoil_shape_t{s.R, s.R, s.E, s.K, s.N};
  spec.numSteps = 1;
  spec.seed = seed;
  spec.popularity = how.popularity;
  spec.skew = how.skew;
  const trefoil_trace_t *trace = nullptr;
  trefoil_routing_t routing;
  OK(trefoilTraceGenerate(&trace, &spec));
  OK(trefoilTraceRouting(trace, 0, &routing));
  std::vector<std::vector<int32_t>> rows(s.R);
  for (int r = 0; r < s.R; r++)
    rows[r].assign(routing.topkIdx[r], routing.topkIdx[r] + routing.numTokens[r] * s.K);
  trefoilTraceDestroy(trace);
  return rows;
}

double busiestPort(const Shape &s, const std::vector<StepRank> &step, bool combine) {
  std::vector<int64_t> tokens, rows(s.R * s.R);
  std::vector<const int32_t *> topk;
  const trefoil_case_t c = caseOf(s, step, tokens, topk);
  OK(trefoilRefTraffic(&c, combine, rows.data()));
  int64_t most = 0;
  for (int r = 0; r < s.R; r++) {
    int64_t out = 0, in = 0;
    for (int q = 0; q < s.R; q++) {
      if (q == r) continue;
      out += rows[r * s.R + q];
      in += rows[q * s.R + r];
    }
    most = std::max({most, out, in});
  }
  return (double)most * (combine ? s.combineBytes() : s.tokenBytes() + s.scaleBytes);
}

template <class F> void onAllRanks(const Ranks &w, F f) {
  std::vector<std::thread> threads;
  for (int r = 0; r < (int)w.ranks.size(); r++)
    threads.emplace_back([&, r] {
      CU(cudaSetDevice(w.ranks[r].device));
      f(r);
    });
  for (std::thread &t : threads) t.join();
}

void Work::make(Ranks &ranks, const Shape &shape, const Routing &how, int numSets) {
  w = &ranks;
  s = shape;
  routing = how;
  s.numSms = GRID;
  s.steps = numSets;
  OK(epHtLayout(&s.config, &at));
  sets.assign(numSets, std::vector<StepRank>(s.R));
  for (int r = 0; r < s.R; r++) {
    HtRank &k = w->ranks[r];
    k.exchange = w->take(r, at.bytes, 0);
    k.control = w->take(r, EP_HT_CONTROL_BYTES, 0);
    k.scratch = w->take(r, epHtScratchBytes(&s.config), 0);
  }
  port[0] = port[1] = 0;
  for (int i = 0; i < numSets; i++) {
    const auto rows = routingOf(s, how, i + 1);
    for (int r = 0; r < s.R; r++) {
      sets[i][r].B = s.N;
      sets[i][r].topk = rows[r];
    }
    std::vector<int64_t> tokens;
    std::vector<const int32_t *> topk;
    const trefoil_case_t c = caseOf(s, sets[i], tokens, topk);
    onAllRanks(*w, [&](int r) {
      Rng rng = {(uint64_t)(i * 1000 + r + 7)};
      const ep_ht_handle_t h = {w->take(r, epHtHandleBytes(&s.config, s.K), POISON),
                                s.K,
                                s.expertMajor,
                                s.drop,
                                s.zeroCopyOn,
                                s.alignment,
                                s.maxRecv};
      makeRank(*w, rng, s, c, sets[i][r], r, groupOf(*w, s, at, r), h);
    });
    Rng rng = {(uint64_t)i + 1};
    openWindows(rng, s, sets[i]);
    for (int combine = 0; combine < 2; combine++)
      port[combine] += busiestPort(s, sets[i], combine) / numSets;
  }
  w->sync();
}

// Each set is updated with its own routing, into a handle of its own, and stays so. With gradients those are
// what is timed.
bool Work::check(const Sms &dispatch, const Sms &combine) {
  for (int i = 0; i < (int)sets.size(); i++) {
    for (int r = 0; r < s.R; r++) {
      CU(cudaSetDevice(w->ranks[r].device));
      cudaStream_t q = w->ranks[r].stream;
      update(r, i, nullptr, q);
      for (pass = 0; pass < s.passes; pass++) {
        operate(false, dispatch, r, i, nullptr, q);
        operate(true, combine, r, i, nullptr, q);
      }
      pass = s.passes - 1;
    }
  }
  w->sync();
  std::vector<char> good(s.R, 1);
  onAllRanks(*w, [&](int r) {
    for (int i = 0; i < (int)sets.size(); i++) good[r] &= checkRank(s, sets[i], i, r);
  });
  return std::count(good.begin(), good.end(), 0) == 0 && !failed();
}

bool Work::failed() const {
  bool any = false;
  for (const HtRank &k : w->ranks) {
    HtControl c;
    CU(cudaMemcpy(&c, k.control, sizeof c, cudaMemcpyDeviceToHost));
    any |= c.wait.failed != 0;
  }
  return any;
}

std::string Work::name(const char *operation) const {
  std::string n = std::string(operation) + (s.expertMajor ? " expert-major" : " flat");
  if (s.scaleBytes) n += " fp8";
  if (pass) n += " backward";
  if (s.windows) n += s.windows == 3 ? " pulled" : " window";
  if (*routing.name) n += std::string(" ") + routing.name;
  return n;
}

// ---- What comes out

struct Rows {
  Clock clock;
  FILE *json = nullptr;
  bool first = true, failed = false;
  double copyNs = 0; // of a byte

  void open(const char *path, const Ranks &w, const std::vector<CopyTimes> &copies);
  void next() {
    fprintf(json, "%s\n  ", first ? "" : ",");
    first = false;
  }
  void close() {
    if (json) fprintf(json, "\n]}\n"), fclose(json);
  }
  void time(const Work &work, int what, const Sms &n); // what: 0 dispatch, 1 combine, 2 Update
  void print(const Work &work, const std::string &name, const Sms &n, double bytes, const Times &t);
};

void Rows::open(const char *path, const Ranks &w, const std::vector<CopyTimes> &copies) {
  for (const CopyTimes &c : copies) {
    printf("plain push by turns [%3d]  kernel %.2f event %.2f us  %.1f GB/s a port\n", c.sms,
           c.times.kernel.p50, c.times.event.p50, 1 / c.nsOfByte());
    copyNs = copyNs > 0 ? std::min(copyNs, c.nsOfByte()) : c.nsOfByte();
  }
  if (!path || !*path) return;
  json = fopen(path, "w");
  if (!json) {
    fprintf(stderr, "%s cannot be written\n", path);
    exit(2);
  }
  cudaDeviceProp p;
  int driver, runtime;
  CU(cudaGetDeviceProperties(&p, 0));
  CU(cudaDriverGetVersion(&driver));
  CU(cudaRuntimeGetVersion(&runtime));
  fprintf(json,
          "{\"device\": \"%zu x %s\", \"driver_cuda\": %d, \"runtime\": %d, \"iterations\": %d, "
          "\"copy_GBps\": %.1f, \"copies\": [",
          w.ranks.size(), p.name, driver, runtime, clock.iterations - WARM, 1 / copyNs);
  for (const CopyTimes &c : copies) {
    next();
    fprintf(json, "{\"sms\": %d, \"port_bytes\": %.0f, \"kernel_us\": %.2f, \"event_us\": %.2f}",
            c.sms, c.bytes, c.times.kernel.p50, c.times.event.p50);
  }
  fprintf(json, "],\n \"rows\": [");
  first = true;
}

void Rows::time(const Work &work, int what, const Sms &n) {
  static const char *const names[] = {"dispatch", "combine", "update"};
  const Times t = clock.time([&](int r, int i, uint64_t *stamps) {
    cudaStream_t q = work.w->ranks[r].stream;
    if (what == 2)
      work.update(r, i, stamps, q);
    else
      work.operate(what, n, r, i, stamps, q);
  });
  if (work.failed()) {
    printf("%s [%d]: GAVE UP while it was timed\n", work.name(names[what]).c_str(), n.sms);
    failed = true;
    return;
  }
  print(work, work.name(names[what]), n, what == 2 ? 0 : work.port[what], t);
}

void Rows::print(const Work &work, const std::string &name, const Sms &n, double bytes,
                 const Times &t) {
  const Shape &s = work.s;
  const double bound = bytes * copyNs * 1e-3, share = bound / t.kernel.p50;
  printf("%-34s %5d tokens [%3d, %2d send] kernel %8.2f (%.2f to %.2f, p99 %.2f) event %8.2f us",
         name.c_str(), s.N, n.sms, n.senders, t.kernel.p50, t.kernel.min, t.kernel.max,
         t.kernel.p99, t.event.p50);
  if (bytes > 0) printf("  port %.1f MB, %.1f %% of the copy", bytes * 1e-6, share * 100);
  printf("\n");
  fflush(stdout);
  if (!json) return;
  next();
  fprintf(json,
          "{\"operation\": \"%s\", \"check\": \"ok\", \"sms\": %d, \"senders\": %d, \"ranks\": %d, "
          "\"tokens\": %d, \"topk\": %d, \"experts\": %d, \"hidden\": %d, \"skew\": %g, "
          "\"kernel_us\": %.2f, \"kernel_p99_us\": %.2f, \"kernel_min_us\": %.2f, "
          "\"kernel_max_us\": %.2f, \"event_us\": %.2f, \"event_p99_us\": %.2f, "
          "\"port_bytes\": %.0f, \"bound_us\": %.2f, \"copy_share\": %.4f}",
          name.c_str(), n.sms, n.senders, s.R, s.N, s.K, s.E, s.width, work.routing.skew,
          t.kernel.p50, t.kernel.p99, t.kernel.min, t.kernel.max, t.event.p50, t.event.p99, bytes,
          bound, share);
}

} // namespace

#endif
