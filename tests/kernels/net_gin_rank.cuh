// A rank of the tests of kernels/net over NCCL's GIN, or over the host runtime's device communicators.
#ifndef TREFOIL_TESTS_KERNELS_NET_GIN_RANK_CUH
#define TREFOIL_TESTS_KERNELS_NET_GIN_RANK_CUH

#include "kernels/net/gin.cuh"
#include "tests/kernels/net_times.cuh"

#define NC(x)                                                                                      \
  do {                                                                                             \
    if ((x) != ncclSuccess) {                                                                      \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, ncclGetLastError(nullptr));       \
      exit(3);                                                                                     \
    }                                                                                              \
  } while (0)

template <class T> static T *onDevice(const T &value) {
  T *p = zeros<T>(1);
  CU(cudaMemcpy(p, &value, sizeof value, cudaMemcpyHostToDevice));
  return p;
}

static ncclDevComm_t makeDevComm(const Options &o, ncclComm_t comm) {
  ncclDevCommRequirements_t reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  reqs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  reqs.ginContextCount = 1;
  reqs.ginSignalCount = NET_SIGNALS * o.ranks;
  reqs.ginCounterCount = o.ranks;
  ncclDevComm_t dev;
  NC(ncclDevCommCreate(comm, &reqs, &dev));
  return dev;
}

// No rank leaves while others may still write to its memory.
static void meet(ncclComm_t comm, cudaStream_t stream, int *word) {
  NC(ncclAllReduce(word, word, 1, ncclInt32, ncclSum, comm, stream));
  CU(cudaStreamSynchronize(stream));
}

// us: [NUM_EXCHANGES], for the times.
static void runGinRank(const Options &o, Rank &k, int rank, int device, ncclUniqueId id,
                       double *us = nullptr) {
  ncclComm_t comm;
  ncclWindow_t window;
  void *memory;
  CU(cudaSetDevice(device));
  NC(ncclCommInitRank(&comm, o.ranks, id, rank));
  k.work = workOf(o, rank);
  prepare(k);
  const size_t bytes = o.times ? timesBytes(o) : netWorkBytes(k.work);
  NC(ncclMemAlloc(&memory, bytes));
  CU(cudaMemset(memory, 0, bytes));
  CU(cudaDeviceSynchronize());
  NC(ncclCommWindowRegister(comm, memory, bytes, &window, 0));
  ncclDevComm_t dev = makeDevComm(o, comm);
  k.work.memory = (char *)memory;
  k.work.port.comm = onDevice(dev);
  k.work.port.window = window;
  int *word = zeros<int>(1);
  CU(cudaDeviceSynchronize());
  meet(comm, k.stream, word);
  if (o.times)
    takeTimes<GinWire>(k, us);
  else if (rank != o.late)
    launch<GinWire>(k);
  CU(cudaStreamSynchronize(k.stream));
  meet(comm, k.stream, word);
  NC(ncclDevCommDestroy(comm, &dev));
  NC(ncclCommWindowDeregister(comm, window));
  NC(ncclCommDestroy(comm));
  NC(ncclMemFree(memory));
}

#endif
