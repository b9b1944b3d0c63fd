/* NumPy's .npy: the header, and integers and floats out of its data. */
#ifndef TREFOIL_PLAN_NPY_H
#define TREFOIL_PLAN_NPY_H

#include "trefoil/base.h"

enum { EP_NPY_MAX_DIMS = 4 };

/* Where bytes come from: *got of at most room, 0 at the end. */
typedef struct ep_stream {
  trefoil_result_t (*read)(void *from, uint8_t *to, size_t room, size_t *got);
  void *from;
} ep_stream_t;

typedef struct ep_npy {
  char kind;                     /* 'i', 'u' or 'f' */
  int itemBytes;                 /* 1, 2, 4 or 8 */
  int numDims;                   /* 1 to EP_NPY_MAX_DIMS */
  int64_t dims[EP_NPY_MAX_DIMS]; /* C order */
  int64_t numItems;
  const uint8_t *data; /* all of it in memory, [numItems * itemBytes]; NULL: it comes by `stream` */
  ep_stream_t stream;
} ep_npy_t;

/* Parses a whole file (versions 1.0, 2.0 and 3.0) in memory; sentences start with `name`. Refuses
 * other dtypes and byte orders, Fortran order, and data of another length than the shape says. */
trefoil_result_t epNpyParse(const char *name, const uint8_t *bytes, size_t numBytes, ep_npy_t *npy);
/* Takes the header alone from a stream that says it has size bytes; nothing of the data is read. */
trefoil_result_t epNpyOpen(const char *name, ep_stream_t stream, uint64_t size, ep_npy_t *npy);

/* The data, read chunk by chunk; a streamed array once. A stream that ends early, or goes on, is
 * refused.
 * out[i] = (int64_t)item i; 'u' values past INT64_MAX are refused, 'f' kinds too. */
trefoil_result_t epNpyInts(const char *name, const ep_npy_t *npy, int64_t *out);
/* The same into int32, refusing what does not fit. */
trefoil_result_t epNpyInts32(const char *name, const ep_npy_t *npy, int32_t *out);
/* f4 or f8 into float; NaN, infinity and what float cannot hold are refused. */
trefoil_result_t epNpyFloats(const char *name, const ep_npy_t *npy, float *out);

enum { EP_NPY_HEADER_BYTES = 128 };
/* Writes a version 1.0 header of exactly EP_NPY_HEADER_BYTES for a C-order [rows, cols] array of
 * dtype ("<i4"). */
void epNpyHeader(char *header, const char *dtype, int64_t rows, int64_t cols);

#endif
