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

/* ---- Where experts and their copies are ---- */

typedef enum how { IN_TURN, GLOBAL, HIERARCHICAL } how_t;

static const char *const hows[] = {"in-turn", "global", "hierarchical"};

/* Do nodes take whole groups of experts, as many each? */
static int isByGroups(const scenario_t *s, int nodes) {
  return s->moe.numGroups && s->moe.numGroups % nodes == 0 &&
         s->moe.numExperts % s->moe.numGroups == 0;
}

/* auto: only copies are placed; hierarchically where routing is by groups and nodes divide them, else
 * by load where it is known to be unequal; and in turn where ranks differ in their number. */
static how_t chooseHow(const scenario_args_t *args, const scenario_t *s, int isSkewed,
                       const trefoil_shape_t *shape, int nodes) {
  for (how_t how = IN_TURN; how <= HIERARCHICAL; how++)
    if (!strcmp(args->placement, hows[how])) return how;
  int physical = args->physicalExperts;
  if (physical <= shape->numExperts || physical % shape->numRanks) return IN_TURN;
  if ((args->grouped || args->trace) && nodes > 1 && isByGroups(s, nodes)) return HIERARCHICAL;
  return isSkewed ? GLOBAL : IN_TURN;
}

static int checkHow(const char *verb, const scenario_args_t *args, const scenario_t *s, how_t how,
                    const trefoil_shape_t *shape, int nodes) {
  if (how == HIERARCHICAL && !isByGroups(s, nodes)) {
    if (!s->moe.numGroups) {
      return cliUsage(verb, "--placement hierarchical: the file of %s states no groups of experts",
                      s->moe.name);
    }
    return cliUsage(verb,
                    "--placement hierarchical: %d nodes do not divide the %d groups of experts of "
                    "%s; --placement global",
                    nodes, s->moe.numGroups, s->moe.name);
  }
  if (shape->numExperts != s->moe.numExperts) {
    return cliUsage(verb, "--placement %s: the trace's %d experts are copies in their places",
                    args->placement, shape->numExperts);
  }
  return -1;
}

/* Replaces the trace by one of physical experts, in their places. */
static int placeExperts(const char *verb, const scenario_args_t *args, const scenario_t *s,
                        int isSkewed, const trefoil_trace_t **trace, const char **placement) {
  const trefoil_shape_t *shape = &(*trace)->shape;
  int R = shape->numRanks, nodes = R / trefoilRanksPerNode(R, s->cluster.gpusPerNode);
  int physical =
      args->physicalExperts > shape->numExperts ? args->physicalExperts : shape->numExperts;
  how_t how = chooseHow(args, s, isSkewed, shape, nodes);
  *placement = hows[how];
  if (how == IN_TURN && physical == shape->numExperts) return -1;
  if (how != IN_TURN && strcmp(args->placement, "auto")) {
    int rc = checkHow(verb, args, s, how, shape, nodes);
    if (rc >= 0) return rc;
  }
  trefoil_placement_t p = {.physicalExperts = physical, .seed = (uint64_t)args->seed};
  p.numGroups = how == HIERARCHICAL ? s->moe.numGroups : 0;
  p.numNodes = nodes;
  p.isAlike = !isSkewed;
  const trefoil_trace_t *placed;
  if (how == IN_TURN ? trefoilTraceCopies(&placed, *trace, physical, (uint64_t)args->seed)
                     : trefoilTracePlaced(&placed, *trace, &p)) {
    return cliFail(verb, "%s", trefoilLastError());
  }
  trefoilTraceDestroy(*trace);
  *trace = placed;
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
  t.numMasked = args->maskedSelections;
  *r = (scenario_routing_t){0};
  if (t.numMasked > args->tokens * s->moe.topk) {
    return cliUsage(verb, "--masked-selections %lld: a rank has %lld, top-%d of %lld tokens",
                    args->maskedSelections, args->tokens * s->moe.topk, s->moe.topk, args->tokens);
  }
  trefoil_result_t result = trefoilTraceGenerate(&r->trace, &t);
  if (result == TREFOIL_INVALID_ARGUMENT) return cliUsage(verb, "%s", trefoilLastError());
  if (result) return cliFail(verb, "%s", trefoilLastError());
  int rc = placeExperts(verb, args, s, zipf > 0, &r->trace, &r->placement);
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
                      const trefoil_trace_t **trace, const char **placement) {
  const trefoil_trace_hints_t hints = {.numExperts = args->physicalExperts};
  const trefoil_trace_t *read;
  int isStated = trefoilTraceLoad(&read, args->trace, NULL) == TREFOIL_OK;
  if (!isStated && trefoilTraceLoad(&read, args->trace, &hints)) {
    const char *sentence = trefoilLastError();
    return cliFail(verb, "%s%s", sentence,
                   strstr(sentence, "experts: say") ? " with --physical-experts" : "");
  }
  int rc = checkTrace(verb, args, s, read);
  if (rc < 0) rc = placeExperts(verb, args, s, 1, &read, placement);
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
  int rc = scenarioOpenTrace(verb, args, s, &r->trace, &r->placement);
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
