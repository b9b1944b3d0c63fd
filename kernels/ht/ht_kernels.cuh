// What the launch code of high throughput hands to its kernels, and the kernels by name.
#ifndef TREFOIL_KERNELS_HT_KERNELS_CUH
#define TREFOIL_KERNELS_HT_KERNELS_CUH

#include "kernels/common/reduce.cuh"
#include "kernels/ht/ht.h"

struct UpdateArgs {
  ep_ht_update_t op;
  int *counts;          // [sets][tiles]
  int *keptOf;          // [L]
  int sets;             // L + 1 + R, across domains more
  int perSource, tiles; // tiles of 256 tokens: of a source, of all
  int idBits, perWord;  // 16 and 4, or 32 and 2
};

// How rows lie in the caller's tensors and travel: bytes [0, tokenBytes) from the tokens, the rest from the
// scales, in numChunks chunks of chunkBytes (the last one shorter).
struct HtRow {
  int tokenBytes, scaleBytes, rowBytes, chunkBytes, numChunks;
};

// Shared memory of a block with one of the pipelines (ht/ht_pipe.cuh).
struct HtShape {
  int stages;   // of the ring, of a chunk each; rows: rings
  int descInts; // of a work item's description
  int take;     // candidates taken at a time, at most 32
  int lanes;    // of the scheduler, for an item; where the policy has no number of its own
  int batch;    // items described at a time, at most 32 / lanes
};

struct HtDispatchArgs {
  ep_ht_dispatch_t op;
  HtRow row;
  HtShape sender, receiver, push; // push: of senders where no pair needs a FIFO
  const char *zeros;              // a chunk of zeros
  int split, pushSplit;           // blocks below it send first
  int lead;                       // own tokens that receivers are ahead with
  int pairsAt;                    // in shared memory: a kernel with windows' peers
  int fifoBits;                   // log2 of fifoSlots
  int room;                       // stages that a block has memory for
  int stageStride;                // bytes of one
};

struct HtCombineArgs {
  ep_ht_combine_t op;
  HtRow row;
  HtShape sender, receiver;
  int split, fifoBits, room, stageStride;
  int sourcesAt; // in shared memory: where a pulling combine reads
};

// How a dispatch's rows go to a peer if both have windows for it (ht_pairs.cuh).
enum HtWay { HT_FIFOS, HT_PUSH, HT_PULL };

// What ht_launch.cu works out of an operation: a launch, and its kernel's arguments.
struct HtLaunch {
  int blocks, threads;
  size_t shared;
};
// moreSets: behind those of one domain.
trefoil_result_t epHtPrepareUpdate(const ep_ht_update_t &op, int moreSets, UpdateArgs *args,
                                   HtLaunch *launch);
trefoil_result_t epHtPrepareDispatch(const ep_ht_dispatch_t &op, HtDispatchArgs *args,
                                     HtLaunch *launch);
trefoil_result_t epHtPrepareCombine(const ep_ht_combine_t &op, HtCombineArgs *args,
                                    HtLaunch *launch);
trefoil_result_t epHtStart(const void *kernel, const HtLaunch &launch, void **params, void *stream);
trefoil_result_t epHtLoadKernel(const void *kernel);

// That one of so many ranks, or nodes, gets a token, under uniform routing.
double epHtShareOf(int of, int topk);

const void *epHtUpdateKernel();
size_t epHtUpdateShared(int sets, int numLocal);
const void *epHtDispatchKernel(bool expertMajor, HtWay way);
// pulls: flat only.
const void *epHtCombineKernel(trefoil_dtype_t dtype, bool expertMajor, bool pulls);

constexpr int HT_PAIRS_BYTES = EP_HT_MAX_RANKS * 16 + 8;
constexpr int HT_PULL_SOURCES_BYTES = EP_HT_MAX_RANKS * 12 + 8;
constexpr int HT_ROW_WARPS = 16;                        // reducers (ht_rows.cuh)
constexpr int HT_ROW_VECTORS = 4;                       // of 16 bytes, of a lane in a step
constexpr int HT_ROW_DEPTH = 6;                         // steps whose copies are under way
constexpr int HT_ROW_STEP = HT_ROW_VECTORS * 32 * 16;   // bytes of a chunk at a time
constexpr int HT_ROW_RING = HT_ROW_DEPTH * HT_ROW_STEP; // shared memory of a warp
constexpr int HT_PIPE_THREADS =
    (2 + HT_ROW_WARPS) * 32; // a scatter pipeline has four warps of them
// Of a dispatch; behind its pipelines' warps those for weights where there are windows.
__host__ __device__ constexpr int htDispatchThreads(HtWay way) {
  return HT_PIPE_THREADS + (way == HT_FIFOS ? 0 : 64);
}
constexpr int HT_DESC_HEAD = 8; // ints in front of a description's entries

#endif
