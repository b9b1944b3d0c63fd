/* "I[:F],I[:F]" becomes changes, checked against what the group has. */
#include "cli/what_if.h"

#include "cli/cli.h"

#include <stdio.h>
#include <string.h>

typedef enum of_what { OF_RANK, OF_PORT, OF_RAIL } of_what_t;

static const struct {
  const char *option, *key;
  of_what_t of;
  int takesFactor, isRate;
  double factor; /* where none is given */
} kinds[WHAT_IF_KINDS] = {
    [TREFOIL_CHANGE_NIC_RATE] = {"--slow-nic", "slow_nic", OF_PORT, 1, 1, 0.5},
    [TREFOIL_CHANGE_RAIL_RATE] = {"--slow-rail", "slow_rail", OF_RAIL, 1, 1, 0.5},
    [TREFOIL_CHANGE_NVLINK_RATE] = {"--slow-nvlink", "slow_nvlink", OF_RANK, 1, 1, 0.5},
    [TREFOIL_CHANGE_SM_RATE] = {"--straggler", "straggler", OF_RANK, 1, 1, 0.5},
    [TREFOIL_CHANGE_START_US] = {"--late", "late", OF_RANK, 1, 0, 10},
    [TREFOIL_CHANGE_NIC_FAIL] = {"--nic-fail", "nic_fail", OF_PORT, 0, 1, 1},
    [TREFOIL_CHANGE_RAIL_FAIL] = {"--rail-fail", "rail_fail", OF_RAIL, 0, 1, 1},
};

/* How many of these the group has, and what they are called. */
static int countOf(of_what_t of, const trefoil_cluster_t *c, const trefoil_shape_t *s,
                   const char **name) {
  static const char *const names[] = {"ranks", "network ports", "rails"};
  *name = names[of];
  if (of == OF_RANK) return s->numRanks;
  int perNode = (s->ranksPerNode + c->gpusPerNic - 1) / c->gpusPerNic;
  if (c->nicGbPerS <= 0) perNode = 0;
  return of == OF_RAIL ? perNode : perNode * (s->numRanks / s->ranksPerNode);
}

static int parseOne(const char *verb, int kind, const char **text, trefoil_change_t *change) {
  double factor = kinds[kind].factor;
  int index, used = 0, more = 0;
  if (sscanf(*text, "%d%n", &index, &used) != 1) used = 0;
  if (used && (*text)[used] == ':' && kinds[kind].takesFactor) {
    if (sscanf(*text + used, ":%lf%n", &factor, &more) != 1) used = 0;
    used += more;
  }
  if (!used || ((*text)[used] && (*text)[used] != ',')) {
    return cliUsage(verb, "%s %s: expected %s", kinds[kind].option, *text,
                    kinds[kind].takesFactor ? "I, I:FACTOR, or a list of these"
                                            : "an index or a list of these");
  }
  if (!(factor <= 1e9) || (kinds[kind].isRate ? factor <= 0 : factor < 0)) {
    return cliUsage(verb, "%s %d:%g: expected %s", kinds[kind].option, index, factor,
                    kinds[kind].isRate ? "a factor above 0, at most 1e6"
                                       : "microseconds, 0 or more, at most 1e9");
  }
  *change = (trefoil_change_t){(trefoil_change_kind_t)kind, index, factor};
  *text += used + ((*text)[used] == ',');
  return -1;
}

static int parseKind(const char *verb, what_if_t *w, int kind, int limit, const char *name) {
  const char *text = w->given[kind];
  do {
    if (w->numChanges == maxChanges) {
      return cliUsage(verb, "more than %d changes of the cluster", maxChanges);
    }
    trefoil_change_t *change = &w->changes[w->numChanges];
    int rc = parseOne(verb, kind, &text, change);
    if (rc >= 0) return rc;
    if (change->index < 0 || change->index >= limit) {
      if (limit == 0) {
        return cliUsage(verb, "%s %d: there are no %s", kinds[kind].option, change->index, name);
      }
      return cliUsage(verb, "%s %d: the EP group has %d %s, 0 to %d", kinds[kind].option,
                      change->index, limit, name, limit - 1);
    }
    w->numChanges++;
  } while (*text);
  return -1;
}

/* "I-J[:GBS[:START[:END]]]" */
static int parseFlow(const char *verb, const char **text, trefoil_flow_t *flow) {
  double *const numbers[] = {&flow->gbPerS, &flow->startUs, &flow->endUs};
  const char *at = *text;
  int used = 0;
  if (sscanf(at, "%d-%d%n", &flow->from, &flow->to, &used) != 2) used = 0;
  at += used;
  for (int i = 0; i < 3 && used > 0 && *at == ':'; i++) {
    used = 0;
    if (sscanf(at, ":%lf%n", numbers[i], &used) != 1) used = 0;
    at += used;
  }
  if (used <= 0 || (*at && *at != ',')) {
    return cliUsage(verb, "--background %s: expected I-J[:GBS[:START[:END]]], products, or a list",
                    *text);
  }
  *text = at + (*at == ',');
  return -1;
}

static int parseBackground(const char *verb, what_if_t *w, int numRanks) {
  static const char products[] = "products";
  const size_t n = sizeof products - 1;
  const char *text = w->background;
  do {
    if (!strncmp(text, products, n) && (!text[n] || text[n] == ',')) {
      w->hasProducts = 1;
      text += n + (text[n] == ',');
      continue;
    }
    if (w->numFlows == maxFlows) return cliUsage(verb, "more than %d background flows", maxFlows);
    trefoil_flow_t *flow = &w->flows[w->numFlows++];
    *flow = (trefoil_flow_t){0, 0, 0, 0, 0};
    int rc = parseFlow(verb, &text, flow);
    if (rc >= 0) return rc;
    if (flow->from < 0 || flow->from >= numRanks || flow->to < 0 || flow->to >= numRanks) {
      return cliUsage(verb, "--background %d-%d: the EP group has %d ranks, 0 to %d", flow->from,
                      flow->to, numRanks, numRanks - 1);
    }
  } while (*text);
  return -1;
}

int whatIfParse(const char *verb, what_if_t *w, const trefoil_cluster_t *cluster,
                const trefoil_shape_t *shape) {
  w->numChanges = w->numFlows = w->hasProducts = 0;
  for (int kind = 0; kind < WHAT_IF_KINDS; kind++) {
    if (!w->given[kind]) continue;
    const char *name;
    int limit = countOf(kinds[kind].of, cluster, shape, &name);
    int rc = parseKind(verb, w, kind, limit, name);
    if (rc >= 0) return rc;
  }
  return w->background ? parseBackground(verb, w, shape->numRanks) : -1;
}

int whatIfNeedsEngine(const what_if_t *w) {
  for (int kind = 0; kind < WHAT_IF_KINDS; kind++)
    if (w->given[kind]) return 1;
  return w->background || w->oversubscription > 0 || w->skewUs > 0;
}

json_t *whatIfJson(const what_if_t *w) {
  json_t *j = json_object();
  for (int kind = 0; kind < WHAT_IF_KINDS; kind++)
    if (w->given[kind]) json_object_set_new(j, kinds[kind].key, json_string(w->given[kind]));
  if (w->oversubscription > 0)
    json_object_set_new(j, "oversubscribe", json_real(w->oversubscription));
  if (w->skewUs > 0) json_object_set_new(j, "skew_us", json_real(w->skewUs));
  if (w->background) json_object_set_new(j, "background", json_string(w->background));
  if (w->zipf > 0) json_object_set_new(j, "zipf", json_real(w->zipf));
  return j;
}
