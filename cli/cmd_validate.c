/* trefoil validate: the Python package puts the parts together; --bytes is here: bytes from each source to
 * each destination, by reference, plan and both engines of the simulator, on the cases of `trefoil check`. */
#include "cli/check_verb.h"

#include "validate/legs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct request {
  long long numCases, seed, firstCase;
  char *modes, *ranks;
  int bytes, json, simGridEvery;
} request_t;

static void showProgress(void *context, uint64_t cases) {
  cliProgress("bytes of all legs", cases, *(const uint64_t *)context, NULL);
}

static json_t *tablesJson(const ep_legs_options_t *o, const ep_legs_outcome_t *out) {
  json_t *tables = json_object();
  for (int i = 0; i < o->numLegs; i++)
    json_object_set_new(tables, o->legs[i].name, json_integer((json_int_t)out->tables[i]));
  return tables;
}

static int printOutcome(const request_t *q, const ep_legs_options_t *o,
                        const ep_legs_outcome_t *out) {
  int isGreen = !out->failed && !out->interrupted;
  if (q->json) {
    json_t *j =
        json_pack("{s:b, s:i, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:o, s:o}", "ok",
                  isGreen, "failed", out->failed, "interrupted", out->interrupted != 0, "asked",
                  (json_int_t)o->numCases, "seed", (json_int_t)q->seed, "first_case",
                  (json_int_t)o->firstCase, "cases", (json_int_t)out->cases, "workloads",
                  (json_int_t)out->workloads, "numbers_compared", (json_int_t)out->numbers,
                  "bytes_sent", (json_int_t)out->bytes, "seconds", out->seconds, "tables",
                  tablesJson(o, out), "environment", cliEnvironment());
    if (out->failed) {
      json_object_set_new(j, "failed_case", json_integer((json_int_t)out->failedCase));
      json_object_set_new(j, "failure", json_string(out->text));
    }
    int rc = cliPrintJson(j);
    return isGreen ? rc : CLI_FAILED;
  }
  if (out->failed) printf("DIFFERENT\n%s\n", out->text);
  if (out->interrupted)
    printf("interrupted (%s) after %llu of %llu cases; so far:\n",
           out->interrupted == SIGINT ? "SIGINT" : "SIGTERM", (unsigned long long)out->cases,
           (unsigned long long)o->numCases);
  char bytes[CLI_NUMBER_BYTES];
  printf("%llu case%s, %llu dispatches with their combines, %s sent: ",
         (unsigned long long)out->cases, out->cases == 1 ? "" : "s",
         (unsigned long long)out->workloads, cliBytes(bytes, (double)out->bytes));
  printf("%s, %llu numbers compared, %.1f s\n", out->failed ? "they differ" : "all legs agree",
         (unsigned long long)out->numbers, out->seconds);
  printf("tables:");
  for (int i = 0; i < o->numLegs; i++)
    printf("%s %s %llu", i ? "," : "", o->legs[i].name, (unsigned long long)out->tables[i]);
  putchar('\n');
  return isGreen ? CLI_OK : CLI_FAILED;
}

static void replayCommand(const request_t *q, char *text, size_t bytes) {
  int n = snprintf(text, bytes, "trefoil validate --bytes --seed %lld", q->seed);
  if (q->modes && n > 0 && (size_t)n < bytes)
    n += snprintf(text + n, bytes - (size_t)n, " --modes %s", q->modes);
  if (q->ranks && n > 0 && (size_t)n < bytes)
    snprintf(text + n, bytes - (size_t)n, " --ranks %s", q->ranks);
}

static int runBytes(request_t *q) {
  ep_leg_t legs[EP_MAX_LEGS];
  ep_legs_options_t o = {.legs = legs, .progress = showProgress};
  char replay[512];
  o.choice.seed = (uint64_t)q->seed;
  if (q->modes && !cliModes(q->modes, &o.choice.modes))
    return cliUsage("validate",
                    "--modes %s: expected all, ll, ht, or some of ll-expert-major, "
                    "ll-rank-major, ht-flat, ht-expert-major",
                    q->modes);
  if (q->ranks && !cliRange(q->ranks, &o.choice.minRanks, &o.choice.maxRanks))
    return cliUsage("validate", "--ranks %s: expected N or LOW-HIGH", q->ranks);
  if (o.choice.maxRanks > EP_MAX_RANKS)
    return cliUsage("validate", "--ranks %s: random cases have at most %d ranks", q->ranks,
                    EP_MAX_RANKS);
  int oneCase = q->firstCase >= 0 && q->numCases < 0;
  o.firstCase = q->firstCase < 0 ? 0 : (uint64_t)q->firstCase;
  o.numCases = q->numCases < 0 ? (oneCase ? 1 : 5000) : (uint64_t)q->numCases;
  if (o.numCases == 0) return cliUsage("validate", "--cases 0: nothing would be compared");
  if (!q->simGridEvery) q->simGridEvery = oneCase ? 1 : 32;
  o.numLegs = epLegsOfBuild(legs, q->simGridEvery);
  replayCommand(q, replay, sizeof replay);
  o.replay = replay;
  o.context = &o.numCases;
  o.interrupted = cliInterrupts();
  ep_legs_outcome_t *out = malloc(sizeof *out);
  if (!out) return cliFail("validate", "out of memory");
  trefoil_result_t result = epLegsRun(&o, out);
  cliProgressEnd();
  int rc = result == TREFOIL_OK ? printOutcome(q, &o, out)
                                : cliFail("validate", "%s", trefoilLastError());
  free(out);
  return rc;
}

int cmdValidate(int argc, char **argv) {
  int isBytes = 0;
  for (int i = 1; i < argc; i++) isBytes |= !strcmp(argv[i], "--bytes");
  if (!isBytes) return cliRunPython("validate", "trefoil.validation", argc, argv);
  request_t q = {.seed = 1, .firstCase = -1, .numCases = -1};
  const struct poptOption options[] = {
      {"bytes", 0, POPT_ARG_NONE, &q.bytes, 0, "bytes alone: needs no Python", NULL},
      {"cases", 'n', POPT_ARG_LONGLONG, &q.numCases, CLI_NOT_NEGATIVE,
       "random cases (default 5000)", "N"},
      {"seed", 's', POPT_ARG_LONGLONG, &q.seed, 0, "what fixes them (default 1)", "S"},
      {"case", 0, POPT_ARG_LONGLONG, &q.firstCase, CLI_NOT_NEGATIVE,
       "this case alone, or with --cases the first of them", "I"},
      {"modes", 0, POPT_ARG_STRING, &q.modes, 0,
       "all, ll, ht, ll-expert-major, ll-rank-major, ht-flat, ht-expert-major", "LIST"},
      {"ranks", 'r', POPT_ARG_STRING, &q.ranks, 0, "ranks of a group: N or LOW-HIGH", "R"},
      {"simgrid-every", 0, POPT_ARG_INT, &q.simGridEvery, CLI_POSITIVE,
       "SimGrid replays one dispatch of so many (default 32; of a case alone: all)", "N"},
      CLI_COMMON_OPTIONS(&q.json)};
  const cli_args_t args = {
      "validate", NULL,
      "Do reference, plan and simulator agree on who sends how much to whom? Every pair of ranks,\n"
      "tier, phase and link of the random cases of `trefoil check`. Without --bytes: also the CPU\n"
      "library's results, and the committed measurements against the models (docs/check.md)."};
  int rc = cliParse(&args, options, argc, argv, NULL);
  return rc >= 0 ? rc : runBytes(&q);
}
