// Fibers and their scheduler. One pass visits every warp of the launch once, from a random one on. A warp
// runs its lanes until all of them stand still: then the accesses they stand before happen as one, under
// one lock of the process, and it goes on, for a random while.
#include "machine_internal.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <execinfo.h>
#include <mutex>
#include <sys/mman.h>
#include <time.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace emulator {

namespace {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr uint64_t SLOWER = 10; // than a GPU, about: time limits of kernels count device time

thread_local Thread *current;

std::mutex linesLock;
bool saysWhere;

// What AddressSanitizer holds of a stack would else be held of the next mapping at its address.
void unmap(void *stack) {
#ifdef __SANITIZE_ADDRESS__
  ASAN_UNPOISON_MEMORY_REGION(stack, STACK_BYTES);
#endif
  munmap(stack, STACK_BYTES);
}

// Stacks are kept for the thread's later launches. Pages that nobody touched cost nothing.
struct Stacks {
  std::vector<void *> idle;
  ~Stacks() {
    for (void *p : idle) unmap(p);
  }
};
thread_local Stacks stacks;

struct Allocator {
  boost::context::stack_context allocate() {
    void *p;
    if (stacks.idle.empty()) {
      p = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (p == MAP_FAILED) fail("no memory for another thread's stack");
    } else {
      p = stacks.idle.back();
      stacks.idle.pop_back();
    }
    *(uint64_t *)p = 0x57ac57ac57ac57acull;
    boost::context::stack_context s;
    s.size = STACK_BYTES;
    s.sp = (char *)p + STACK_BYTES;
    return s;
  }
  void deallocate(boost::context::stack_context &s) {
    void *p = (char *)s.sp - STACK_BYTES;
    if (*(uint64_t *)p != 0x57ac57ac57ac57acull) fail("a thread's stack overflowed");
    stacks.idle.push_back(p);
  }
};

bool isComplete(const Warp &w, const Meet &m) {
  return m.arrived && !(m.mask & w.live & ~m.arrived);
}

void complete(Warp &w, Meet &m) {
  m.came[m.phase & 1] = m.arrived;
  m.arrived = 0;
  m.phase++;
  for (Thread &t : w.threads) {
    if (t.state == State::MEETING && t.meet == &m) t.state = State::READY;
  }
}

void release(Block &b, int id) {
  Barrier &k = b.barriers[id];
  k.arrived = 0;
  k.sumBefore = k.sum;
  k.sum = 0;
  k.phase++;
  for (Warp &w : b.warps) {
    for (Thread &t : w.threads) {
      if (t.state == State::BARRIER && t.barrier == id) t.state = State::READY;
    }
  }
}

// A thread has ended: who waited for it need not any more.
void end(Thread &t) {
  Warp &w = *t.warp;
  Block &b = *t.block;
  t.state = State::ENDED;
  w.live &= ~(1u << t.lane);
  b.live--;
  b.launch->live--;
  for (auto &m : w.meets) {
    if (isComplete(w, *m)) complete(w, *m);
  }
  Barrier &k = b.barriers[0];
  if (k.needed == 0 && k.arrived && k.arrived == b.live) release(b, 0);
  if (b.live == 0 && (b.loading || b.reading)) {
    fail("block %u ended while %d bulk copies still used its shared memory", t.place.block,
         b.loading + b.reading);
  }
}

// What a lane stands before happens; false: it stands before nothing of the kind.
bool move(Thread &t, Access kind) {
  if (t.state != State::ACCESS || t.access.access != kind) return false;
  t.state = State::READY;
  if (!t.access.on) return true;
  if ((uintptr_t)t.access.p & 15) fail("a 16-byte access at %p", t.access.p);
  if (kind == Access::LOAD) {
    memcpy(t.access.v, t.access.p, 16);
    std::atomic_thread_fence(std::memory_order_acquire);
  } else {
    std::atomic_thread_fence(std::memory_order_release);
    memcpy(t.access.p, t.access.v, 16);
  }
  return true;
}

// The lock makes a packet whole between the threads of a process. Ranks of other processes do not have it:
// for them the flag, which the last lane of a packet has, is stored last and loaded first.
bool moveTogether(Warp &w) {
  bool any = false;
  std::lock_guard<std::mutex> guard(linesLock);
  for (auto t = w.threads.rbegin(); t != w.threads.rend(); ++t) any |= move(*t, Access::LOAD);
  for (Thread &t : w.threads) any |= move(t, Access::STORE);
  return any;
}

// Resumes every lane that can run. False: none could.
bool resume(Warp &w) {
  bool any = false;
  for (Thread &t : w.threads) {
    if (t.state != State::READY) continue;
    any = true;
    current = &t;
    t.at = std::move(t.at).resume();
    if (!t.at) end(t);
    w.onlyPolls = w.onlyPolls && t.state == State::POLLING;
  }
  return any;
}

// False: it did nothing but look whether others have done something.
bool runWarp(Launch &l, Warp &w) {
  if (!w.live) return false;
  if (w.stalled > 0) {
    w.stalled--;
    return false;
  }
  if (l.draw(256) == 0) w.stalled = (int)l.draw(40);
  for (Thread &t : w.threads) {
    if (t.state == State::POLLING) t.state = State::READY;
  }
  w.onlyPolls = true;
  for (int left = 1 + (int)l.draw(24); left > 0;) {
    if (resume(w)) continue;
    if (!moveTogether(w)) break;
    w.onlyPolls = false;
    left--;
  }
  while (resume(w)) { // nobody stays in the middle of what others wait for
  }
  // Who only polls, and has for long, looks more and more seldom.
  w.polls = w.onlyPolls ? w.polls + 1 : 0;
  if (w.polls > 2) w.stalled += w.polls < 16 ? w.polls : 16;
  return !w.onlyPolls;
}

void makeThread(Launch &l, Block &b, Warp &w, unsigned thread, unsigned block) {
  Thread &t = w.threads[thread % 32];
  t.place = Place{thread, block, l.numThreads, l.numBlocks};
  t.lane = thread % 32;
  t.warp = &w;
  t.block = &b;
  t.at = boost::context::fiber(std::allocator_arg, Allocator(),
                               [&l, &t](boost::context::fiber &&back) {
                                 t.back = std::move(back);
                                 l.body();
                                 return std::move(t.back);
                               });
  w.live |= 1u << t.lane;
}

void makeBlock(Launch &l, unsigned i) {
  Block &b = l.blocks[i];
  b.launch = &l;
  b.live = (int)l.numThreads;
  b.memory.assign(l.sharedBytes + 256, (char)0xC3);
  b.shared = (char *)(((uintptr_t)b.memory.data() + 127) & ~(uintptr_t)127);
  b.warps.resize((l.numThreads + 31) / 32);
  for (size_t w = 0; w < b.warps.size(); w++) {
    const unsigned n = l.numThreads - (unsigned)w * 32;
    b.warps[w].threads.resize(n < 32 ? n : 32);
    if (l.draw(8) == 0) b.warps[w].stalled = (int)l.draw(150); // a late start
  }
  for (unsigned t = 0; t < l.numThreads; t++) makeThread(l, b, b.warps[t / 32], t, i);
}

// Nobody can run any more. Some of those who wait say where.
void describeStandstill(Launch &l) {
  int of[6] = {}, shown = 0;
  for (Block &b : l.blocks) {
    for (Warp &w : b.warps) {
      for (Thread &t : w.threads) of[(int)t.state]++;
    }
  }
  fprintf(stderr,
          "emulator: standstill: %d threads wait in a meeting, %d at a barrier, %d have ended\n",
          of[3], of[4], of[5]);
  saysWhere = true;
  for (Block &b : l.blocks) {
    for (Warp &w : b.warps) {
      unsigned last = 99;
      for (Thread &t : w.threads) {
        if (t.state == State::ENDED || shown >= 12 || (unsigned)t.state == last) continue;
        last = (unsigned)t.state;
        shown++;
        fprintf(stderr, "block %u, thread %u waits %s\n", t.place.block, t.place.thread,
                t.state == State::MEETING ? "for its warp" : "at a barrier");
        current = &t;
        t.at = std::move(t.at).resume();
      }
    }
  }
  fail("standstill");
}

} // namespace

void run(Launch &l) {
  l.live = (int)(l.numBlocks * l.numThreads);
  l.blocks.resize(l.numBlocks);
  std::vector<Warp *> warps;
  for (unsigned i = 0; i < l.numBlocks; i++) makeBlock(l, i);
  for (Block &b : l.blocks) {
    for (Warp &w : b.warps) warps.push_back(&w);
  }
  Thread *const before = current;
  int idle = 0; // passes in which nothing happened
  while (l.live) {
    const size_t n = warps.size(), first = l.draw((unsigned)n);
    bool can = !l.copies.empty(), did = can;
    for (size_t i = 0; i < n; i++) {
      Warp &w = *warps[(first + i) % n];
      for (Thread &t : w.threads) {
        can = can ||
              (t.state != State::MEETING && t.state != State::BARRIER && t.state != State::ENDED);
      }
      if (runWarp(l, w)) did = true;
    }
    if (!can && l.live) describeStandstill(l);
    moveCopies(l, false);
    idle = did ? 0 : idle + 1;
    if (idle > 20) { // another launch must go on first
      const timespec moment = {0, 50000};
      nanosleep(&moment, nullptr);
    }
  }
  moveCopies(l, true);
  current = before;
}

Thread &self() {
  if (!current) fail("device code was called outside a launch");
  return *current;
}

void leave(State state) {
  Thread &t = self();
  t.state = state;
  t.back = std::move(t.back).resume();
  while (saysWhere) {
    void *at[12];
    backtrace_symbols_fd(at, backtrace(at, 12), 2);
    t.back = std::move(t.back).resume();
  }
}

const Place &place() {
  return self().place;
}
unsigned lane() {
  return self().lane;
}

Met meet(unsigned mask, Meeting kind, uint64_t value) {
  Thread &t = self();
  Warp &w = *t.warp;
  if (!(mask >> t.lane & 1)) fail("lane %u is not in its own mask %08x", t.lane, mask);
  Meet *m = nullptr;
  for (auto &x : w.meets) {
    if (x->mask == mask) m = x.get();
  }
  if (!m) {
    w.meets.emplace_back(new Meet());
    m = w.meets.back().get();
    m->mask = mask;
  }
  if (!m->arrived) m->kind = kind;
  if (m->kind != kind) {
    fail("lanes of block %u, warp %u meet in different operations (%d, %d)", t.place.block,
         t.place.thread / 32, (int)m->kind, (int)kind);
  }
  const unsigned phase = m->phase & 1;
  m->values[phase][t.lane] = value;
  m->arrived |= 1u << t.lane;
  if (isComplete(w, *m)) {
    complete(w, *m);
  } else {
    t.meet = m;
    leave(State::MEETING);
  }
  return Met{m->values[phase], m->came[phase]};
}

namespace {

int arrive(int id, int numThreads, bool waits, int sum) {
  Thread &t = self();
  Block &b = *t.block;
  Barrier &k = b.barriers[id];
  if (!k.arrived) k.needed = numThreads;
  if (k.needed != numThreads) {
    fail("barrier %d of block %u: for %d threads, and for %d", id, t.place.block, k.needed,
         numThreads);
  }
  k.arrived++;
  k.sum += sum;
  if (k.arrived == (numThreads ? numThreads : b.live)) {
    release(b, id);
  } else if (waits) {
    t.barrier = id;
    leave(State::BARRIER);
  }
  return k.sumBefore;
}

} // namespace

void syncThreads(int id, int numThreads, bool waits) {
  arrive(id, numThreads, waits, 0);
}
int syncCount(bool is) {
  return arrive(0, 0, true, is);
}

void together(Access access, void *p, uint4 *v, bool on) {
  Thread &t = self();
  t.access = {access, p, v, on};
  leave(State::ACCESS);
}

void poll() {
  leave(State::POLLING);
}

char *dynamicShared() {
  return self().block->shared;
}

char *staticShared(const void *key, size_t bytes) {
  std::vector<uint64_t> &v = self().block->named[key];
  if (v.empty()) v.assign((bytes + 15) / 8, 0xC3C3C3C3C3C3C3C3ull);
  return (char *)(((uintptr_t)v.data() + 15) & ~(uintptr_t)15);
}

uint32_t sharedOffset(const void *p) {
  return (uint32_t)((const char *)p - self().block->shared);
}

uint64_t clock() {
  static const uint64_t slower = [] {
    const char *s = getenv("TREFOIL_EMULATOR_SLOWER");
    const uint64_t n = s ? strtoull(s, nullptr, 10) : 0;
    return n ? n : SLOWER;
  }();
  static const clockid_t which = [] {
    const char *s = getenv("TREFOIL_EMULATOR_CLOCK");
    return s && !strcmp(s, "cpu") ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
  }();
  timespec t;
  clock_gettime(which, &t);
  return ((uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec) / slower + 1;
}

void fail(const char *format, ...) {
  va_list args;
  va_start(args, format);
  fprintf(stderr, "emulator: ");
  vfprintf(stderr, format, args);
  fprintf(stderr, "\n");
  va_end(args);
  void *at[16];
  backtrace_symbols_fd(at, backtrace(at, 16), 2);
  abort();
}

} // namespace emulator
