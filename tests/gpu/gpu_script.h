/* Scripts of operations and what they must leave behind: cases of the checker
 * (validate/check_case.h), made by its generator or by hand, run back to back in images of their
 * own, and compared at the very end. */
#ifndef TREFOIL_TESTS_GPU_SCRIPT_H
#define TREFOIL_TESTS_GPU_SCRIPT_H

#include "gpu_team.h"

/* ---- By hand: every operation is bf16 of the group's full width unless it is changed ---- */
trefoil_result_t scriptBegin(ep_check_case_t *c, const ep_check_group_t *group, uint64_t seed,
                             int numRounds);
ep_check_op_t *scriptAdd(ep_check_case_t *c, ep_op_kind_t kind, int handle);
/* A routing for the handle, then Update. */
ep_check_op_t *scriptUpdate(ep_check_case_t *c, int handle, int routing);
trefoil_result_t scriptEnd(ep_check_case_t *c);

/* ---- Many of them ---- */
typedef struct script_list {
  const ep_check_group_t *group;
  int numCases;
  ep_check_case_t *cases;
  size_t *offsets; /* of the cases' images in a rank's device memory; [numCases] is their sum */
  uint8_t *initial[EP_MAX_ROUNDS][EP_MAX_RANKS], *expected[EP_MAX_ROUNDS][EP_MAX_RANKS];
  /* Changes the inputs of a case (NULL: as made), before the reference sees them. */
  void (*change)(const ep_check_case_t *c, int caseIdx, int rank, uint8_t *image);
} script_list_t;

trefoil_result_t scriptListBegin(script_list_t *list, const ep_check_group_t *group, int numCases);
/* Cases of the checker's generator, only such as can run without the host: no graphs, masks, waits or
 * handles of their own. */
trefoil_result_t scriptListGenerate(script_list_t *list, uint64_t seed);
/* After all cases are made: images, and the reference's answers, on all cores. */
trefoil_result_t scriptListExpect(script_list_t *list);
void scriptListFree(script_list_t *list);
/* Dispatches and combines in the list. */
int scriptListOps(const script_list_t *list, ep_op_kind_t kind);

/* A rank runs all cases without waiting for the host once, then compares. before (may be NULL) is
 * called before each operation. */
typedef trefoil_result_t (*script_before_t)(gpu_rank_t *rank, const script_list_t *list,
                                            int caseIdx, int opIdx);
trefoil_result_t scriptListRun(gpu_rank_t *rank, const script_list_t *list, script_before_t before);
/* Compares a result of this rank. */
trefoil_result_t scriptCompare(const script_list_t *list, int caseIdx, int round, int rank,
                               const uint8_t *result);

#endif
