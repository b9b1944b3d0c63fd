/* What the host runtime adds to CUDA's and NCCL's names: the sentence behind an error, and what a
 * library that plays the device side on the CPU needs. C99 and C++. */
#ifndef TREFOIL_HOST_H
#define TREFOIL_HOST_H

#include <stddef.h>
#include <stdint.h>

#include <nccl.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* Why the last failing cuda or nccl call on this thread failed; "" before the first failure. Valid
 * until the next failing call on this thread. */
const char *trefoilHostLastError(void);

/* 1 if the rank is there: its process lives and it has neither destroyed nor aborted its communicator;
 * 0 if it is gone (trefoilHostLastError then says how); -1 for a bad argument. Cheap enough to call
 * every millisecond, not in a spinning loop. */
int trefoilHostPeerAlive(ncclComm_t comm, int rank);

/* 1 if the rank is a thread of this process, so that its ordinary pointers can be read here; else 0;
 * -1 for a bad argument. */
int trefoilHostSameProcess(ncclComm_t comm, int rank);

/* Like ncclGetPeerDevicePointer, but also for ranks on other pretended nodes. */
ncclResult_t trefoilHostPeerPointer(ncclWindow_t window, size_t offset, int rank, void **outPtr);

/* This rank's memory behind a window of comm, and the flags it was registered with. The handle is looked
 * up, not followed: anything else (a stale handle, another communicator's, any number) is
 * ncclInvalidArgument. Out-parameters may be NULL. */
ncclResult_t trefoilHostWindowRange(ncclComm_t comm, ncclWindow_t window, void **base,
                                    size_t *bytes, int *flags);

/* The live allocation that an address lies in. Costs a few nanoseconds for an address that this thread has
 * asked for since memory was last allocated or freed. */
typedef enum {
  trefoilHostMemoryNone = 0,    /* the program's own memory, or no memory */
  trefoilHostMemoryFreed = 1,   /* between allocations: freed, or past the end of one */
  trefoilHostMemoryDevice = 2,  /* */
  trefoilHostMemoryManaged = 3, /* */
  trefoilHostMemoryPinned = 4,  /* pinned or registered host memory */
  trefoilHostMemoryPeer = 5     /* another process's, mapped here for a window */
} trefoil_host_memory_kind_t;
typedef struct {
  trefoil_host_memory_kind_t kind;
  int device;   /* -1 unless an allocation was found, as below */
  void *base;   /* NULL */
  size_t bytes; /* 0 */
} trefoil_host_memory_t;
void trefoilHostMemory(const void *ptr, trefoil_host_memory_t *out);

/* All ranks meet: each shows `bytes` (at most 256) at `mine` and finds all ranks' in `all`, by rank.
 * ncclRemoteError if a rank is gone or does not come within timeoutNs; then the barrier round has failed for
 * all that had come, nothing of it is left, and the next one begins anew: a round is complete on all ranks or
 * on none. */
ncclResult_t trefoilHostBarrierRound(ncclComm_t comm, const void *mine, size_t bytes, void *all,
                                     uint64_t timeoutNs);
/* Around a collective call that may meet: it begins; it has failed here, perhaps before it met anybody. Ranks
 * that meet in a call of the same number (since the last completed round) wait for this rank no more than a
 * second, and then fail with its code and its sentence. */
void trefoilHostCallBegin(ncclComm_t comm);
void trefoilHostCallFail(ncclComm_t comm, ncclResult_t code, const char *why);

/* Waits until *word differs from `seen`: spins for some microseconds, then sleeps. The word lies in
 * window memory (or anywhere, between threads of one process). Returns ncclSuccess; ncclTimeout after
 * timeoutNs; ncclRemoteError as soon as rank `peer` is gone (peer -1: none is watched). What changes
 * the word calls trefoilHostWake(word) afterwards: a release store of it, then the wake. */
ncclResult_t trefoilHostWaitChange(ncclComm_t comm, int peer, const uint32_t *word, uint32_t seen,
                                   uint64_t timeoutNs);
void trefoilHostWake(const uint32_t *word);

/* GIN of a device communicator (ncclDevCommCreate), for what runs kernels: a put between windows, which
 * returns at once, and a context's signals and counters. The network in net/ decides when data move and
 * signals are raised (TREFOIL_NET_*, docs/net.md). What is wrong fails the communicator
 * (ncclCommGetAsyncError), and nothing moves any more. Offsets are in windows of the same communicator, on
 * this rank and on the peer. */
typedef struct {
  int context, peer;
  ncclWindow_t to, from;
  uint64_t toOffset, fromOffset, bytes;
  int signal; /* -1: none */
  int strong; /* seen only after all earlier puts of the context to the peer, else after its own */
  uint64_t add;
  int counter; /* of this rank, plus 1 when the source may be reused; -1: none */
} trefoil_host_put_t;
void trefoilHostGinPut(void *gin, const trefoil_host_put_t *put);
uint64_t trefoilHostGinSignal(void *gin, int context, int signal);
uint64_t trefoilHostGinCounter(void *gin, int context, int counter);

/* The timeout of every wait for other ranks: NCCL_EP_TIMEOUT_MS if > 0, else 100 s. Nanoseconds. */
uint64_t trefoilHostTimeoutNs(void);

/* Who runs kernels. Without a launcher every launch fails with cudaErrorNotSupported; this library brings
 * none. prepare copies what the launch needs, the values behind args included, and returns NULL for a kernel
 * it does not know; run is called on the stream's thread in the stream's order, several times for a launch
 * that was captured; release once at the end. The launcher must live as long as the process. */
typedef struct {
  dim3 gridDim, blockDim;
  void **args;
  size_t sharedBytes;
} trefoil_host_launch_t;
typedef struct {
  void *(*prepare)(const void *func, const trefoil_host_launch_t *launch);
  void (*run)(void *launch);
  void (*release)(void *launch);
} trefoil_host_launcher_t;
void trefoilHostSetLauncher(const trefoil_host_launcher_t *launcher);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
