/* trefoil bench --gpu: runs every variant at every number of tokens in one process, prints what
 * validate/gpu_times.h defines. */
#include "cli/check_verb.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_RUNS = 256 };
enum { PLAIN = 1, TO_E4M3 = 2, PARTIAL = 4, FP8 = 8, BACKWARD = 16 };

static const char *variantName(const ep_real_options_t *o) {
  return o->toE4m3     ? "e4m3"
         : o->partial  ? "partial"
         : o->fp8      ? "fp8"
         : o->backward ? "backward"
                       : "plain";
}

int cliTakeVariant(const char *word, ep_real_options_t *o) {
  o->toE4m3 = !strcmp(word, "e4m3");
  o->partial = !strcmp(word, "partial");
  o->fp8 = !strcmp(word, "fp8");
  o->backward = !strcmp(word, "backward");
  return !strcmp(word, variantName(o));
}

static int takeVariants(const char *text, unsigned *set) {
  char copy[64], *save = NULL;
  snprintf(copy, sizeof copy, "%s", text);
  for (char *word = strtok_r(copy, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
    ep_real_options_t o = {0};
    if (!cliTakeVariant(word, &o)) return 0;
    *set |= o.toE4m3 ? TO_E4M3 : o.partial ? PARTIAL : o.fp8 ? FP8 : o.backward ? BACKWARD : PLAIN;
  }
  return *set != 0;
}

int cliTakeTokens(const char *text, long long *tokens) {
  int n = 0;
  for (const char *at = text; *at;) {
    char *end;
    if (n == CLI_MAX_TOKENS) return 0;
    tokens[n] = strtoll(at, &end, 10);
    if (end == at || tokens[n] < 1 || tokens[n] > 1 << 20 || (*end && *end != ',')) return 0;
    n++;
    at = *end ? end + 1 : end;
  }
  return n;
}

/* What a mode can be: only LL quantises, only its expert-major layout has partial sums, only HT a
 * backward. */
static unsigned variantsOf(int mode, const ep_real_options_t *base) {
  unsigned set = PLAIN;
  if (mode < TREFOIL_HT_FLAT && base->hidden % 512 == 0) set |= TO_E4M3;
  if (mode == TREFOIL_LL_EXPERT_MAJOR) set |= PARTIAL;
  if (mode >= TREFOIL_HT_FLAT) set |= BACKWARD;
  if (base->hidden % 512 == 0) set |= FP8;
  return set;
}

static int makeRuns(const cli_gpu_bench_t *b, unsigned variants, ep_real_options_t *runs) {
  int n = 0;
  for (int mode = 0; mode < TREFOIL_NUM_MODES; mode++) {
    if (!(b->modes & (1u << mode))) continue;
    long long tokens[CLI_MAX_TOKENS];
    const char *standard = mode < TREFOIL_HT_FLAT ? "1,8,32,64,128" : "4096";
    int numTokens = cliTakeTokens(b->tokens ? b->tokens : standard, tokens);
    for (unsigned bit = PLAIN; bit <= BACKWARD; bit <<= 1) {
      if (!(variantsOf(mode, &b->base) & variants & bit)) continue;
      for (int i = 0; i < numTokens && n < MAX_RUNS; i++) {
        ep_real_options_t *o = &runs[n++];
        *o = b->base;
        o->mode = (trefoil_mode_t)mode;
        o->shape.maxTokens = tokens[i];
        o->toE4m3 = bit == TO_E4M3;
        o->partial = bit == PARTIAL;
        o->fp8 = bit == FP8;
        o->backward = bit == BACKWARD;
        o->repeats = 1;
      }
    }
  }
  return n;
}

/* ---- Output ---- */

static json_t *spreadJson(const ep_gpu_spread_t *s) {
  return json_pack("{s:f, s:f, s:f, s:f}", "p50_s", s->p50, "p99_s", s->p99, "min_s", s->min,
                   "max_s", s->max);
}

/* Called and replayed apart. */
static json_t *pairJson(const ep_gpu_spread_t s[2]) {
  return json_pack("{s:o, s:o}", "called", spreadJson(&s[0]), "replayed", spreadJson(&s[1]));
}

static json_t *figuresJson(const ep_gpu_times_t *t, ep_gpu_what_t what) {
  const ep_gpu_figures_t *f = &t->of[what];
  json_t *j = json_pack("{s:o}", "event", pairJson(f->event));
  if (what == EP_GPU_EMPTY) return j;
  if (t->hasKernelTimes) {
    json_object_set_new(j, "kernel", pairJson(f->kernel));
    json_object_set_new(j, "event_over_kernel", pairJson(f->eventOverKernel));
  }
  json_object_set_new(j, "host", spreadJson(&f->host));
  json_object_set_new(j, "back_to_back_s", json_real(f->backToBack));
  json_object_set_new(j, "busiest_port_bytes", json_integer((json_int_t)f->portBytes));
  json_object_set_new(j, "ratio", json_real(f->ratio));
  return j;
}

static const char *const whatNames[EP_GPU_NUM_WHAT] = {"empty", "dispatch", "combine", "both"};

static const char *const routingNames[] = {"uniform", "zipf", "hot-expert", "hot-rank"};
static const char *const backgroundNames[] = {"nothing", "copies", "copies-from-0", "gemm"};

static int indexOf(const char *word, const char *const *names, int n) {
  for (int i = 0; i < n; i++)
    if (!strcmp(word, names[i])) return i;
  return -1;
}
int cliRoutingOf(const char *word) {
  return indexOf(word, routingNames, 4);
}
int cliBackgroundOf(const char *word) {
  return indexOf(word, backgroundNames, EP_REAL_NUM_BACKGROUND);
}

/* How the point differs from uniform, full, alone and in step. */
static void addCircumstances(json_t *j, const ep_real_options_t *o, const ep_real_result_t *r) {
  json_t *more =
      json_pack("{s:s, s:f, s:f, s:i, s:i, s:f, s:s, s:b}", "routing", routingNames[o->popularity],
                "skew", o->skew, "ragged", o->ragged, "empty_ranks", o->numEmptyRanks, "sms",
                (int)o->maxSms, "start_skew_s", 1e-9 * (double)o->startSkewNs, "background",
                backgroundNames[o->background], "window", o->window);
  json_object_update(j, more);
  json_decref(more);
  if (!o->background || !r->gpu.measured) return;
  json_object_set_new(j, "background_alone_per_second", json_real(r->gpu.backgroundAlone));
  json_object_set_new(j, "background_per_second", json_real(r->gpu.background));
}

json_t *cliGpuRunJson(const ep_real_options_t *o, const ep_real_result_t *r) {
  const trefoil_shape_t *s = &o->shape;
  json_t *j = json_pack("{s:s, s:s, s:i, s:I, s:I, s:i, s:i, s:I, s:b, s:i}", "mode",
                        trefoilModeName(o->mode), "variant", variantName(o), "ranks", s->numRanks,
                        "tokens", (json_int_t)s->maxTokens, "hidden", (json_int_t)o->hidden,
                        "experts", s->numExperts, "topk", s->topk, "seed", (json_int_t)o->seed,
                        "ok", r->ok, "iterations", r->gpu.iterations);
  addCircumstances(j, o, r);
  if (!r->ok) json_object_set_new(j, "difference", json_string(r->difference));
  cliPutsJson(j, &r->puts);
  if (!r->gpu.measured) return j;
  json_object_set_new(j, "copy_bytes_per_second", json_real(r->gpu.copyRate));
  json_t *times = json_object();
  for (int what = 0; what < EP_GPU_NUM_WHAT; what++)
    if (r->gpu.of[what].event[0].p50 > 0)
      json_object_set_new(times, whatNames[what], figuresJson(&r->gpu, (ep_gpu_what_t)what));
  json_object_set_new(j, "times", times);
  return j;
}

static void printFigures(const ep_gpu_times_t *t, ep_gpu_what_t what) {
  const ep_gpu_figures_t *f = &t->of[what];
  if (f->event[0].p50 <= 0) return;
  const double us = 1e6;
  printf("  %-8s", whatNames[what]);
  if (what == EP_GPU_EMPTY) {
    printf(" event %6.2f us, replayed %6.2f\n", us * f->event[0].p50, us * f->event[1].p50);
    return;
  }
  if (t->hasKernelTimes)
    printf(" kernel %6.2f us (p99 %6.2f), replayed %6.2f (%6.2f)", us * f->kernel[0].p50,
           us * f->kernel[0].p99, us * f->kernel[1].p50, us * f->kernel[1].p99);
  printf("  event %6.2f, %6.2f  host %5.2f (%5.2f)  back to back %6.2f", us * f->event[0].p50,
         us * f->event[1].p50, us * f->host.p50, us * f->host.p99, us * f->backToBack);
  if (f->ratio > 0) printf("  port %6.2f MB  ratio %.3f", 1e-6 * (double)f->portBytes, f->ratio);
  putchar('\n');
}

static void printRun(const ep_real_options_t *o, const ep_real_result_t *r) {
  const trefoil_shape_t *s = &o->shape;
  printf("%s %s, %d ranks, %lld tokens a rank, hidden %lld, top-%d of %d\n",
         trefoilModeName(o->mode), variantName(o), s->numRanks, (long long)s->maxTokens,
         (long long)o->hidden, s->topk, s->numExperts);
  if (!r->ok) {
    printf("  not timed, it fails its check: %s\n", r->difference);
    return;
  }
  printf("  copy     all to all, %.1f GB/s a port%s\n", 1e-9 * r->gpu.copyRate,
         r->gpu.hasKernelTimes ? "" : "; the library tells no kernel times, ratios are of events");
  for (int what = 0; what < EP_GPU_NUM_WHAT; what++) printFigures(&r->gpu, (ep_gpu_what_t)what);
  cliPutsText(&r->puts, "  ");
}

/* "580.159.04" of what the kernel module says; "" without one. */
static void driverVersion(char *text, size_t bytes) {
  char line[256], *at = NULL;
  FILE *f = fopen("/proc/driver/nvidia/version", "r");
  *text = 0;
  if (f && fgets(line, sizeof line, f)) at = strpbrk(line, "0123456789");
  while (at && !(at[strspn(at, "0123456789")] == '.')) /* the first word with a point in it */
    at = strpbrk(at + strspn(at, "0123456789"), "0123456789");
  if (at) {
    at[strspn(at, "0123456789.")] = 0;
    snprintf(text, bytes, "%s", at);
  }
  if (f) fclose(f);
}

json_t *cliGpuFactsJson(const ep_gpu_times_t *t, int ranks) {
  char driver[64], nccl[32];
  driverVersion(driver, sizeof driver);
  snprintf(nccl, sizeof nccl, "%d.%d.%d", t->ncclVersion / 10000, t->ncclVersion / 100 % 100,
           t->ncclVersion % 100);
  return json_pack("{s:s, s:i, s:i, s:s, s:i, s:i, s:s}", "name", t->facts.name, "count", ranks,
                   "sms", t->facts.numSms, "driver", driver, "driver_cuda", t->facts.driver,
                   "runtime", t->facts.runtime, "nccl", nccl);
}

static json_t *allJson(const cli_gpu_bench_t *b, const ep_real_options_t *runs,
                       const ep_real_result_t *r, int n) {
  json_t *list = json_array();
  for (int i = 0; i < n; i++) json_array_append_new(list, cliGpuRunJson(&runs[i], &r[i]));
  json_t *j = json_pack("{s:o, s:o, s:o}", "gpu_benchmarks", list, "gpu",
                        cliGpuFactsJson(&r[0].gpu, b->base.shape.numRanks), "environment",
                        cliEnvironment());
  cliLibrariesJson(j, &b->base.paths);
  return j;
}

int cliDraw(const char *module, const char *path, const json_t *all) {
  int ends[2], status = 1;
  if (pipe(ends) != 0) return cliFail("bench", "no pipe could be made");
  fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) {
    char *arguments[] = {(char *)module, (char *)path, NULL};
    dup2(ends[0], 0);
    close(ends[0]);
    close(ends[1]);
    _exit(cliRunPython("bench", module, 2, arguments));
  }
  close(ends[0]);
  signal(SIGPIPE, SIG_IGN);
  if (pid > 0) json_dumpfd(all, ends[1], 0);
  close(ends[1]);
  if (pid > 0) waitpid(pid, &status, 0);
  return status == 0 ? CLI_OK : cliFail("bench", "%s was not drawn", path);
}

static int printAll(const cli_gpu_bench_t *b, const ep_real_options_t *runs,
                    const ep_real_result_t *r, int n) {
  int failed = 0, code = CLI_OK;
  for (int i = 0; i < n; i++) {
    failed |= !r[i].ok;
    if (!b->json) printRun(&runs[i], &r[i]);
  }
  json_t *all = allJson(b, runs, r, n);
  if (!b->json) {
    printf("%d x %s\n", b->base.shape.numRanks, n ? r[0].gpu.facts.name : "");
    cliLibrariesText(&b->base.paths);
  }
  if (b->plot) code = cliDraw("trefoil.bench_plot", b->plot, all);
  if (b->json)
    code |= cliPrintJson(all);
  else
    json_decref(all);
  return failed ? CLI_FAILED : code;
}

int cliBenchGpu(const cli_gpu_bench_t *b) {
  unsigned variants = 0;
  long long tokens[CLI_MAX_TOKENS];
  if (!epGpuToolsBuilt())
    return cliFail("bench", "this build has no CUDA kernels to measure with: build it where nvcc "
                            "of CUDA 13.0 or newer is");
  if (!takeVariants(b->variants ? b->variants : "plain,e4m3,partial", &variants))
    return cliUsage("bench", "--variant %s: expected some of plain, e4m3, partial, fp8, backward",
                    b->variants);
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
  int n = makeRuns(b, variants, runs), numDone = 0;
  if (n == 0) {
    free(runs);
    free(results);
    return cliUsage("bench", "no mode of --mode has a variant of --variant");
  }
  trefoil_result_t rc = epRealRunAll(runs, n, results, &numDone);
  cliProgressEnd();
  int code = numDone > 0 ? printAll(b, runs, results, numDone) : CLI_FAILED;
  if (rc != TREFOIL_OK)
    code = cliFail("bench", "%s %s, %lld tokens: %s", trefoilModeName(runs[numDone].mode),
                   variantName(&runs[numDone]), (long long)runs[numDone].shape.maxTokens,
                   trefoilLastError());
  if (runs[0].interrupted && *runs[0].interrupted) {
    fprintf(stderr, "trefoil bench: interrupted after %d shapes\n", numDone);
    code = CLI_FAILED;
  }
  free(runs);
  free(results);
  return code;
}
