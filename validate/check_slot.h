/* A case at work: its images on every rank, the reference's answers, and one rank's run of it. */
#ifndef TREFOIL_VALIDATE_CHECK_SLOT_H
#define TREFOIL_VALIDATE_CHECK_SLOT_H

#include "validate/check_counts.h"
#include "validate/check_rank.h"
#include "validate/checker.h"

typedef struct ep_buffer {
  uint8_t *data;
  size_t bytes;
} ep_buffer_t;
void epBuffersFree(ep_buffer_t *buffers, size_t count);

/* One rank's images of one slot. */
enum {
  EP_INITIAL,
  EP_EXPECTED = EP_INITIAL + EP_MAX_ROUNDS,
  EP_BOUNDS = EP_EXPECTED + EP_MAX_ROUNDS,
  EP_NUM_IMAGES = EP_BOUNDS + EP_MAX_ROUNDS
};

typedef struct ep_slot {
  ep_check_case_t c;
  ep_buffer_t (*buffers)[EP_NUM_IMAGES]; /* [ranks] */
  uint8_t *initial[EP_MAX_ROUNDS][EP_MAX_RANKS];
  uint8_t *expected[EP_MAX_ROUNDS][EP_MAX_RANKS];
  uint8_t *bounds[EP_MAX_ROUNDS][EP_MAX_RANKS]; /* order-free: sums of magnitudes */
  ep_check_counts_t counts;
} ep_slot_t;
/* Makes the case and what the reference says of it. */
trefoil_result_t epSlotMake(ep_slot_t *slot, const ep_check_team_t *team, uint64_t index);

/* A rank that runs slots. */
typedef struct ep_worker_rank {
  ep_check_team_t *team;
  ep_check_rank_t rank;
  ep_buffer_t *buffers; /* [EP_MAX_ROUNDS] */
  uint8_t *result[EP_MAX_ROUNDS];
} ep_worker_rank_t;
/* Also makes this thread that rank's. */
void epWorkerRankInit(ep_worker_rank_t *worker, ep_check_team_t *team, int rank,
                      ep_buffer_t *buffers);
/* Runs a rank's part of a slot and compares; 0: all is well. *region: 1 + that of the first difference,
 * which `what` describes and that is not reported yet; else 0, and epTeamFail was called. */
int epSlotRun(ep_worker_rank_t *worker, ep_slot_t *slot, int *region, char what[EP_CHECK_SENTENCE]);
/* Opening or closing the batch failed. */
void epWorkerRankFailed(ep_worker_rank_t *worker, ep_phase_t phase);
void epWorkerRankPhase(ep_worker_rank_t *worker, ep_phase_t phase);

#endif
