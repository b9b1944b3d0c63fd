// Kernel times of high-throughput Update, dispatch and combine on GPUs that share NVLink.
//
//   ht_bench [--ranks R] [--tokens B] [--hidden H] [--topk K] [--align A] [--iterations n] [--virtual]
//            [--stages LIST] [--only flat|em] [--fifo-slots N] [--out file.json]
// --virtual: the ranks share one GPU and its SMs
//
// Stages (default goals):
//   goals    Update, dispatch and combine, both layouts, with the SMs of the goals and some others
//   sweep    both operations and layouts by 4 to 32 SMs, and more
//   senders  the same with the SMs of the goals, by how many blocks send first
//   window   dispatch into windows, the caller's E4M3 rows too, and flat combine out of windows
//   fp8      dispatch of the caller's E4M3 rows with f32 scales, a scale for 128
//   backward the same of gradients, with those of the weights
//   twice    twice the tokens
//   skewed   Zipf, a hot expert, a hot rank, against the bound from exact port loads
//   background  beside products of matrices (ht_background.cuh)
// How times are taken and what the plain copy is: ht_time.cuh. What fails its check against the reference is
// not timed; a launch that gives up is no row, and the exit code is 1.
#include "ht_background.cuh"

namespace {

struct Options {
  int R = 4, tokens = 4096, hidden = 7168, topk = 8, iterations = 200;
  int ring = 0; // chunks; 0: as the library chooses
  bool isVirtual = false;
  int64_t alignment = 1;
  std::string only, out, stages = "goals";

  bool has(const char *stage) const {
    return ("," + stages + ",").find(std::string(",") + stage + ",") != std::string::npos;
  }
  bool wants(bool expertMajor) const { return only != (expertMajor ? "flat" : "em"); }
};

constexpr int EXPERTS = 256;
// SMs of the goals: [expert-major][combine]. 0 senders: as many as the kernels choose.
constexpr Sms GOALS[2][2] = {{{24, 0}, {20, 0}}, {{24, 0}, {28, 0}}};

Shape shapeOf(const Options &o, bool expertMajor, bool fp8, int windows = 0) {
  Shape s = {};
  s.R = o.R;
  s.E = EXPERTS;
  s.K = o.topk;
  s.L = (s.E + s.R - 1) / s.R;
  s.N = o.tokens;
  s.passes = 1;
  s.dtype = fp8 ? TREFOIL_E4M3 : TREFOIL_BF16;
  s.scaleBytes = fp8 ? ((o.hidden + 127) / 128 * 4 + 15) / 16 * 16 : 0;
  s.combineDtype = TREFOIL_BF16;
  s.width = s.combineWidth = o.hidden;
  s.expertMajor = expertMajor;
  s.alignment = expertMajor ? o.alignment : 1;
  s.idx64 = s.finite = true;
  s.windows = windows;
  s.config = ep_ht_config_t{s.R, s.E, s.K, s.N, (size_t)s.combineBytes(), o.ring};
  return s;
}

// Makes it and checks it; false: it is not to be timed.
bool ready(Rows &rows, Work &work, Ranks &w, const Shape &s, const Routing &how, int sets) {
  work.make(w, s, how, sets);
  if (work.check(GOALS[s.expertMajor][0], GOALS[s.expertMajor][1])) return true;
  printf("%s: CHECK FAILED\n", work.name("check").c_str());
  rows.failed = true;
  return false;
}

void goals(Rows &rows, const Work &work) {
  static const std::vector<int> tried[2][2] = {{{24, 22, 20, 16, 12}, {20, 24, 18, 10}},
                                               {{24, 28, 32, 20}, {28, 24, 32}}};
  rows.time(work, 2, Sms{GRID, 0});
  for (int combine = 0; combine < 2; combine++)
    for (const int sms : tried[work.s.expertMajor][combine]) rows.time(work, combine, Sms{sms, 0});
}

void sweep(Rows &rows, const Work &work) {
  for (int combine = 0; combine < 2; combine++)
    for (int sms : {4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 28, 32, 40, 64, 132})
      rows.time(work, combine, Sms{sms, 0});
}

void senders(Rows &rows, const Work &work) {
  for (int combine = 0; combine < 2; combine++) {
    const int goal = GOALS[work.s.expertMajor][combine].sms;
    for (int sms : {goal - 4, goal, goal + 4})
      for (int n = sms / 4; n < sms; n += n < sms / 2 ? 1 : sms / 6)
        rows.time(work, combine, Sms{sms, n});
  }
}

void layout(Rows &rows, Background &background, Ranks &w, const Options &o, bool expertMajor) {
  Work work;
  if (ready(rows, work, w, shapeOf(o, expertMajor, false), UNIFORM, 2)) {
    if (o.has("goals")) goals(rows, work);
    if (o.has("sweep")) sweep(rows, work);
    if (o.has("senders")) senders(rows, work);
    for (int combine = 0; o.has("background") && combine < 2; combine++)
      background.measure(work, combine, GOALS[expertMajor][combine]);
  }
  w.free();
}

void windowOf(Rows &rows, Ranks &w, const Options &o, bool expertMajor, bool fp8, int windows) {
  Work work;
  if (ready(rows, work, w, shapeOf(o, expertMajor, fp8, windows), UNIFORM, fp8 ? 1 : 2)) {
    for (const int sms : {132, 64, 40, 32, 28, 24, 20, 16, 12, 10, 8, 6, 4}) {
      if (sms > (fp8 ? 24 : expertMajor ? 132 : 32)) continue;
      rows.time(work, 0, Sms{sms, 0});
      if (!expertMajor && !fp8) rows.time(work, 1, Sms{sms, 0});
    }
  }
  w.free();
}

// Flat: all blocks of a dispatch send, all of a combine receive. Pulled: all of a dispatch receive.
void window(Rows &rows, Ranks &w, const Options &o, bool expertMajor) {
  for (const int windows : {1, 3}) {
    for (const bool fp8 : {false, true}) windowOf(rows, w, o, expertMajor, fp8, windows);
  }
}

void backward(Rows &rows, Ranks &w, const Options &o, bool expertMajor) {
  for (const bool windows : {false, true}) {
    Work work;
    Shape s = shapeOf(o, expertMajor, false, windows);
    s.passes = 2;
    if (ready(rows, work, w, s, UNIFORM, 1)) {
      for (int combine = 0; combine < 2; combine++)
        rows.time(work, combine, GOALS[expertMajor][combine]);
    }
    w.free();
  }
}

void otherShapes(Rows &rows, Ranks &w, Options o, bool expertMajor) {
  if (o.has("fp8")) {
    Work work;
    if (ready(rows, work, w, shapeOf(o, expertMajor, true), UNIFORM, 1)) {
      for (int sms : {10, 12, 16, 20, 24}) rows.time(work, 0, Sms{sms, 0});
    }
    w.free();
  }
  if (o.has("twice")) {
    Work work;
    o.tokens *= 2;
    if (ready(rows, work, w, shapeOf(o, expertMajor, false), UNIFORM, 1)) {
      rows.time(work, 2, Sms{GRID, 0});
      for (int combine = 0; combine < 2; combine++)
        rows.time(work, combine, GOALS[expertMajor][combine]);
    }
    w.free();
  }
}

void skewed(Rows &rows, Ranks &w, const Options &o, bool expertMajor) {
  static const Routing kinds[] = {{TREFOIL_POPULARITY_ZIPF, 0.8, "zipf 0.8"},
                                  {TREFOIL_POPULARITY_ZIPF, 1.2, "zipf 1.2"},
                                  {TREFOIL_POPULARITY_HOT_EXPERT, 60, "hot-expert"},
                                  {TREFOIL_POPULARITY_HOT_RANK, 8, "hot-rank"}};
  for (const Routing &how : kinds) {
    for (const bool windows : {false, true}) {
      Work work;
      if (ready(rows, work, w, shapeOf(o, expertMajor, false, windows), how, 1)) {
        if (windows) rows.time(work, 0, Sms{expertMajor ? 24 : 16, 0});
        if (!windows) rows.time(work, 0, GOALS[expertMajor][0]);
        if (!windows || !expertMajor) rows.time(work, 1, GOALS[expertMajor][1]);
      }
      w.free();
    }
  }
}

bool parse(Options &o, int argc, char **argv) {
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--virtual") {
      o.isVirtual = true;
      i--;
      continue;
    }
    if (i + 1 == argc) return false;
    const char *value = argv[i + 1];
    if (name == "--ranks")
      o.R = atoi(value);
    else if (name == "--tokens")
      o.tokens = atoi(value);
    else if (name == "--hidden")
      o.hidden = atoi(value);
    else if (name == "--topk")
      o.topk = atoi(value);
    else if (name == "--fifo-slots")
      o.ring = atoi(value);
    else if (name == "--align")
      o.alignment = atoi(value);
    else if (name == "--iterations")
      o.iterations = atoi(value);
    else if (name == "--out")
      o.out = value;
    else if (name == "--only")
      o.only = value;
    else if (name == "--stages")
      o.stages = value;
    else
      return false;
  }
  return o.R >= 2 && o.R <= 8 && o.tokens > 0 && o.iterations > 0;
}

} // namespace

int main(int argc, char **argv) {
  beforeCuda();
  Options o;
  if (!parse(o, argc, argv)) {
    fprintf(stderr, "usage: see the head of ht_bench.cu; 2 to 8 ranks\n");
    return 2;
  }
  const int wanted = o.isVirtual ? 1 : o.R;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < wanted) {
    printf("skipped: needs %d GPUs, found %d\n", wanted, devices);
    return 77;
  }
  Ranks w;
  if (o.isVirtual) GRID /= o.R;
  w.open(o.R, o.isVirtual);
  Rows rows;
  rows.clock.open(w, o.iterations);
  rows.open(o.out.c_str(), w,
            measureCopies(rows.clock, o.hidden * 2,
                          (double)o.tokens * std::min(o.R - 1, o.topk) * 0.9 * o.hidden * 2));
  Background background;
  if (o.has("background")) background.open(rows);
  for (const bool expertMajor : {false, true}) {
    if (!o.wants(expertMajor)) continue;
    if (o.has("goals") || o.has("sweep") || o.has("senders") || o.has("background"))
      layout(rows, background, w, o, expertMajor);
    if (o.has("window")) window(rows, w, o, expertMajor);
    if (o.has("backward")) backward(rows, w, o, expertMajor);
    otherShapes(rows, w, o, expertMajor);
    if (o.has("skewed")) skewed(rows, w, o, expertMajor);
  }
  background.close();
  rows.close();
  rows.clock.close();
  return rows.failed;
}
