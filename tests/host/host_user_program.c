/* A program as its author wrote it for GPUs: CUDA runtime and NCCL, nothing else. argv[1] gives the rank
 * count of a single process with one thread a rank; with MPI_RANKS defined it is one process a rank. The
 * same file is compiled against our headers, against the real ones, and, dynamically linked, started
 * with LD_PRELOAD. Prints "ok" and exits 0 if every rank saw what it should. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include <cuda_runtime.h>
#include <nccl.h>
#ifdef MPI_RANKS
#include <mpi.h>
#endif

#define CUDA(call)                                                                                 \
  do {                                                                                             \
    cudaError_t e = (call);                                                                        \
    if (e != cudaSuccess) {                                                                        \
      fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(e));                                   \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)
#define NCCL(call)                                                                                 \
  do {                                                                                             \
    ncclResult_t r = (call);                                                                       \
    if (r != ncclSuccess) {                                                                        \
      fprintf(stderr, "%s: %s (%s)\n", #call, ncclGetErrorString(r), ncclGetLastError(NULL));      \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

enum { COUNT = 1 << 16 };

typedef struct {
  int rank, numRanks, wrong;
  ncclUniqueId id;
} rank_t;

static void *run(void *arg) {
  rank_t *me = (rank_t *)arg;
  ncclComm_t comm;
  cudaStream_t stream;
  cudaEvent_t start, end;
  float *device, *host = (float *)malloc(COUNT * sizeof(float)), ms = -1;
  int next = (me->rank + 1) % me->numRanks, before = (me->rank + me->numRanks - 1) % me->numRanks;
  CUDA(cudaSetDevice(me->rank % 8));
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaEventCreate(&start));
  CUDA(cudaEventCreate(&end));
  NCCL(ncclCommInitRank(&comm, me->numRanks, me->id, me->rank));
  CUDA(cudaMalloc((void **)&device, 2 * COUNT * sizeof(float)));
  for (int i = 0; i < COUNT; i++) host[i] = (float)(me->rank + i % 10);
  CUDA(cudaMemcpyAsync(device, host, COUNT * sizeof(float), cudaMemcpyHostToDevice, stream));
  CUDA(cudaEventRecord(start, stream));
  NCCL(ncclAllReduce(device, device, COUNT, ncclFloat, ncclSum, comm, stream));
  NCCL(ncclGroupStart());
  NCCL(ncclSend(device, COUNT, ncclFloat, next, comm, stream));
  NCCL(ncclRecv(device + COUNT, COUNT, ncclFloat, before, comm, stream));
  NCCL(ncclGroupEnd());
  CUDA(cudaEventRecord(end, stream));
  CUDA(
      cudaMemcpyAsync(host, device + COUNT, COUNT * sizeof(float), cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  CUDA(cudaEventElapsedTime(&ms, start, end));
  me->wrong = ms < 0;
  for (int i = 0; i < COUNT; i++)
    me->wrong +=
        host[i] != (float)(me->numRanks * (i % 10) + me->numRanks * (me->numRanks - 1) / 2);
  NCCL(ncclCommDestroy(comm));
  CUDA(cudaFree(device));
  CUDA(cudaEventDestroy(start));
  CUDA(cudaEventDestroy(end));
  CUDA(cudaStreamDestroy(stream));
  free(host);
  return NULL;
}

#ifdef MPI_RANKS
int main(int argc, char **argv) {
  rank_t me = {0, 0, 0, {{0}}};
  int wrong;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &me.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &me.numRanks);
  if (me.rank == 0) NCCL(ncclGetUniqueId(&me.id));
  MPI_Bcast(&me.id, sizeof me.id, MPI_BYTE, 0, MPI_COMM_WORLD);
  run(&me);
  MPI_Allreduce(&me.wrong, &wrong, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (me.rank == 0) printf("%s: %d ranks\n", wrong ? "wrong" : "ok", me.numRanks);
  MPI_Finalize();
  return wrong != 0;
}
#else
int main(int argc, char **argv) {
  rank_t ranks[16];
  pthread_t threads[16];
  int numRanks = argc > 1 ? atoi(argv[1]) : 4, wrong = 0;
  ncclUniqueId id;
  NCCL(ncclGetUniqueId(&id));
  for (int r = 0; r < numRanks; r++) {
    ranks[r].rank = r;
    ranks[r].numRanks = numRanks;
    ranks[r].id = id;
    pthread_create(&threads[r], NULL, run, &ranks[r]);
  }
  for (int r = 0; r < numRanks; r++) {
    pthread_join(threads[r], NULL);
    wrong += ranks[r].wrong;
  }
  printf("%s: %d ranks\n", wrong ? "wrong" : "ok", numRanks);
  return wrong != 0;
}
#endif
