// Kernels by address, and what the host runtime calls to run one on a stream.
#include "machine_internal.h"

#include "host/trefoil_host.h"

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

namespace emulator {

namespace {

std::mutex lock;
std::unordered_map<const void *, Kernel> &kernels() {
  static auto *known = new std::unordered_map<const void *, Kernel>();
  return *known;
}

struct alignas(64) Chunk {
  char bytes[64];
};

struct Request {
  const void *function;
  Kernel kernel;
  unsigned numBlocks, numThreads;
  size_t sharedBytes;
  std::vector<std::vector<Chunk>> values;
};

uint64_t nextSeed() {
  static const uint64_t seed = [] {
    const char *s = getenv("TREFOIL_EMULATOR_SEED");
    return s ? strtoull(s, nullptr, 0) : 1;
  }();
  static std::atomic<uint64_t> launches;
  return (seed * 0x9E3779B97F4A7C15ull + ++launches) * 0xD1B54A32D192ED03ull | 1;
}

void *prepare(const void *function, const trefoil_host_launch_t *at) {
  Request *r = new Request();
  {
    std::lock_guard<std::mutex> guard(lock);
    const auto k = kernels().find(function);
    if (k == kernels().end()) {
      delete r;
      return nullptr;
    }
    r->kernel = k->second;
  }
  r->function = function;
  r->numBlocks = at->gridDim.x * at->gridDim.y * at->gridDim.z;
  r->numThreads = at->blockDim.x * at->blockDim.y * at->blockDim.z;
  r->sharedBytes = at->sharedBytes;
  for (size_t i = 0; i < r->kernel.numParams; i++) {
    const size_t n = r->kernel.bytes[i];
    r->values.emplace_back((n + 63) / 64);
    memcpy(r->values.back().data(), at->args[i], n);
  }
  return r;
}

void runRequest(void *data) {
  Request &r = *(Request *)data;
  std::vector<void *> params;
  for (auto &v : r.values) params.push_back(v.data());
  params.push_back(nullptr);
  Launch l;
  l.numBlocks = r.numBlocks;
  l.numThreads = r.numThreads;
  l.sharedBytes = r.sharedBytes;
  l.random = nextSeed();
  l.body = [&] { r.kernel.call(r.function, params.data()); };
  run(l);
}

void release(void *data) {
  delete (Request *)data;
}

// Before main: the runtime has somebody who runs kernels.
const bool isInstalled = [] {
  static const trefoil_host_launcher_t launcher = {prepare, runRequest, release};
  trefoilHostSetLauncher(&launcher);
  return true;
}();

} // namespace

void know(const void *function, const Kernel &kernel) {
  std::lock_guard<std::mutex> guard(lock);
  kernels()[function] = kernel;
}

} // namespace emulator
