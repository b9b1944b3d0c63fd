/* The legs that must agree on bytes: the bytes of each (source, destination), over which tier, in which
 * phase.
 *
 * Every leg fills a table of its own from the same workload, each by its own means:
 *
 *   routing    counted token by token, straight from routing (leg_counts.c): what the others must equal
 *   reference  trefoilRefTraffic: sums over all phases, so only pairs are compared
 *   plan       the transfers of the plan
 *   queues     what the engine of port queues issued and brought to its end, and its links' sums
 *   simgrid    the same of SimGrid
 *
 * epLegsRun walks the checker's random cases (check_case.h), so that a case has the same number in
 * `trefoil check` and in `trefoil validate`. A leg is a name and a function: tests plant faulty ones. */
#ifndef TREFOIL_VALIDATE_LEGS_H
#define TREFOIL_VALIDATE_LEGS_H

#include "trefoil/sim.h"
#include "validate/check_case.h"

#include <signal.h>

/* Ports whose sums are compared beside the pairs. One network port a rank. */
enum { EP_LEG_NVLINK_OUT, EP_LEG_NVLINK_IN, EP_LEG_NIC_OUT, EP_LEG_NIC_IN, EP_LEG_NUM_PORTS };

/* bytes [2 operations, tiers, phases, R, R]; ports [2, EP_LEG_NUM_PORTS, R]. All zero at first. */
typedef struct ep_leg_table {
  int numRanks;
  uint64_t *bytes, *ports;
  int hasPorts; /* the leg filled ports itself; else they follow from bytes */
} ep_leg_table_t;

typedef struct ep_leg {
  const char *name;
  trefoil_result_t (*fill)(const trefoil_sim_workload_t *work, ep_leg_table_t *table);
  int pairsOnly; /* knows no phases: all its bytes stand at phase 0 of their tier */
  int every;     /* takes part in one case of so many; 0 and 1: in all */
} ep_leg_t;

/* Where a pair's bytes stand, and a port's. */
static inline size_t epLegAt(const ep_leg_table_t *t, int op, int tier, int phase) {
  size_t R = (size_t)t->numRanks;
  return (((size_t)op * TREFOIL_NUM_TIERS + (size_t)tier) * TREFOIL_NUM_PHASES + (size_t)phase) *
         R * R;
}
static inline size_t epLegPortAt(const ep_leg_table_t *t, int op, int port) {
  return ((size_t)op * EP_LEG_NUM_PORTS + (size_t)port) * (size_t)t->numRanks;
}

/* The legs of this build: five, or four without SimGrid. Row 0 is what the others must equal. */
enum { EP_MAX_LEGS = 8 };
int epLegsOfBuild(ep_leg_t legs[EP_MAX_LEGS], int simGridEvery);

typedef struct ep_legs_options {
  ep_check_choice_t choice;
  uint64_t firstCase, numCases;
  const ep_leg_t *legs;
  int numLegs;
  const char *replay; /* "trefoil validate --bytes --seed 1" */
  const volatile sig_atomic_t
      *interrupted; /* NULL, or a signal's number once it came: the run ends */
  void (*progress)(void *context, uint64_t cases);
  void *context;
} ep_legs_options_t;

enum { EP_LEGS_TEXT = 2048 };
typedef struct ep_legs_outcome {
  uint64_t cases, workloads;    /* a workload: one dispatch and one combine of one routing */
  uint64_t tables[EP_MAX_LEGS]; /* that each leg filled */
  uint64_t numbers;             /* compared, zeros that both sides have left out */
  uint64_t bytes;               /* the sum over workloads of what row 0 says is sent */
  double seconds;
  int interrupted; /* the signal, or 0 */
  int failed;      /* something differs, or not all cases that were asked for were done */
  uint64_t failedCase;
  char text[EP_LEGS_TEXT]; /* the case, the first pair or port that differs, the replay command */
} ep_legs_outcome_t;

/* TREFOIL_OK: the run took place, outcome->failed says how it ended. Stops at the first case that
 * differs. */
trefoil_result_t epLegsRun(const ep_legs_options_t *options, ep_legs_outcome_t *outcome);

/* ---- leg_counts.c ---- */
trefoil_result_t epLegRouting(const trefoil_sim_workload_t *work, ep_leg_table_t *table);
/* ---- leg_tables.c ---- */
trefoil_result_t epLegReference(const trefoil_sim_workload_t *work, ep_leg_table_t *table);
trefoil_result_t epLegPlan(const trefoil_sim_workload_t *work, ep_leg_table_t *table);
trefoil_result_t epLegQueues(const trefoil_sim_workload_t *work, ep_leg_table_t *table);
trefoil_result_t epLegSimGrid(const trefoil_sim_workload_t *work, ep_leg_table_t *table);

#endif
