// High throughput with experts that give back what they get: many tokens, and buffers past 2^31 bytes.
//
//   ht_flow [--ranks R] [--gpus] [--tokens N] [--width W] [--total T] [--sms S] [--huge]
//
// By default R virtual ranks share GPU 0, with 4 SMs each; --gpus gives each its own. Rounds go on until T
// tokens (a million) have gone out and come back; no round waits for the host. A round binds new routing to
// a handle, flat and expert-major by turns, through FIFOs and into windows, and sends tokens there and back,
// then gradients and the gradients of the weights.
//
// Elements say which rank, round, token and column they are from, and every sum is exact (ht_flow.cuh):
// the slot of (token, expert) must hold the token, a token must come back as many times as it has ranks
// (flat) or experts (expert-major), and the sum over all that came back must be what the host works out
// from the routing alone. Slots are those of trefoil/layout.h, not the kernels' own. Comparing is done on
// the device.
//
// --huge: one round each of many rows, very wide rows and wide tables, where outputs, inputs or routing
// words pass 2^31 or 2^32 bytes; needs GPUs with 60 GB of free memory.
#include "ht_flow.cuh"

namespace {

struct Buffers {
  char *tokens, *received, *out;
  float *weights, *slotWeights, *outWeights;
  int64_t *slotIdx;
  Found *found;
  char *handles[2]; // flat, expert-major
};

struct Run {
  const Flow &f;
  Ranks &w;
  ep_ht_config_t config;
  ep_ht_layout_t at;
  std::vector<Buffers> buffers;
  std::vector<std::vector<Turn>> rounds;
  int64_t mostSlots = 1;

  void prepare();
  void queue(int round, int pass, int r);
  bool compare(long long expectedSum);
};

void Run::prepare() {
  config = ep_ht_config_t{f.R, f.E, f.K, f.N, (size_t)f.width * 2, 0};
  OK(epHtLayout(&config, &at));
  for (auto &turns : rounds) {
    for (int r = 0; r < f.R; r++) {
      Turn &t = turns[r];
      mostSlots = std::max(mostSlots, (int64_t)t.slots.size());
      t.topkOnDevice = w.upload(r, t.topk);
      t.slotsOnDevice = w.upload(r, t.slots);
      t.backOnDevice = w.upload(r, t.back);
    }
  }
  buffers.resize(f.R);
  const size_t row = (size_t)f.width * 2;
  for (int r = 0; r < f.R; r++) {
    Buffers &b = buffers[r];
    b.tokens = w.take(r, f.N * row, POISON);
    b.received = w.take(r, mostSlots * row, POISON);
    b.out = w.take(r, f.N * row, POISON);
    b.weights = (float *)w.take(r, (size_t)f.N * f.K * 4, 0);
    b.slotWeights = (float *)w.take(r, mostSlots * f.K * 4, 0);
    b.outWeights = (float *)w.take(r, (size_t)f.N * f.K * 4, POISON);
    b.slotIdx = (int64_t *)w.take(r, mostSlots * f.K * 8, 0);
    b.found = (Found *)w.take(r, sizeof(Found), 0);
    for (char *&h : b.handles) h = w.take(r, epHtHandleBytes(&config, f.K), POISON);
    HtRank &k = w.ranks[r];
    k.exchange = w.take(r, at.bytes, 0);
    k.control = w.take(r, EP_HT_CONTROL_BYTES, 0);
    k.scratch = w.take(r, epHtScratchBytes(&config), 0);
  }
  w.sync();
}

// One way there and back: pass 0 forward, 1 gradients.
void Run::queue(int round, int pass, int r) {
  Turn &t = rounds[round][r];
  Buffers &b = buffers[r];
  const cudaStream_t q = w.ranks[r].stream;
  const bool em = isExpertMajor(f, round);
  const int number = 2 * round + pass, words = f.width / 2;
  ep_ht_group_t g = {};
  for (int p = 0; p < f.R; p++) g.peers[p] = w.ranks[p].exchange;
  g.at = at;
  g.control = w.ranks[r].control;
  g.scratch = w.ranks[r].scratch;
  g.timeoutNs = 20000000000ull;
  g.rank = r;
  g.numRanks = f.R;
  g.numExperts = f.E;
  g.numLocal = f.L();
  g.maxTokens = f.N;
  const ep_ht_handle_t h = {b.handles[em], f.K, em, 0, 0, em ? f.alignment : 1, 0};
  if (pass == 0) {
    ep_ht_update_t u = {};
    u.group = g;
    u.handle = h;
    u.topkIdx = t.topkOnDevice;
    u.numTokens = t.B;
    u.numSms = f.numSms;
    OK(epHtUpdate(&u, q));
  }
  CU(epStart(makeKernel, 16, 256, q,
             Tokens{(unsigned *)b.tokens, pass ? nullptr : b.weights, r, number, t.B, words, f.K}));
  CU(cudaMemsetAsync(b.received, POISON, t.slots.size() * f.width * 2, q));
  CU(cudaMemsetAsync(b.out, POISON, (size_t)t.B * f.width * 2, q));
  ep_ht_dispatch_t d = {};
  d.group = g;
  d.handle = h;
  d.tokens = b.tokens;
  d.outTokens = b.received;
  d.topkRows = (int64_t)t.slots.size();
  d.tokenBytes = f.width * 2;
  d.numSms = f.numSms;
  if (pass == 0) {
    d.weights = b.weights;
    d.outWeights = b.slotWeights;
    d.outIdx = em ? nullptr : b.slotIdx;
  }
  if (f.windows == 1 || (f.windows && round / 2 % 2)) {
    d.window.is = 1;
    d.window.id = 1;
    for (int p = 0; p < f.R; p++) d.window.tokens[p] = buffers[p].received;
  }
  if (f.windows == 1 ? round % 2 : f.windows && round / 2 % 3 == 1) {
    d.input.is = 1;
    d.input.tokens = (const char *)b.tokens - g.peers[r];
  }
  OK(epHtDispatch(&d, q));
  CU(cudaMemsetAsync(b.tokens, POISON, (size_t)t.B * f.width * 2, q)); // peers have read them
  CU(epStart(lookKernel, 16, 256, q,
             Look{(unsigned *)b.received, t.slotsOnDevice, b.found, (long long)t.slots.size(),
                  number, words, false}));
  ep_ht_combine_t c = {};
  c.group = g;
  c.handle = h;
  c.tokens = b.received;
  c.out = b.out;
  c.dtype = TREFOIL_BF16;
  c.rowBytes = f.width * 2;
  c.numSms = f.numSms;
  if (f.windows == 1 || (f.windows && round / 2 % 3)) {
    c.input.is = 1;
    c.input.tokens = (const char *)b.received - g.peers[r];
  }
  if (pass == 1) {
    c.rowWeights = b.slotWeights;
    c.outWeights = b.outWeights;
  }
  OK(epHtCombine(&c, q));
  CU(epStart(
      lookKernel, 16, 256, q,
      Look{(unsigned *)b.out, t.backOnDevice, b.found, (long long)t.B, number, words, pass == 0}));
  if (pass == 1)
    CU(epStart(lookWeightsKernel, 16, 256, q,
               LookWeights{b.outWeights, b.found, r, 2 * round, t.B, f.K}));
}

bool Run::compare(long long expectedSum) {
  bool ok = true;
  long long sum = 0;
  for (int r = 0; r < f.R; r++) {
    Found n;
    CU(cudaMemcpy(&n, buffers[r].found, sizeof n, cudaMemcpyDeviceToHost));
    sum += n.sum;
    if (n.wrong)
      printf("  rank %d: %llu pairs of elements are wrong, first in row %llu at element %llu\n", r,
             n.wrong, ~n.notFirst >> 32, ~n.notFirst & 0xffffffff);
    if (n.wrongWeights)
      printf("  rank %d: %llu gradients of weights are wrong\n", r, n.wrongWeights);
    ok &= !n.wrong && !n.wrongWeights;
  }
  if (sum != expectedSum) printf("  the sum is %lld, must be %lld\n", sum, expectedSum);
  return ok && sum == expectedSum;
}

bool runFlow(const Flow &f, Ranks &w) {
  Run run = {f, w, {}, {}, {}, {}};
  long long sum = 0, tokens = 0;
  for (int i = 0; i < f.rounds || tokens < f.total; i++) {
    std::vector<Turn> turns(f.R);
    for (int r = 0; r < f.R; r++) {
      makeRouting(f, i, r, turns[r]);
      tokens += turns[r].B;
    }
    expect(f, i, turns);
    sum += sumOf(f, 2 * i, turns);
    run.rounds.push_back(std::move(turns));
  }
  run.prepare();
  const int rounds = (int)run.rounds.size();
  for (int i = 0; i < rounds; i++) {
    for (int pass = 0; pass < 2; pass++) {
      for (int r = 0; r < f.R; r++) {
        CU(cudaSetDevice(w.ranks[r].device));
        run.queue(i, pass, r);
      }
    }
  }
  w.sync();
  const bool ok = run.compare(sum);
  printf("%s: %d rounds, %lld tokens, rows of %d bytes, up to %lld rows (%.2f GB) received: %s\n",
         f.name.c_str(), rounds, tokens, f.width * 2, (long long)run.mostSlots,
         1e-9 * (double)run.mostSlots * f.width * 2, ok ? "ok" : "FAILED");
  fflush(stdout);
  w.free();
  return ok;
}

// name, R, E, K, N, width, numSms, rounds, total, random, flatOnly, windows, alignment
std::vector<Flow> hugeFlows(int R) {
  const int many = 320000 / R; // rows received: 320,000 of 14,336 bytes, past 2^32
  return {{"many rows, flat", R, R, R, many, 7168, 16, 1, 0, false, true, 0, 1},
          {"many rows, flat, windows", R, R, R, many, 7168, 16, 1, 0, false, true, 1, 1},
          {"many rows, both layouts", R, R, R, many / 2, 7168, 16, 4, 0, false, false, 2, 128},
          {"rows of 64 MB", R, R, R, 20, ((1 << 26) - 16) / 2, 16, 4, 0, false, false, 2, 1},
          {"wide tables", R, 64, 64, 1 << 20, 8, 16, 1, 0, false, true, 0, 1}};
}

} // namespace

int main(int argc, char **argv) {
  beforeCuda();
  int R = 4, tokens = 1024, width = 512, sms = 4;
  long long total = 1 << 20;
  bool gpus = false, huge = false;
  for (int i = 1; i < argc; i++) {
    const std::string o = argv[i];
    auto next = [&] { return i + 1 < argc ? argv[++i] : "0"; };
    if (o == "--ranks") R = atoi(next());
    if (o == "--tokens") tokens = atoi(next());
    if (o == "--width") width = atoi(next()) / 8 * 8;
    if (o == "--total") total = atoll(next());
    if (o == "--sms") sms = atoi(next());
    if (o == "--gpus") gpus = true;
    if (o == "--huge") huge = true;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < (gpus ? R : 1)) {
    printf("skipped: needs %d GPUs, found %d\n", gpus ? R : 1, devices);
    return 77;
  }
  if (huge) {
    size_t available, all;
    CU(cudaMemGetInfo(&available, &all));
    if (available < 60ull << 30) {
      printf("skipped: needs 60 GB of free GPU memory, %.1f GB here\n", 1e-9 * (double)available);
      return 77;
    }
  }
  Ranks w;
  w.open(R, !gpus);
  bool ok = true;
  if (huge) {
    for (const Flow &f : hugeFlows(R)) ok &= runFlow(f, w);
  } else {
    ok = runFlow(Flow{"many tokens", R, 8 * R, 8, tokens, width, sms, 4, total, true, false, 2, 16},
                 w);
  }
  return ok ? 0 : 1;
}
