/* nccl_ep.h as strict C99. */
#include "abi_asserts.h"

int abiC99(void);
int abiC99(void) {
  size_t sizes[2] = {3, 4};
  ncclEpTensor_t t = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .sizes = sizes};
  return initialisersAreRight() && t.size == 48 && t.ndim == 2 && t.sizes == sizes;
}
