/* trefoil plan: the closed form over numbers of GPUs, or over the steps of a trace. */
#include "cli/cli.h"

#include "trefoil/models.h"
#include "trefoil/trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct request {
  char *cluster, *moe, *mode, *gpus, *trace, *dispatchDtype, *combine, *variant;
  int closedForm, ep, physicalExperts, json;
  long long tokens, seed;
} request_t;

typedef struct setup {
  trefoil_cluster_t cluster;
  trefoil_moe_t moe;
  trefoil_predict_spec_t spec;
  const char *mode; /* "ll", "ht" */
} setup_t;

/* One row: a number of GPUs, or a step. */
typedef struct point {
  int gpus, ep, step;
  trefoil_prediction_t p;
} point_t;

enum { maxPoints = 64, defaultTokensLl = 128, defaultTokensHt = 4096 };

static int isOneOf(const char *text, const char *a, const char *b) {
  return !strcmp(text, a) || !strcmp(text, b);
}

/* 2 bytes an element, or 1 and a 4-byte scale for every 128. */
static size_t rowBytes(const trefoil_moe_t *moe, int fp8) {
  size_t H = (size_t)moe->hidden;
  return fp8 ? H + 4 * ((H + 127) / 128) : 2 * H;
}

static int setUp(const request_t *q, setup_t *s) {
  if (!q->closedForm) {
    return cliUsage("plan", "say --closed-form: it is the one way of planning so far");
  }
  if (!isOneOf(q->mode, "ll", "ht"))
    return cliUsage("plan", "--mode %s is neither ll nor ht", q->mode);
  if (!isOneOf(q->dispatchDtype, "bf16", "fp8")) {
    return cliUsage("plan", "--dispatch-dtype %s is neither bf16 nor fp8", q->dispatchDtype);
  }
  if (!isOneOf(q->combine, "exact", "partial")) {
    return cliUsage("plan", "--combine %s is neither exact nor partial", q->combine);
  }
  if (!isOneOf(q->variant, "ours", "per-expert")) {
    return cliUsage("plan", "--variant %s is neither ours nor per-expert", q->variant);
  }
  if (trefoilClusterLoad(&s->cluster, q->cluster) || trefoilMoeLoad(&s->moe, q->moe)) {
    return cliUsage("plan", "%s", trefoilLastError());
  }
  s->mode = q->mode;
  int ll = !strcmp(q->mode, "ll");
  s->spec = (trefoil_predict_spec_t){
      .cluster = &s->cluster,
      .mode = ll ? TREFOIL_LL_EXPERT_MAJOR : TREFOIL_HT_FLAT,
      .variant = strcmp(q->variant, "ours") ? TREFOIL_VARIANT_PER_EXPERT : TREFOIL_VARIANT_OURS,
      .combinePartial = !strcmp(q->combine, "partial"),
      .dispatchRowBytes = rowBytes(&s->moe, !strcmp(q->dispatchDtype, "fp8")),
      .combineRowBytes = rowBytes(&s->moe, 0)};
  return -1;
}

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

static int predictGpus(const request_t *q, const setup_t *s, point_t *points, int n) {
  int physical = q->physicalExperts ? q->physicalExperts : s->moe.numExperts;
  for (int i = 0; i < n; i++) {
    point_t *pt = &points[i];
    if (pt->gpus > s->cluster.maxGpus) {
      return cliUsage("plan", "%d GPUs: cluster %s speaks for at most %d", pt->gpus,
                      s->cluster.name, s->cluster.maxGpus);
    }
    pt->ep = trefoilEpSize(pt->gpus, physical, q->ep);
    if (q->ep && pt->ep != q->ep && pt->gpus >= q->ep) {
      return cliUsage(
          "plan",
          "%d GPUs cannot be cut into EP groups of %d with %d physical experts: --ep must "
          "divide the GPUs and be at most the experts (--physical-experts)",
          pt->gpus, q->ep, physical);
    }
    cliProgress("closed form", (uint64_t)i, (uint64_t)n, NULL);
    if (i > 0 && points[i - 1].ep == pt->ep) { /* more replicas of the same group */
      pt->p = points[i - 1].p;
      continue;
    }
    trefoil_predict_load_t load = {pt->ep, physical, q->tokens, (uint64_t)q->seed};
    if (trefoilPredictUniform(&s->spec, &s->moe, &load, &pt->p)) {
      cliProgressEnd();
      return cliFail("plan", "%s", trefoilLastError());
    }
  }
  cliProgressEnd();
  return -1;
}

static json_t *opJson(const trefoil_prediction_t *p, int op) {
  const trefoil_port_loads_t *l = &p->loads[op];
  const trefoil_bound_t *b = &p->bound[op];
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

static int printJson(const request_t *q, const setup_t *s, const point_t *points, int n) {
  json_t *list = json_array();
  for (int i = 0; i < n; i++) {
    const point_t *pt = &points[i];
    json_t *j =
        json_pack("{s:i, s:i, s:i, s:o, s:o}", "gpus", pt->gpus, "ep", pt->ep, "replicas",
                  pt->gpus / pt->ep, "dispatch", opJson(&pt->p, 0), "combine", opJson(&pt->p, 1));
    if (pt->step >= 0) json_object_set_new(j, "step", json_integer(pt->step));
    json_array_append_new(list, j);
  }
  json_t *root =
      json_pack("{s:s, s:s, s:s, s:I, s:I, s:s, s:s, s:s, s:o}", "cluster", s->cluster.name, "moe",
                s->moe.name, "mode", s->mode, "tokens", (json_int_t)q->tokens, "seed",
                (json_int_t)q->seed, "dispatch_dtype", q->dispatchDtype, "combine", q->combine,
                "variant", q->variant, "points", list);
  const trefoil_cluster_t *c = &s->cluster;
  double fixedUs = strcmp(s->mode, "ll") ? c->htFixedUs : c->llFixedUs;
  json_object_set_new(root, "rates",
                      json_pack("{s:f, s:f, s:f, s:f}", "nvlink_bytes_per_second",
                                1e9 * c->nvlinkGbPerS, "nic_bytes_per_second", 1e9 * c->nicGbPerS,
                                "net_latency_seconds", 1e-6 * c->netLatencyUs, "fixed_seconds",
                                1e-6 * fixedUs));
  if (q->trace) json_object_set_new(root, "trace", json_string(q->trace));
  return cliPrintJson(root);
}

static void printOp(const trefoil_prediction_t *p, int op) {
  const uint64_t *m = p->loads[op].maxBytes;
  uint64_t nvlink = m[1] > m[2] ? m[1] : m[2], nic = m[3] > m[4] ? m[3] : m[4];
  const trefoil_bound_t *b = &p->bound[op];
  printf(" | %9.1f %9.2f %9.2f  %-10s", b->us, 1e-6 * (double)nvlink, 1e-6 * (double)nic,
         b->limit == TREFOIL_PORT_NONE ? "latency" : trefoilPortName(b->limit));
}

static void printText(const request_t *q, const setup_t *s, const point_t *points, int n) {
  int steps = n > 0 && points[0].step >= 0;
  printf("closed form, a lower bound: %s, %s (hidden %d, top-%d of %d), %s", s->cluster.name,
         s->moe.name, s->moe.hidden, s->moe.topk, s->moe.numExperts, s->mode);
  if (q->trace) {
    printf(", routing of %s\n", q->trace);
  } else {
    printf(", %lld tokens a GPU, uniform routing of seed %lld\n", q->tokens, q->seed);
  }
  printf("dispatch %s, combine bf16 (%s), rows %s; MB are those of the busiest port\n\n",
         q->dispatchDtype, q->combine, q->variant);
  printf("%6s %5s %8s | %-41s | %-41s\n", steps ? "step" : "GPUs", "EP", "replicas",
         "dispatch us NVLink MB    NIC MB  limit", " combine us NVLink MB    NIC MB  limit");
  for (int i = 0; i < n; i++) {
    const point_t *pt = &points[i];
    printf("%6d %5d %8d", steps ? pt->step : pt->gpus, pt->ep, pt->gpus / pt->ep);
    printOp(&pt->p, 0);
    printOp(&pt->p, 1);
    putchar('\n');
  }
}

/* Every step of the trace on its own number of ranks. */
static int planTrace(request_t *q, const setup_t *s) {
  const trefoil_trace_t *trace;
  const trefoil_trace_hints_t hints = {.numExperts = q->physicalExperts};
  if (trefoilTraceLoad(&trace, q->trace, &hints))
    return cliFail("plan", "%s%s", trefoilLastError(),
                   strstr(trefoilLastError(), "experts: say") ? " with --physical-experts" : "");
  int n = trace->numSteps, R = trace->shape.numRanks, rc = -1;
  q->tokens = (long long)trace->shape.maxTokens;
  point_t *points = calloc((size_t)n, sizeof *points);
  if (!points) rc = cliFail("plan", "out of memory for %d steps", n);
  if (rc < 0 && (trace->shape.topk != s->moe.topk || R > s->cluster.maxGpus)) {
    rc = cliUsage("plan", "the trace has top-%d on %d ranks; %s has top-%d, %s at most %d GPUs",
                  trace->shape.topk, R, s->moe.name, s->moe.topk, s->cluster.name,
                  s->cluster.maxGpus);
  }
  for (int i = 0; i < n && rc < 0; i++) {
    trefoil_routing_t routing;
    (void)trefoilTraceRouting(trace, i, &routing);
    routing.shape.ranksPerNode = trefoilRanksPerNode(R, s->cluster.gpusPerNode);
    points[i].gpus = points[i].ep = R;
    points[i].step = i;
    if (trefoilPredictRouting(&s->spec, &routing, &points[i].p)) {
      rc = cliFail("plan", "%s", trefoilLastError());
    }
  }
  if (rc < 0 && q->json) rc = printJson(q, s, points, n);
  if (rc < 0) {
    printText(q, s, points, n);
    rc = CLI_OK;
  }
  free(points);
  trefoilTraceDestroy(trace);
  return rc;
}

static int planGpus(const request_t *q, const setup_t *s) {
  int gpus[maxPoints], n = parseGpus(q->gpus, gpus);
  if (n == 0) return cliUsage("plan", "--gpus %s is not like 8..1024 or 8,16,72", q->gpus);
  point_t *points = calloc(maxPoints, sizeof *points);
  if (!points) return cliFail("plan", "out of memory");
  for (int i = 0; i < n; i++) {
    points[i].gpus = gpus[i];
    points[i].step = -1;
  }
  int rc = predictGpus(q, s, points, n);
  if (rc < 0 && q->json) rc = printJson(q, s, points, n);
  if (rc < 0) {
    printText(q, s, points, n);
    rc = CLI_OK;
  }
  free(points);
  return rc;
}

int cmdPlan(int argc, char **argv) {
  request_t q = {
      .cluster = "dgx-h100", .moe = "deepseek-v3", .mode = "ll", .dispatchDtype = "bf16"};
  q.combine = "exact";
  q.variant = "ours";
  q.seed = 1;
  const struct poptOption options[] = {
      {"closed-form", 0, POPT_ARG_NONE, &q.closedForm, 0, "from exact port loads (docs/models.md)",
       NULL},
      {"cluster", 0, POPT_ARG_STRING, &q.cluster, 0, "preset or file (default dgx-h100)", "NAME"},
      {"moe", 0, POPT_ARG_STRING, &q.moe, 0, "preset or file (default deepseek-v3)", "NAME"},
      {"mode", 0, POPT_ARG_STRING, &q.mode, 0, "ll (default) or ht", "MODE"},
      {"tokens", 0, POPT_ARG_LONGLONG, &q.tokens, CLI_POSITIVE,
       "tokens a GPU (default: 128 in ll, 4096 in ht)", "N"},
      {"gpus", 0, POPT_ARG_STRING, &q.gpus, 0,
       "A..B doubles from A to B, or a list A,B (default 8..1024, as far as the cluster goes)",
       "G"},
      {"ep", 0, POPT_ARG_INT, &q.ep, CLI_POSITIVE,
       "GPUs of an EP group (default: as many as can be)", "N"},
      {"physical-experts", 0, POPT_ARG_INT, &q.physicalExperts, CLI_POSITIVE,
       "with redundant copies (default: the model's experts)", "E"},
      {"dispatch-dtype", 0, POPT_ARG_STRING, &q.dispatchDtype, 0,
       "bf16 (default) or fp8 with a scale per 128", "T"},
      {"combine", 0, POPT_ARG_STRING, &q.combine, 0,
       "ll: exact (default), one row a (token, expert), or partial, one a (token, rank)", "HOW"},
      {"variant", 0, POPT_ARG_STRING, &q.variant, 0,
       "rows of dispatch: ours (default), one a (token, rank), or per-expert", "V"},
      {"trace", 0, POPT_ARG_STRING, &q.trace, 0, "routing of a file, step by step, on its ranks",
       "FILE"},
      {"seed", 0, POPT_ARG_LONGLONG, &q.seed, 0, "of the uniform routing (default 1)", "S"},
      CLI_COMMON_OPTIONS(&q.json)};
  const cli_args_t args = {
      "plan", NULL,
      "Predicts dispatch and combine on a cluster, without running anything: the bytes of every\n"
      "NVLink and network port by the plan, and the time that the busiest one needs. EP groups "
      "take\n"
      "as many GPUs as there are experts; more GPUs are replicas."};
  int rc = cliParse(&args, options, argc, argv, NULL);
  if (rc >= 0) return rc;
  setup_t s;
  rc = setUp(&q, &s);
  if (rc >= 0) return rc;
  if (q.tokens == 0) q.tokens = strcmp(q.mode, "ll") ? defaultTokensHt : defaultTokensLl;
  if (q.trace) return planTrace(&q, &s);
  char range[32];
  snprintf(range, sizeof range, "%d..%d", s.cluster.maxGpus < 8 ? s.cluster.maxGpus : 8,
           s.cluster.maxGpus < 1024 ? s.cluster.maxGpus : 1024);
  if (!q.gpus) q.gpus = range;
  return planGpus(&q, &s);
}
