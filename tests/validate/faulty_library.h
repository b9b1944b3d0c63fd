/* Inside of the faulty library. */
#ifndef FAULTY_LIBRARY_H
#define FAULTY_LIBRARY_H

#include <cuda_runtime_api.h>
#include <stddef.h>

/* Logs the fault; 0: there was one already, do nothing. */
int faultRecord(int rank, size_t row);
int faultAlways(void);
/* At the first opportunity, not a later one (TREFOIL_FAULT_SOON). */
int faultSoon(void);

/* TREFOIL_FAULT is KIND:CALL, on rank TREFOIL_FAULT_RANK (1), the third time:
 *
 *   error    returns ncclInvalidArgument          crash   writes to address 8
 *   code     returns ncclInternalError            kill    SIGKILL
 *   abort    abort()                              throw   a C++ exception
 *   exit0    exit(0)                              exit1   exit(1)
 *   _exit0   _exit(0)                             hang    never returns
 *   stream   what never ends is put on the stream, the call goes on
 *   print    writes to stdout and stderr, every time on every rank
 *
 * Nonzero: the result code to return at once. */
int faultAt(const char *call, int rank, cudaStream_t stream);
#define FAULT_AT(call, rank, stream)                                                               \
  do {                                                                                             \
    int faultCode = faultAt(#call, (rank), (stream));                                              \
    if (faultCode) return (ncclResult_t)faultCode;                                                 \
  } while (0)

/* faulty_throw.cpp */
void faultThrow(void);

#endif
