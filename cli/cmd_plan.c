/* trefoil plan: the Python package plans; --closed-form is here: port loads over numbers of GPUs, or
 * over the steps of a trace, without Python and without a simulation. */
#include "cli/cli.h"

#include "cli/scenario.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct request {
  scenario_args_t of;
  char *gpus;
  int closedForm, json;
} request_t;

/* One row: a number of GPUs, or a step. */
typedef struct point {
  int gpus, ep, step;
  trefoil_prediction_t p;
} point_t;

enum { maxPoints = 64 };

/* "A..B" doubles from A to B; "A,B,C" and "A" are themselves. Returns how many, or 0. */
static int parseGpus(const char *text, int *gpus) {
  int first, last, n = 0, used = 0;
  if (sscanf(text, "%d..%d%n", &first, &last, &used) == 2 && !text[used]) {
    if (first < 1 || last < first || last > TREFOIL_MAX_RANKS) return 0;
    for (; first <= last && n < maxPoints; first *= 2) gpus[n++] = first;
    return n;
  }
  while (n < maxPoints && sscanf(text, "%d%n", &gpus[n], &used) == 1) {
    if (gpus[n] < 1 || gpus[n] > TREFOIL_MAX_RANKS) return 0;
    n++;
    text += used;
    if (!*text) return n;
    if (*text++ != ',') return 0;
  }
  return 0;
}

/* Of uniform routing. */
static int predictGenerated(const request_t *q, const scenario_t *s, point_t *pt) {
  scenario_routing_t of;
  int rc = scenarioGenerate("plan", &q->of, s, pt->ep, 0, &of);
  if (rc >= 0) return rc;
  if (trefoilPredictRouting(&s->spec, &of.routing, &pt->p))
    rc = cliFail("plan", "%s", trefoilLastError());
  scenarioReleaseRouting(&of);
  return rc;
}

static int predictGpus(const request_t *q, const scenario_t *s, point_t *points, int n) {
  for (int i = 0; i < n; i++) {
    point_t *pt = &points[i];
    int rc = scenarioEpSize("plan", &q->of, s, pt->gpus, &pt->ep);
    if (rc >= 0) return rc;
    cliProgress("closed form", (uint64_t)i, (uint64_t)n, NULL);
    if (i > 0 && points[i - 1].ep == pt->ep) { /* more replicas of the same group */
      pt->p = points[i - 1].p;
      continue;
    }
    rc = predictGenerated(q, s, pt);
    if (rc >= 0) {
      cliProgressEnd();
      return rc;
    }
  }
  cliProgressEnd();
  return -1;
}

static json_t *opJson(const trefoil_prediction_t *p, int op) {
  const trefoil_port_loads_t *l = &p->loads[op];
  const trefoil_closed_form_t *b = &p->closedForm[op];
  const uint64_t *m = l->maxBytes;
  uint64_t nvlink = m[TREFOIL_PORT_NVLINK_OUT] > m[TREFOIL_PORT_NVLINK_IN]
                        ? m[TREFOIL_PORT_NVLINK_OUT]
                        : m[TREFOIL_PORT_NVLINK_IN];
  uint64_t nic = m[TREFOIL_PORT_NIC_OUT] > m[TREFOIL_PORT_NIC_IN] ? m[TREFOIL_PORT_NIC_OUT]
                                                                  : m[TREFOIL_PORT_NIC_IN];
  return json_pack("{s:f, s:f, s:s, s:I, s:I, s:I, s:I}", "seconds", b->us * 1e-6, "fixed_seconds",
                   b->fixedUs * 1e-6, "limit",
                   b->limit == TREFOIL_PORT_NONE ? "latency" : trefoilPortName(b->limit),
                   "nvlink_bytes", (json_int_t)nvlink, "nic_bytes", (json_int_t)nic,
                   "total_nvlink_bytes", (json_int_t)l->totalBytes[TREFOIL_TIER_NVLINK],
                   "total_net_bytes", (json_int_t)l->totalBytes[TREFOIL_TIER_NET]);
}

static int printJson(const request_t *q, const scenario_t *s, const point_t *points, int n) {
  json_t *list = json_array();
  for (int i = 0; i < n; i++) {
    const point_t *pt = &points[i];
    json_t *j = json_pack("{s:i, s:i, s:i, s:i, s:o, s:o}", "gpus", pt->gpus, "ep", pt->ep,
                          "replicas", pt->gpus / pt->ep, "ranks_per_node",
                          trefoilRanksPerNode(pt->ep, s->cluster.gpusPerNode), "dispatch",
                          opJson(&pt->p, 0), "combine", opJson(&pt->p, 1));
    if (pt->step >= 0) json_object_set_new(j, "step", json_integer(pt->step));
    json_array_append_new(list, j);
  }
  json_t *root =
      json_pack("{s:s, s:s, s:s, s:I, s:I, s:s, s:s, s:s, s:o}", "cluster", s->cluster.name, "moe",
                s->moe.name, "mode", q->of.mode, "tokens", (json_int_t)q->of.tokens, "seed",
                (json_int_t)q->of.seed, "dispatch_dtype", q->of.dispatchDtype, "combine",
                q->of.combine, "variant", q->of.variant, "points", list);
  const trefoil_cluster_t *c = &s->cluster;
  double fixedUs = s->isLl ? c->llFixedUs : c->htFixedUs;
  json_object_set_new(root, "rates",
                      json_pack("{s:f, s:f, s:f, s:f}", "nvlink_bytes_per_second",
                                1e9 * c->nvlinkGbPerS, "nic_bytes_per_second", 1e9 * c->nicGbPerS,
                                "net_latency_seconds", 1e-6 * c->netLatencyUs, "fixed_seconds",
                                1e-6 * fixedUs));
  if (q->of.trace) json_object_set_new(root, "trace", json_string(q->of.trace));
  return cliPrintJson(root);
}

static void printOp(const trefoil_prediction_t *p, int op) {
  const uint64_t *m = p->loads[op].maxBytes;
  uint64_t nvlink = m[1] > m[2] ? m[1] : m[2], nic = m[3] > m[4] ? m[3] : m[4];
  const trefoil_closed_form_t *b = &p->closedForm[op];
  printf(" | %9.1f %9.2f %9.2f  %-10s", b->us, 1e-6 * (double)nvlink, 1e-6 * (double)nic,
         b->limit == TREFOIL_PORT_NONE ? "latency" : trefoilPortName(b->limit));
}

static void printText(const request_t *q, const scenario_t *s, const point_t *points, int n) {
  int steps = n > 0 && points[0].step >= 0;
  printf("closed form (bytes over measured rates, and fixed times): %s, %s (hidden %d, top-%d of "
         "%d), %s",
         s->cluster.name, s->moe.name, s->moe.hidden, s->moe.topk, s->moe.numExperts, q->of.mode);
  if (q->of.trace) {
    printf(", routing of %s\n", q->of.trace);
  } else {
    printf(", %lld tokens a GPU, uniform routing of seed %lld\n", q->of.tokens, q->of.seed);
  }
  printf("dispatch %s, combine bf16 (%s), rows %s; MB are those of the busiest port\n\n",
         q->of.dispatchDtype, q->of.combine, q->of.variant);
  printf("%6s %5s %8s | %-41s | %-41s\n", steps ? "step" : "GPUs", "EP", "replicas",
         "dispatch us NVLink MB    NIC MB  limit", " combine us NVLink MB    NIC MB  limit");
  for (int i = 0; i < n; i++) {
    const point_t *pt = &points[i];
    printf("%6d %5d %8d", steps ? pt->step : pt->gpus, pt->ep, pt->gpus / pt->ep);
    printOp(&pt->p, 0);
    printOp(&pt->p, 1);
    putchar('\n');
  }
  for (int i = 0; i < n; i++)
    if (i == 0 || points[i].ep != points[i - 1].ep) scenarioPrintUneven(s, points[i].ep);
}

static int predictSteps(const scenario_t *s, const trefoil_trace_t *trace, point_t *points) {
  int R = trace->shape.numRanks;
  for (int i = 0; i < trace->numSteps; i++) {
    trefoil_routing_t routing;
    (void)trefoilTraceRouting(trace, i, &routing);
    routing.shape.ranksPerNode = trefoilRanksPerNode(R, s->cluster.gpusPerNode);
    points[i].gpus = points[i].ep = R;
    points[i].step = i;
    if (trefoilPredictRouting(&s->spec, &routing, &points[i].p)) {
      return cliFail("plan", "%s", trefoilLastError());
    }
  }
  return -1;
}

static int print(const request_t *q, const scenario_t *s, const point_t *points, int n) {
  if (q->json) return printJson(q, s, points, n);
  printText(q, s, points, n);
  return CLI_OK;
}

/* Every step of the trace on its own number of ranks. */
static int planTrace(request_t *q, const scenario_t *s) {
  const trefoil_trace_t *trace;
  const char *placement;
  int rc = scenarioOpenTrace("plan", &q->of, s, &trace, &placement);
  if (rc >= 0) return rc;
  int n = trace->numSteps;
  q->of.tokens = (long long)trace->shape.maxTokens;
  point_t *points = calloc((size_t)n, sizeof *points);
  rc = points ? predictSteps(s, trace, points) : cliFail("plan", "out of memory for %d steps", n);
  if (rc < 0) rc = print(q, s, points, n);
  free(points);
  trefoilTraceDestroy(trace);
  return rc;
}

static int planGpus(const request_t *q, const scenario_t *s) {
  int gpus[maxPoints], n = parseGpus(q->gpus, gpus);
  if (n == 0) return cliUsage("plan", "--gpus %s is not like 8..1024 or 8,16,72", q->gpus);
  point_t *points = calloc(maxPoints, sizeof *points);
  if (!points) return cliFail("plan", "out of memory");
  for (int i = 0; i < n; i++) {
    points[i].gpus = gpus[i];
    points[i].step = -1;
  }
  int rc = predictGpus(q, s, points, n);
  if (rc < 0) rc = print(q, s, points, n);
  free(points);
  return rc;
}

static int planClosedForm(int argc, char **argv) {
  cliCatchSignals("plan");
  request_t q = {.of = SCENARIO_DEFAULTS};
  const struct poptOption options[] = {
      {"closed-form", 0, POPT_ARG_NONE, &q.closedForm, 0, "from exact port loads (docs/sim.md)",
       NULL},
      {"gpus", 0, POPT_ARG_STRING, &q.gpus, 0,
       "A..B doubles from A to B, or a list A,B (default 8..1024, as far as the cluster goes)",
       "G"},
      SCENARIO_OPTIONS(&q.of),
      CLI_COMMON_OPTIONS(&q.json)};
  const cli_args_t args = {
      "plan", NULL,
      "Predicts dispatch and combine on a cluster, without running anything: the bytes of every\n"
      "NVLink and network port by the plan, and the time that the busiest one needs. EP groups "
      "take\n"
      "as many GPUs as there are experts; more GPUs are replicas."};
  int rc = cliParse(&args, options, argc, argv, NULL);
  if (rc >= 0) return rc;
  scenario_t s;
  rc = scenarioLoad("plan", &q.of, &s);
  if (rc >= 0) return rc;
  if (q.of.trace) return planTrace(&q, &s);
  char range[32];
  snprintf(range, sizeof range, "%d..%d", s.cluster.maxGpus < 8 ? s.cluster.maxGpus : 8,
           s.cluster.maxGpus < 1024 ? s.cluster.maxGpus : 1024);
  if (!q.gpus) q.gpus = range;
  return planGpus(&q, &s);
}

int cmdPlan(int argc, char **argv) {
  for (int i = 1; i < argc; i++)
    if (!strcmp(argv[i], "--closed-form")) return planClosedForm(argc, argv);
  return cliRunPython("plan", "trefoil.capacity", argc, argv);
}
