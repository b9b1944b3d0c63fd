/* Element types: bytes and names. */
#include "trefoil/base.h"

static const struct {
  const char *name;
  size_t bytes;
} dtypes[] = {
    [TREFOIL_INT8] = {"int8", 1},   [TREFOIL_UINT8] = {"uint8", 1},
    [TREFOIL_INT32] = {"int32", 4}, [TREFOIL_UINT32] = {"uint32", 4},
    [TREFOIL_INT64] = {"int64", 8}, [TREFOIL_UINT64] = {"uint64", 8},
    [TREFOIL_F16] = {"f16", 2},     [TREFOIL_F32] = {"f32", 4},
    [TREFOIL_F64] = {"f64", 8},     [TREFOIL_BF16] = {"bf16", 2},
    [TREFOIL_E4M3] = {"e4m3", 1},   [TREFOIL_E5M2] = {"e5m2", 1},
    [TREFOIL_FP4X2] = {"fp4x2", 1},
};

static int known(trefoil_dtype_t dtype) {
  return (unsigned)dtype < sizeof dtypes / sizeof dtypes[0];
}

size_t trefoilDtypeBytes(trefoil_dtype_t dtype) {
  return known(dtype) ? dtypes[dtype].bytes : 0;
}

const char *trefoilDtypeName(trefoil_dtype_t dtype) {
  return known(dtype) ? dtypes[dtype].name : "unknown";
}
