/* trefoil trace generate | import | describe: routing traces as files. */
#include "cli/cli.h"

#include "trefoil/models.h"
#include "trefoil/plan.h"
#include "trefoil/trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const popularities[] = {"uniform", "zipf", "hot-expert", "hot-rank"};

/* libzip has an unfinished file of its own meanwhile, which only it removes. */
static int save(const char *verb, const trefoil_trace_t *trace, cli_file_t *file) {
  cliHoldSignals(1);
  int rc = -1;
  if (!file->isTemporary) {
    rc = cliFail(verb, "%s: cannot be written: it is not a regular file", file->path);
  } else if (trefoilTraceSave(trace, file->writing)) {
    cliFileDrop(file);
    rc = cliFail(verb, "%s: cannot be written: %s", file->path, trefoilLastError());
  }
  cliHoldSignals(0);
  return rc < 0 ? cliFileKeep(file) : rc;
}

/* Saves, says what was written, releases the trace. */
static int saveAndReport(const char *verb, const trefoil_trace_t *trace, cli_file_t *file,
                         int json) {
  int rc = save(verb, trace, file);
  const char *path = file->path;
  if (rc >= 0) {
    trefoilTraceDestroy(trace);
    return rc;
  }
  rc = CLI_OK;
  if (json) {
    rc = cliPrintJson(json_pack("{s:s, s:i, s:I, s:i, s:i, s:i, s:i}", "file", path, "steps",
                                trace->numSteps, "tokens", (json_int_t)trace->numTokens, "ranks",
                                trace->shape.numRanks, "ranks_per_node", trace->shape.ranksPerNode,
                                "experts", trace->shape.numExperts, "topk", trace->shape.topk));
  } else {
    printf("%s: %d step%s, %lld tokens, %d ranks (%d per node), top-%d of %d experts\n", path,
           trace->numSteps, trace->numSteps == 1 ? "" : "s", (long long)trace->numTokens,
           trace->shape.numRanks, trace->shape.ranksPerNode, trace->shape.topk,
           trace->shape.numExperts);
  }
  trefoilTraceDestroy(trace);
  return rc;
}

/* The one operand, or a usage error. */
static int oneOperand(const char *verb, const char *const *operands, const char **path) {
  if (!operands || !operands[0] || !*operands[0] || operands[1])
    return cliUsage(verb, "name one file");
  *path = operands[0];
  return -1;
}

/* Options that another one would have to be there for; negative: not given. */
static int checkTogether(const trefoil_trace_spec_t *s, trefoil_popularity_t popularity) {
  if (s->skew >= 0 && popularity == TREFOIL_POPULARITY_UNIFORM) {
    return cliUsage("trace generate", "--skew is of --popularity zipf, hot-expert or hot-rank");
  }
  if (s->hot >= 0 && popularity < TREFOIL_POPULARITY_HOT_EXPERT) {
    return cliUsage("trace generate", "--hot is of --popularity hot-expert or hot-rank");
  }
  if (!s->numGroups != !s->topkGroups) {
    return cliUsage("trace generate", "--groups and --topk-groups belong together");
  }
  if (s->burstLow >= 0 && !s->burstPeriod) {
    return cliUsage("trace generate", "--burst-low is of --burst-period");
  }
  return -1;
}

static int generate(int argc, char **argv) {
  trefoil_trace_spec_t s = {.shape = {8, 0, 256, 8, 128}, .numSteps = 1, .burstLow = -1, .hot = -1};
  char *popularity = "uniform", *moe = NULL;
  long long tokens = 128, seed = 1;
  int json = 0, experts = 0, topk = 0;
  s.skew = -1;
  const struct poptOption options[] = {
      {"ranks", 'r', POPT_ARG_INT, &s.shape.numRanks, CLI_POSITIVE, "ranks (default 8)", "R"},
      {"ranks-per-node", 0, POPT_ARG_INT, &s.shape.ranksPerNode, CLI_POSITIVE,
       "ranks of a node (default: 8, or all if 8 does not divide them)", "G"},
      {"moe", 0, POPT_ARG_STRING, &moe, 0, "experts and top-k of a model's layer", "NAME"},
      {"experts", 0, POPT_ARG_INT, &experts, CLI_POSITIVE, "experts (default 256)", "E"},
      {"topk", 0, POPT_ARG_INT, &topk, CLI_POSITIVE, "top-k (default 8)", "K"},
      {"tokens", 0, POPT_ARG_LONGLONG, &tokens, CLI_NOT_NEGATIVE,
       "tokens of a full rank (default 128)", "N"},
      {"steps", 0, POPT_ARG_INT, &s.numSteps, CLI_POSITIVE, "steps (default 1)", "S"},
      {"popularity", 0, POPT_ARG_STRING, &popularity, 0,
       "of experts: uniform (default), zipf, hot-expert, hot-rank", "KIND"},
      {"skew", 0, POPT_ARG_DOUBLE, &s.skew, CLI_NOT_NEGATIVE,
       "zipf: exponent (default 1); hot: weight of the hot one, others 1 (default 10)", "X"},
      {"hot", 0, POPT_ARG_INT, &s.hot, CLI_NOT_NEGATIVE, "the hot expert or rank (default 0)", "I"},
      {"ragged", 0, POPT_ARG_DOUBLE, &s.ragged, CLI_NOT_NEGATIVE,
       "token counts between N and (1 - X) N, each alike (default 0)", "X"},
      {"empty-ranks", 0, POPT_ARG_INT, &s.numEmptyRanks, CLI_NOT_NEGATIVE,
       "ranks without tokens, each step others", "M"},
      {"burst-period", 0, POPT_ARG_INT, &s.burstPeriod, CLI_NOT_NEGATIVE,
       "only one step in P is full, the others have --burst-low of its tokens", "P"},
      {"burst-low", 0, POPT_ARG_DOUBLE, &s.burstLow, CLI_NOT_NEGATIVE,
       "see --burst-period (default 0.25)", "X"},
      {"groups", 0, POPT_ARG_INT, &s.numGroups, CLI_POSITIVE,
       "of experts; a row's experts are of --topk-groups of them", "N"},
      {"topk-groups", 0, POPT_ARG_INT, &s.topkGroups, CLI_POSITIVE, "see --groups", "M"},
      {"unused", 0, POPT_ARG_DOUBLE, &s.unusedFraction, CLI_NOT_NEGATIVE,
       "share of entries that are -1", "X"},
      {"weights", 0, POPT_ARG_NONE, &s.withWeights, 0, "write topk_weights too", NULL},
      {"seed", 0, POPT_ARG_LONGLONG, &seed, CLI_NOT_NEGATIVE, "(default 1)", "S"},
      CLI_COMMON_OPTIONS(&json)};
  const cli_args_t args = {"trace generate", "FILE.npz",
                           "Writes seeded routing: seed, step, rank and token alone fix a row."};
  const char *const *operands, *path = NULL;
  int rc = cliParse(&args, options, argc, argv, &operands);
  if (rc >= 0 || (rc = oneOperand("trace generate", operands, &path)) >= 0) return rc;
  unsigned kind = 0;
  while (kind < 4 && strcmp(popularity, popularities[kind])) kind++;
  if (kind == 4) {
    return cliUsage("trace generate",
                    "--popularity %s: expected uniform, zipf, hot-expert or hot-rank", popularity);
  }
  rc = checkTogether(&s, (trefoil_popularity_t)kind);
  if (rc >= 0) return rc;
  trefoil_moe_t model;
  if (moe && trefoilMoeLoad(&model, moe))
    return cliUsage("trace generate", "%s", trefoilLastError());
  s.shape.numExperts = experts ? experts : moe ? model.numExperts : 256;
  s.shape.topk = topk ? topk : moe ? model.topk : 8;
  if (!s.shape.ranksPerNode) s.shape.ranksPerNode = s.shape.numRanks % 8 ? s.shape.numRanks : 8;
  s.shape.maxTokens = tokens;
  s.seed = (uint64_t)seed;
  s.popularity = (trefoil_popularity_t)kind;
  if (s.skew < 0) s.skew = kind == TREFOIL_POPULARITY_ZIPF ? 1 : 10;
  if (s.hot < 0) s.hot = 0;
  if (s.burstLow < 0) s.burstLow = 0.25;
  static cli_file_t file;
  rc = cliFileBegin(&file, "trace generate", path);
  if (rc >= 0) return rc;
  const trefoil_trace_t *trace;
  trefoil_result_t result = trefoilTraceGenerate(&trace, &s);
  if (result == TREFOIL_INVALID_ARGUMENT)
    return cliUsage("trace generate", "%s", trefoilLastError());
  if (result) return cliFail("trace generate", "%s", trefoilLastError());
  return saveAndReport("trace generate", trace, &file, json);
}

/* What a file of arrays alone does not say. */
#define HINT_OPTIONS(h)                                                                              \
  {"ranks", 'r', POPT_ARG_INT, &(h)->numRanks, CLI_POSITIVE, "ranks, where the file does not say",   \
   "R"},                                                                                             \
      {"ranks-per-node", 0, POPT_ARG_INT, &(h)->ranksPerNode, CLI_POSITIVE, "ranks of a node", "G"}, \
  {                                                                                                  \
    "experts", 0, POPT_ARG_INT, &(h)->numExperts, CLI_POSITIVE,                                      \
        "experts, where the file does not say", "E"                                                  \
  }

/* A trace that was not loaded: the library's sentence, and the option that says what it misses. */
static int refused(const char *verb) {
  static const char *const missing[][2] = {{"experts: say", "--experts"},
                                           {"ranks: say", "--ranks"}};
  const char *sentence = trefoilLastError(), *option = NULL;
  for (int i = 0; i < 2; i++)
    if (strstr(sentence, missing[i][0])) option = missing[i][1];
  return cliFail(verb, "%s%s%s", sentence, option ? " with " : "", option ? option : "");
}

static int import(int argc, char **argv) {
  trefoil_trace_hints_t h = {0};
  long long tokensPerRank = 0, maxTokens = 0;
  char *array = NULL;
  int json = 0;
  const struct poptOption options[] = {
      HINT_OPTIONS(&h),
      {"tokens-per-rank", 0, POPT_ARG_LONGLONG, &tokensPerRank, CLI_POSITIVE,
       "cut [T, K] into steps of R blocks of N tokens (default: one step, ranks alike)", "N"},
      {"max-tokens", 0, POPT_ARG_LONGLONG, &maxTokens, CLI_POSITIVE,
       "most tokens a rank may have (default: the most that one has)", "N"},
      {"array", 0, POPT_ARG_STRING, &array, 0, "the .npz member to read (default topk_idx)",
       "NAME"},
      CLI_COMMON_OPTIONS(&json)};
  const cli_args_t args = {
      "trace import", "FROM.npz|FROM.npy TO.npz",
      "Makes a trace of expert ids that NumPy wrote: [T, K], [R, B, K] or [steps, R, B, K] "
      "integers,\n"
      "-1 for an unused entry; an .npz may hold offsets [steps, R + 1] and topk_weights too."};
  const char *const *operands;
  int rc = cliParse(&args, options, argc, argv, &operands);
  if (rc >= 0) return rc;
  if (!operands || !operands[0] || !operands[1] || operands[2]) {
    return cliUsage("trace import", "name two files");
  }
  h.tokensPerRank = tokensPerRank;
  h.maxTokens = maxTokens;
  h.array = array;
  static cli_file_t file;
  rc = cliFileBegin(&file, "trace import", operands[1]);
  if (rc >= 0) return rc;
  const trefoil_trace_t *trace;
  if (trefoilTraceLoad(&trace, operands[0], &h)) return refused("trace import");
  return saveAndReport("trace import", trace, &file, json);
}

/* ---- describe ---- */

typedef struct link_bytes {
  const char *what;
  trefoil_mode_t mode;
  uint64_t tier[TREFOIL_NUM_TIERS];
  uint64_t most; /* of a pair of ranks */
  int src, dst;
  json_t *pairs; /* [R][R], or NULL: not wanted */
} link_bytes_t;

/* Bytes of the dispatches of all steps in [first, end), summed by pair. */
static int sumLinks(const trefoil_trace_t *t, int first, int end, size_t rowBytes,
                    link_bytes_t *l) {
  size_t R = (size_t)t->shape.numRanks;
  uint64_t *sum = calloc(2 * R * R, sizeof *sum), *one = sum + R * R;
  if (!sum) return cliFail("trace describe", "out of memory for %zu ranks", R);
  int rc = -1;
  for (int step = first; step < end && rc < 0; step++) {
    trefoil_routing_t routing;
    trefoil_plan_config_t config = {.mode = l->mode, .rowBytes = rowBytes};
    trefoil_plan_t *plan = NULL;
    (void)trefoilTraceRouting(t, step, &routing);
    if (trefoilPlanCreate(&plan, &routing, &config) || trefoilPlanTraffic(plan, -1, one)) {
      rc = cliFail("trace describe", "%s", trefoilLastError());
    } else {
      for (size_t i = 0; i < R * R; i++) sum[i] += one[i];
    }
    trefoilPlanDestroy(plan);
  }
  for (size_t i = 0; i < R * R && rc < 0; i++) {
    int src = (int)(i / R), dst = (int)(i % R);
    int tier = src == dst ? TREFOIL_TIER_SELF
               : trefoilNodeOf(&t->shape, src) == trefoilNodeOf(&t->shape, dst)
                   ? TREFOIL_TIER_NVLINK
                   : TREFOIL_TIER_NET;
    l->tier[tier] += sum[i];
    if (tier == TREFOIL_TIER_SELF || sum[i] <= l->most) continue;
    l->most = sum[i];
    l->src = src;
    l->dst = dst;
  }
  for (size_t a = 0; a < R && l->pairs; a++) {
    json_t *row = json_array();
    for (size_t b = 0; b < R; b++)
      json_array_append_new(row, json_integer((json_int_t)sum[a * R + b]));
    json_array_append_new(l->pairs, row);
  }
  free(sum);
  return rc;
}

static json_t *linksJson(const link_bytes_t *l) {
  return json_pack("{s:I, s:I, s:I, s:I, s:[i, i], s:o}", "self", (json_int_t)l->tier[0], "nvlink",
                   (json_int_t)l->tier[1], "net", (json_int_t)l->tier[2], "busiest_pair_bytes",
                   (json_int_t)l->most, "busiest_pair", l->src, l->dst, "links", l->pairs);
}

static int describeJson(const trefoil_trace_t *t, int step, size_t rowBytes,
                        const trefoil_trace_stats_t *d, const link_bytes_t *links) {
  json_t *root = json_pack(
      "{s:i, s:i, s:i, s:i, s:I, s:i, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:i, s:f, s:f, s:i}",
      "ranks", t->shape.numRanks, "ranks_per_node", t->shape.ranksPerNode, "experts",
      t->shape.numExperts, "topk", t->shape.topk, "max_tokens", (json_int_t)t->shape.maxTokens,
      "steps", step < 0 ? t->numSteps : 1, "tokens", (json_int_t)d->numTokens, "entries",
      (json_int_t)d->numEntries, "empty_ranks", (json_int_t)d->emptyRanks, "min_tokens",
      (json_int_t)d->minTokens, "most_tokens", (json_int_t)d->maxTokens, "gini_experts",
      d->giniExperts, "max_over_mean_experts", d->maxOverMeanExperts, "hottest_expert",
      d->hottestExpert, "gini_ranks", d->giniRanks, "max_over_mean_ranks", d->maxOverMeanRanks,
      "hottest_rank", d->hottestRank);
  json_object_set_new(root, "worst_step", json_integer(d->worstStep));
  json_object_set_new(root, "worst_max_over_mean_ranks", json_real(d->worstMaxOverMeanRanks));
  json_object_set_new(root, "ranks_per_token", json_real(d->ranksPerToken));
  json_object_set_new(root, "nodes_per_token", json_real(d->nodesPerToken));
  json_object_set_new(root, "row_bytes", json_integer((json_int_t)rowBytes));
  json_object_set_new(root, "dispatch_bytes_ll", linksJson(&links[0]));
  json_object_set_new(root, "dispatch_bytes_ht", linksJson(&links[1]));
  json_t *provenance = json_loads(t->provenance, 0, NULL);
  json_object_set_new(root, "provenance", provenance ? provenance : json_object());
  return cliPrintJson(root);
}

static void printLinks(const link_bytes_t *l) {
  char t[4][CLI_NUMBER_BYTES];
  printf("  %-20s self %s, nvlink %s, net %s; busiest pair %d -> %d with %s\n", l->what,
         cliBytes(t[0], (double)l->tier[0]), cliBytes(t[1], (double)l->tier[1]),
         cliBytes(t[2], (double)l->tier[2]), l->src, l->dst, cliBytes(t[3], (double)l->most));
}

static int describe(const trefoil_trace_t *t, int step, size_t rowBytes, int json) {
  trefoil_trace_stats_t d;
  if (trefoilTraceDescribe(t, step, &d))
    return cliUsage("trace describe", "%s", trefoilLastError());
  int first = step < 0 ? 0 : step, end = step < 0 ? t->numSteps : step + 1;
  link_bytes_t links[2] = {{.what = "dispatch, LL:", .mode = TREFOIL_LL_RANK_MAJOR},
                           {.what = "dispatch, HT:", .mode = TREFOIL_HT_FLAT}};
  for (int i = 0; i < 2; i++) {
    links[i].pairs = json ? json_array() : NULL;
    int rc = sumLinks(t, first, end, rowBytes, &links[i]);
    if (rc >= 0) return rc;
  }
  if (json) return describeJson(t, step, rowBytes, &d, links);
  printf(
      "%d ranks (%d per node), top-%d of %d experts; %d step%s, %lld tokens, %lld to %lld a rank "
      "and step",
      t->shape.numRanks, t->shape.ranksPerNode, t->shape.topk, t->shape.numExperts, end - first,
      end - first == 1 ? "" : "s", (long long)d.numTokens, (long long)d.minTokens,
      (long long)d.maxTokens);
  if (d.emptyRanks)
    printf(", none %lld time%s", (long long)d.emptyRanks, d.emptyRanks == 1 ? "" : "s");
  putchar('\n');
  printf("  experts              Gini %.4f, max/mean %.3f (expert %d)\n", d.giniExperts,
         d.maxOverMeanExperts, d.hottestExpert);
  printf("  ranks                Gini %.4f, max/mean %.3f (rank %d); worst step %d: %.3f\n",
         d.giniRanks, d.maxOverMeanRanks, d.hottestRank, d.worstStep, d.worstMaxOverMeanRanks);
  printf("  distinct per token   %.3f ranks, %.3f nodes\n", d.ranksPerToken, d.nodesPerToken);
  printf("  with rows of %zu bytes (--row-bytes):\n", rowBytes);
  for (int i = 0; i < 2; i++) printLinks(&links[i]);
  printf("  provenance           %s\n", t->provenance);
  return CLI_OK;
}

static int describeFile(int argc, char **argv) {
  int step = -1, json = 0;
  long long rowBytes = 14336;
  trefoil_trace_hints_t h = {0};
  const struct poptOption options[] = {
      {"step", 0, POPT_ARG_INT, &step, CLI_NOT_NEGATIVE, "one step (default: all, summed)", "S"},
      {"row-bytes", 0, POPT_ARG_LONGLONG, &rowBytes, CLI_POSITIVE,
       "bytes of a token row (default 14336: 7168 bf16)", "B"},
      HINT_OPTIONS(&h),
      CLI_COMMON_OPTIONS(&json)};
  const cli_args_t args = {
      "trace describe", "FILE",
      "Says how even the routing is: Gini and max/mean over experts and ranks, distinct ranks and\n"
      "nodes of a token, and the bytes that a dispatch puts on the links in LL and HT."};
  const char *const *operands, *path = NULL;
  int rc = cliParse(&args, options, argc, argv, &operands);
  if (rc >= 0 || (rc = oneOperand("trace describe", operands, &path)) >= 0) return rc;
  if (rowBytes > 1 << 30) {
    return cliUsage("trace describe", "--row-bytes %lld: must be in [1, 2^30]", rowBytes);
  }
  const trefoil_trace_t *trace;
  if (trefoilTraceLoad(&trace, path, &h)) return refused("trace describe");
  rc = describe(trace, step, (size_t)rowBytes, json);
  trefoilTraceDestroy(trace);
  return rc;
}

int cmdTrace(int argc, char **argv) {
  cliCatchSignals("trace");
  if (cliIsSub(argc, argv, "generate")) return generate(argc - 1, argv + 1);
  if (cliIsSub(argc, argv, "import")) return import(argc - 1, argv + 1);
  if (cliIsSub(argc, argv, "describe")) return describeFile(argc - 1, argv + 1);
  if (cliIsSub(argc, argv, "--help") || cliIsSub(argc, argv, "-h")) {
    puts("usage: trefoil trace generate [OPTIONS] FILE.npz\n"
         "       trefoil trace import [OPTIONS] FROM TO.npz\n"
         "       trefoil trace describe [OPTIONS] FILE\n\n"
         "Routing traces as files that NumPy reads and writes. Each takes --help and --json.");
    return CLI_OK;
  }
  return cliUsage("trace", "say generate, import or describe");
}
