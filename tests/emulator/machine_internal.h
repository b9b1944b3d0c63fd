// Blocks, warps and threads of a launch, for the files of the machine.
#ifndef TREFOIL_TESTS_EMULATOR_MACHINE_INTERNAL_H
#define TREFOIL_TESTS_EMULATOR_MACHINE_INTERNAL_H

#include "tests/emulator/machine.h"

#include <boost/context/fiber.hpp>
#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace emulator {

struct Block;
struct Warp;
struct Launch;

enum class State { READY, POLLING, ACCESS, MEETING, BARRIER, ENDED };

struct Meet {
  unsigned mask = 0, arrived = 0, came[2] = {}, phase = 0;
  Meeting kind = Meeting::SYNC;
  uint64_t values[2][32];
};

struct StoreGroup {
  int unread = 0, unwritten = 0;
};

struct Thread {
  boost::context::fiber at, back;
  Place place;
  unsigned lane = 0;
  Warp *warp = nullptr;
  Block *block = nullptr;
  State state = State::READY;
  const Meet *meet = nullptr;
  int barrier = -1;
  struct {
    Access access;
    void *p;
    uint4 *v;
    bool on;
  } access = {};
  std::vector<std::shared_ptr<StoreGroup>> groups; // the last one is open
  struct Async {
    char *to;
    const char *from;
  };
  std::vector<std::vector<Async>> async{1}; // asynchronous copies by group; the last one is open
};

struct Warp {
  std::vector<Thread> threads;
  unsigned live = 0;
  int stalled = 0; // passes that it sits out
  int polls = 0;   // turns in which it did nothing else
  bool onlyPolls = false;
  std::vector<std::unique_ptr<Meet>> meets;
};

struct Barrier {
  int arrived = 0, needed = 0, sum = 0, sumBefore = 0;
  unsigned phase = 0;
};

struct Block {
  Launch *launch = nullptr;
  std::vector<Warp> warps;
  int live = 0;
  Barrier barriers[16];
  std::vector<char> memory; // dynamic shared, 128-byte aligned from `shared`
  char *shared = nullptr;
  std::map<const void *, std::vector<uint64_t>> named; // static shared
  int loading = 0, reading = 0;                        // bulk copies that touch shared memory
};

struct Copy {
  Block *block;
  char *to;
  const char *from;
  int bytes;
  uint64_t *barrier;                 // of a load
  std::shared_ptr<StoreGroup> group; // of a store
  std::vector<char> data;            // what a store has read
  bool hasRead;
  unsigned rounds = 0; // that it still waits, of a store that has read
};

struct Launch {
  unsigned numBlocks, numThreads;
  size_t sharedBytes;
  std::function<void()> body;
  std::vector<Block> blocks;
  std::vector<Copy> copies;
  uint64_t random;
  int live = 0; // threads

  unsigned draw(unsigned below) {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return (unsigned)((random >> 11) % below);
  }
};

Thread &self();
void leave(State state); // back to the scheduler, until it is READY again
void moveCopies(Launch &l, bool all);
void run(Launch &l);

} // namespace emulator

#endif
