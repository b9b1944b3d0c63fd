/* trefoil simulate: dispatch and combine of one step on a cluster, replayed in time. */
#include "cli/cli.h"
#include "cli/simulate.h"

#include "plan/clock.h"
#include "plan/error.h"

#include <stdio.h>
#include <string.h>

static const char verb[] = "simulate";

typedef struct request {
  char *engine, *costs, *timeline, *links, *platform, *each;
  int json, compare;
  double timeoutS;
  cli_file_t *files; /* [NUM_FILES] */
} request_t;

enum { TIMELINE, LINKS, PLATFORM, NUM_FILES };

/* All that is to be written can be: known before anything is computed. */
static int beginFiles(request_t *q) {
  static cli_file_t files[NUM_FILES];
  const char *const paths[NUM_FILES] = {q->timeline, q->links, q->platform};
  q->files = files;
  for (int i = 0; i < NUM_FILES; i++) {
    int rc = paths[i] ? cliFileBegin(&files[i], verb, paths[i]) : -1;
    if (rc >= 0) return rc;
  }
  return -1;
}

/* The engine's number; -1 for the closed form; -2: no such engine. */
static int parseEngine(const char *text) {
  if (!strcmp(text, "auto")) return TREFOIL_ENGINE_AUTO;
  if (!strcmp(text, "closed-form")) return -1;
  for (int e = TREFOIL_ENGINE_SIMGRID; e <= TREFOIL_ENGINE_FAIR; e++)
    if (!strcmp(text, trefoilEngineName((trefoil_engine_t)e))) return e;
  return -2;
}

static int checkRequest(const request_t *q, simulated_t *s) {
  int engine = parseEngine(q->engine);
  if (engine == -2) {
    return cliUsage(verb, "--engine %s: expected auto, simgrid, fair, queues or closed-form",
                    q->engine);
  }
  s->closedForm = engine == -1;
  s->run.engine = engine < 0 ? TREFOIL_ENGINE_AUTO : (trefoil_engine_t)engine;
  if (s->closedForm && whatIfNeedsEngine(&s->whatIf)) {
    return cliUsage(verb, "the closed form knows neither failures, stragglers, switches nor "
                          "background work: leave out --engine closed-form");
  }
  if (s->closedForm && (q->timeline || q->links || q->platform)) {
    return cliUsage(verb, "the closed form has no %s: leave out --engine closed-form",
                    q->timeline ? "timeline" : "links");
  }
  if (s->closedForm && q->compare) {
    return cliUsage(verb, "--compare runs both engines: leave out --engine closed-form");
  }
  if (s->args.trace && s->whatIf.zipf > 0) {
    return cliUsage(verb, "--zipf and --trace both say what the routing is: give one");
  }
  if (s->args.trace && s->args.maskedSelections) {
    return cliUsage(verb, "--masked-selections is of generated routing, a trace has its own");
  }
  if (s->stepIdx && !s->args.trace) {
    return cliUsage(verb, "--step %d is a step of a trace: give --trace", s->stepIdx);
  }
  return -1;
}

/* The record that was asked for, or the default one of the mode; "ideal" is none. */
static int loadCosts(const request_t *q, simulated_t *s) {
  const char *name = q->costs;
  if (!name) name = trefoilCostRecordDefault(s->of.spec.mode, s->of.spec.variant);
  s->hasRecord = !s->closedForm && name && strcmp(name, "ideal");
  if (!s->hasRecord) {
    trefoil_result_t result = trefoilCostsIdeal(&s->record.costs, &s->of.cluster, s->of.spec.mode);
    snprintf(s->record.costs.name, sizeof s->record.costs.name, "ideal");
    return result == TREFOIL_OK ? -1 : cliFail(verb, "%s", trefoilLastError());
  }
  if (trefoilCostRecordLoad(&s->record, name)) return cliUsage(verb, "%s", trefoilLastError());
  if (s->record.isHt == s->of.isLl) {
    return cliUsage(verb, "--costs %s: they are of %s, the mode is %s", name,
                    s->record.isHt ? "ht" : "ll", s->of.isLl ? "ll" : "ht");
  }
  trefoil_result_t result =
      trefoilCostRecordOnCluster(&s->record, &s->of.cluster, &s->record.costs, &s->otherPorts);
  return result == TREFOIL_OK ? -1 : cliUsage(verb, "--costs %s: %s", name, trefoilLastError());
}

/* A what-if that the costs cannot answer would look as if it cost nothing. */
static int checkStraggler(const simulated_t *s) {
  if (!s->whatIf.given[TREFOIL_CHANGE_SM_RATE]) return -1;
  for (int op = 0; op < 2; op++) {
    const trefoil_op_costs_t *c = &s->record.costs.op[op];
    if (c->tokenNs > 0 || c->sendRowNs > 0 || c->sendGbPerSPerSm > 0 || c->receiveRowNs > 0 ||
        c->receiveGbPerSPerSm > 0) {
      return -1;
    }
  }
  return cliUsage(verb,
                  "--straggler: the costs %s have no time of SMs, so a slow one changes nothing: "
                  "name costs that have, as in --costs %s",
                  s->record.costs.name, s->of.isLl ? "deepep-ll-h100" : "deepep-ht-h100");
}

/* The fit may be off, but no network port is faster than its line: what an interval begins with at
 * the least. 0 where a what-if makes ports faster. */
static double leastUs(const simulated_t *s, int op) {
  const trefoil_closed_form_t *closed = &s->result.op[op].closedForm;
  if (closed->limit != TREFOIL_PORT_NIC_OUT && closed->limit != TREFOIL_PORT_NIC_IN) return 0;
  for (int i = 0; i < s->whatIf.numChanges; i++) {
    const trefoil_change_t *c = &s->whatIf.changes[i];
    int isRate = c->kind == TREFOIL_CHANGE_NIC_RATE || c->kind == TREFOIL_CHANGE_RAIL_RATE;
    if (isRate && c->factor > 1) return 0;
  }
  return closed->us - closed->fixedUs;
}

/* Bytes of the busiest port over its line rate. Ports that failed send their bytes elsewhere, and
 * ports that were made faster have another line rate: these what-ifs leave some or all of it out. */
static void findBounds(simulated_t *s) {
  int usesNic = 1;
  double faster = 1;
  for (int i = 0; i < s->whatIf.numChanges; i++) {
    const trefoil_change_t *c = &s->whatIf.changes[i];
    if (c->kind == TREFOIL_CHANGE_NIC_FAIL || c->kind == TREFOIL_CHANGE_RAIL_FAIL) usesNic = 0;
    int isRate = c->kind == TREFOIL_CHANGE_NIC_RATE || c->kind == TREFOIL_CHANGE_RAIL_RATE ||
                 c->kind == TREFOIL_CHANGE_NVLINK_RATE;
    if (isRate && c->factor > faster) faster = c->factor;
  }
  for (int op = 0; op < 2; op++) {
    const trefoil_port_loads_t *loads = &s->result.op[op].loads;
    s->boundUs[op] = trefoilLineBoundUs(&s->of.cluster, loads, usesNic) / faster;
  }
}

/* How far to trust the times. */
static trefoil_result_t findIntervals(simulated_t *s) {
  if (!s->hasRecord) return TREFOIL_OK;
  const trefoil_shape_t *shape = &s->step.routing.shape;
  trefoil_fit_point_t point = {.nodes = shape->numRanks / shape->ranksPerNode,
                               .ranks = shape->numRanks,
                               .hidden = s->of.moe.hidden,
                               .experts = shape->numExperts,
                               .topk = shape->topk,
                               .tokens = shape->maxTokens,
                               .sms = s->sms ? s->sms : s->record.costs.numSms,
                               .otherPorts = s->otherPorts};
  const size_t rowBytes[] = {s->of.spec.dispatchRowBytes, s->of.spec.combineRowBytes};
  for (int op = 0; op < 2; op++) {
    double us = s->result.op[op].us, least = leastUs(s, op);
    trefoil_interval_t *interval = &s->interval[op];
    point.rowBytes = (int)rowBytes[op];
    EP_TRY(trefoilCostRecordInterval(&s->record, (trefoil_op_t)op, &point, us, interval));
    if (interval->lowUs < least) interval->lowUs = least < us ? least : us;
  }
  return TREFOIL_OK;
}

/* An operation takes no more SMs than a GPU has. */
static int limitSms(simulated_t *s) {
  int most = s->of.cluster.gpuSms;
  if (!most) return -1;
  if (s->sms > most) {
    return cliUsage(verb, "--sms %d: a GPU of cluster %s has %d SMs", s->sms, s->of.cluster.name,
                    most);
  }
  if (!s->sms && s->hasRecord && s->record.costs.numSms > most) s->sms = most;
  return -1;
}

/* The cluster, the model, the costs, and one step of routing. */
static int load(const request_t *q, simulated_t *s) {
  int rc = scenarioLoad(verb, &s->args, &s->of);
  if (rc < 0 && s->of.spec.combinePartial && !s->of.isLl) {
    rc = cliUsage(verb, "--combine partial is of ll: ht sends partial sums in any case");
  }
  if (rc < 0) rc = loadCosts(q, s);
  if (rc < 0) rc = limitSms(s);
  if (rc >= 0) return rc;
  if (s->args.trace) {
    rc = scenarioReadTrace(verb, &s->args, &s->of, s->stepIdx, &s->step);
    if (rc >= 0) return rc;
    s->ep = s->step.routing.shape.numRanks;
    s->args.tokens = s->step.routing.shape.maxTokens;
    if (!s->gpus) s->gpus = s->ep;
    if (s->gpus % s->ep || s->gpus > s->of.cluster.maxGpus) {
      return cliUsage(verb, "--gpus %d: the trace has %d ranks, so a multiple of that, at most %d",
                      s->gpus, s->ep, s->of.cluster.maxGpus);
    }
    return -1;
  }
  int physical = s->args.physicalExperts ? s->args.physicalExperts : s->of.moe.numExperts;
  if (!s->gpus) s->gpus = s->args.ep ? s->args.ep : s->of.cluster.gpusPerNode;
  if (s->args.ep > s->gpus) {
    return cliUsage(verb, "--ep %d: an EP group cannot have more than the %d GPUs of --gpus",
                    s->args.ep, s->gpus);
  }
  if (s->args.ep > physical) {
    return cliUsage(verb,
                    "--ep %d: an EP group has at most as many GPUs as there are experts, %d; "
                    "--physical-experts %d would do",
                    s->args.ep, physical, s->args.ep);
  }
  rc = scenarioEpSize(verb, &s->args, &s->of, s->gpus, &s->ep);
  if (rc >= 0) return rc;
  return scenarioGenerate(verb, &s->args, &s->of, s->ep, s->whatIf.zipf, &s->step);
}

/* The closed form alone, in the shape of a simulation's answer. */
static trefoil_result_t closedForm(simulated_t *s) {
  trefoil_prediction_t p;
  EP_TRY(trefoilPredictRouting(&s->of.spec, &s->step.routing, &p));
  for (int op = 0; op < 2; op++) {
    s->result.op[op] = (trefoil_sim_op_t){.us = p.closedForm[op].us,
                                          .firstUs = p.closedForm[op].us,
                                          .floorUs = p.closedForm[op].us,
                                          .closedForm = p.closedForm[op],
                                          .loads = p.loads[op],
                                          .numRanks = s->ep};
  }
  return TREFOIL_OK;
}

/* The same on the engine that did not answer. */
static trefoil_result_t compareEngines(simulated_t *s, const trefoil_sim_workload_t *workload) {
  trefoil_sim_t *sim;
  EP_TRY(trefoilSimCreate(&sim, workload));
  trefoil_result_t result = TREFOIL_OK;
  for (int op = 0; op < 2 && result == TREFOIL_OK; op++) {
    trefoil_sim_run_t run = s->run;
    trefoil_sim_result_t other;
    int isQueues = s->result.op[op].engine == TREFOIL_ENGINE_QUEUES;
    run.engine = isQueues ? TREFOIL_ENGINE_SIMGRID : TREFOIL_ENGINE_QUEUES;
    run.maxSpans = 0;
    result = trefoilSimRun(sim, &run, &other);
    if (result == TREFOIL_OK) s->otherUs[op] = other.op[op].us;
  }
  trefoilSimDestroy(sim);
  return result;
}

/* Many tokens take a while in each of these. */
static void showStage(uint64_t done, const char *what) {
  cliProgress("simulating", done, 3, what);
}

static trefoil_result_t replay(const request_t *q, simulated_t *s, trefoil_sim_t **sim) {
  const trefoil_sim_workload_t workload = {.routing = &s->step.routing,
                                           .mode = s->of.spec.mode,
                                           .variant = s->of.spec.variant,
                                           .combinePartial = s->of.spec.combinePartial,
                                           .dispatchRowBytes = s->of.spec.dispatchRowBytes,
                                           .combineRowBytes = s->of.spec.combineRowBytes};
  s->run.cluster = &s->of.cluster;
  s->run.costs = &s->record.costs;
  s->run.numSms = s->sms;
  s->run.oversubscription = s->whatIf.oversubscription;
  s->run.startSkewUs = s->whatIf.skewUs;
  s->run.seed = (uint64_t)s->args.seed;
  s->run.changes = s->whatIf.changes;
  s->run.numChanges = s->whatIf.numChanges;
  s->run.flows = s->whatIf.flows;
  s->run.numFlows = s->whatIf.numFlows;
  s->run.hasProducts = s->whatIf.hasProducts;
  s->run.maxSpans = q->timeline ? s->maxSpans : 0;
  s->run.timeoutS = q->timeoutS;
  showStage(1, "the plan's transfers");
  EP_TRY(trefoilSimCreate(sim, &workload));
  if (q->platform) {
    EP_TRY(trefoilSimWritePlatform(*sim, &s->run, TREFOIL_OP_DISPATCH, q->files[PLATFORM].writing));
  }
  showStage(2, "replay");
  EP_TRY(trefoilSimRun(*sim, &s->run, &s->result));
  return q->compare ? compareEngines(s, &workload) : TREFOIL_OK;
}

static int answer(const request_t *q, const simulated_t *s) {
  if (q->platform) {
    int rc = cliFileKeep(&q->files[PLATFORM]);
    if (rc >= 0) return rc;
  }
  if (q->links) {
    int rc = simulatedLinks(s, &q->files[LINKS]);
    if (rc >= 0) return rc;
  }
  if (q->timeline) {
    int rc = timelineWrite(s, &q->files[TIMELINE]);
    if (rc >= 0) return rc;
  }
  if (q->json) return cliPrintJson(simulatedJson(s));
  simulatedText(s);
  return CLI_OK;
}

static int simulate(const request_t *q, simulated_t *s) {
  double start = epNow();
  showStage(0, "routing");
  int rc = load(q, s);
  if (rc < 0) rc = whatIfParse(verb, &s->whatIf, &s->of.cluster, &s->step.routing.shape);
  if (rc < 0) rc = checkStraggler(s);
  if (rc < 0) {
    memoryNeed(&s->of.spec, &s->step.routing.shape, s->step.maxReceived, &s->memory);
    trefoil_sim_t *sim = NULL;
    trefoil_result_t result = s->closedForm ? closedForm(s) : replay(q, s, &sim);
    s->wallS = epNow() - start;
    cliProgressEnd();
    if (result == TREFOIL_OK) result = findIntervals(s);
    findBounds(s);
    rc = result == TREFOIL_OK                 ? answer(q, s)
         : result == TREFOIL_INVALID_ARGUMENT ? cliUsage(verb, "%s", trefoilLastError())
                                              : cliFail(verb, "%s", trefoilLastError());
    trefoilSimDestroy(sim);
  }
  cliProgressEnd();
  scenarioReleaseRouting(&s->step);
  return rc;
}

int cmdSimulate(int argc, char **argv) {
  static simulated_t s = {.args = SCENARIO_DEFAULTS, .maxSpans = 200000};
  request_t q = {.engine = "auto"};
  long long spans = s.maxSpans;
  const struct poptOption options[] = {
      {"gpus", 0, POPT_ARG_INT, &s.gpus, CLI_POSITIVE,
       "GPUs: EP groups of them, as large as can be (default: --ep, or one node)", "G"},
      SCENARIO_OPTIONS(&s.args),
      {"masked-selections", 0, POPT_ARG_LONGLONG, &s.args.maskedSelections, CLI_NOT_NEGATIVE,
       "so many random selections of each rank are -1: no row (default 0)", "N"},
      {"step", 0, POPT_ARG_INT, &s.stepIdx, CLI_NOT_NEGATIVE, "of the trace (default 0)", "I"},
      {"costs", 0, POPT_ARG_STRING, &q.costs, 0,
       "cost record of the kernels: preset, file, or ideal: ports and latency alone (default: the "
       "mode's preset)",
       "NAME"},
      {"sms", 0, POPT_ARG_INT, &s.sms, CLI_POSITIVE, "SMs of an operation (default: the costs')",
       "N"},
      {"engine", 0, POPT_ARG_STRING, &q.engine, 0,
       "auto (default), simgrid, fair, queues, or closed-form: without replay", "NAME"},
      {"compare", 0, POPT_ARG_NONE, &q.compare, 0,
       "replay on the other engine too, and say how far "
       "apart they are",
       NULL},
      WHAT_IF_OPTIONS(&s.whatIf),
      {"timeline", 0, POPT_ARG_STRING, &q.timeline, 0,
       "write what every rank and link does when, for ui.perfetto.dev", "FILE"},
      {"timeline-spans", 0, POPT_ARG_LONGLONG, &spans, CLI_POSITIVE,
       "most transfers that it keeps (default 200000)", "N"},
      {"links", 0, POPT_ARG_STRING, &q.links, 0, "write the load of every link as CSV", "FILE"},
      {"platform", 0, POPT_ARG_STRING, &q.platform, 0,
       "write the platform of dispatch, as SimGrid's XML", "FILE"},
      {"timeout", 0, POPT_ARG_DOUBLE, &q.timeoutS, CLI_POSITIVE,
       "wall clock of SimGrid and fair (default 600)", "SECONDS"},
      {"each", 0, POPT_ARG_STRING, &q.each, 0,
       "alone: a step a line, its options as a JSON list (-: stdin); a JSON line with code, out "
       "and err for each",
       "FILE"},
      CLI_COMMON_OPTIONS(&q.json)};
  const cli_args_t args = {
      verb, NULL,
      "Replays the plan of one dispatch and one combine in time, on a cluster that need not be at\n"
      "hand: SimGrid's fair flows, or port queues where there are too many. docs/sim.md says\n"
      "what the answer means and what it leaves out."};
  int rc = cliParse(&args, options, argc, argv, NULL);
  if (rc >= 0) return rc;
  if (q.each) {
    int isAlone = argc == 2 || (argc == 3 && !strcmp(argv[1], "--each"));
    return isAlone ? simulateEach(q.each) : cliUsage(verb, "--each stands alone");
  }
  s.maxSpans = spans;
  cliCatchSignals(verb);
  rc = checkRequest(&q, &s);
  if (rc < 0) rc = beginFiles(&q);
  return rc >= 0 ? rc : simulate(&q, &s);
}
