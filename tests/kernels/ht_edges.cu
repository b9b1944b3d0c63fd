// High throughput where something just fits or just does not, against the reference, bit for bit.
//
//   ht_edges [--ranks R] [--gpus] [--only TEXT] [--most N] [--list] [--domains n]
//
// By default R virtual ranks share GPU 0; --gpus gives each its own. Each edge is a case of two or three
// steps (ht_case.cuh): Update, dispatch, combine and the gradients' way back, both layouts, through FIFOs
// and with windows. Edges: numbers of tokens around tiles of 256; chunks around the end of a FIFO; rows
// around chunks of 14,336 bytes, with scales across their border; top-k from 1 to 64; fewer experts than
// ranks; nobody, or one rank, has tokens; everything goes to one rank or expert; slots just within
// maxRecv. "held": all calls return while the stream stands still. --domains: NVLink domains of n ranks, and
// instead of all these the edges of the rings between them (Edges::rings). A failure prints the command
// that repeats it.
#include "ht_case.cuh"

#include <set>

namespace {

struct Edge {
  std::string name;
  Shape s;
  Fill fill;
  // Chunks that a rank with all its tokens sends.
  int size() const {
    const int row = std::max(s.tokenBytes() + s.scaleBytes, s.combineBytes());
    return s.steps * s.N * std::min(s.K, s.R) * ((row + EP_HT_CHUNK_BYTES - 1) / EP_HT_CHUNK_BYTES);
  }
};

struct Edges {
  int R;
  std::vector<Edge> all;

  Shape small(bool expertMajor) const {
    Shape s = {};
    s.R = R;
    s.E = 4 * R;
    s.K = 4;
    s.N = 20;
    s.steps = s.passes = 2;
    s.numSms = 3;
    s.expertMajor = expertMajor;
    s.alignment = expertMajor ? 8 : 1;
    s.dtype = s.combineDtype = TREFOIL_BF16;
    s.width = s.combineWidth = 8;
    s.idx64 = s.finite = true;
    return s;
  }
  // Through FIFOs, and with outputs in windows. FIFO 0: chosen from N. `more`: bytes past the longest row
  // that the group allows.
  void add(const std::string &name, Shape s, int ring, const Fill &fill, int more = 0,
           bool windows = true) {
    s.L = (s.E + R - 1) / R;
    const int row = std::max(s.tokenBytes() + s.scaleBytes, s.combineBytes());
    s.config = ep_ht_config_t{R, s.E, s.K, s.N, (size_t)(row + more), ring};
    const std::string whole = name + (s.expertMajor ? " expert-major" : " flat");
    all.push_back(Edge{whole, s, fill});
    if (!windows) return;
    s.windows = 1;
    all.push_back(Edge{whole + ", windows", s, fill});
    s.windows = 3;
    all.push_back(Edge{whole + ", windows of inputs", s, fill});
  }
  void tiles(bool em);
  void fifos(bool em);
  void chunks(bool em);
  void experts(bool em);
  void nobody(bool em);
  void crowds(bool em);
  void rings(int perDomain);
};

Fill random(const Shape &s, std::function<int64_t(int step, int rank)> tokens) {
  const int K = s.K, E = s.E;
  return [=](int step, int rank, StepRank &k) {
    Rng rng = {(uint64_t)(step * 64 + rank + 1)};
    k.B = tokens(step, rank);
    k.topk = randomRouting(rng, (int)k.B, K, E, 0);
  };
}

// Token t of rank r to the experts first(step, r), + 1, + 2, ...
Fill consecutive(int K, std::function<int64_t(int step, int rank)> tokens,
                 std::function<int(int step, int rank)> first) {
  return [=](int step, int rank, StepRank &k) {
    k.B = tokens(step, rank);
    for (int64_t i = 0; i < k.B * K; i++) k.topk.push_back(first(step, rank) + (int)(i % K));
  };
}

void Edges::tiles(bool em) {
  for (const int n : {1, 255, 256, 257, 511, 512, 513, 769}) {
    Shape s = small(em);
    s.N = n;
    s.numSms = n % 2 ? 3 : 16; // Update's blocks: several tiles each, or one
    add("tiles of " + std::to_string(n), s, 0, random(s, [n](int step, int rank) {
          const int sizes[] = {n, n - 1, 255, 256, 257, 0, 1, n};
          return std::min(sizes[(step + rank) % 8], n);
        }));
  }
}

// Each rank sends exactly n chunks a step to one other, which changes.
void Edges::fifos(bool em) {
  const int ranks = R;
  for (const int slots : {1, 2, 8, 64, 512}) {
    for (const int n :
         std::set<int>{slots - 1, slots, slots + 1, 2 * slots - 1, 2 * slots, 2 * slots + 1}) {
      if (n == 0) continue;
      Shape s = small(em);
      s.E = R;
      s.K = 1;
      s.N = std::max(n, slots == 512 ? 512 : 1);
      s.steps = 3;
      const auto tokens = [n](int, int) { return n; };
      const auto next = [ranks](int step, int rank) { return (rank + 1 + step) % ranks; };
      add(std::to_string(n) + " chunks, FIFO " + std::to_string(slots), s, slots == 512 ? 0 : slots,
          consecutive(1, tokens, next));
      if (slots > 8) continue;
      s.width = s.combineWidth = (2 * EP_HT_CHUNK_BYTES + 16) / 2; // three chunks
      add(std::to_string(n) + " rows of three chunks, FIFO " + std::to_string(slots), s, slots,
          consecutive(1, tokens, next));
    }
  }
}

void Edges::chunks(bool em) {
  for (const int chunks : {1, 2, 3}) {
    for (const int off : {-16, 0, 16}) {
      Shape s = small(em);
      const int bytes = chunks * EP_HT_CHUNK_BYTES + off;
      s.N = 5;
      s.width = s.combineWidth = bytes / 2;
      const auto full = [](int, int) { return 5; };
      add("rows of " + std::to_string(bytes), s, 4, random(s, full));
      s.combineDtype = TREFOIL_F32;
      s.combineWidth = bytes / 4;
      s.dtype = TREFOIL_E4M3;
      for (const int scales : {16, 32, 48, 224}) { // the border between tokens and scales moves
        s.scaleBytes = scales;
        s.width = bytes - 32;
        add("rows of " + std::to_string(s.width) + " and " + std::to_string(scales), s, 4,
            random(s, full), off + 16);
      }
    }
  }
}

void Edges::experts(bool em) {
  const auto full = [](int, int) { return 9; };
  for (const int K : {1, 2, 3, 5, 7, 8, 9, 31, 32, 33, 63, 64}) {
    Shape s = small(em);
    s.N = 9;
    s.K = K;
    s.E = K + 3;
    add("top-" + std::to_string(K), s, 8, random(s, full));
  }
  std::vector<int> numbers = {1, R - 1, R, R + 1, 2 * R - 1};
  if (R >= 16) numbers.insert(numbers.end(), {65520, 65536}); // ids of 16 and of 32 bits
  for (const int E : numbers) {
    if (E < 1) continue;
    Shape s = small(em);
    s.N = 9;
    s.E = E;
    s.K = std::min(E, 2);
    add(std::to_string(E) + " experts", s, 8, random(s, full));
  }
  for (const int each : {31, 32, 33, 127, 128, 129, 257}) { // bits in Update, and more than it has
    Shape s = small(em);
    s.N = 9;
    s.E = R * each;
    s.K = 8;
    const int E = s.E;
    add(std::to_string(each) + " experts a rank", s, 8, [E](int step, int rank, StepRank &k) {
      Rng rng = {(uint64_t)(step * 64 + rank + 1)};
      k.B = 9;
      k.topk = randomRouting(rng, 9, 8, E, 3);
    });
  }
  for (const int n : {127, 128, 129}) {
    Shape s = small(em);
    s.N = n;
    s.E = R;
    s.K = 1;
    s.alignment = 128;
    const int ranks = R; // each expert gets exactly n
    add("zones of " + std::to_string(n) + " aligned to 128", s, 0,
        consecutive(
            1, [n](int, int) { return n; },
            [ranks](int step, int rank) { return (rank + step) % ranks; }));
  }
}

void Edges::nobody(bool em) {
  const int last = R - 1;
  for (const int alignment : {1, 128}) {
    Shape s = small(em);
    s.alignment = alignment;
    s.steps = 3;
    const std::string a = ", alignment " + std::to_string(alignment);
    add("nobody has tokens" + a, s, 8, random(s, [](int, int) { return 0; }));
    add("nobody, everybody, nobody" + a, s, 8,
        random(s, [](int step, int) { return step == 1 ? 20 : 0; }));
    add("the first alone has tokens" + a, s, 8,
        random(s, [](int, int rank) { return rank == 0 ? 20 : 0; }));
    add("the last alone has tokens" + a, s, 8,
        random(s, [last](int, int rank) { return rank == last ? 20 : 0; }));
    add("only unused entries" + a, s, 8, [](int, int, StepRank &k) {
      k.B = 20;
      k.topk.assign(80, -1);
    });
  }
}

void Edges::crowds(bool em) {
  const int n = 300, last = R - 1;
  const auto full = [n](int, int) { return n; };
  Shape s = small(em);
  s.N = n;
  for (const int hot : {0, last}) {
    add("all to rank " + std::to_string(hot), s, 16,
        consecutive(4, full, [hot](int, int) { return 4 * hot; }));
  }
  add("all to one rank, another each step", s, 16,
      consecutive(4, full, [last](int step, int) { return 4 * (step % (last + 1)); }));
  s.K = 1;
  add("all to one expert", s, 16, consecutive(1, full, [](int, int) { return 1; }));
  // Slots of rank 0: R n flat; expert-major four zones of R n, R n a multiple of the alignment.
  s.K = 4;
  s.alignment = em ? 4 : 1;
  const int64_t slots = (int64_t)R * n * (em ? 4 : 1);
  for (const int64_t maxRecv :
       std::set<int64_t>{slots, slots - 1, slots + 1, (int64_t)R * n, (int64_t)n}) {
    for (int drop = 0; drop < (em ? 3 : 2); drop++) { // 2: and zero copy
      s.maxRecv = maxRecv;
      s.drop = drop > 0;
      s.zeroCopyOn = drop == 2;
      add("maxRecv " + std::to_string(maxRecv) + " of " + std::to_string(slots) +
              (drop == 2   ? ", drop, zero copy"
               : drop == 1 ? ", drop"
                           : ", trap"),
          s, 16, consecutive(4, full, [](int, int) { return 0; }));
    }
  }
}

// Every rank sends its tokens by a pattern: 'f' to the rank with its number in the next domain, 'n' to the
// next rank of its own, '.' to none.
Fill byPattern(int ranks, int perDomain, const std::string &pattern) {
  return [=](int, int rank, StepRank &k) {
    const int first = rank / perDomain * perDomain;
    k.B = (int64_t)pattern.size();
    for (const char c : pattern) {
      const int next = first + (rank - first + 1) % perDomain;
      k.topk.push_back(c == '.' ? -1 : c == 'f' ? (rank + perDomain) % ranks : next);
    }
  };
}

// Rings between NVLink domains of two ranks or more. As small as they can be: they run in the emulator.
void Edges::rings(int perDomain) {
  Shape s = small(false);
  s.perDomain = perDomain;
  s.numSms = EP_HT_FAR_LEAST_SMS;
  s.steps = 1;
  const auto patterned = [&](const std::string &name, int sms, int slots,
                             const std::string &pattern) {
    Shape of = s;
    of.E = R;
    of.K = 1;
    of.N = (int)pattern.size();
    of.numSms = sms;
    of.ringSlots = slots;
    add(name, of, 1, byPattern(R, perDomain, pattern), 0, false);
  };
  // The second slot of a chunk comes after near rows that wait for FIFOs, whose receivers wait for the first.
  patterned("a chunk that cannot fill", s.numSms, 8, "fnnnf");
  // Two blocks send, eight tokens at a time. One has the first slot, behind near rows that wait for each
  // other, and has taken three times eight tokens beside; the other one fills a slot that follows.
  std::string apart = "nnnnf...";
  for (int i = 0; i < 5; i++) apart += "f.......";
  patterned("a gap before a slot that is filled", s.numSms + 1, 16, apart);
  // Each slot needs the credit of the one before: all roles must run beside one another.
  patterned("one slot", s.numSms, 1, "ffnf");
  // One rank has room for the tokens of the first rank alone: the other domain gets sums of nothing.
  Shape full = s;
  full.K = 1;
  full.N = 5;
  full.maxRecv = full.N;
  full.drop = true;
  full.ringSlots = 4;
  const auto five = [](int, int) { return 5; };
  add("rows that are dropped far away", full, 4, consecutive(1, five, [](int, int) { return 0; }),
      0, false);
  // Rows of all ranks: each domain's are summed and rounded before they meet others. Two Updates.
  Shape wide = s;
  wide.K = wide.E = R;
  wide.N = 3;
  wide.width = wide.combineWidth = 64;
  wide.ringSlots = wide.steps = 2;
  const auto three = [](int, int) { return 3; };
  add("sums of each domain", wide, 2, consecutive(R, three, [](int, int) { return 0; }), 0, false);
}

// ---- Calls that return while the stream stands still

// One thread: until the host says so, or a limit.
__global__ void holdKernel(volatile unsigned *words) {
  const uint64_t since = clockNs();
  while (!words[0]) {
    if (clockNs() - since > 8000000000ull) {
      words[1] = 1;
      return;
    }
  }
}

bool held(Ranks &w) {
  Edges e = {(int)w.ranks.size(), {}};
  Shape s = e.small(true);
  s.N = 100;
  s.steps = 12;
  e.add("held", s, 8, random(s, [](int step, int rank) { return (step * 37 + rank * 11) % 101; }));
  unsigned *words, *onDevice;
  CU(cudaHostAlloc(&words, 4096, cudaHostAllocMapped | cudaHostAllocPortable));
  CU(cudaHostGetDevicePointer(&onDevice, words, 0));
  words[0] = words[1] = 0;
  const Around around = {[&] {
                           for (HtRank &k : w.ranks) {
                             CU(cudaSetDevice(k.device));
                             CU(epStart(holdKernel, 1, 1, k.stream, onDevice));
                           }
                         },
                         [&] {
                           const bool waited = ((volatile unsigned *)words)[1];
                           ((volatile unsigned *)words)[0] = 1;
                           if (waited) printf("  a call returned only when the stream went on\n");
                           return !waited;
                         }};
  Rng rng = {7};
  const bool ok = runCase(w, rng, e.all[0].s, e.all[0].fill, around);
  CU(cudaFreeHost(words));
  return ok;
}

} // namespace

int main(int argc, char **argv) {
  beforeCuda();
  int R = 4, most = INT32_MAX, perDomain = 0;
  bool gpus = false, list = false;
  std::string only;
  for (int i = 1; i < argc; i++) {
    const std::string o = argv[i];
    auto next = [&] { return i + 1 < argc ? argv[++i] : "0"; };
    if (o == "--ranks") R = atoi(next());
    if (o == "--only") only = next();
    if (o == "--most") most = atoi(next());
    if (o == "--domains") perDomain = atoi(next());
    if (o == "--gpus") gpus = true;
    if (o == "--list") list = true;
  }
  Edges e = {R, {}};
  if (perDomain) e.rings(perDomain);
  for (const bool em : {false, true}) {
    if (perDomain) break;
    e.tiles(em);
    e.fifos(em);
    e.chunks(em);
    e.experts(em);
    e.nobody(em);
    e.crowds(em);
  }
  const auto skips = [&](const Edge &edge) {
    return edge.name.find(only) == std::string::npos || edge.size() > most;
  };
  for (const Edge &edge : e.all)
    if (list && !skips(edge)) printf("%6d %s\n", edge.size(), edge.name.c_str());
  if (list) return 0;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < (gpus ? R : 1)) {
    printf("skipped: needs %d GPUs, found %d\n", gpus ? R : 1, devices);
    return 77;
  }
  Ranks w;
  w.open(R, !gpus);
  int failed = 0, ran = 0;
  const auto count = [&](const std::string &name, bool ok) {
    ran++;
    if (ok) return;
    failed++;
    printf("FAILED: ht_edges --ranks %d --domains %d%s --only '%s'\n", R, perDomain,
           gpus ? " --gpus" : "", name.c_str());
    fflush(stdout);
  };
  for (const Edge &edge : e.all) {
    if (skips(edge)) continue;
    Rng rng = {1};
    count(edge.name, runCase(w, rng, edge.s, edge.fill));
  }
  if (!perDomain && std::string("held").find(only) != std::string::npos) count("held", held(w));
  printf("%d ranks on %s: %d edges, %d failed\n", R, gpus ? "GPUs" : "one GPU", ran, failed);
  return failed || !ran ? 1 : 0;
}
