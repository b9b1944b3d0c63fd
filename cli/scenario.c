/* The words of a scenario: checked, loaded, and turned into rows and bytes. */
#include "cli/scenario.h"

#include "cli/cli.h"

#include <string.h>

enum { defaultTokensLl = 128, defaultTokensHt = 4096 };

static int isOneOf(const char *text, const char *a, const char *b) {
  return !strcmp(text, a) || !strcmp(text, b);
}

/* "ll", "ht", or a mode with its layout; -1: neither. */
static int parseMode(const char *text) {
  if (!strcmp(text, "ll")) return TREFOIL_LL_EXPERT_MAJOR;
  if (!strcmp(text, "ht")) return TREFOIL_HT_FLAT;
  for (int mode = 0; mode < TREFOIL_NUM_MODES; mode++)
    if (!strcmp(text, trefoilModeName((trefoil_mode_t)mode))) return mode;
  return -1;
}

static int parseVariant(const char *text) {
  static const char *const names[] = {"ours", "per-expert", "rails"};
  for (int v = 0; v < (int)(sizeof names / sizeof *names); v++)
    if (!strcmp(text, names[v])) return v;
  return -1;
}

/* 2 bytes an element; fp8: 1 and a 4-byte scale for every 128; fp4: a half and a scale of a byte for
 * every 16, as nvfp4. */
static size_t rowBytes(const trefoil_moe_t *moe, const char *dtype) {
  size_t H = (size_t)moe->hidden;
  if (!strcmp(dtype, "fp4")) return (H + 1) / 2 + (H + 15) / 16;
  return !strcmp(dtype, "fp8") ? H + 4 * ((H + 127) / 128) : 2 * H;
}

int scenarioLoad(const char *verb, scenario_args_t *args, scenario_t *s) {
  int mode = parseMode(args->mode);
  if (mode < 0) {
    return cliUsage(verb,
                    "--mode %s: expected ll, ht, ll-expert-major, ll-rank-major, ht-flat or "
                    "ht-expert-major",
                    args->mode);
  }
  if (!isOneOf(args->dispatchDtype, "bf16", "fp8") && strcmp(args->dispatchDtype, "fp4")) {
    return cliUsage(verb, "--dispatch-dtype %s: expected bf16, fp8 or fp4", args->dispatchDtype);
  }
  if (!isOneOf(args->combine, "exact", "partial")) {
    return cliUsage(verb, "--combine %s is neither exact nor partial", args->combine);
  }
  if (!isOneOf(args->placement, "auto", "in-turn") &&
      !isOneOf(args->placement, "global", "hierarchical")) {
    return cliUsage(verb, "--placement %s: expected auto, in-turn, global or hierarchical",
                    args->placement);
  }
  int variant = parseVariant(args->variant);
  if (variant < 0) {
    return cliUsage(verb, "--variant %s is none of ours, per-expert and rails", args->variant);
  }
  if (trefoilClusterLoad(&s->cluster, args->cluster) || trefoilMoeLoad(&s->moe, args->moe)) {
    return cliUsage(verb, "%s", trefoilLastError());
  }
  if (args->physicalExperts && args->physicalExperts < s->moe.numExperts) {
    return cliUsage(verb, "--physical-experts %d: %s has %d experts, so at least that many",
                    args->physicalExperts, s->moe.name, s->moe.numExperts);
  }
  if (args->grouped && !s->moe.numGroups) {
    return cliUsage(verb, "--grouped: the file of %s states no groups of experts", s->moe.name);
  }
  if (args->grouped && args->trace) {
    return cliUsage(verb, "--grouped is of generated routing, a trace has its own");
  }
  s->isLl = mode == TREFOIL_LL_EXPERT_MAJOR || mode == TREFOIL_LL_RANK_MAJOR;
  if (args->tokens == 0) args->tokens = s->isLl ? defaultTokensLl : defaultTokensHt;
  if (args->tokens > TREFOIL_MAX_TOKENS) {
    return cliUsage(verb, "--tokens %lld: at most %lld", args->tokens,
                    (long long)TREFOIL_MAX_TOKENS);
  }
  s->spec = (trefoil_predict_spec_t){.cluster = &s->cluster,
                                     .mode = (trefoil_mode_t)mode,
                                     .variant = (trefoil_variant_t)variant,
                                     .combinePartial = !strcmp(args->combine, "partial"),
                                     .dispatchRowBytes = rowBytes(&s->moe, args->dispatchDtype),
                                     .combineRowBytes = rowBytes(&s->moe, "bf16")};
  return -1;
}

int scenarioEpSize(const char *verb, const scenario_args_t *args, const scenario_t *s, int numGpus,
                   int *ep) {
  if (numGpus > s->cluster.maxGpus) {
    return cliUsage(verb, "%d GPUs: cluster %s speaks for at most %d", numGpus, s->cluster.name,
                    s->cluster.maxGpus);
  }
  int physical = args->physicalExperts ? args->physicalExperts : s->moe.numExperts;
  *ep = trefoilEpSize(numGpus, physical, args->ep);
  if (args->ep && *ep != args->ep && numGpus >= args->ep) {
    return cliUsage(verb,
                    "%d GPUs cannot be cut into EP groups of %d with %d physical experts: --ep "
                    "must divide the GPUs and be at most the experts (--physical-experts)",
                    numGpus, args->ep, physical);
  }
  return -1;
}

void scenarioPrintUneven(const scenario_t *s, int ep) {
  int most = s->cluster.gpusPerNode, of = trefoilRanksPerNode(ep, most);
  if (ep <= most || of == most) return;
  printf("EP %d on nodes of %d: %d NVLink domains of %d, the largest that %d nodes allow\n", ep,
         most, ep / of, of, (ep + most - 1) / most);
}
