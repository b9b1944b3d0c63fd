/* trefoil bench --against: two libraries in one process, timed in turn (validate/real_pair.h). */
#include "cli/check_verb.h"

#include "validate/order_free.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RUNS = 128 };

static const char *const operationNames[] = {"dispatch", "combine"};
static const char *const figureNames[EP_PAIR_NUM_FIGURES] = {"event", "host", "kernel_span",
                                                             "kernel_sum", "wall"};

static int makeRuns(const cli_gpu_bench_t *b, ep_real_options_t *runs) {
  int n = 0;
  for (int mode = 0; mode < TREFOIL_NUM_MODES; mode++) {
    if (!(b->modes & (1u << mode))) continue;
    long long tokens[CLI_MAX_TOKENS];
    int isLl = mode < TREFOIL_HT_FLAT;
    const char *standard = !isLl ? "4096" : b->isGpu ? "1,8,32,64,128" : "128";
    int numTokens = cliTakeTokens(b->tokens ? b->tokens : standard, tokens);
    for (int i = 0; i < numTokens && n < MAX_RUNS; i++) {
      runs[n] = b->base;
      runs[n].mode = (trefoil_mode_t)mode;
      runs[n].shape.maxTokens = tokens[i];
      runs[n++].repeats = 1;
    }
  }
  return n;
}

/* ---- Output ---- */

static json_t *figuresJson(const ep_pair_operation_t *o, int lib) {
  json_t *j = json_object();
  for (int f = 0; f < EP_PAIR_NUM_FIGURES; f++) {
    const ep_gpu_spread_t *s = &o->of[lib][f];
    if (s->p50 > 0)
      json_object_set_new(j, figureNames[f],
                          json_pack("{s:f, s:f, s:f, s:f}", "p50_s", s->p50, "p99_s", s->p99,
                                    "min_s", s->min, "max_s", s->max));
  }
  if (o->numKernels[lib] > 0)
    json_object_update_new(
        j, json_pack("{s:i, s:i}", "kernels", o->numKernels[lib], "copies", o->numCopies[lib]));
  return j;
}

static json_t *operationJson(const ep_pair_operation_t *o) {
  json_t *ratios = json_object();
  for (int f = 0; f < EP_PAIR_NUM_FIGURES; f++)
    if (o->ratio[f].p50 > 0)
      json_object_set_new(ratios, figureNames[f],
                          json_pack("{s:f, s:f, s:f}", "p50", o->ratio[f].p50, "min",
                                    o->ratio[f].min, "max", o->ratio[f].max));
  return json_pack("{s:[o, o], s:o}", "libraries", figuresJson(o, 0), figuresJson(o, 1),
                   "against_over_library", ratios);
}

static json_t *runJson(const ep_real_options_t *o, const ep_real_result_t *r) {
  const trefoil_shape_t *s = &o->shape;
  const ep_pair_times_t *t = &r->pair;
  json_t *j =
      json_pack("{s:s, s:i, s:I, s:I, s:i, s:i, s:b, s:[b, b]}", "mode", trefoilModeName(o->mode),
                "ranks", s->numRanks, "tokens", (json_int_t)s->maxTokens, "hidden",
                (json_int_t)o->hidden, "experts", s->numExperts, "topk", s->topk, "ok",
                r->ok && t->measured, "order_used", t->moved[0], t->moved[1]);
  if (!r->ok || !t->measured) {
    json_object_set_new(j, "difference", json_string(r->difference));
    if (t->culprit >= 0) json_object_set_new(j, "failed_library", json_integer(t->culprit));
    return j;
  }
  json_object_update_new(
      j, json_pack("{s:i, s:i}", "blocks", t->blocks, "iterations", t->blocks * t->iterations));
  if (*t->noKernels) json_object_set_new(j, "no_kernel_times", json_string(t->noKernels));
  for (int op = 0; op < 2; op++)
    json_object_set_new(j, operationNames[op], operationJson(&t->operations[op]));
  return j;
}

static void printOperation(const char *name, const ep_pair_operation_t *o) {
  for (int f = 0; f < EP_PAIR_NUM_FIGURES; f++) {
    if (o->of[0][f].p50 <= 0) continue;
    printf("  %-9s %-12s %9.2f us (p99 %9.2f)  against %9.2f us (p99 %9.2f)  ratio %5.2f (%.2f to "
           "%.2f)\n",
           name, figureNames[f], 1e6 * o->of[0][f].p50, 1e6 * o->of[0][f].p99,
           1e6 * o->of[1][f].p50, 1e6 * o->of[1][f].p99, o->ratio[f].p50, o->ratio[f].min,
           o->ratio[f].max);
  }
}

static void printRun(const ep_real_options_t *o, const ep_real_result_t *r) {
  const ep_pair_times_t *t = &r->pair;
  printf("%s, %d ranks, %lld tokens a rank, hidden %lld, top-%d of %d\n", trefoilModeName(o->mode),
         o->shape.numRanks, (long long)o->shape.maxTokens, (long long)o->hidden, o->shape.topk,
         o->shape.numExperts);
  if (!r->ok || !t->measured) {
    printf("  not timed, %s: %s\n",
           t->culprit == 0   ? "--library fails its check"
           : t->culprit == 1 ? "--against fails its check"
                             : "the run failed",
           r->difference);
    return;
  }
  for (int op = 0; op < 2; op++) printOperation(operationNames[op], &t->operations[op]);
  if (*t->noKernels) printf("  no kernel times: %s\n", t->noKernels);
}

static int printAll(const cli_gpu_bench_t *b, const ep_real_options_t *runs,
                    const ep_real_result_t *r, int n) {
  int failed = 0, code = CLI_OK;
  json_t *list = json_array();
  for (int i = 0; i < n; i++) {
    failed |= !r[i].ok || !r[i].pair.measured;
    if (!b->json) printRun(&runs[i], &r[i]);
    json_array_append_new(list, runJson(&runs[i], &r[i]));
  }
  json_t *all =
      json_pack("{s:b, s:o, s:s, s:s, s:o}", "ok", !failed, "against_benchmarks", list, "against",
                b->base.against, "against_level", b->base.againstOpen ? "order-free" : "strict",
                "environment", cliEnvironment());
  cliLibrariesJson(all, &b->base.paths);
  ep_gpu_times_t facts = {0};
  for (int i = 0; i < n; i++) /* a shape that failed has told none */
    if (r[i].pair.ncclVersion) facts.ncclVersion = r[i].pair.ncclVersion;
  if (n) facts.facts = r[0].pair.facts;
  if (b->isGpu) json_object_set_new(all, "gpu", cliGpuFactsJson(&facts, b->base.shape.numRanks));
  if (!b->json) {
    cliLibrariesText(&b->base.paths);
    printf("against %s, compared %s\n", b->base.against,
           b->base.againstOpen ? "order-free" : "strictly");
  }
  if (b->plot) code = cliDraw("trefoil.bench_plot", b->plot, all);
  if (b->json)
    code |= cliPrintJson(all);
  else
    json_decref(all);
  return failed ? CLI_FAILED : code;
}

int cliBenchAgainst(const cli_gpu_bench_t *b) {
  long long tokens[CLI_MAX_TOKENS];
  if (b->isGpu && !epGpuToolsBuilt())
    return cliFail("bench", "this build has no CUDA kernels to measure with: build it where nvcc "
                            "of CUDA 13.0 or newer is");
  if (b->variants) return cliUsage("bench", "--variant does not go with --against");
  if (b->tokens && !cliTakeTokens(b->tokens, tokens))
    return cliUsage("bench", "--tokens %s: expected numbers like 1,8,128, at most %d", b->tokens,
                    CLI_MAX_TOKENS);
  ep_real_options_t *runs = calloc(MAX_RUNS, sizeof *runs);
  ep_real_result_t *results = calloc(MAX_RUNS, sizeof *results);
  if (!runs || !results) {
    free(runs);
    free(results);
    return cliFail("bench", "out of memory");
  }
  int n = makeRuns(b, runs), at = 0, numDone = 1, code = CLI_OK;
  trefoil_result_t rc = TREFOIL_OK;
  /* a shape that one of them fails, aborts or hangs at ends its process: the rest goes on in another */
  for (; at < n && rc == TREFOIL_OK && numDone > 0 && !*b->base.interrupted; at += numDone)
    rc = epRealRunAll(runs + at, n - at, results + at, &numDone);
  cliProgressEnd();
  n = at;
  if (n > 0) code = printAll(b, runs, results, n);
  if (rc != TREFOIL_OK) code = cliFail("bench", "%s", trefoilLastError());
  free(runs);
  free(results);
  return code;
}
