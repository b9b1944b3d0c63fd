/* Tensor descriptors, the version, and the last error. */
#include <stdlib.h>
#include <string.h>

#include "api/object.h"

/* NVIDIA's Python binding looks for this text in the file. */
__attribute__((used)) static const char banner[] = "NCCL EP version 0.2.0+cuda13.0";

const char *ncclEpGetLastError(void) {
  return trefoilLastError();
}

ncclResult_t ncclEpGetVersion(int *version) {
  if (!version) {
    return (ncclResult_t)epFail(TREFOIL_INVALID_ARGUMENT, "ncclEpGetVersion: version is NULL");
  }
  *version = NCCL_EP_VERSION_CODE;
  return ncclSuccess;
}

static trefoil_result_t allocTensor(ncclEpTensor_t **tensor, const ncclEpTensor_t *like,
                                    const ncclEpTensorAllocConfig_t *config) {
  EP_CHECK(tensor, TREFOIL_INVALID_ARGUMENT, "ncclEpTensorAlloc: tensor is NULL");
  EP_CHECK(like->ndim >= 1, TREFOIL_INVALID_ARGUMENT, "ncclEpTensorAlloc: ndim is 0; must be >= 1");
  EP_CHECK(like->ndim <= 64, TREFOIL_INVALID_ARGUMENT, "ncclEpTensorAlloc: ndim is %u; at most 64",
           like->ndim);
  EP_CHECK(like->sizes, TREFOIL_INVALID_ARGUMENT, "ncclEpTensorAlloc: sizes is NULL");
  EP_CHECK(trefoilDtypeBytes((trefoil_dtype_t)like->datatype) > 0, TREFOIL_INVALID_ARGUMENT,
           "ncclEpTensorAlloc: datatype is %d, which is none", (int)like->datatype);
  if (config) {
    ncclEpTensorAllocConfig_t copy;
    EP_TRY(epCopyStruct(&copy, config,
                        EP_STRUCT(ncclEpTensorAllocConfig_t, NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE)));
  }
  size_t sizesBytes = like->ndim * sizeof *like->sizes;
  ncclEpTensor_t *t = calloc(1, sizeof *t + sizesBytes);
  EP_CHECK(t, TREFOIL_SYSTEM_ERROR, "ncclEpTensorAlloc: out of memory");
  *t = *like;
  t->sizes = memcpy(t + 1, like->sizes, sizesBytes);
  trefoil_result_t result = epRegister(t, EP_OBJECT_TENSOR);
  if (result == TREFOIL_OK) {
    *tensor = t;
  } else {
    free(t);
  }
  return result;
}

ncclResult_t ncclEpTensorAlloc(ncclEpTensor_t **tensor, unsigned ndim, ncclDataType_t datatype,
                               const size_t *sizes, const ncclEpTensorAllocConfig_t *config) {
  ncclEpTensor_t like = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = ndim, .datatype = datatype,
                         .sizes = (size_t *)(uintptr_t)sizes};
  return (ncclResult_t)allocTensor(tensor, &like, config);
}

ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t *tensor) {
  if (!tensor) return ncclSuccess;
  if (!epUnregister(tensor, EP_OBJECT_TENSOR)) {
    return (ncclResult_t)epFail(TREFOIL_INVALID_ARGUMENT,
                                "ncclEpTensorDestroy: %p was not made by ncclEpTensorAlloc, or was "
                                "destroyed before",
                                (void *)tensor);
  }
  free(tensor);
  return ncclSuccess;
}
