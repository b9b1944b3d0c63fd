/* Puts between NVLink domains: as a library counts them (trefoil/device.h), and the least that rows need. */
#ifndef TREFOIL_VALIDATE_PUTS_H
#define TREFOIL_VALIDATE_PUTS_H

#include "trefoil/shape.h"
#include "validate/library.h"

/* By NCCL_EP_PUT_... */
typedef struct ep_puts {
  uint64_t counted[NCCL_EP_PUT_KINDS], least[NCCL_EP_PUT_KINDS];
} ep_puts_t;

const char *epPutName(int kind);
ep_puts_t epPutsLoad(const _Atomic uint64_t *counted, const _Atomic uint64_t *least);
void epPutsAdd(ep_puts_t *to, const ep_puts_t *puts);
uint64_t epPutsCounted(const ep_puts_t *puts);
/* A rank's own: of no kind fewer than the least; a sentence. */
trefoil_result_t epPutsCheck(const ep_puts_t *puts);
/* The user has chosen that low latency on GPUs dispatches by rails. */
int epIsByRails(void);

/* Adds to of[r].least what the ranks r need at least for an operation that moves bytes [src * R + dst]:
 * a put to each rank in another domain that gets some; NCCL_EP_PUT_WEIGHTS: that returns some.
 * isByDomain: one to each domain. */
void epPutsNeed(const trefoil_shape_t *shape, const uint64_t *bytes, int kind, int isByDomain,
                ep_puts_t *of);

/* counted[NCCL_EP_PUT_KINDS]: a rank's puts to all ranks since the group was made. ncclInvalidUsage: the
 * library counts none. */
ncclResult_t epPutsRead(const ep_library_t *lib, ncclEpGroup_t group, int numRanks,
                        cudaStream_t stream, uint64_t *counted);

#endif
