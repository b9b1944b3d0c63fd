/* trefoil bench: times of dispatch and combine beside the rate of a plain copy in the same run. What
 * fails its check is not timed. */
#include "cli/check_verb.h"

#include "validate/checker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct times {
  double p50, p99; /* seconds */
  uint64_t bytes;  /* by the plan, rows that stay on their rank included */
  double rate, ratio;
} times_t;

static int byValue(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static times_t summary(double *seconds, int n, const uint64_t *bytes, int R, double copyRate) {
  times_t t = {0};
  for (int i = 0; i < R * R; i++) t.bytes += bytes[i];
  if (n == 0) return t;
  qsort(seconds, (size_t)n, sizeof *seconds, byValue);
  t.p50 = seconds[n / 2];
  t.p99 = seconds[n * 99 / 100];
  t.rate = t.p50 > 0 ? (double)t.bytes / t.p50 : 0;
  t.ratio = copyRate > 0 ? t.rate / copyRate : 0;
  return t;
}

static json_t *timesJson(const times_t *t) {
  return json_pack("{s:f, s:f, s:I, s:f, s:f}", "p50_s", t->p50, "p99_s", t->p99, "bytes",
                   (json_int_t)t->bytes, "bytes_per_second", t->rate, "ratio_to_copy", t->ratio);
}

static void printTimes(const char *what, const times_t *t) {
  printf("  %-9s p50 %9.1f us  p99 %9.1f us  %8.2f MB  %6.2f GB/s  %4.2f of a copy\n", what,
         1e6 * t->p50, 1e6 * t->p99, 1e-6 * (double)t->bytes, 1e-9 * t->rate, t->ratio);
}

static void showStep(void *context, const char *what, uint64_t done, uint64_t total) {
  (void)context;
  cliProgress(what, done, total, "");
}

/* One mode; 0 if it agreed and was timed. */
static int benchMode(ep_real_options_t *o, ep_real_result_t *r, json_t *list, int json) {
  const trefoil_shape_t *s = &o->shape;
  if (cliRealFits("bench", o) >= 0) return 1;
  if (epRealRun(o, r) != TREFOIL_OK) {
    cliProgressEnd();
    cliFail("bench", "%s: %s", trefoilModeName(o->mode), trefoilLastError());
    return 1;
  }
  cliProgressEnd();
  if (*o->interrupted) return 1;
  times_t d = summary(r->dispatchTimes, r->numRepeats, r->dispatchBytes, s->numRanks, r->copyRate);
  times_t c = summary(r->combineTimes, r->numRepeats, r->combineBytes, s->numRanks, r->copyRate);
  if (json) {
    json_t *j = json_pack(
        "{s:s, s:i, s:i, s:I, s:I, s:i, s:i, s:b}", "mode", trefoilModeName(o->mode), "ranks",
        s->numRanks, "ranks_per_node", s->ranksPerNode, "tokens", (json_int_t)s->maxTokens,
        "hidden", (json_int_t)o->hidden, "experts", s->numExperts, "topk", s->topk, "ok", r->ok);
    if (r->ok)
      json_object_update_new(j, json_pack("{s:i, s:f, s:o, s:o}", "repeats", r->numRepeats,
                                          "copy_bytes_per_second", r->copyRate, "dispatch",
                                          timesJson(&d), "combine", timesJson(&c)));
    else
      json_object_set_new(j, "difference", json_string(r->difference));
    cliPutsJson(j, &r->puts);
    json_array_append_new(list, j);
    return !r->ok;
  }
  printf("%s, %d ranks (%d per node), %lld tokens a rank, hidden %lld, top-%d of %d\n",
         trefoilModeName(o->mode), s->numRanks, s->ranksPerNode, (long long)s->maxTokens,
         (long long)o->hidden, s->topk, s->numExperts);
  if (!r->ok) {
    printf("  not timed, it fails its check: %s\n", r->difference);
    return 1;
  }
  printf("  %-9s %d ranks at once, %.2f GB/s\n", "copy", s->numRanks, 1e-9 * r->copyRate);
  printTimes("dispatch", &d);
  printTimes("combine", &c);
  cliPutsText(&r->puts, "  ");
  return 0;
}

/* Small random cases a second on one job. */
static int benchCases(const ep_real_options_t *real, double seconds, json_t *into, int json) {
  ep_check_options_t o = {.paths = real->paths, .seconds = seconds, .replay = "trefoil check"};
  o.choice.seed = 1;
  ep_check_outcome_t *outcome = calloc(1, sizeof *outcome);
  o.interrupted = real->interrupted;
  if (!outcome) return cliFail("bench", "out of memory");
  int rc = epCheckRun(&o, outcome) != TREFOIL_OK ? cliFail("bench", "%s", trefoilLastError())
                                                 : outcome->failed || outcome->interrupted;
  const ep_check_status_t *s = &outcome->status;
  double rate = s->seconds > 0 && !rc ? (double)s->cases / s->seconds : 0;
  if (json)
    json_object_set_new(into, "cases_per_second", json_real(rate));
  else if (!rc)
    printf("random cases: %.0f a second (%llu, all agree)\n", rate, (unsigned long long)s->cases);
  else
    printf("random cases: not timed, %s\n", outcome->failed        ? outcome->text
                                            : outcome->interrupted ? "interrupted"
                                                                   : "no run");
  free(outcome);
  return rc;
}

int cmdBench(int argc, char **argv) {
  cli_check_t v = {.seed = 1, .tokens = -1};
  char *tokens = NULL, *variants = NULL, *plot = NULL, ranks[16];
  char *points = NULL, *against = NULL;
  int repeats = 10;
  double seconds = 2, minutes = 0;
  const struct poptOption options[] = {
      {"mode", 0, POPT_ARG_STRING, &v.modes, 0,
       "all, ll, ht, ll-expert-major, ll-rank-major, ht-flat, ht-expert-major", "LIST"},
      {"moe", 0, POPT_ARG_STRING, &v.moe, 0, "a model's layer", "NAME"},
      {"hidden", 0, POPT_ARG_LONGLONG, &v.hidden, CLI_POSITIVE, "hidden size (default 7168)", "H"},
      {"experts", 0, POPT_ARG_INT, &v.experts, CLI_POSITIVE, "experts (default 256)", "E"},
      {"topk", 0, POPT_ARG_INT, &v.topk, CLI_POSITIVE, "top-k (default 8)", "K"},
      {"tokens", 0, POPT_ARG_STRING, &tokens, 0,
       "tokens a rank (default: 128 in LL, 4096 in HT); on GPUs a list, 1,8,32,64,128 in LL", "N"},
      {"variant", 0, POPT_ARG_STRING, &variants, 0,
       "GPUs: plain, e4m3 (the dispatch quantises), partial (the combine sums at the experts), fp8 "
       "(the caller's), backward",
       "LIST"},
      {"against", 0, POPT_ARG_STRING, &against, 0,
       "another library, timed in turn with --library, with ratios", "PATH"},
      {"level", 0, POPT_ARG_STRING, &v.level, 0,
       "of the check of --against: strict (default), or order-free", "LEVEL"},
      {"plot", 0, POPT_ARG_STRING, &plot, 0,
       "with --gpu or --against: also a picture, .svg, .png or .pdf", "FILE"},
      {"points", 0, POPT_ARG_STRING, &points, 0,
       "what to time: JSON objects, one a line; prints one a line (docs/measure.md)", "FILE"},
      {"minutes", 0, POPT_ARG_DOUBLE, &minutes, CLI_NOT_NEGATIVE,
       "with --points: start nothing later (0: no limit)", "M"},
      {"ranks", 'r', POPT_ARG_STRING, &v.ranks, 0, "ranks (default 8; on GPUs all of them)", "R"},
      {"ranks-per-node", 0, POPT_ARG_INT, &v.ranksPerNode, CLI_POSITIVE, "pretended nodes", "G"},
      {"repeats", 0, POPT_ARG_INT, &repeats, CLI_POSITIVE,
       "timed operations in HT (default 10); ten times as many in LL", "N"},
      {"seconds", 0, POPT_ARG_DOUBLE, &seconds, CLI_NOT_NEGATIVE,
       "for random cases (default 2; 0: none)", "T"},
      {"seed", 's', POPT_ARG_LONGLONG, &v.seed, 0, "of the routing (default 1)", "S"},
      {"timeout-ms", 0, POPT_ARG_LONGLONG, &v.timeoutMs, CLI_POSITIVE, "of the group", "MS"},
      CLI_LIBRARY_OPTIONS(&v.library),
      CLI_COMMON_OPTIONS(&v.json)};
  const cli_args_t args = {
      "bench", NULL,
      "Times of dispatch and combine on a real shape, from call to the end of the stream on the\n"
      "slowest rank; bytes as the plan counts them; beside them the rate at which all ranks at "
      "once\n"
      "copy memory in the same run. A mode whose check fails is not timed. And random cases a "
      "second.\n"
      "With --gpu: low latency (--mode ht for the rest) on GPUs in lockstep, kernel, event and "
      "host time,\n"
      "called and replayed from graphs; 200 of each."};
  int rc = cliParse(&args, options, argc, argv, NULL);
  if (rc >= 0) return rc;
  if ((rc = cliNoLaunch("bench")) >= 0) return rc;
  if (repeats > EP_REAL_MAX_REPEATS / 10)
    return cliUsage("bench", "--repeats %d: expected 1 to %d", repeats, EP_REAL_MAX_REPEATS / 10);
  if (!v.moe) {
    v.hidden = v.hidden ? v.hidden : 7168;
    v.experts = v.experts ? v.experts : 256;
    v.topk = v.topk ? v.topk : 8;
  }
  char paths[3][4096];
  unsigned modes;
  ep_real_options_t o;
  if (v.library.gpu) {
    ep_library_paths_t found;
    int devices;
    if ((rc = cliLibraries("bench", &v.library, paths, &found)) >= 0) return rc;
    if (epLibraryProbe(&found, &devices) != TREFOIL_OK)
      return cliFail("bench", "%s", trefoilLastError());
    snprintf(ranks, sizeof ranks, "%d", devices);
    if (!v.ranks) v.ranks = ranks;
    if (!v.modes) v.modes = against ? "all" : "ll";
  } else if (points) {
    if (tokens) return cliUsage("bench", "--tokens does not go with --points");
  } else if (!against && (variants || plot)) {
    return cliUsage("bench", "--%s goes with --gpu", variants ? "variant" : "plot");
  } else if (tokens && !against) {
    char *end;
    v.tokens = strtoll(tokens, &end, 10);
    if (*end || end == tokens || v.tokens < 1)
      return cliUsage("bench", "--tokens %s: expected a whole number, 1 or more", tokens);
  }
  if (v.level && !against) return cliUsage("bench", "--level is of the check of --against");
  if (against && points) return cliUsage("bench", "--against does not go with --points");
  if ((rc = cliRealOptions("bench", &v, &modes, &o)) >= 0) return rc;
  if ((rc = cliLibraries("bench", &v.library, paths, &o.paths)) >= 0) return rc;
  o.progress = showStep;
  o.interrupted = cliInterrupts();
  if (points) {
    o.repeats = repeats;
    return cliBenchPoints(points, minutes, &o);
  }
  o.against = against;
  o.againstOpen = o.open;
  o.open = 0;
  if (against)
    return cliBenchAgainst(
        &(cli_gpu_bench_t){o, modes, variants, tokens, plot, v.json, v.library.gpu});
  if (v.library.gpu)
    return cliBenchGpu(&(cli_gpu_bench_t){o, modes, variants, tokens, plot, v.json, 1});
  ep_real_result_t *r = malloc(sizeof *r);
  json_t *list = json_array(), *all = json_object();
  if (!r) return cliFail("bench", "out of memory");
  int failed = 0;
  for (int mode = 0; mode < TREFOIL_NUM_MODES; mode++) {
    if (!(modes & (1u << mode)) || *o.interrupted) continue;
    o.mode = (trefoil_mode_t)mode;
    o.shape.maxTokens = v.tokens > 0 ? v.tokens : mode < TREFOIL_HT_FLAT ? 128 : 4096;
    o.repeats = mode < TREFOIL_HT_FLAT ? 10 * repeats : repeats;
    failed |= benchMode(&o, r, list, v.json);
    fflush(stdout);
  }
  free(r);
  if (seconds > 0 && !*o.interrupted) failed |= benchCases(&o, seconds, all, v.json);
  if (*o.interrupted) {
    failed = 1;
    json_object_set_new(all, "interrupted", json_true());
    if (!v.json) puts("interrupted: what is above was timed, the rest was not");
  }
  if (!v.json) {
    cliLibrariesText(&o.paths);
    json_decref(list);
    json_decref(all);
    return failed ? CLI_FAILED : CLI_OK;
  }
  cliLibrariesJson(all, &o.paths);
  json_object_set_new(all, "benchmarks", list);
  json_object_set_new(all, "environment", cliEnvironment());
  rc = cliPrintJson(all);
  return failed ? CLI_FAILED : rc;
}
