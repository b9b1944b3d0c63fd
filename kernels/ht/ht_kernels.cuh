// What the launch code of high throughput hands to its kernels, and the kernels by name.
#ifndef TREFOIL_KERNELS_HT_KERNELS_CUH
#define TREFOIL_KERNELS_HT_KERNELS_CUH

#include "kernels/ht/ht.h"

struct UpdateArgs {
  ep_ht_update_t op;
  int *counts;           // [rows][chunks]
  int *keptOf;           // [L]
  int rows;              // L + 1 + R
  int perSource, chunks; // chunks of 256 tokens: of a source, of all
  int idBits, perWord;   // 16 and 4, or 32 and 2
};

// How rows lie in the caller's tensors and travel: bytes [0, tokenBytes) from the tokens, the rest from the
// scales, in numPieces pieces of pieceBytes (the last one shorter).
struct HtRow {
  int tokenBytes, scaleBytes, rowBytes, pieceBytes, numPieces;
};

// Shared memory of a block with one of the pipelines (ht/ht_pipe.cuh).
struct HtShape {
  int slots;    // pieces in the ring
  int descInts; // of a work item's description
  int take;     // candidates taken at a time, at most 32
  int batch;    // items described at a time, at most 32 / the policy's lanes
};

struct HtDispatchArgs {
  ep_ht_dispatch_t op;
  HtRow row;
  HtShape feed, follow, direct; // direct: of feeders where no pair needs a ring
  const char *zeros;            // a piece of zeros
  int split, directSplit;       // blocks below it feed first
  int pairsAt;                  // in shared memory: what a direct kernel knows of its peers
  int ringBits;                 // log2 of ringUnits
  int room;                     // slots that a block has memory for
  int slotStride;               // bytes of one
};

struct HtCombineArgs {
  ep_ht_combine_t op;
  HtRow row;
  HtShape feed, follow;
  int split, ringBits, room, slotStride;
  int sourcesAt; // in shared memory: where a combine out of windows reads
};

const void *epHtUpdateKernel();
size_t epHtUpdateShared(int rows, int numLocal);
const void *epHtDispatchKernel(bool expertMajor, bool direct);
// outOfWindows: flat only.
const void *epHtCombineKernel(trefoil_dtype_t dtype, bool expertMajor, bool outOfWindows);

constexpr int HT_SCATTER_THREADS = 128;                    // a block of two scatter pipelines
constexpr int HT_DIRECT_THREADS = HT_SCATTER_THREADS + 64; // with the warps for weights
constexpr int HT_PAIRS_BYTES = EP_HT_MAX_RANKS * 16 + 8;
constexpr int HT_SOURCES_BYTES = EP_HT_MAX_RANKS * 12 + 8;
constexpr int HT_REDUCE_WARPS = 7, HT_REDUCE_GROUPS = 2;
constexpr int HT_REDUCE_VECTORS = // of 16 bytes, of a thread
    (EP_HT_PIECE_BYTES / 16 + HT_REDUCE_WARPS * 32 - 1) / (HT_REDUCE_WARPS * 32);
constexpr int HT_GATHER_THREADS = 128 + HT_REDUCE_WARPS * HT_REDUCE_GROUPS * 32;
constexpr int HT_DESC_HEAD = 8; // ints in front of a description's entries

#endif
