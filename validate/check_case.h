/* What a random case is: a group, handles, and a script of operations on one image.
 *
 *   seed, case I  ->  batch b = I / 64  ->  ep_check_group_t: shape, limits, handles, environment
 *                 ->  ep_check_case_t: routings, payloads, the script, the image
 *
 * The image is one piece of device memory per rank that holds every tensor of the case, separated by
 * guards. Its bytes start as noise with the inputs written in; the reference writes the outputs
 * into a copy, operation by operation; the library under test does its work on the original; then
 * the two must be equal in every byte. So a row in the wrong slot, a touched guard, a changed input
 * and a stale counter are all the same kind of difference, and nothing can be forgotten.
 *
 * Offsets are the same on all ranks (windows need that); extents are each rank's own. A case has one
 * round, or, captured into a graph, two: the same addresses and sizes with other contents, so that
 * a replay must not remember. Everything is plain data, made by the generator alone. */
#ifndef TREFOIL_VALIDATE_CHECK_CASE_H
#define TREFOIL_VALIDATE_CHECK_CASE_H

#include <nccl_ep.h>

#include "trefoil/ref.h"
#include "validate/grad_draw.h"
#include "validate/order_free.h"
#include "validate/profile.h"
#include "validate/rng.h"

enum {
  EP_BATCH_CASES = 64,
  EP_MAX_RANKS = 16,
  EP_MAX_HANDLES = 3,
  EP_MAX_OPS = 24,
  EP_MAX_REGIONS = 128,
  EP_MAX_ROUTINGS = 2,
  EP_MAX_ROUNDS = 2
};

/* Beside the bits of trefoil_mode_t: steps of A2SGD (trefoil/a2sgd.h), which are drawn only if asked for. */
#define EP_MODE_A2SGD (1u << TREFOIL_NUM_MODES)

#define EP_CHECK_MOST_RANKS 8 /* where none are asked for */

/* What the user asks the generator for. Zero means: everything. */
typedef struct ep_check_choice {
  uint64_t seed;
  unsigned modes; /* bit per trefoil_mode_t, EP_MODE_A2SGD */
  int minRanks, maxRanks;
  unsigned orderFree; /* EP_OPEN_...: only what can be compared so; 0: strict */
  int gpuSubset; /* only what runs on GPUs: one NVLink domain unless ranksPerNode says more, tokens and
                    scales in whole and aligned 16 bytes, no FP4; larger top-k and more experts instead */
  int ranksPerNode; /* 0: drawn; else nodes of the greatest common divisor with the ranks */
  const ep_profile_t *profile;  /* NULL, or what the library takes: only that is drawn */
  const ep_check_cell_t *cells; /* NULL, or [numCells]: batch b is one of cell b % numCells */
  int numCells;
} ep_check_choice_t;

typedef struct ep_check_handle {
  trefoil_mode_t mode;
  int topk;
  int initTopk; /* what InitHandle gets: topk or -1 */
  size_t alignment;
  int ownMemory; /* handle_mem given by the caller */
  int shareWith; /* an earlier handle whose handle_mem it shares, or -1 */
} ep_check_handle_t;

typedef struct ep_check_group {
  uint64_t seed, batch;
  trefoil_shape_t shape; /* topk: the largest of the handles */
  int highThroughput;
  unsigned orderFree;
  int gpuSubset;
  int limited;              /* drawn within a profile: scripts have only... */
  uint64_t allowed, forced; /* ...these features, and all of those */
  int64_t hidden;           /* limited: elements of a full row; 0: any width */
  int warmUp;               /* limited: first calls take long, so none is captured */
  int64_t shortHidden;      /* limited: the one of a short row; 0: any smaller width */
  int64_t maxRecv;          /* 0 = eager */
  int drop;
  size_t maxTokenBytes;
  int numTopk; /* the group's bound, or 0 */
  int enableMask, customAlloc, partial, useWindow;
  ncclEpZeroCopyMode_t zeroCopy;
  unsigned maxSms;   /* max_num_sms; 0 = AUTO */
  size_t imageBytes; /* capacity of a rank's image */
  int numHandles;
  ep_check_handle_t handles[EP_MAX_HANDLES];
  int isGrad; /* an object of A2SGD in the place of a group: of shape the ranks count, and no handles */
  ep_grad_model_t model;
  int64_t syncPeriod;
} ep_check_group_t;

typedef enum ep_op_kind {
  EP_OP_UPDATE,
  EP_OP_DISPATCH,
  EP_OP_COMBINE,
  EP_OP_COMPLETE,
  EP_OP_MASK_UPDATE,
  EP_OP_MASK_QUERY,
  EP_OP_MASK_CLEAN,
  EP_OP_SYNC, /* wait for the stream */
  EP_OP_GRAD_STEP,
  EP_OP_GRAD_SYNC
} ep_op_kind_t;

typedef enum ep_tensor_id {
  EP_T_IDX, /* Update: topk_idx */
  EP_T_IN_TOKENS,
  EP_T_IN_WEIGHTS,
  EP_T_IN_SCALES,
  EP_T_OUT_TOKENS,
  EP_T_OUT_WEIGHTS,
  EP_T_OUT_SCALES,
  EP_T_OUT_IDX,
  EP_T_EXPERT_COUNTERS,
  EP_T_EXPERT_OFFSETS,
  EP_T_TOTAL,
  EP_T_SOURCE_COUNTERS,
  EP_T_MASK,
  EP_T_GRAD,
  EP_T_UPDATE, /* in place: its content is the gradient; of a synchronisation: the parameters */
  EP_NUM_TENSORS
} ep_tensor_id_t;

typedef enum ep_payload {
  EP_PAYLOAD_CODED,   /* small integers that tell (rank, token, element) */
  EP_PAYLOAD_FINITE,  /* ordinary values of mixed size and sign */
  EP_PAYLOAD_SPECIAL, /* zeros of both signs, subnormals, infinities, NaNs, extremes */
  EP_PAYLOAD_BITS,    /* any bits */
  EP_NUM_PAYLOADS
} ep_payload_t;

typedef struct ep_check_op {
  ep_op_kind_t kind;
  int handle;
  int routing;
  int backward, sendOnly, roundScales, globalIds, wantCounters, wideCounters;
  trefoil_quant_t quant;
  trefoil_dtype_t dtype;
  int64_t width;
  trefoil_dtype_t scaleDtype;
  int64_t scaleWidth;
  ep_payload_t payload;
  uint64_t payloadKey;
  int from; /* combine: the dispatch whose output it reads in place; of A2SGD: a step before it; or -1 */
  int inPlace;                /* a step of A2SGD; a synchronisation always is */
  ep_grad_values_t values;    /* likewise: its gradient's, or a synchronisation's parameters' */
  int64_t step;               /* of a synchronisation */
  int extraRows;              /* HT: rows of the output tensors beyond what is needed */
  int region[EP_NUM_TENSORS]; /* index, or -1: the tensor is not part of the call */
} ep_check_op_t;

/* A tensor's place in the image. */
typedef struct ep_check_region {
  size_t offset, bytes; /* bytes: of the rank with most */
  int op;               /* the operation that owns it */
  ep_tensor_id_t tensor;
} ep_check_region_t;

typedef struct ep_check_routing {
  int64_t numTokens[EP_MAX_RANKS];
  int topk;
  int wideIds;                 /* the caller's ids are int64 */
  int32_t *ids[EP_MAX_ROUNDS]; /* all ranks one after another */
  const int32_t *rows[EP_MAX_ROUNDS][EP_MAX_RANKS];
} ep_check_routing_t;

typedef struct ep_check_case {
  const ep_check_group_t *group;
  uint64_t index;
  int numRounds; /* 2: captured and replayed */
  int captured;
  int freshHandle; /* handle 0 is created for this case alone */
  int numRoutings;
  ep_check_routing_t routings[EP_MAX_ROUTINGS];
  int maskClasses[EP_MAX_RANKS]; /* ranks of one class see one another; masks only */
  int numMasks;                  /* the script has mask calls */
  uint8_t active[EP_MAX_RANKS * EP_MAX_RANKS];
  uint32_t trapped; /* bit per rank: over max_recv with TRAP */
  int64_t slots[EP_MAX_ROUTINGS][EP_MAX_HANDLES][EP_MAX_RANKS]; /* HT: the larger of the rounds */
  uint32_t delays;                                              /* bit per rank: comes late */
  int numOps, numRegions;
  ep_check_op_t ops[EP_MAX_OPS];
  ep_check_region_t regions[EP_MAX_REGIONS];
  size_t usedBytes; /* of the image */
} ep_check_case_t;

/* Shape and element type of a tensor on a rank. */
typedef struct ep_check_dims {
  unsigned ndim;
  size_t sizes[3];
  trefoil_dtype_t dtype;
  size_t rowBytes; /* of the last dimension */
  size_t bytes;
} ep_check_dims_t;

/* ---- check_group.c: the batch ---- */
void epMakeGroup(ep_check_group_t *group, const ep_check_choice_t *choice, uint64_t batch);

/* ---- check_limits.c: the batch within a profile; changes what was drawn freely ---- */
void epLimitGroup(ep_check_group_t *group, const ep_check_choice_t *choice, ep_rng_t *rng);
/* Whether a script uses a feature here: never if it is not allowed, always if it is forced. */
int epUses(const ep_check_group_t *group, ep_rng_t *rng, ep_feature_t feature, int oneIn);

/* ---- check_generate.c, check_steps.c, check_routing.c: the case ---- */
trefoil_result_t epMakeCase(ep_check_case_t *c, const ep_check_group_t *group, uint64_t index);
void epFreeCase(ep_check_case_t *c);
/* The script of an order-free or limited group: one whole operation after another. */
void epMakeSteps(ep_check_case_t *c, ep_rng_t *rng);
/* Appends an operation without tensors; routing -1: none. */
ep_check_op_t *epAddOp(ep_check_case_t *c, ep_op_kind_t kind, int handle, int routing,
                       ep_rng_t *rng);
/* Ranks in one class see one another: every mask of this kind leaves each class able to go on. */
void epMakeMasks(ep_check_case_t *c, ep_rng_t *rng);
/* ---- check_grad.c: batches and cases of A2SGD ---- */
void epMakeGradGroup(ep_check_group_t *group, ep_rng_t *rng);
trefoil_result_t epMakeGradCase(ep_check_case_t *c, ep_rng_t *rng);
/* The updates, or the parameters, of all ranks, where a mask is in force or not. */
trefoil_result_t epExpectGrad(const ep_check_case_t *c, const ep_check_op_t *op, int isMasked,
                              uint8_t *const *images);

/* Which ranks a TRAP stops, and how many slots arrive (HT); after the script is made. */
trefoil_result_t epCountSlots(ep_check_case_t *c);
trefoil_result_t epMakeRouting(ep_check_case_t *c, int routing, ep_rng_t *rng);

/* ---- check_layout.c: tensors and their places ---- */
void epTensorDims(const ep_check_case_t *c, const ep_check_op_t *op, ep_tensor_id_t tensor,
                  int rank, ep_check_dims_t *dims);
/* Places all tensors of the script; returns 0 if the image is too small. */
int epPlaceTensors(ep_check_case_t *c, ep_rng_t *rng);
/* The operation as the reference takes it. */
void epReferenceCase(const ep_check_case_t *c, const ep_check_op_t *op, int round,
                     trefoil_case_t *out);
const char *epTensorName(ep_tensor_id_t tensor);

/* ---- check_image.c: contents ---- */
/* Fills the image of a rank: noise, then the inputs. */
void epFillImage(const ep_check_case_t *c, int round, int rank, uint8_t *image);
/* count elements of a payload (key: what it stands for). */
void epFillPayload(ep_payload_t payload, trefoil_dtype_t dtype, uint64_t key, int64_t count,
                   void *out);

/* ---- check_expect.c: the reference ---- */
/* images [R]: after epFillImage; the script's outputs are written into them. */
trefoil_result_t epExpect(const ep_check_case_t *c, int round, uint8_t *const *images);

#endif
