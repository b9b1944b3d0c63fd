/* One simulated step, as the verb simulate hands it from asking to answering. */
#ifndef TREFOIL_CLI_SIMULATE_H
#define TREFOIL_CLI_SIMULATE_H

#include "cli/cli.h"
#include "cli/memory_need.h"
#include "cli/scenario.h"
#include "cli/what_if.h"

#include "trefoil/cost_record.h"
#include "trefoil/sim.h"

typedef struct simulated {
  scenario_args_t args;
  what_if_t whatIf;
  scenario_t of;
  scenario_routing_t step;
  trefoil_cost_record_t record;
  int otherPorts; /* of the record's cluster and this one */
  int hasRecord;  /* else record.costs are the ideal ones, which have no intervals */
  int gpus, ep, stepIdx, sms, closedForm;
  int64_t maxSpans;
  memory_need_t memory;
  trefoil_sim_run_t run;
  trefoil_sim_result_t result;
  double otherUs[2];              /* of the engine that did not answer; 0: not asked */
  double boundUs[2];              /* bytes over line rates, by trefoil_op_t */
  trefoil_interval_t interval[2]; /* by trefoil_op_t, where there is a record */
  double wallS;                   /* routing and replay together */
} simulated_t;

/* ---- simulate_output.c ---- */
json_t *simulatedJson(const simulated_t *s);
void simulatedText(const simulated_t *s);
/* What the network does to a rank's rows is the text's and the JSON's; every link's load is a CSV:
 * op,kind,index,bytes,busy_seconds,share. -1, or an exit code. */
int simulatedLinks(const simulated_t *s, cli_file_t *file);

/* ---- simulate_each.c ---- */
/* One step a line of the file ("-": stdin), its options as a JSON list of words; for each a line with
 * its exit code and what it printed. Returns an exit code. */
int simulateEach(const char *path);

/* ---- timeline.c ---- */
/* Both operations as a trace for ui.perfetto.dev. -1, or an exit code. */
int timelineWrite(const simulated_t *s, cli_file_t *file);

#endif
