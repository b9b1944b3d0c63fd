/* What tests of faults share: three scripts, the mask, the doctor. */
#ifndef TREFOIL_TESTS_GPU_FAULT_H
#define TREFOIL_TESTS_GPU_FAULT_H

#include "gpu_script.h"

enum { FAULT_TIMEOUT_MS = 1000 };

typedef struct fault {
  /* [0] before or during the fault, [1] LL: without the victim, [2] all again */
  script_list_t list;
  int victim;
  int lateMs; /* the victim comes after so long */
} fault_t;

void faultSleep(int64_t ms);
/* Each script is an Update, a Dispatch, a Combine. */
trefoil_result_t faultScripts(fault_t *f, const ep_check_group_t *g);
/* Calls all operations of a script and waits for them. */
trefoil_result_t faultCall(ep_check_rank_t *k, const ep_check_case_t *c);
/* Runs one of the scripts from its inputs; compares if asked. */
trefoil_result_t faultWork(ep_check_rank_t *k, const script_list_t *list, int i, int compare);
/* The mask has 0 for the victim (-1: nobody) alone, the async error is as said; clears it. */
trefoil_result_t faultMask(ep_check_rank_t *k, int victim, int wantedFlag);

/* trefoil doctor --hang, where TREFOIL_CLI says what trefoil is. */
typedef struct doctor {
  char folder[64], output[1200];
  int code;
} doctor_t;
/* Progress records from here on; 0: there is no doctor to read them. */
int doctorOpen(doctor_t *d);
void doctorAsk(doctor_t *d);
void doctorClose(doctor_t *d);

#endif
