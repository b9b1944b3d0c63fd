/* What the network needs of CUDA's driver, which is loaded when memory of a GPU is first registered:
 * copies on streams of their own, pinned memory, 64-bit writes, and memory shared between processes.
 *
 * Each function returns 0, or -1 and why. Used by one thread at a time, any thread, in the context that was
 * current at epNetCudaOpen. */
#ifndef TREFOIL_NET_CUDA_H
#define TREFOIL_NET_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ep_net_cuda ep_net_cuda_t;

int epNetCudaOpen(int numStreams, ep_net_cuda_t **out, char *why);
void epNetCudaClose(ep_net_cuda_t *cuda);
/* Makes the context current in this thread. */
int epNetCudaEnter(ep_net_cuda_t *cuda, char *why);

/* This thread's mode of stream captures, and *mode in its place. A question about an event ends captures of
 * other threads in the global mode unless the thread that asks has the relaxed one. */
#define EP_NET_CAPTURE_RELAXED 2
int epNetCudaExchangeMode(ep_net_cuda_t *cuda, int *mode, char *why);

int epNetCudaCopy(ep_net_cuda_t *cuda, int stream, uint64_t to, uint64_t from, size_t bytes,
                  uint32_t *ticket, char *why);
/* In this thread's context. Copies of a stream finish in their order. */
bool epNetCudaFinished(ep_net_cuda_t *cuda, int stream, uint32_t ticket);
/* After all earlier work of the stream. */
int epNetCudaWrite(ep_net_cuda_t *cuda, int stream, uint64_t at, uint64_t value, char *why);

int epNetCudaPinned(ep_net_cuda_t *cuda, size_t bytes, void **out, char *why);
void epNetCudaUnpin(ep_net_cuda_t *cuda, void *memory);

/* The allocation that holds an address, for another process. descriptor -1: it cannot be shared. */
typedef struct {
  int descriptor;
  uint64_t span, offset; /* of the allocation, and of the address in it */
} ep_net_share_t;
int epNetCudaExport(ep_net_cuda_t *cuda, uint64_t address, ep_net_share_t *out, char *why);
/* Maps it; *base is the address of the allocation here. */
int epNetCudaImport(ep_net_cuda_t *cuda, const ep_net_share_t *share, uint64_t *base, char *why);
void epNetCudaUnmap(ep_net_cuda_t *cuda, uint64_t base, uint64_t span);

#endif
