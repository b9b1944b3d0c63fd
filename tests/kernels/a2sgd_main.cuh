// The main program of the tests of A2SGD's kernels: cases by seed, one after the other.
#ifndef TREFOIL_TESTS_KERNELS_A2SGD_MAIN_CUH
#define TREFOIL_TESTS_KERNELS_A2SGD_MAIN_CUH

#include "a2sgd_case.cuh"

namespace {

struct Options {
  int maxSms = 132;
  int64_t most; // elements of a tensor
  bool verbose = false, isLarge = false;
};

using RunCase = bool (*)(World &, uint64_t seed, const Options &);

struct Program {
  const char *name;
  RunCase plain, fault, leftBehind;
  size_t (*bytesOf)(const Options &); // of a rank's memory
  int64_t most;
  int smsOfAll; // that blocks of all ranks of one GPU may take; 0: each launch ends by itself
};

int runProgram(int argc, char **argv, const Program &p) {
  int R = 4, cases = 200, only = -1;
  uint64_t seed = 1;
  bool gpus = false, faults = false;
  Options o;
  o.most = p.most;
  for (int i = 1; i < argc; i++) {
    auto value = [&] { return i + 1 < argc ? strtoull(argv[++i], nullptr, 0) : 0ull; };
    if (!strcmp(argv[i], "--ranks"))
      R = (int)value();
    else if (!strcmp(argv[i], "--gpus"))
      gpus = true;
    else if (!strcmp(argv[i], "--cases"))
      cases = (int)value();
    else if (!strcmp(argv[i], "--seed"))
      seed = value();
    else if (!strcmp(argv[i], "--case"))
      only = (int)value();
    else if (!strcmp(argv[i], "--sms"))
      o.maxSms = (int)value();
    else if (!strcmp(argv[i], "--most"))
      o.most = (int64_t)value();
    else if (!strcmp(argv[i], "--faults"))
      faults = true;
    else if (!strcmp(argv[i], "--large"))
      o.isLarge = true;
    else if (!strcmp(argv[i], "--verbose"))
      o.verbose = true;
    else {
      fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  int devices = 0;
  const int needed = World::gpusFor(R, !gpus);
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < needed) {
    printf("skipped: %d GPUs here, %d needed\n", devices, needed);
    return 77;
  }
  if (!gpus && p.smsOfAll) o.maxSms = std::min(o.maxSms, std::max(1, p.smsOfAll / R));
  World w;
  w.open(R, !gpus, 4096, p.bytesOf(o));
  OK(epA2sgdLoad());
  int failed = 0, ran = 0;
  for (int i = 0; i < cases; i++) {
    if (only >= 0 && i != only) continue;
    const RunCase run = !faults || R == 1 ? p.plain : i % 3 ? p.fault : p.leftBehind;
    ran++;
    if (run(w, seed * 1000003ull + i * 7919ull, o)) continue;
    failed++;
    printf("FAILED: %s --ranks %d%s%s%s --sms %d --most %lld --seed %llu --case %d --verbose\n",
           p.name, R, gpus ? " --gpus" : "", faults ? " --faults" : "", o.isLarge ? " --large" : "",
           o.maxSms, (long long)o.most, (unsigned long long)seed, i);
    fflush(stdout);
    if (failed == 5) break;
  }
  printf("%d ranks on %s: %d cases, %d failed\n", R, needed > 1 ? "GPUs" : "one GPU", ran, failed);
  return failed ? 1 : 0;
}

} // namespace

#endif
