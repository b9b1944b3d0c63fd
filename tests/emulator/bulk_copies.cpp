// Bulk copies, which happen later and in any order, and the barriers of shared memory that count them.
#include "machine_internal.h"

namespace emulator {

namespace {

// One store in LATE is written long after it has read, up to so many rounds of the scheduler.
constexpr unsigned LATE = 6, MOST_ROUNDS = 100;

// In the 64 bits of the barrier itself, as on a GPU: a phase ends when nothing is pending any more.
struct Word {
  uint64_t valid : 4, phase : 1, arrivals : 13, pending : 13, unused : 1, bytes : 32;
};
constexpr unsigned VALID = 0xA;

Word load(const uint64_t *b, const char *what) {
  Word w;
  static_assert(sizeof w == 8, "a barrier has 64 bits");
  memcpy(&w, b, 8);
  if (w.valid != VALID) fail("%s a barrier that is not initialised", what);
  return w;
}

void store(uint64_t *b, Word w) {
  if (w.pending == 0 && w.bytes == 0) {
    w.phase ^= 1;
    w.pending = w.arrivals;
  }
  memcpy(b, &w, 8);
}

char *inShared(Block &b, uint32_t at, int bytes) {
  if (bytes <= 0 || bytes % 16 || at % 16) fail("a bulk copy of %d bytes at %u", bytes, at);
  if (at + (size_t)bytes > b.launch->sharedBytes) {
    fail("a bulk copy of %d bytes at %u, past the block's %zu bytes of shared memory", bytes, at,
         b.launch->sharedBytes);
  }
  return b.shared + at;
}

void checkGlobal(const void *p) {
  if ((uintptr_t)p & 15) fail("a bulk copy at the misaligned address %p", p);
}

std::shared_ptr<StoreGroup> openGroup(Thread &t) {
  if (t.groups.empty()) t.groups.push_back(std::make_shared<StoreGroup>());
  return t.groups.back();
}

// One step of a copy: true when it is done.
bool step(Copy &c) {
  if (c.barrier) {
    memcpy(c.to, c.from, (size_t)c.bytes);
    Word w = load(c.barrier, "a bulk load completes at");
    w.bytes -= (unsigned)c.bytes;
    store(c.barrier, w);
    c.block->loading--;
    return true;
  }
  if (!c.hasRead) {
    c.data.assign(c.from, c.from + c.bytes);
    c.hasRead = true;
    c.group->unread--;
    c.block->reading--;
    return false;
  }
  memcpy(c.to, c.data.data(), (size_t)c.bytes);
  c.group->unwritten--;
  return true;
}

} // namespace

void moveCopies(Launch &l, bool all) {
  for (size_t i = 0; i < l.copies.size();) {
    Copy &c = l.copies[i];
    if (!all && (c.rounds || l.draw(3) == 0)) {
      c.rounds -= c.rounds > 0;
      i++;
      continue;
    }
    bool done = step(c);
    if (all && !done) done = step(c);
    if (!done) {
      if (l.draw(LATE) == 0) c.rounds = l.draw(MOST_ROUNDS);
      i++;
      continue;
    }
    if (i + 1 < l.copies.size()) l.copies[i] = std::move(l.copies.back());
    l.copies.pop_back();
  }
}

void barrierStart(uint64_t *b, int arrivals) {
  Word w = {};
  w.valid = VALID;
  w.arrivals = w.pending = (unsigned)arrivals;
  memcpy(b, &w, 8);
}

void barrierEnd(uint64_t *b) {
  load(b, "the end of");
  memset(b, 0xC3, 8);
}

void barrierCount(uint64_t *b, int arrivals, int bytes) {
  Word w = load(b, "an arrival at");
  if ((int)w.pending < arrivals) {
    fail("%d arrivals at a barrier that waits for %d more", arrivals, (int)w.pending);
  }
  w.bytes += (unsigned)bytes;
  w.pending -= (unsigned)arrivals;
  store(b, w);
}

bool barrierPassed(uint64_t *b, uint32_t parity) {
  return load(b, "a wait for").phase != (parity & 1);
}

void startLoad(uint32_t to, const void *from, int bytes, uint64_t *b) {
  Block &k = *self().block;
  checkGlobal(from);
  load(b, "a bulk load counts at");
  k.launch->copies.push_back(
      Copy{&k, inShared(k, to, bytes), (const char *)from, bytes, b, nullptr, {}, false});
  k.loading++;
}

void startCopy(uint32_t to, const void *from) {
  Thread &t = self();
  checkGlobal(from);
  t.async.back().push_back({inShared(*t.block, to, 16), (const char *)from});
}

void commitCopies() {
  self().async.emplace_back();
}

void awaitCopies(int butLast) {
  std::vector<std::vector<Thread::Async>> &groups = self().async;
  while ((int)groups.size() - 1 > butLast) {
    for (const Thread::Async &c : groups[0]) memcpy(c.to, c.from, 16);
    groups.erase(groups.begin());
  }
}

void startStore(void *to, uint32_t from, int bytes) {
  Thread &t = self();
  Block &k = *t.block;
  checkGlobal(to);
  auto group = openGroup(t);
  group->unread++;
  group->unwritten++;
  k.launch->copies.push_back(
      Copy{&k, (char *)to, inShared(k, from, bytes), bytes, nullptr, group, {}, false});
  k.reading++;
}

void commitStores() {
  Thread &t = self();
  openGroup(t);
  t.groups.push_back(std::make_shared<StoreGroup>());
}

void awaitStores(int butLast, bool onlyRead) {
  Thread &t = self();
  for (;;) {
    const int committed = t.groups.empty() ? 0 : (int)t.groups.size() - 1;
    bool waits = false;
    for (int i = 0; i < committed - butLast; i++) {
      waits = waits || t.groups[i]->unread || (!onlyRead && t.groups[i]->unwritten);
    }
    if (!waits) break;
    poll();
  }
  while (t.groups.size() > 1 && !t.groups[0]->unwritten) t.groups.erase(t.groups.begin());
}

} // namespace emulator
