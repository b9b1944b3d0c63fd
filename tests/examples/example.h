/* What the examples share: stop on an error, run ranks as threads, copy to and from the device.
 * Only nccl_ep.h, nccl.h and cuda_runtime.h are used, so the examples build against NVIDIA's too. */
#ifndef TREFOIL_EXAMPLE_H
#define TREFOIL_EXAMPLE_H

#include <nccl_ep.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define STOP(...)                                                                                  \
  do {                                                                                             \
    fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                \
    fprintf(stderr, __VA_ARGS__);                                                                  \
    fputc('\n', stderr);                                                                           \
    exit(1);                                                                                       \
  } while (0)
#define CUDA(call)                                                                                 \
  do {                                                                                             \
    cudaError_t cudaResult = (call);                                                               \
    if (cudaResult != cudaSuccess) STOP("%s: %s", #call, cudaGetErrorString(cudaResult));          \
  } while (0)
#define NCCL(call)                                                                                 \
  do {                                                                                             \
    ncclResult_t ncclResult = (call);                                                              \
    if (ncclResult != ncclSuccess) STOP("%s: %s", #call, ncclGetErrorString(ncclResult));          \
  } while (0)
#define EP(call)                                                                                   \
  do {                                                                                             \
    if ((call) != ncclSuccess) STOP("%s: %s", #call, ncclEpGetLastError());                        \
  } while (0)

/* A tensor of this block: TENSOR(pointer, ncclFloat32, 2, rows, columns). */
#define TENSOR(pointer, type, dims, ...)                                                           \
  {                                                                                                \
    NCCL_EP_TENSOR_INIT_INLINE, .ndim = (dims), .datatype = (type), .data = (pointer),             \
                                .sizes = (size_t[]) {                                              \
      __VA_ARGS__                                                                                  \
    }                                                                                              \
  }

/* Device memory, filled from the host (or with zeros if from is NULL). cudaMemset returns before it
 * is done, and a non-blocking stream does not wait for it: hence the synchronisation. */
static inline void *onDevice(const void *from, size_t bytes) {
  void *memory = NULL;
  CUDA(cudaMalloc(&memory, bytes ? bytes : 1));
  if (from)
    CUDA(cudaMemcpy(memory, from, bytes, cudaMemcpyHostToDevice));
  else
    CUDA(cudaMemset(memory, 0, bytes));
  CUDA(cudaDeviceSynchronize());
  return memory;
}

static inline void toHost(void *to, const void *device, size_t bytes) {
  CUDA(cudaMemcpy(to, device, bytes, cudaMemcpyDeviceToHost));
}

typedef struct {
  int rank, numRanks;
  ncclUniqueId id;
  void (*run)(int rank, int numRanks, ncclComm_t comm);
  pthread_t thread;
} example_rank_t;

static void *exampleThread(void *argument) {
  example_rank_t *r = argument;
  ncclComm_t comm;
  CUDA(cudaSetDevice(r->rank));
  NCCL(ncclCommInitRank(&comm, r->numRanks, r->id, r->rank));
  r->run(r->rank, r->numRanks, comm);
  NCCL(ncclCommDestroy(comm));
  return NULL;
}

/* Runs `run` once a rank, each in a thread with its own device and communicator. */
static inline void runRanks(int numRanks, void (*run)(int, int, ncclComm_t)) {
  example_rank_t *ranks = calloc((size_t)numRanks, sizeof *ranks);
  ncclUniqueId id;
  NCCL(ncclGetUniqueId(&id));
  for (int r = 0; r < numRanks; r++) {
    ranks[r] = (example_rank_t){.rank = r, .numRanks = numRanks, .id = id, .run = run};
    if (pthread_create(&ranks[r].thread, NULL, exampleThread, &ranks[r])) STOP("no thread");
  }
  for (int r = 0; r < numRanks; r++) pthread_join(ranks[r].thread, NULL);
  free(ranks);
}

#endif
