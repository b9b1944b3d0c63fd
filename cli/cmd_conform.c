/* trefoil conform: what of the interface a library does, feature by feature. */
#include "cli/conform.h"
#include "cli/profile_load.h"
#include "plan/regular_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct options {
  long long numCases, outside, seed, onlyCase, timeoutMs;
  double limit;
  char *profile, *ranks, *html, *from;
  int json, markdown, gpuCases, jobs;
  cli_library_t library;
} options_t;

static void replayCommand(const options_t *v, char *text, size_t bytes) {
  const char *const strings[][2] = {{"profile", v->profile},
                                    {"ranks", v->ranks},
                                    {"library", v->library.library},
                                    {"nccl", v->library.nccl},
                                    {"cuda", v->library.cuda}};
  size_t n =
      (size_t)snprintf(text, bytes, "trefoil conform --seed %lld --cases %lld --outside %lld",
                       v->seed, v->numCases, v->outside);
  for (size_t i = 0; i < sizeof strings / sizeof *strings && n < bytes; i++)
    if (strings[i][1])
      n += (size_t)snprintf(text + n, bytes - n, " --%s %s", strings[i][0], strings[i][1]);
  if (n < bytes)
    snprintf(text + n, bytes - n, "%s%s", v->gpuCases ? " --gpu-cases" : "",
             v->library.gpu ? " --gpu" : "");
}

/* -1, or an exit code after the sentence. */
static int prepare(const options_t *v, conform_t *c, char paths[3][4096]) {
  ep_check_options_t *o = &c->check;
  o->choice.seed = (uint64_t)v->seed;
  o->choice.gpuSubset = v->gpuCases || v->library.gpu;
  o->jobs = v->jobs;
  o->limitNs = (uint64_t)(v->limit * 1e9);
  o->timeoutNs = (uint64_t)v->timeoutMs * 1000000u;
  if (v->ranks && !cliRange(v->ranks, &o->choice.minRanks, &o->choice.maxRanks))
    return cliUsage("conform", "--ranks %s: expected N or LOW-HIGH", v->ranks);
  if (o->choice.maxRanks > EP_MAX_RANKS)
    return cliUsage("conform", "--ranks %s: random cases have at most %d ranks", v->ranks,
                    EP_MAX_RANKS);
  int rc = cliLibraries("conform", &v->library, paths, &o->paths);
  if (rc >= 0) return rc;
  if (v->profile && cliProfileLoad(&c->profile, v->profile) != TREFOIL_OK)
    return cliUsage("conform", "--profile: %s", trefoilLastError());
  if (epLibraryAsk(&o->paths, &c->facts) != TREFOIL_OK)
    return cliFail("conform", "%s", trefoilLastError());
  if (!v->profile && cliProfileOf(&c->profile, &c->facts) != TREFOIL_OK)
    return cliUsage("conform", "%s", trefoilLastError());
  if (o->choice.gpuSubset) /* no FP4 hardware is asked for */
    c->profile.features &= ~EP_BIT(EP_F_NVFP4);
  if (!o->choice.maxRanks) {
    int most = c->facts.numDevices < 8 ? c->facts.numDevices : 8;
    o->choice.maxRanks = c->facts.isHost && most > 4 ? 4 : most;
    o->choice.minRanks = o->choice.maxRanks > 1 ? 2 : 1;
  }
  o->choice.orderFree = c->profile.open;
  if (c->profile.firstCallNs && !o->limitNs)
    o->limitNs = o->timeoutNs + o->timeoutNs / 4 + 5000000000u + c->profile.firstCallNs;
  if (!conformPlan(c, v->numCases, (int)v->outside)) return cliFail("conform", "out of memory");
  if (!c->numCells)
    return cliUsage("conform", "--cases 0: nothing lies outside of profile %s", c->profile.name);
  return -1;
}

/* A kept result, shown again. */
static int showKept(const options_t *v) {
  json_error_t error;
  FILE *file = NULL;
  if (epOpenRegular(v->from, &file, NULL) != TREFOIL_OK)
    return cliFail("conform", "%s", trefoilLastError());
  json_t *result = json_loadf(file, JSON_REJECT_DUPLICATES, &error);
  fclose(file);
  if (!result) return cliFail("conform", "%s, line %d: %s", v->from, error.line, error.text);
  if (!json_is_array(json_object_get(result, "cells"))) {
    json_decref(result);
    return cliFail("conform", "%s: this is no result of trefoil conform --json: it has no cells",
                   v->from);
  }
  int rc = v->html ? conformPage(result, v->html) : CLI_OK;
  if (v->json) return cliPrintJson(result) == CLI_OK ? rc : CLI_FAILED;
  if (v->markdown)
    conformMarkdown(result);
  else
    conformText(result);
  json_decref(result);
  return rc;
}

/* One case, as a replay says. */
static int runOne(const options_t *v, conform_t *c, ep_check_outcome_t *outcome) {
  ep_check_options_t *o = &c->check;
  o->choice.profile = &c->profile;
  o->choice.cells = c->cells;
  o->choice.numCells = c->numCells;
  o->firstCase = (uint64_t)v->onlyCase;
  o->numCases = 1;
  uint64_t inBatch = o->firstCase % EP_BATCH_CASES;
  uint64_t cell = o->firstCase / EP_BATCH_CASES;
  if (cell >= (uint64_t)c->numCells || inBatch >= (uint64_t)c->cells[cell].numCases)
    return cliUsage("conform", "--case %lld: these options have no such case", v->onlyCase);
  if (epCheckRun(o, outcome) != TREFOIL_OK) return cliFail("conform", "%s", trefoilLastError());
  return cliPrintOutcome(o, outcome, v->json);
}

static int runAll(const options_t *v, conform_t *c, ep_check_outcome_t *outcome) {
  c->check.interrupted = cliInterrupts();
  trefoil_result_t rc = conformRun(c, outcome);
  cliProgressEnd();
  if (rc == TREFOIL_INVALID_ARGUMENT) return cliUsage("conform", "%s", trefoilLastError());
  if (rc != TREFOIL_OK) return cliFail("conform", "%s", trefoilLastError());
  json_t *result = conformJson(c, outcome);
  if (!result) return cliFail("conform", "out of memory for the result");
  int ok = json_is_true(json_object_get(result, "ok"));
  int page = v->html ? conformPage(result, v->html) : CLI_OK;
  if (v->json) {
    if (cliPrintJson(result) != CLI_OK) return CLI_FAILED;
  } else {
    conformText(result);
    json_decref(result);
  }
  return ok ? page : CLI_FAILED;
}

int cmdConform(int argc, char **argv) {
  options_t v = {.seed = 1, .numCases = 2000, .outside = 2, .onlyCase = -1, .timeoutMs = 20000};
  const struct poptOption options[] = {
      {"profile", 'p', POPT_ARG_STRING, &v.profile, 0,
       "what the library says it takes (default: by its version)", "NAME|FILE"},
      {"cases", 'n', POPT_ARG_LONGLONG, &v.numCases, CLI_NOT_NEGATIVE,
       "cases within the profile, about (default 2000; 0: none, and no verdict)", "N"},
      {"outside", 0, POPT_ARG_LONGLONG, &v.outside, CLI_NOT_NEGATIVE,
       "cases of each feature outside of it (default 2)", "N"},
      {"seed", 's', POPT_ARG_LONGLONG, &v.seed, 0, "what fixes them (default 1)", "S"},
      {"case", 0, POPT_ARG_LONGLONG, &v.onlyCase, CLI_NOT_NEGATIVE, "this case alone", "I"},
      {"ranks", 'r', POPT_ARG_STRING, &v.ranks, 0,
       "ranks of a group: N or LOW-HIGH (default: 2 to all GPUs; without a GPU 2-4)", "R"},
      {"jobs", 'j', POPT_ARG_INT, &v.jobs, CLI_POSITIVE, "groups at a time (default 1)", "J"},
      {"timeout-ms", 0, POPT_ARG_LONGLONG, &v.timeoutMs, CLI_POSITIVE,
       "of the groups (default 20000)", "MS"},
      {"limit", 0, POPT_ARG_DOUBLE, &v.limit, CLI_POSITIVE,
       "a call that takes longer hangs (default: as trefoil check, and the profile's first call)",
       "SECONDS"},
      {"html", 0, POPT_ARG_STRING, &v.html, 0, "also write the table as a page", "FILE"},
      {"from", 0, POPT_ARG_STRING, &v.from, 0, "show a kept result (--json) again, run nothing",
       "FILE"},
      {"markdown", 0, POPT_ARG_NONE, &v.markdown, 0, "with --from: as a section of a page", NULL},
      {"gpu-cases", 0, POPT_ARG_NONE, &v.gpuCases, 0,
       "only cases that GPUs of one NVLink domain run, as with --gpu", NULL},
      CLI_LIBRARY_OPTIONS(&v.library),
      CLI_COMMON_OPTIONS(&v.json)};
  const cli_args_t args = {
      "conform", NULL,
      "What of the interface does a library do? Feature by feature, in all modes: agrees bit for\n"
      "bit, agrees with order open, refused, aborts, hangs, wrong: counts, and how to see one\n"
      "again. Cases are drawn within a profile of what the library says it takes, then outside of\n"
      "it; nothing that the library does ends the run."};
  int rc = cliParse(&args, options, argc, argv, NULL);
  if (rc >= 0) return rc;
  if (v.from) return showKept(&v);
  if (v.markdown) return cliUsage("conform", "--markdown goes with --from");
  if (v.numCases > 1000000 || v.outside > EP_BATCH_CASES)
    return cliUsage("conform", "--cases %lld, --outside %lld: at most 1000000 and %d", v.numCases,
                    v.outside, EP_BATCH_CASES);
  if (!v.numCases && !v.outside)
    return cliUsage("conform", "--cases 0 and --outside 0 leave nothing to run");
  if ((rc = cliNoLaunch("conform")) >= 0) return rc;
  char paths[3][4096], replay[4096];
  conform_t *c = calloc(1, sizeof *c);
  ep_check_outcome_t *outcome = malloc(sizeof *outcome);
  if (!c || !outcome) {
    free(c);
    free(outcome);
    return cliFail("conform", "out of memory");
  }
  replayCommand(&v, replay, sizeof replay);
  c->check.replay = replay;
  rc = prepare(&v, c, paths);
  if (rc < 0) rc = v.onlyCase >= 0 ? runOne(&v, c, outcome) : runAll(&v, c, outcome);
  conformFree(c);
  free(c);
  free(outcome);
  return rc;
}
