/* Memory of one GPU for an operation's group and handle, and for the outputs of a dispatch. */
#ifndef TREFOIL_CLI_MEMORY_NEED_H
#define TREFOIL_CLI_MEMORY_NEED_H

#include "plan/sizing.h"
#include "trefoil/models.h"

typedef struct memory_need {
  int known;     /* 0: the shape is refused; why says it */
  char why[160]; /* also why it is not the GPU library's, or "" */
  /* "gpu": kernels' own layout; "gpu-formula": the same for more ranks than they take; "cpu": the CPU
   * library's table */
  const char *library;
  size_t totals[2][3];  /* [of handle][ep_memory_t] */
  uint64_t outputBytes; /* rows that a dispatch may write: LL's capacity, HT's rows received */
} memory_need_t;

/* The GPU library's where it takes the shape; in low latency by its formula where only ranks are too many;
 * else the CPU library's, which takes every shape. maxReceived: rows that the busiest rank receives. */
void memoryNeed(const trefoil_predict_spec_t *spec, const trefoil_shape_t *shape,
                int64_t maxReceived, memory_need_t *need);

#endif
