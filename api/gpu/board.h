/* Where ranks of a communicator meet in collective calls, before and beside NCCL. */
#ifndef TREFOIL_API_GPU_BOARD_H
#define TREFOIL_API_GPU_BOARD_H

#include "api/object.h"

struct ep_board;

/* What a rank says at a meeting. */
typedef struct ep_board_word {
  uint32_t call; /* ep_board_call_t */
  uint32_t topk;
  uint64_t groupId; /* of the group that it is about, the same on all ranks */
  ep_settings_t settings;
} ep_board_word_t;

typedef enum ep_board_call {
  EP_BOARD_CREATE_GROUP = 1,
  EP_BOARD_GROUP_READY = 2, /* this rank's part of CreateGroup worked */
  EP_BOARD_INIT_HANDLE = 3,
  EP_BOARD_HANDLE_READY = 4,
  EP_BOARD_DESTROY_GROUP = 5
} ep_board_call_t;

/* Opens this rank's view of the communicator's board; several groups share it. */
trefoil_result_t epBoardOpen(ncclComm_t comm, int rank, int numRanks, struct ep_board **out);
void epBoardClose(struct ep_board *board);

/* Waits until all ranks have come, then all[R] is what they said, in order of rank; or fails, on every
 * rank that came, and then nothing was met: TREFOIL_REMOTE_ERROR naming who did not come within
 * timeoutNs; the sentence of a rank whose call failed before it came. The ranks must all make the same
 * call: TREFOIL_INVALID_USAGE. */
trefoil_result_t epBoardMeet(struct ep_board *board, const ep_board_word_t *mine,
                             uint64_t timeoutNs, ep_board_word_t *all);

/* Meetings that took place: the same on all ranks between two of them. */
uint64_t epBoardMeetings(const struct ep_board *board);
/* The call fails, and on all ranks alike: they hear of it by themselves. */
void epBoardShareFailure(struct ep_board *board);

/* All ranks have come: no file is needed any more, the board's memory stays. */
void epBoardUnlink(struct ep_board *board);

/* The backend's functions around a collective call. */
void epBoardCallBegin(ncclComm_t comm);
void epBoardCallFail(ncclComm_t comm, trefoil_result_t code, const char *why);

#endif
