/* A piece of stream-ordered work. */
#include <stdlib.h>

#include "host_internal.h"

ep_stream_op_t *epOpNew(enum cudaGraphNodeType type,
                        void (*run)(ep_stream_op_t *, cudaStream_t, uint64_t)) {
  ep_stream_op_t *op = calloc(1, sizeof *op);
  if (!op) return NULL;
  op->type = type;
  op->run = run;
  return op;
}

void epOpFree(ep_stream_op_t *op) {
  if (op->release) op->release(op->shared);
  free(op);
}
