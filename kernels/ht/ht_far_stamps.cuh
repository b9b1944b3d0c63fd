// Clock stamps of the poster (ht_far_poster.cuh): when slots of a ring were filled, put, had left, had
// landed, were read. Only in a build for that purpose, with -DTREFOIL_HT_FAR_STAMPS for the compilers;
// without it nothing here is compiled, and kernels are what they are.
//
// Such a build writes to the file $TREFOIL_HT_FAR_STAMPS.RANK, if the variable is set, as the kernels run: a
// mapping of it that the GPU sees. trefoil.ht_stamps reads it. A stamp is a store to the host's memory: the
// next system fence of the poster takes about a microsecond longer.
#ifndef TREFOIL_KERNELS_HT_FAR_STAMPS_CUH
#define TREFOIL_KERNELS_HT_FAR_STAMPS_CUH
#ifdef TREFOIL_HT_FAR_STAMPS

#include <fcntl.h>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

constexpr int HT_STAMPED_LAUNCHES = 128, HT_STAMPED_RINGS = 7, HT_STAMPS = 255;

enum HtStampOf : uint32_t { // slots of this launch without a gap, but for HT_STAMP_LEFT and _REFILLED
  HT_STAMP_FILLED,
  HT_STAMP_PUT,
  HT_STAMP_LEFT, // puts to the ring's peer, of the communicator: their sources may be used again
  HT_STAMP_LANDED,
  HT_STAMP_READ,
  HT_STAMP_RETURNED,
  HT_STAMP_REFILLED, // slots since the rings began
};
struct HtStamp {
  uint64_t ns;
  uint32_t of, count;
};
struct HtStampedDuty { // of one launch, ring and duty
  uint64_t number;     // 1 + that of the launch
  uint32_t stamps, reserved;
  HtStamp at[HT_STAMPS];
};
// The file: [kind][launch mod HT_STAMPED_LAUNCHES][ring][duty].
struct HtStampFile {
  HtStampedDuty duties[2][HT_STAMPED_LAUNCHES][HT_STAMPED_RINGS][4];
};

// The stamps of a rank as the GPU sees them; NULL: none are wanted, or the file cannot be had.
inline HtStampFile *htStampsOf(int rank) {
  static std::mutex lock;
  static HtStampFile *known[64] = {};
  const char *name = getenv("TREFOIL_HT_FAR_STAMPS");
  const std::lock_guard<std::mutex> guard(lock);
  if (!name || rank < 0 || rank >= 64) return nullptr;
  if (known[rank]) return known[rank];
  char path[1024];
  snprintf(path, sizeof path, "%s.%d", name, rank);
  const int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) return nullptr;
  void *here = MAP_FAILED, *there = nullptr;
  if (!ftruncate(file, sizeof(HtStampFile)))
    here = mmap(nullptr, sizeof(HtStampFile), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (here == MAP_FAILED) return nullptr;
#ifndef __CUDACC__ // the emulator
  there = here;
#else
  if (cudaHostRegister(here, sizeof(HtStampFile),
                       cudaHostRegisterMapped | cudaHostRegisterPortable) ||
      cudaHostGetDevicePointer(&there, here, 0))
    return nullptr;
#endif
  return known[rank] = (HtStampFile *)there;
}

#endif
#endif
