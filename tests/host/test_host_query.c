/* Copies of three dimensions, questions about devices, occupancy, and the names of CUDA 12's programs. */
#include <cuda_profiler_api.h>
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include "test.h"
#include "trefoil_host.h"

#define OK(call)       REQUIRE((call) == cudaSuccess, "%s: %s", #call, trefoilHostLastError())
#define IS(call, code) CHECK((call) == (code), "%s: %s", #call, trefoilHostLastError())

enum { WIDTH = 7, HEIGHT = 5, DEPTH = 3 };

static int valueAt(int x, int y, int z) {
  return 1 + x + WIDTH * (y + HEIGHT * z);
}

/* A sub-box of a pitched box, to the host and back into another place. */
TEST(boxes_are_copied_and_filled) {
  struct cudaExtent extent = make_cudaExtent(WIDTH, HEIGHT, DEPTH);
  struct cudaPitchedPtr box;
  unsigned char host[DEPTH][HEIGHT][WIDTH], back[DEPTH][HEIGHT][WIDTH];
  for (int z = 0; z < DEPTH; z++)
    for (int y = 0; y < HEIGHT; y++)
      for (int x = 0; x < WIDTH; x++) host[z][y][x] = (unsigned char)valueAt(x, y, z);
  OK(cudaMalloc3D(&box, extent));
  CHECK(box.pitch >= WIDTH && box.xsize == WIDTH && box.ysize == HEIGHT, "pitch %zu", box.pitch);
  OK(cudaMemset3D(box, 0, extent));
  struct cudaMemcpy3DParms p;
  memset(&p, 0, sizeof p);
  p.srcPtr = make_cudaPitchedPtr(host, WIDTH, WIDTH, HEIGHT);
  p.dstPtr = box;
  p.srcPos = make_cudaPos(1, 2, 1);
  p.dstPos = (struct cudaPos){3, 0, 0};
  p.extent = (struct cudaExtent){4, 3, 2};
  p.kind = cudaMemcpyHostToDevice;
  OK(cudaMemcpy3D(&p));
  memset(&p, 0, sizeof p);
  p.srcPtr = box;
  p.dstPtr = (struct cudaPitchedPtr){back, WIDTH, WIDTH, HEIGHT};
  p.extent = extent;
  p.kind = cudaMemcpyDeviceToHost;
  OK(cudaMemcpy3DAsync(&p, NULL)); /* to pageable memory: complete */
  for (int z = 0; z < DEPTH; z++)
    for (int y = 0; y < HEIGHT; y++)
      for (int x = 0; x < WIDTH; x++) {
        int inside = x >= 3 && y < 3 && z < 2;
        int expected = inside ? valueAt(x - 2, y + 2, z + 1) : 0;
        CHECK(back[z][y][x] == expected, "(%d, %d, %d): %d, not %d", x, y, z, back[z][y][x],
              expected);
      }
  p.extent.depth = DEPTH + 1;
  IS(cudaMemcpy3D(&p), cudaErrorInvalidValue);
  p.extent = (struct cudaExtent){SIZE_MAX / 2, HEIGHT, DEPTH};
  IS(cudaMemcpy3D(&p), cudaErrorInvalidPitchValue);
  p.extent = (struct cudaExtent){WIDTH, HEIGHT + 1, 2};
  IS(cudaMemcpy3D(&p), cudaErrorInvalidValue);
  p.extent = extent;
  p.dstArray = (cudaArray_t)back;
  IS(cudaMemcpy3D(&p), cudaErrorNotSupported);
  extent.depth = DEPTH + 2;
  IS(cudaMemset3D(box, 0, extent), cudaErrorInvalidValue);
  OK(cudaFree(box.ptr));
}

TEST(a_box_of_pageable_memory_is_read_at_the_call) {
  struct cudaExtent extent = {WIDTH, HEIGHT, DEPTH};
  struct cudaPitchedPtr box;
  unsigned char source[DEPTH * HEIGHT * WIDTH], last = 0;
  cudaStream_t s;
  OK(cudaStreamCreate(&s));
  OK(cudaMalloc3D(&box, extent));
  struct cudaMemcpy3DParms p;
  memset(&p, 0, sizeof p);
  p.srcPtr = (struct cudaPitchedPtr){source, WIDTH, WIDTH, HEIGHT};
  p.dstPtr = box;
  p.extent = extent;
  p.kind = cudaMemcpyDefault;
  for (int i = 1; i < 100; i++) {
    memset(source, i, sizeof source);
    OK(cudaMemset3DAsync(box, 0, extent, s));
    OK(cudaMemcpy3DAsync(&p, s));
    memset(source, 0, sizeof source);
    OK(cudaStreamSynchronize(s));
    const char *end = (char *)box.ptr + (DEPTH * HEIGHT - 1) * box.pitch + WIDTH - 1;
    OK(cudaMemcpy(&last, end, 1, cudaMemcpyDefault));
    CHECK(last == i, "round %d: %d", i, last);
  }
  OK(cudaFree(box.ptr));
  OK(cudaStreamDestroy(s));
}

TEST(devices_reach_one_another) {
  int value = -1;
  OK(cudaDeviceGetP2PAttribute(&value, cudaDevP2PAttrAccessSupported, 0, 1));
  CHECK(value == 1, "%d", value);
  OK(cudaDeviceGetP2PAttribute(&value, cudaDevP2PAttrCudaArrayAccessSupported, 1, 0));
  CHECK(value == 0, "%d", value);
  IS(cudaDeviceGetP2PAttribute(&value, cudaDevP2PAttrAccessSupported, 1, 1),
     cudaErrorInvalidDevice);
  IS(cudaDeviceGetP2PAttribute(&value, (enum cudaDeviceP2PAttr)6, 0, 1), cudaErrorInvalidValue);
}

TEST(profilers_are_told_nothing) {
  OK(cudaProfilerStart());
  nvtxEventAttributes_t event;
  memset(&event, 0, sizeof event);
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = "a range";
  CHECK(nvtxRangePushEx(&event) == NVTX_NO_PUSH_POP_TRACKING, "a level");
  CHECK(nvtxRangePushA("another") == NVTX_NO_PUSH_POP_TRACKING, "a level");
  CHECK(nvtxRangePop() == NVTX_NO_PUSH_POP_TRACKING, "a level");
  CHECK(!nvtxRangeStartA("a third") && !nvtxDomainCreateA("a domain"), "a handle");
  nvtxRangeEnd(0);
  nvtxMarkA("a mark");
  OK(cudaProfilerStop());
}

TEST(there_is_no_driver_to_enter) {
  void *entry = &entry;
  enum cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSuccess;
  IS(cudaGetDriverEntryPoint("cuMemCreate", &entry, 0, &status), cudaErrorSymbolNotFound);
  CHECK(!entry && status == cudaDriverEntryPointSymbolNotFound, "status %d", (int)status);
  CHECK(strstr(trefoilHostLastError(), "cuMemCreate"), "%s", trefoilHostLastError());
  entry = &entry;
  IS(cudaGetDriverEntryPointByVersion("cuInit", &entry, 12000, 0, NULL), cudaErrorSymbolNotFound);
  CHECK(!entry, "an entry");
}

static void *prepare(const void *func, const trefoil_host_launch_t *launch) {
  (void)launch;
  return (void *)func;
}
static void nothing(void *launch) {
  (void)launch;
}

TEST(blocks_fit_by_threads_and_shared_memory) {
  static const trefoil_host_launcher_t launcher = {prepare, nothing, nothing};
  int blocks = -1;
  size_t bytes = 0;
  IS(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, prepare, 128, 0),
     cudaErrorNotSupported);
  CHECK(strstr(trefoilHostLastError(), "cudaOccupancy"), "%s", trefoilHostLastError());
  trefoilHostSetLauncher(&launcher);
  const struct {
    int threads;
    size_t shared;
    int blocks;
  } cases[] = {{1024, 0, 2}, {1000, 0, 2},     {128, 0, 16},     {32, 0, 32},
               {1, 0, 32},   {128, 100000, 2}, {128, 232448, 1}, {128, 232449, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, prepare, cases[i].threads,
                                                     cases[i].shared));
    CHECK(blocks == cases[i].blocks, "%d threads, %zu bytes: %d blocks", cases[i].threads,
          cases[i].shared, blocks);
  }
  OK(cudaOccupancyAvailableDynamicSMemPerBlock(&bytes, prepare, 2, 128));
  CHECK(bytes == 233472 / 2 - 1024, "%zu", bytes);
  IS(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, prepare, 1025, 0),
     cudaErrorInvalidValue);
  trefoilHostSetLauncher(NULL);
}

extern struct ncclTeamOf { int numRanks, rank, stride; } ncclTeamCft(void *comm, int mode);
extern int ncclLLA2ACalcSlots(int maxElts, int maxEltSize);

TEST(what_returns_no_code_returns_nothing_and_says_so) {
  struct ncclTeamOf team = ncclTeamCft(NULL, 0);
  CHECK(!team.numRanks && !team.rank && !team.stride, "%d ranks", team.numRanks);
  CHECK(strstr(trefoilHostLastError(), "ncclTeamCft is not"), "%s", trefoilHostLastError());
  CHECK(ncclLLA2ACalcSlots(1, 1) == 0, "slots");
  CHECK(strstr(trefoilHostLastError(), "ncclLLA2ACalcSlots is not"), "%s", trefoilHostLastError());
  struct cudaChannelFormatDesc desc = cudaCreateChannelDesc(8, 16, 0, 1, cudaChannelFormatKindNone);
  CHECK(desc.x == 8 && desc.y == 16 && desc.w == 1 && desc.f == cudaChannelFormatKindNone, "%d",
        desc.x);
}

/* As CUDA 12's header declares it. */
extern cudaError_t cudaGetDeviceProperties_v2(void *prop, int device);
extern cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream,
                                               enum cudaStreamCaptureStatus *status,
                                               unsigned long long *id, cudaGraph_t *graph,
                                               const cudaGraphNode_t **nodes, size_t *count);

TEST(cuda_12_programs_find_their_names) {
  struct cudaDeviceProp now;
  union {
    char bytes[1032 + 64];
    int words[258];
    size_t longs[129];
  } old;
  memset(&old, 0xee, sizeof old);
  OK(cudaGetDeviceProperties(&now, 3));
  OK(cudaGetDeviceProperties_v2(&old, 3));
  CHECK(!memcmp(old.bytes, now.name, sizeof now.name), "%s", old.bytes);
  CHECK(old.longs[288 / 8] == now.totalGlobalMem, "%zu bytes", old.longs[288 / 8]);
  CHECK(old.words[360 / 4] == 9 && old.words[388 / 4] == now.multiProcessorCount, "%d, %d",
        old.words[360 / 4], old.words[388 / 4]);
  CHECK(old.longs[640 / 8] == now.sharedMemPerMultiprocessor && old.words[772 / 4] == 1, "%zu",
        old.longs[640 / 8]);
  CHECK((unsigned char)old.bytes[1032] == 0xee, "it wrote past the struct");
  enum cudaStreamCaptureStatus status;
  size_t count = 9;
  OK(cudaStreamGetCaptureInfo_v2(cudaStreamPerThread, &status, NULL, NULL, NULL, &count));
  CHECK(status == cudaStreamCaptureStatusNone, "%d", (int)status);
}

TEST_MAIN()
