/* The parts that both versions share. */
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime.h>
#include <nccl.h>

typedef struct {
  unsigned size, magic, ndim;
  int datatype;
  void *data, *win;
  uint64_t offset;
  size_t *sizes;
} tensor_t;
typedef struct {
  unsigned size, magic;
  tensor_t *tokens, *topk_weights, *scales;
} dispatch_inputs_t;
typedef struct {
  unsigned size, magic;
  tensor_t *tokens, *topk_weights, *scales, *topk_idx;
} dispatch_outputs_t;
typedef struct {
  unsigned size, magic;
  tensor_t *tokens, *topk_weights;
} combine_outputs_t;

int ncclEpCreateGroup(void **group, ncclComm_t comm, const void *config);
int ncclEpGroupDestroy(void *group);
int ncclEpCreateHandle(void **handle, void *group, int layout, const tensor_t *idx,
                       const void *info, const void *config, cudaStream_t stream);
int ncclEpHandleDestroy(void *handle);
int ncclEpDispatch(void *handle, const void *in, const void *out, const void *info,
                   const void *config, cudaStream_t stream);
int ncclEpCombine(void *handle, const void *in, const void *out, const void *config,
                  cudaStream_t stream);
int ncclEpComplete(void *handle, const void *config, cudaStream_t stream);
