// A machine that runs CUDA kernels on the CPU: what a kernel's own source, compiled as C++, finds in place
// of the GPU. Each CUDA thread is a fiber; the blocks of a launch run on one operating-system thread, those
// of other launches on others, so ranks really run at the same time.
//
// What is true to the GPU: lanes of a warp meet where the source says so and nowhere else; a warp's "sys"
// accesses happen together, so that a 128-byte packet is moved whole; bulk copies read and write later, in
// any order, until they are waited for; warps start, stall and go on at random. What is not: memory is never
// weaker than x86's, so a missing fence does not show here; and the speed says nothing.
//
// What the kernel must not do is a failure with a sentence, and the process ends: lanes of a warp that
// meet in different operations, a thread that waits for a barrier nobody completes any more, misaligned or
// out-of-range bulk copies, a block that ends while its bulk copies are under way, __trap.
#ifndef TREFOIL_TESTS_EMULATOR_MACHINE_H
#define TREFOIL_TESTS_EMULATOR_MACHINE_H

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace emulator {

// ---- Where a thread is
struct Place {
  unsigned thread, block, numThreads, numBlocks;
};
const Place &place();

// ---- Meetings of the lanes of a warp
enum class Meeting { SYNC, SHUFFLE, VOTE, REDUCE, MATCH };
struct Met {
  const uint64_t *values; // by lane
  unsigned came;          // lanes that are there
};
// All lanes of the mask that have not ended; values stay until the next meeting but one.
Met meet(unsigned mask, Meeting kind, uint64_t value);
unsigned lane();

// ---- Barriers of a block: numThreads 0 = all that have not ended
void syncThreads(int id, int numThreads, bool waits);
int syncCount(bool is);

// ---- Memory
enum class Access { LOAD, STORE };
// The accesses of a warp's lanes at the same point happen as one. `on`: whether this lane's does.
void together(Access access, void *p, uint4 *v, bool on);
void poll(); // others get their turn
char *dynamicShared();
char *staticShared(const void *key, size_t bytes);
uint32_t sharedOffset(const void *p);

// ---- Bulk copies and the barriers that count them
void barrierStart(uint64_t *b, int arrivals);
void barrierEnd(uint64_t *b);
void barrierCount(uint64_t *b, int arrivals, int bytes);
bool barrierPassed(uint64_t *b, uint32_t parity);
void startLoad(uint32_t to, const void *from, int bytes, uint64_t *b);
// Asynchronous copies of 16 bytes, made as late as may be: when their group is waited for.
void startCopy(uint32_t to, const void *from);
void commitCopies();
void awaitCopies(int butLast);
void startStore(void *to, uint32_t from, int bytes);
void commitStores();
void awaitStores(int butLast, bool onlyRead);

uint64_t clock(); // nanoseconds, slowed down as the machine is slower than a GPU
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

// ---- Kernels by address: what is needed to call one
struct Kernel {
  size_t numParams;
  const size_t *bytes;
  void (*call)(const void *function, void **params);
};
void know(const void *function, const Kernel &kernel);

template <class... P, size_t... I>
void callWith(const void *f, void **params, std::index_sequence<I...>) {
  ((void (*)(P...))f)(*(P *)params[I]...);
}
template <class... P> const void *addressOf(void (*kernel)(P...)) {
  static_assert((std::is_trivially_copyable<P>::value && ...), "parameters are copied");
  static const size_t bytes[] = {sizeof(P)..., 0};
  know((const void *)kernel, Kernel{sizeof...(P), bytes, [](const void *f, void **params) {
                                      callWith<P...>(f, params, std::index_sequence_for<P...>());
                                    }});
  return (const void *)kernel;
}

} // namespace emulator

#endif
