/* trefoil bench --points FILE: a campaign's points (docs/measure.md), all in one process that keeps its
 * communicator. A line of JSON is printed as each point ends, so that what is interrupted loses the point it
 * was at and no other. After a point that fails its check nothing more is run: a library that
 * wrote wrong bytes is not trusted with the next shape. */
#include "cli/check_verb.h"

#include "plan/regular_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_POINTS = 1024, LINE_BYTES = 4096 };

typedef struct points {
  ep_real_options_t runs[MAX_POINTS];
  json_t *asked[MAX_POINTS];
  int n;
} points_t;

/* The names; whole numbers have their bounds in takePoint. */
static const char *const known[] = {
    "mode",          "variant",    "tokens",     "hidden", "experts",     "topk",
    "seed",          "routing",    "skew",       "ragged", "empty_ranks", "sms",
    "start_skew_us", "background", "iterations", "window", "id",          NULL};

static const char *unknownName(const json_t *j) {
  void *at = json_object_iter((json_t *)j);
  for (; at; at = json_object_iter_next((json_t *)j, at)) {
    int i = 0;
    while (known[i] && strcmp(known[i], json_object_iter_key(at))) i++;
    if (!known[i]) return json_object_iter_key(at);
  }
  return NULL;
}

static int between(double value, double low, double high) {
  return value >= low && value <= high;
}

/* NULL, or what is wrong. */
static const char *takePoint(json_t *j, ep_real_options_t *o) {
  const char *mode = NULL, *variant = "plain", *routing = "uniform", *background = "nothing";
  json_int_t tokens = 0, hidden = 7168, seed = 1;
  int experts = 256, topk = 8, empty = 0, sms = 0, iterations = 0, window = 0;
  double skew = 0, ragged = 0, startSkew = 0;
  unsigned modes;
  json_error_t error;
  if (json_unpack_ex(
          j, &error, 0,
          "{s:s, s:I, s?s, s?I, s?i, s?i, s?I, s?s, s?F, s?F, s?i, s?i, s?F, s?s, s?i, s?b}",
          "mode", &mode, "tokens", &tokens, "variant", &variant, "hidden", &hidden, "experts",
          &experts, "topk", &topk, "seed", &seed, "routing", &routing, "skew", &skew, "ragged",
          &ragged, "empty_ranks", &empty, "sms", &sms, "start_skew_us", &startSkew, "background",
          &background, "iterations", &iterations, "window", &window))
    return "a point needs a mode and a number of tokens, and each value has its type";
  if (!cliModes(mode, &modes) || (modes & (modes - 1))) return "mode names no single mode";
  if (!cliTakeVariant(variant, o)) return "variant is not known";
  if (cliRoutingOf(routing) < 0) return "routing is none of uniform, zipf, hot-expert, hot-rank";
  if (cliBackgroundOf(background) < 0)
    return "background is none of nothing, copies, copies-from-0, gemm";
  if (!between((double)tokens, 1, 1 << 20) || !between((double)hidden, 1, 1 << 20))
    return "tokens and hidden are 1 to 1048576";
  if (experts < 1 || topk < 1 || topk > experts) return "experts and topk: 1 <= topk <= experts";
  if (!between(skew, 0, 1e6) || !between(ragged, 0, 1)) return "skew is 0 to 1e6, ragged 0 to 1";
  if (!between(startSkew, 0, 10000)) return "start_skew_us is 0 to 10000";
  if (sms < 0 || sms > 1024 || empty < 0 || !between(iterations, 0, EP_GPU_ITERATIONS))
    return "sms is 0 to 1024, empty_ranks 0 or more, iterations 0 to 200";
  while (!(modes & (1u << o->mode))) o->mode = (trefoil_mode_t)(o->mode + 1);
  o->shape.maxTokens = tokens;
  o->shape.numExperts = experts;
  o->shape.topk = topk;
  o->hidden = hidden;
  o->seed = (uint64_t)seed;
  o->popularity = (trefoil_popularity_t)cliRoutingOf(routing);
  o->skew = skew;
  o->ragged = ragged;
  o->numEmptyRanks = empty;
  o->maxSms = (unsigned)sms;
  o->startSkewNs = (uint64_t)(1000 * startSkew + 0.5);
  o->background = (ep_real_background_t)cliBackgroundOf(background);
  o->iterations = iterations;
  o->window = window;
  return NULL;
}

static int readPoints(const char *path, const ep_real_options_t *base, points_t *p) {
  char line[LINE_BYTES];
  FILE *f = NULL;
  if (epOpenRegular(path, &f, NULL) != TREFOIL_OK)
    return cliFail("bench", "%s", trefoilLastError());
  for (int number = 1; fgets(line, sizeof line, f); number++) {
    const char *why = NULL;
    json_t *j = json_loads(line, 0, NULL);
    if (p->n == MAX_POINTS)
      why = "more than 1024 points";
    else if (!json_is_object(j))
      why = "not a JSON object";
    else if (unknownName(j))
      why = unknownName(j);
    else {
      p->runs[p->n] = *base;
      p->runs[p->n].mode = (trefoil_mode_t)0;
      why = takePoint(j, &p->runs[p->n]);
    }
    if (why) {
      fclose(f);
      int rc = cliUsage("bench", "%s, line %d: %s%s", path, number,
                        json_is_object(j) && why == unknownName(j) ? "no such name: " : "", why);
      json_decref(j);
      return rc;
    }
    p->asked[p->n++] = j;
  }
  fclose(f);
  return p->n ? -1 : cliUsage("bench", "%s holds no points", path);
}

static int byValue(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Without GPUs: from the barrier to the end of the slowest rank's stream. */
static json_t *wallJson(const double *times, int n) {
  double s[EP_REAL_MAX_REPEATS];
  memcpy(s, times, sizeof *s * (size_t)n);
  qsort(s, (size_t)n, sizeof *s, byValue);
  return json_pack("{s:{s:f, s:f, s:f, s:f}}", "wall", "p50_s", s[n / 2], "p99_s", s[n * 99 / 100],
                   "min_s", s[0], "max_s", s[n - 1]);
}

static void printPoint(void *context, int i, const ep_real_result_t *r) {
  const points_t *p = context;
  json_t *j = cliGpuRunJson(&p->runs[i], r);
  json_object_set(j, "point", p->asked[i]);
  if (r->gpu.measured) {
    json_object_set_new(j, "gpu", cliGpuFactsJson(&r->gpu, p->runs[i].shape.numRanks));
  } else if (r->numRepeats > 0) {
    json_t *times = json_object();
    json_object_set_new(times, "dispatch", wallJson(r->dispatchTimes, r->numRepeats));
    if (epRealHasCombine(&p->runs[i]))
      json_object_set_new(times, "combine", wallJson(r->combineTimes, r->numRepeats));
    json_object_set_new(j, "times", times);
    json_object_set_new(j, "iterations", json_integer(r->numRepeats));
  }
  cliProgressEnd();
  json_dumpf(j, stdout, JSON_COMPACT);
  putchar('\n');
  fflush(stdout);
  json_decref(j);
}

int cliBenchPoints(const char *path, double minutes, const ep_real_options_t *base) {
  points_t *p = calloc(1, sizeof *p);
  ep_real_result_t *results = calloc(MAX_POINTS, sizeof *results);
  if (!p || !results) {
    free(p);
    free(results);
    return cliFail("bench", "out of memory");
  }
  int rc = readPoints(path, base, p), numDone = 0, failed = 0;
  if (rc < 0) {
    p->runs[0].seconds = 60 * minutes;
    p->runs[0].finished = printPoint;
    p->runs[0].context = p;
    p->runs[0].interrupted = base->interrupted;
    trefoil_result_t result = epRealRunAll(p->runs, p->n, results, &numDone);
    cliProgressEnd();
    for (int i = 0; i < numDone; i++) failed |= !results[i].ok;
    if (base->interrupted && *base->interrupted) {
      fprintf(stderr, "trefoil bench: interrupted after %d points\n", numDone);
      failed = 1;
    }
    rc = result != TREFOIL_OK ? cliFail("bench", "point %d: %s", numDone, trefoilLastError())
         : failed             ? CLI_FAILED
                              : CLI_OK;
  }
  for (int i = 0; i < p->n; i++) json_decref(p->asked[i]);
  free(p);
  free(results);
  return rc;
}
