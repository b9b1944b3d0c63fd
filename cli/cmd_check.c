/* trefoil check: random cases, or (--moe, --hidden) one real shape with everything it moves. */
#include "cli/check_verb.h"
#include "cli/profile_load.h"

#include "validate/checker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct progress_t {
  uint64_t numCases;
  double seconds;
} progress_t;

static void showProgress(void *context, const ep_check_status_t *s) {
  const progress_t *p = context;
  char detail[96];
  snprintf(detail, sizeof detail, "%llu cases, %.0f a second", (unsigned long long)s->cases,
           s->seconds > 0 ? (double)s->cases / s->seconds : 0.0);
  if (p->numCases)
    cliProgress("checking", s->cases, p->numCases, detail);
  else
    cliProgress("checking", (uint64_t)(s->seconds * 10), (uint64_t)(p->seconds * 10), detail);
}

/* The command that does the same again, but for the number of the case. */
static void replayCommand(const cli_check_t *v, char *text, size_t bytes) {
  char perNode[16];
  snprintf(perNode, sizeof perNode, "%d", v->ranksPerNode);
  const char *const strings[][2] = {
      {"modes", v->modes},       {"ranks-per-node", v->ranksPerNode ? perNode : NULL},
      {"ranks", v->ranks},       {"level", v->level},
      {"profile", v->profile},   {"library", v->library.library},
      {"nccl", v->library.nccl}, {"cuda", v->library.cuda}};
  size_t n = (size_t)snprintf(text, bytes, "trefoil check --seed %lld", v->seed);
  for (size_t i = 0; i < sizeof strings / sizeof *strings && n < bytes; i++)
    if (strings[i][1])
      n += (size_t)snprintf(text + n, bytes - n, " --%s %s", strings[i][0], strings[i][1]);
  if (v->timeoutMs && n < bytes)
    n += (size_t)snprintf(text + n, bytes - n, " --timeout-ms %lld", v->timeoutMs);
  if (v->limit > 0 && n < bytes)
    n += (size_t)snprintf(text + n, bytes - n, " --limit %g", v->limit);
  if (n < bytes)
    snprintf(text + n, bytes - n, "%s%s%s%s", v->processes ? " --processes" : "",
             v->countBytes ? " --count-bytes" : "", v->gpuCases ? " --gpu-cases" : "",
             v->library.gpu ? " --gpu" : "");
}

/* Ranks that mpirun or torchrun started; *launch numRanks 1: none. -1, or an exit code. */
static int openLaunch(const cli_check_t *v, int minRanks, int maxRanks, ep_launch_t *launch) {
  if (epLaunchFind(launch) != TREFOIL_OK) return cliUsage("check", "%s", trefoilLastError());
  if (launch->numRanks == 1) return -1;
  if (v->ranks && (minRanks != launch->numRanks || maxRanks != launch->numRanks))
    return cliUsage("check", "--ranks %s in a launch of %d processes: each process is a rank",
                    v->ranks, launch->numRanks);
  if (v->processes || v->jobs > 1)
    return cliUsage("check", "--%s in a launch of %d processes: the launcher says how many",
                    v->processes ? "processes" : "jobs", launch->numRanks);
  /* ranks of a batch are together but for the time that one of them waits for a lost one */
  launch->gatherSeconds = 120 + (int)(3 * v->timeoutMs / 1000);
  if (epLaunchOpen(launch) != TREFOIL_OK) return cliFail("check", "%s", trefoilLastError());
  if (launch->rank == 0 && launch->numElsewhere > 0 && !launch->hasSecret)
    fprintf(
        stderr,
        "trefoil check: note: %d of %d ranks are on other machines, and nothing but the launch's "
        "name tells them from others of this network; set TREFOIL_LAUNCH_SECRET where others use "
        "it\n",
        launch->numElsewhere, launch->numRanks);
  return -1;
}

/* Cases within a profile, at its level if none was said. */
static void keepTo(const cli_check_t *v, const ep_profile_t *p, ep_check_options_t *o) {
  if (cliProfileIsFree(p)) return;
  o->choice.profile = p;
  if (!v->level) o->choice.orderFree = p->open;
  if (p->firstCallNs && !o->limitNs)
    o->limitNs =
        (o->timeoutNs ? o->timeoutNs : 20000000000u) * 5 / 4 + 5000000000u + p->firstCallNs;
}

/* An option that means nothing to A2SGD. */
static const char *notOfA2sgd(const cli_check_t *v) {
  return v->level && !strcmp(v->level, "order-free") ? "level order-free"
         : v->profile                                ? "profile"
         : v->countBytes                             ? "count-bytes"
         : v->ranksPerNode                           ? "ranks-per-node"
                                                     : NULL;
}

int cliCheckRandom(const cli_check_t *v) {
  char paths[3][4096], replay[4096], ranks[16];
  cli_check_t said = *v;
  ep_launch_t launch;
  ep_check_options_t o = {.firstCase = (uint64_t)v->firstCase,
                          .numCases = (uint64_t)v->numCases,
                          .seconds = v->seconds,
                          .jobs = v->jobs,
                          .processes = v->processes,
                          .countBytes = v->countBytes,
                          .timeoutNs = (uint64_t)v->timeoutMs * 1000000u,
                          .limitNs = (uint64_t)(v->limit * 1e9),
                          .maxFindings = v->findings ? v->findings : -1,
                          .progress = showProgress};
  o.choice.seed = (uint64_t)v->seed;
  if (v->modes && !cliCaseModes(v->modes, &o.choice.modes))
    return cliUsage("check",
                    "--modes %s: expected all, ll, ht, or some of ll-expert-major, "
                    "ll-rank-major, ht-flat, ht-expert-major, a2sgd",
                    v->modes);
  const char *other = o.choice.modes & EP_MODE_A2SGD ? notOfA2sgd(v) : NULL;
  if (other) return cliUsage("check", "--%s does not go with --modes a2sgd", other);
  if (v->ranks && !cliRange(v->ranks, &o.choice.minRanks, &o.choice.maxRanks))
    return cliUsage("check", "--ranks %s: expected N or LOW-HIGH", v->ranks);
  if (o.choice.maxRanks > EP_MAX_RANKS)
    return cliUsage("check", "--ranks %s: random cases have at most %d ranks", v->ranks,
                    EP_MAX_RANKS);
  if (v->level && strcmp(v->level, "strict") && strcmp(v->level, "order-free"))
    return cliUsage("check", "--level %s: expected strict or order-free", v->level);
  o.choice.orderFree = v->level && !strcmp(v->level, "order-free") ? EP_OPEN_LL_ROWS : 0;
  o.choice.gpuSubset = v->gpuCases || v->library.gpu;
  o.choice.ranksPerNode = v->ranksPerNode;
  if (o.choice.gpuSubset && getenv("NCCL_LSA_TEAM_SIZE"))
    return cliUsage("check", "NCCL_LSA_TEAM_SIZE is set, but random cases on GPUs ignore it: unset "
                             "it, and say --ranks-per-node");
  if (v->ranksPerNode && v->profile)
    return cliUsage("check", "--ranks-per-node does not go with --profile");
  ep_profile_t profile;
  if (v->profile && cliProfileLoad(&profile, v->profile) != TREFOIL_OK)
    return cliUsage("check", "--profile: %s", trefoilLastError());
  if (v->profile) keepTo(v, &profile, &o);
  int rc = cliLibraries("check", &v->library, paths, &o.paths);
  if (rc < 0) rc = openLaunch(v, o.choice.minRanks, o.choice.maxRanks, &launch);
  if (rc >= 0) return rc;
  if (launch.numRanks > 1) {
    o.launch = &launch;
    snprintf(ranks, sizeof ranks, "%d", launch.numRanks);
    said.ranks = ranks;
  } else if (v->library.gpu && !v->ranks) { /* as many ranks as GPUs; the replay says how many */
    if (epLibraryProbe(&o.paths, &o.numDevices) != TREFOIL_OK)
      return cliFail("check", "%s", trefoilLastError());
    o.choice.maxRanks = o.numDevices < EP_CHECK_MOST_RANKS ? o.numDevices : EP_CHECK_MOST_RANKS;
    o.choice.minRanks = 1;
    snprintf(ranks, sizeof ranks, "1-%d", o.choice.maxRanks);
    said.ranks = ranks;
  }
  replayCommand(&said, replay, sizeof replay);
  o.replay = replay;
  progress_t progress = {o.numCases, o.seconds};
  o.context = &progress;
  if (launch.numRanks == 1)
    o.interrupted = cliInterrupts(); /* launchers end all ranks themselves */
  ep_check_outcome_t *outcome = malloc(sizeof *outcome);
  if (!outcome) return cliFail("check", "out of memory");
  enum { MOST_OUTCOMES = 100000000 };
  if (o.choice.orderFree && o.numCases <= MOST_OUTCOMES && launch.numRanks == 1)
    o.outcomes = o.numCases ? calloc(1, o.numCases) : NULL; /* how many agree with order open */
  trefoil_result_t result = epCheckRun(&o, outcome);
  cliProgressEnd();
  if (launch.numRanks > 1) epLaunchClose(&launch);
  if (result == TREFOIL_OK && launch.numRanks > 1 && launch.rank > 0) {
    free(outcome); /* rank 0 tells for all */
    return CLI_OK;
  }
  if (result != TREFOIL_OK) {
    free(o.outcomes);
    free(outcome);
    return result == TREFOIL_INVALID_ARGUMENT ? cliUsage("check", "%s", trefoilLastError())
                                              : cliFail("check", "%s", trefoilLastError());
  }
  if (o.numCases != 1 && launch.numRanks == 1) cliConfirmFindings(&o, outcome);
  rc = cliPrintOutcome(&o, outcome, v->json);
  free(o.outcomes);
  free(outcome);
  return rc;
}

int cmdCheck(int argc, char **argv) {
  cli_check_t v = {.seed = 1, .firstCase = -1, .numCases = -1, .tokens = -1, .findings = 5};
  const struct poptOption options[] = {
      {"cases", 'n', POPT_ARG_LONGLONG, &v.numCases, CLI_NOT_NEGATIVE,
       "random cases (default 20000)", "N"},
      {"seed", 's', POPT_ARG_LONGLONG, &v.seed, 0, "what fixes them (default 1)", "S"},
      {"case", 0, POPT_ARG_LONGLONG, &v.firstCase, CLI_NOT_NEGATIVE,
       "this case alone, or with --cases the first of them", "I"},
      {"seconds", 0, POPT_ARG_DOUBLE, &v.seconds, CLI_POSITIVE, "stop after so long", "T"},
      {"modes", 0, POPT_ARG_STRING, &v.modes, 0,
       "all, ll, ht, ll-expert-major, ll-rank-major, ht-flat, ht-expert-major; a2sgd: steps of "
       "gradient "
       "averaging",
       "LIST"},
      {"mode", 0, POPT_ARG_STRING, &v.modes, 0, "the same", "LIST"},
      {"ranks", 'r', POPT_ARG_STRING, &v.ranks, 0, "ranks of a group: N or LOW-HIGH", "R"},
      {"processes", 0, POPT_ARG_NONE, &v.processes, 0, "a process a rank instead of a thread",
       NULL},
      {"jobs", 'j', POPT_ARG_INT, &v.jobs, CLI_POSITIVE,
       "groups at a time, each in its process (default 1)", "J"},
      {"level", 0, POPT_ARG_STRING, &v.level, 0,
       "strict (default), or order-free: LL slot order, and rounding of sums, open", "LEVEL"},
      {"profile", 0, POPT_ARG_STRING, &v.profile, 0,
       "only cases within what a library says it takes, at its level", "NAME|FILE"},
      {"timeout-ms", 0, POPT_ARG_LONGLONG, &v.timeoutMs, CLI_POSITIVE,
       "of the groups (default 20000)", "MS"},
      {"limit", 0, POPT_ARG_DOUBLE, &v.limit, CLI_POSITIVE,
       "a call that takes longer hangs (default: the timeout, a quarter more and 5 s; on GPUs 60 "
       "s)",
       "SECONDS"},
      {"findings", 0, POPT_ARG_INT, &v.findings, CLI_NOT_NEGATIVE,
       "so many end the run (default 5; 0: none does)", "N"},
      {"count-bytes", 0, POPT_ARG_NONE, &v.countBytes, 0,
       "also compare the bytes that the library counts with the plan", NULL},
      {"gpu-cases", 0, POPT_ARG_NONE, &v.gpuCases, 0,
       "only cases that GPUs run, as with --gpu: in one NVLink domain, "
       "with --ranks-per-node in several",
       NULL},
      CLI_LIBRARY_OPTIONS(&v.library),
      {"moe", 0, POPT_ARG_STRING, &v.moe, 0, "one real shape: a model's layer", "NAME"},
      {"hidden", 0, POPT_ARG_LONGLONG, &v.hidden, CLI_POSITIVE, "or by hand: hidden size", "H"},
      {"experts", 0, POPT_ARG_INT, &v.experts, CLI_POSITIVE, "experts", "E"},
      {"topk", 0, POPT_ARG_INT, &v.topk, CLI_POSITIVE, "top-k", "K"},
      {"tokens", 0, POPT_ARG_LONGLONG, &v.tokens, CLI_POSITIVE,
       "tokens a rank (default: 128 in LL, 4096 in HT)", "N"},
      {"ranks-per-node", 0, POPT_ARG_INT, &v.ranksPerNode, CLI_POSITIVE,
       "pretended nodes of G ranks (random cases: of its common divisor with the ranks; default: "
       "any)",
       "G"},
      CLI_COMMON_OPTIONS(&v.json)};
  const cli_args_t args = {
      "check", NULL,
      "Does a library do what the reference says? Random cases over all modes: every buffer "
      "guarded\n"
      "and full of noise, every byte compared. The first difference says rank, slot, what belongs\n"
      "there and what was found, and how to run that case alone. With --moe or --hidden: one real\n"
      "shape, what goes where, and times."};
  int rc = cliParse(&args, options, argc, argv, NULL);
  if (rc >= 0) return rc;
  if (v.moe || v.hidden || v.experts || v.topk || v.tokens >= 0) return cliCheckReal(&v);
  int oneCase = v.firstCase >= 0 && v.numCases < 0 && v.seconds <= 0;
  if (v.firstCase < 0) v.firstCase = 0;
  if (v.numCases < 0) v.numCases = oneCase ? 1 : v.seconds > 0 ? 0 : 20000;
  if (v.numCases == 0 && v.seconds <= 0)
    return cliUsage("check", "--cases 0: nothing would be checked");
  if (v.jobs > EP_MAX_JOBS)
    return cliUsage("check", "--jobs %d: expected 1 to %d", v.jobs, EP_MAX_JOBS);
  return cliCheckRandom(&v);
}
