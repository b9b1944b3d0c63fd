/* What the headers declare and the host runtime does not do: each fails and says so by name. */
#include "comm_internal.h"

#define NOT_IMPLEMENTED(func)                                                                      \
  return epCudaFail(cudaErrorNotSupported, "%s is not implemented by the host runtime", #func)

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *numBlocks, const void *func,
                                                          int blockSize, size_t dynamicSMemSize) {
  (void)numBlocks, (void)func, (void)blockSize, (void)dynamicSMemSize;
  NOT_IMPLEMENTED(cudaOccupancyMaxActiveBlocksPerMultiprocessor);
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *devPtr) {
  (void)handle, (void)devPtr;
  NOT_IMPLEMENTED(cudaIpcGetMemHandle);
}
cudaError_t cudaIpcOpenMemHandle(void **devPtr, cudaIpcMemHandle_t handle, unsigned int flags) {
  (void)devPtr, (void)handle, (void)flags;
  NOT_IMPLEMENTED(cudaIpcOpenMemHandle);
}
cudaError_t cudaIpcCloseMemHandle(void *devPtr) {
  (void)devPtr;
  NOT_IMPLEMENTED(cudaIpcCloseMemHandle);
}

#define NCCL_NOT_IMPLEMENTED(func)                                                                 \
  return epNcclFail(ncclInvalidUsage, "%s is not implemented by the host runtime", #func)

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  (void)op, (void)scalar, (void)datatype, (void)residence, (void)comm;
  NCCL_NOT_IMPLEMENTED(ncclRedOpCreatePreMulSum);
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  (void)op, (void)comm;
  NCCL_NOT_IMPLEMENTED(ncclRedOpDestroy);
}
ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount,
                            ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags) {
  (void)comm, (void)excludeRanksList, (void)excludeRanksCount, (void)newcomm, (void)config;
  (void)shrinkFlags;
  NCCL_NOT_IMPLEMENTED(ncclCommShrink);
}
