/* What three rank processes do while one of their calls fails: everything from the unique id to the last
 * destroy, compared with the reference. */
#ifndef TREFOIL_TESTS_FAULT_SCENARIO_H
#define TREFOIL_TESTS_FAULT_SCENARIO_H

#include <nccl.h>

#include "fault_calls.h"

enum { R = 3, RUNS = 3 };

typedef struct {
  int bad;          /* of a call without a fault, or a difference from the reference */
  int failed;       /* in the run with the fault: a call failed, and had a sentence */
  int hit, grouped; /* the fault happened; a group was made in that run */
  long blocks, descriptors, mappings;
  char sentence[400], live[2000];
} outcome_t;

/* What the three processes of one place share. */
typedef struct {
  ncclUniqueId ids[RUNS];
  _Atomic int idReady[RUNS]; /* 1 there, 2 there is none */
  _Atomic int arrived[RUNS + 1];
  outcome_t outcomes[R];
  fault_places_t places[R];
} shared_t;

typedef struct {
  shared_t *s;
  int rank, run, faulty; /* faulty: failures are expected */
  outcome_t *out;
} player_t;

/* One run on this rank; the outcome says how it went. */
void faultScenario(player_t *p);

#endif
