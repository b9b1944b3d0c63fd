/* One rank of a group under test: opened for a batch, runs the scripts of its cases. */
#ifndef TREFOIL_VALIDATE_CHECK_RANK_H
#define TREFOIL_VALIDATE_CHECK_RANK_H

#include "validate/check_case.h"
#include "validate/library.h"
#include "validate/worker.h"

typedef enum ep_failed_by {
  EP_FAILED_BY_NOTHING, /* what was found */
  EP_FAILED_BY_EP,      /* a result code of the library under test */
  EP_FAILED_BY_ELSE     /* NCCL, CUDA */
} ep_failed_by_t;

typedef struct ep_check_rank {
  const ep_library_t *lib;
  const ep_check_group_t *group;
  int rank;
  int device; /* this rank's GPU */
  int counts; /* the library counts what this rank sends (check_counts.h) */
  uint64_t putsBefore[NCCL_EP_PUT_KINDS]; /* what the library has counted so far */
  uint64_t timeoutNs;
  ncclComm_t *kept; /* NULL, or where the communicator stays from batch to batch */
  ncclComm_t comm;
  ncclEpGroup_t epGroup;
  trefoil_grad_gpu_t gradients; /* in its place, of a batch of A2SGD */
  ncclEpHandle_t handles[EP_MAX_HANDLES];
  ncclEpHandle_t fresh; /* the case's own, or NULL */
  void *memory[EP_MAX_HANDLES];
  void *image; /* device memory, group->imageBytes */
  ncclWindow_t window;
  cudaStream_t stream;
  int64_t allocated;       /* live blocks of the custom allocator */
  const char *doing;       /* what is being called, for messages */
  ep_place_t *place;       /* told while a call lasts; or NULL */
  ep_watch_t *watch;       /* of all ranks, or NULL: they cannot see one another */
  const _Atomic int *stop; /* set once a rank failed */
  ep_failed_by_t failedBy; /* of the call that failed: whose, */
  ncclResult_t result;     /* and the library's code */
  int orderOpen;           /* set by epRankRunFree: this case used what order-free leaves open */
} ep_check_rank_t;

/* All collective over the ranks of the group; *id from rank 0. On failure the rank is lost and so is
 * the group: the others time out. */
trefoil_result_t epRankOpen(ep_check_rank_t *rank, const ncclUniqueId *id);
/* Runs the script of each round: from `initial` (host) to `result` (host), [numRounds] each. */
trefoil_result_t epRankRun(ep_check_rank_t *rank, const ep_check_case_t *c, uint8_t *const *initial,
                           uint8_t *const *result);
/* The same with slot order and rounding open: rows are matched by content, what is expected is brought into
 * the library's order, and what is left must be equal, combined tokens within their bounds, which are
 * then copied. */
typedef struct ep_free_images { /* this rank's, [numRounds] each */
  uint8_t *initial[EP_MAX_ROUNDS], *expected[EP_MAX_ROUNDS], *result[EP_MAX_ROUNDS];
  const uint8_t *bounds[EP_MAX_ROUNDS]; /* sums of magnitudes, see order_free.h */
} ep_free_images_t;
trefoil_result_t epRankRunFree(ep_check_rank_t *rank, const ep_check_case_t *c,
                               const ep_free_images_t *images);
/* What follows a case: the error flag, the case's own handle. */
trefoil_result_t epRankEnd(ep_check_rank_t *rank, const ep_check_case_t *c);
trefoil_result_t epRankClose(ep_check_rank_t *rank);

ncclEpLayout_t epLayoutOf(trefoil_mode_t mode);

/* ---- check_call.c: one operation as a call of the API ---- */
trefoil_result_t epCallOp(ep_check_rank_t *rank, const ep_check_case_t *c, const ep_check_op_t *op);

/* ---- check_grad_call.c: the same of A2SGD ---- */
trefoil_result_t epGradOpen(ep_check_rank_t *rank);
trefoil_result_t epGradCall(ep_check_rank_t *rank, const ep_check_case_t *c,
                            const ep_check_op_t *op);
trefoil_result_t epGradClose(ep_check_rank_t *rank);

/* ---- order_free.c ---- */
/* The image for the bounds: magnitudes in place of values. */
void epMakeMagnitudes(const ep_check_case_t *c, int rank, uint8_t *image);

#define EP_TRY_EP(rank, call)                                                                      \
  EP_TRY_PLACED(rank, ncclResult_t, call, TREFOIL_REMOTE_ERROR,                                    \
                ((rank)->failedBy = EP_FAILED_BY_EP, (rank)->result = epRc_),                      \
                epLibraryError((rank)->lib, epRc_))
#define EP_TRY_GRAD(rank, call) EP_TRY_EP(rank, (ncclResult_t)(call)) /* the codes are alike */
#define EP_TRY_NCCL(rank, call)                                                                    \
  EP_TRY_PLACED(rank, ncclResult_t, call, TREFOIL_REMOTE_ERROR,                                    \
                (rank)->failedBy = EP_FAILED_BY_ELSE,                                              \
                epNcclError((rank)->lib, (rank)->comm, epRc_))
#define EP_TRY_CUDA(rank, call)                                                                    \
  EP_TRY_PLACED(rank, cudaError_t, call, TREFOIL_SYSTEM_ERROR,                                     \
                (rank)->failedBy = EP_FAILED_BY_ELSE, (rank)->lib->cudaGetErrorString(epRc_))

#endif
