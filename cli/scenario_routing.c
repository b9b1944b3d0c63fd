/* The routing of a scenario: generated, or a step of a file. */
#include "cli/scenario.h"

#include "cli/cli.h"

#include <stdlib.h>
#include <string.h>

/* Rows that each rank receives in dispatch when a token comes once; the most. */
static int countReceived(scenario_routing_t *r) {
  const trefoil_shape_t *s = &r->routing.shape;
  int R = s->numRanks;
  int64_t *rows = calloc((size_t)R, sizeof *rows), *last = malloc((size_t)R * sizeof *last);
  if (!rows || !last) return (free(rows), free(last), 0);
  for (int rank = 0; rank < R; rank++) last[rank] = -1;
  int64_t token = 0;
  for (int src = 0; src < R; src++) {
    const int32_t *idx = r->routing.topkIdx[src];
    for (int64_t t = 0; t < r->routing.numTokens[src]; t++, token++) {
      for (int k = 0; k < s->topk; k++, idx++) {
        if (*idx < 0) continue;
        int dst = trefoilRankOfExpert(s, *idx);
        rows[dst] += last[dst] != token;
        last[dst] = token;
      }
    }
  }
  r->maxReceived = 0;
  for (int rank = 0; rank < R; rank++)
    if (rows[rank] > r->maxReceived) r->maxReceived = rows[rank];
  free(rows);
  free(last);
  return 1;
}

static int finish(const char *verb, const scenario_t *s, int step, scenario_routing_t *r) {
  if (trefoilTraceRouting(r->trace, step, &r->routing)) {
    return cliFail(verb, "%s", trefoilLastError());
  }
  r->routing.shape.ranksPerNode =
      trefoilRanksPerNode(r->routing.shape.numRanks, s->cluster.gpusPerNode);
  if (!countReceived(r)) {
    return cliFail(verb, "out of memory for %d ranks", r->routing.shape.numRanks);
  }
  return -1;
}

/* Replaces the trace by one with redundant copies: placed by load where it is known to be unequal
 * and every rank has as many. */
static int copyExperts(const char *verb, const scenario_args_t *args, int isSkewed,
                       const trefoil_trace_t **trace) {
  int physical = args->physicalExperts;
  if (physical <= (*trace)->shape.numExperts) return -1;
  const trefoil_trace_t *copied;
  int isByLoad = isSkewed && physical % (*trace)->shape.numRanks == 0;
  if ((isByLoad ? trefoilTracePlaced : trefoilTraceCopies)(&copied, *trace, physical,
                                                           (uint64_t)args->seed)) {
    return cliFail(verb, "%s", trefoilLastError());
  }
  trefoilTraceDestroy(*trace);
  *trace = copied;
  return -1;
}

int scenarioGenerate(const char *verb, const scenario_args_t *args, const scenario_t *s, int ep,
                     double zipf, scenario_routing_t *r) {
  trefoil_trace_spec_t t = {.numSteps = 1, .seed = (uint64_t)args->seed};
  t.shape = (trefoil_shape_t){ep, trefoilRanksPerNode(ep, s->cluster.gpusPerNode),
                              s->moe.numExperts, s->moe.topk, args->tokens};
  t.popularity = zipf > 0 ? TREFOIL_POPULARITY_ZIPF : TREFOIL_POPULARITY_UNIFORM;
  t.skew = zipf;
  if (args->grouped) {
    t.numGroups = s->moe.numGroups;
    t.topkGroups = s->moe.topkGroups;
  }
  *r = (scenario_routing_t){0};
  trefoil_result_t result = trefoilTraceGenerate(&r->trace, &t);
  if (result == TREFOIL_INVALID_ARGUMENT) return cliUsage(verb, "%s", trefoilLastError());
  if (result) return cliFail(verb, "%s", trefoilLastError());
  int rc = copyExperts(verb, args, zipf > 0, &r->trace);
  if (rc < 0) rc = finish(verb, s, 0, r);
  if (rc >= 0) scenarioReleaseRouting(r);
  return rc;
}

/* Does the trace fit the model, the cluster, and what else was said? */
static int checkTrace(const char *verb, const scenario_args_t *args, const scenario_t *s,
                      const trefoil_trace_t *t) {
  int R = t->shape.numRanks;
  int E = t->shape.numExperts, physical = args->physicalExperts;
  if (t->shape.topk != s->moe.topk || R > s->cluster.maxGpus) {
    return cliUsage(verb, "the trace has top-%d on %d ranks; %s has top-%d, %s at most %d GPUs",
                    t->shape.topk, R, s->moe.name, s->moe.topk, s->cluster.name,
                    s->cluster.maxGpus);
  }
  if (E != s->moe.numExperts && E != physical) {
    return cliUsage(verb,
                    "the trace has %d experts, %s %d: name its model with --moe, or its copies "
                    "with --physical-experts",
                    E, physical ? "--physical-experts" : s->moe.name,
                    physical ? physical : s->moe.numExperts);
  }
  if (args->ep && args->ep != R) {
    return cliUsage(verb, "--ep %d: the trace has %d ranks, which are the EP group", args->ep, R);
  }
  return -1;
}

int scenarioOpenTrace(const char *verb, const scenario_args_t *args, const scenario_t *s,
                      const trefoil_trace_t **trace) {
  const trefoil_trace_hints_t hints = {.numExperts = args->physicalExperts};
  const trefoil_trace_t *read;
  int isStated = trefoilTraceLoad(&read, args->trace, NULL) == TREFOIL_OK;
  if (!isStated && trefoilTraceLoad(&read, args->trace, &hints)) {
    const char *sentence = trefoilLastError();
    return cliFail(verb, "%s%s", sentence,
                   strstr(sentence, "experts: say") ? " with --physical-experts" : "");
  }
  int rc = checkTrace(verb, args, s, read);
  if (rc < 0) rc = copyExperts(verb, args, 1, &read);
  if (rc >= 0) {
    trefoilTraceDestroy(read);
  } else {
    *trace = read;
  }
  return rc;
}

int scenarioReadTrace(const char *verb, const scenario_args_t *args, const scenario_t *s, int step,
                      scenario_routing_t *r) {
  *r = (scenario_routing_t){0};
  int rc = scenarioOpenTrace(verb, args, s, &r->trace);
  if (rc >= 0) return rc;
  if (step >= r->trace->numSteps) {
    rc = cliUsage(verb, "--step %d: the trace has the steps 0 to %d", step, r->trace->numSteps - 1);
  }
  if (rc < 0) rc = finish(verb, s, step, r);
  if (rc >= 0) scenarioReleaseRouting(r);
  return rc;
}

void scenarioReleaseRouting(scenario_routing_t *r) {
  trefoilTraceDestroy(r->trace);
  *r = (scenario_routing_t){0};
}
