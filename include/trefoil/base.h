/* Trefoil: results, the last error, and element types. C99 and C++.
 *
 * Every function of libtrefoil that can fail returns a trefoil_result_t and, on failure, leaves
 * its out-parameters untouched and records one sentence that trefoilLastError() returns. Nothing
 * prints, aborts or exits. The values equal ncclResult_t's and ncclDataType_t's, so that the
 * NCCL EP front end passes them through. */
#ifndef TREFOIL_BASE_H
#define TREFOIL_BASE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TREFOIL_API __attribute__((visibility("default")))
#else
#define TREFOIL_API
#endif

typedef enum trefoil_result {
  TREFOIL_OK = 0,
  TREFOIL_SYSTEM_ERROR = 2,     /* the operating system refused: memory, files */
  TREFOIL_INTERNAL_ERROR = 3,   /* a bug of ours: please report the sentence */
  TREFOIL_INVALID_ARGUMENT = 4, /* an argument breaks a rule; nothing was done */
  TREFOIL_INVALID_USAGE = 5,    /* legal arguments, wrong time or wrong combination */
  TREFOIL_REMOTE_ERROR = 6      /* another rank is gone or late; the sentence names it */
} trefoil_result_t;

/* Why the last failing call on this thread failed and what to change; "" before the first failure.
 * Valid until the next failing call on this thread. */
TREFOIL_API const char *trefoilLastError(void);

typedef enum trefoil_dtype {
  TREFOIL_INT8 = 0,
  TREFOIL_UINT8 = 1,
  TREFOIL_INT32 = 2,
  TREFOIL_UINT32 = 3,
  TREFOIL_INT64 = 4,
  TREFOIL_UINT64 = 5,
  TREFOIL_F16 = 6,
  TREFOIL_F32 = 7,
  TREFOIL_F64 = 8,
  TREFOIL_BF16 = 9,
  TREFOIL_E4M3 = 10, /* OCP fp8: 448 is the largest finite value, no infinity */
  TREFOIL_E5M2 = 11,
  TREFOIL_FP4X2 = 12 /* two E2M1 values in one byte, the first in the low half */
} trefoil_dtype_t;

/* Bytes of one element (TREFOIL_FP4X2: 1, for two values); 0 for a value outside the enum. */
TREFOIL_API size_t trefoilDtypeBytes(trefoil_dtype_t dtype);
/* "bf16", "e4m3", ...; "unknown" for a value outside the enum. */
TREFOIL_API const char *trefoilDtypeName(trefoil_dtype_t dtype);

#ifdef __cplusplus
}
#endif
#endif
