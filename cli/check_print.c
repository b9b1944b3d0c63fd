/* What random cases came to, as text and JSON. */
#include "cli/check_verb.h"

#include "validate/checker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Does a case fail alone, too? If not, it takes what came before it in the batch. */
static void confirm(const ep_check_options_t *options, ep_check_finding_t *f,
                    ep_check_outcome_t *second) {
  ep_check_options_t again = *options;
  again.firstCase = f->caseIdx;
  again.numCases = 1;
  again.jobs = 1;
  again.maxFindings = 1;
  again.progress = NULL;
  again.found = NULL;
  again.outcomes = NULL;
  size_t used = strlen(f->text);
  if (epCheckRun(&again, second) != TREFOIL_OK || second->failed || second->interrupted) return;
  uint64_t first = f->caseIdx - f->caseIdx % EP_BATCH_CASES;
  if (first < options->firstCase) first = options->firstCase;
  snprintf(f->text + used, sizeof f->text - used,
           "\n(alone it passes; with what came before it: %s --case %llu --cases %llu)",
           options->replay, (unsigned long long)first,
           (unsigned long long)(f->caseIdx - first + 1));
}

/* Not of a hang, which takes its time again, nor of many. */
void cliConfirmFindings(const ep_check_options_t *options, ep_check_outcome_t *outcome) {
  enum { MOST = 5 };
  ep_check_outcome_t *second = malloc(sizeof *second);
  for (int i = 0; second && i < outcome->numFindings && i < MOST && !outcome->interrupted; i++) {
    ep_check_finding_t *f = &outcome->findings[i];
    if (f->outcome != EP_CASE_HANGS && f->numCases == 1) confirm(options, f, second);
  }
  free(second);
}

static json_t *findingJson(const ep_check_finding_t *f) {
  return json_pack("{s:s, s:I, s:I, s:i, s:s, s:s, s:s, s:s}", "outcome", epOutcomeName(f->outcome),
                   "case", (json_int_t)f->caseIdx, "cases", (json_int_t)f->numCases, "rank",
                   f->rank, "call", f->call, "what", f->what, "replay", f->replay, "text", f->text);
}

static int isGreen(const ep_check_outcome_t *outcome) {
  return !outcome->failed && !outcome->interrupted;
}

/* Order-free: cases that agree, but not to the bit. */
static json_int_t numOpen(const ep_check_options_t *o) {
  json_int_t n = 0;
  for (uint64_t i = 0; o->outcomes && i < o->numCases; i++)
    n += o->outcomes[i] == EP_CASE_ORDER_OPEN;
  return n;
}

void cliPutsJson(json_t *into, const ep_puts_t *puts) {
  if (!epPutsCounted(puts)) return;
  json_t *j = json_object();
  for (int k = 0; k < NCCL_EP_PUT_KINDS; k++)
    json_object_set_new(j, epPutName(k),
                        json_pack("{s:I, s:I}", "counted", (json_int_t)puts->counted[k], "least",
                                  (json_int_t)puts->least[k]));
  json_object_set_new(into, "puts", j);
}

void cliPutsText(const ep_puts_t *puts, const char *indent) {
  if (!epPutsCounted(puts)) return;
  printf("%sputs between NVLink domains, least for the rows in ():", indent);
  for (int k = 0; k < NCCL_EP_PUT_KINDS; k++)
    printf("%s %s %llu (%llu)", k ? "," : "", epPutName(k), (unsigned long long)puts->counted[k],
           (unsigned long long)puts->least[k]);
  putchar('\n');
}

static int printJson(const ep_check_options_t *o, const ep_check_outcome_t *outcome) {
  const ep_check_status_t *s = &outcome->status;
  json_t *findings = json_array();
  for (int i = 0; i < outcome->numFindings && i < EP_KEPT_FINDINGS; i++)
    json_array_append_new(findings, findingJson(&outcome->findings[i]));
  json_t *j = json_pack("{s:b, s:i, s:b, s:I, s:I, s:I, s:I, s:f, s:f, s:I, s:i, s:o, s:o}", "ok",
                        isGreen(outcome), "failed", outcome->failed, "interrupted",
                        outcome->interrupted != 0, "seed", (json_int_t)o->choice.seed, "first_case",
                        (json_int_t)o->firstCase, "asked", (json_int_t)outcome->asked, "cases",
                        (json_int_t)s->cases, "seconds", s->seconds, "cases_per_second",
                        s->seconds > 0 ? (double)s->cases / s->seconds : 0, "bytes_compared",
                        (json_int_t)s->bytes, "num_findings", outcome->numFindings, "findings",
                        findings, "environment", cliEnvironment());
  cliLibrariesJson(j, &o->paths);
  json_object_set_new(j, "level", json_string(o->choice.orderFree ? "order-free" : "strict"));
  if (outcome->sharedDevices)
    json_object_set_new(j, "shared_gpus", json_integer(outcome->sharedDevices));
  if (o->outcomes) json_object_set_new(j, "order_open", json_integer(numOpen(o)));
  if (o->countBytes) json_object_set_new(j, "bytes_counted", json_integer((json_int_t)s->counted));
  if (o->countBytes) cliPutsJson(j, &s->puts);
  if (outcome->failed) {
    const char *text = outcome->numFindings ? outcome->findings[0].text : outcome->text;
    json_object_set_new(j, "failed_case", json_integer((json_int_t)outcome->failedCase));
    json_object_set_new(j, "failure", json_string(text));
  }
  int rc = cliPrintJson(j);
  return isGreen(outcome) ? rc : CLI_FAILED;
}

static void printFindings(const ep_check_outcome_t *outcome) {
  static const char *const heads[EP_CASE_NUM_OUTCOMES] = {[EP_CASE_REFUSED] = "REFUSED",
                                                          [EP_CASE_ABORTS] = "ABORTS",
                                                          [EP_CASE_HANGS] = "HANGS",
                                                          [EP_CASE_WRONG] = "DIFFERENT"};
  int n = outcome->numFindings, kept = n < EP_KEPT_FINDINGS ? n : EP_KEPT_FINDINGS;
  for (int i = 0; i < kept; i++)
    printf("%s\n%s\n\n", heads[outcome->findings[i].outcome], outcome->findings[i].text);
  if (n > kept) printf("and %d more findings\n\n", n - kept);
  if (outcome->failed && n == 0) printf("NOT CHECKED\n%s\n\n", outcome->text);
}

static void printCases(const ep_check_options_t *o, const ep_check_outcome_t *outcome) {
  const ep_check_status_t *s = &outcome->status;
  char bytes[CLI_NUMBER_BYTES];
  printf("%llu case%s %s", (unsigned long long)s->cases, s->cases == 1 ? "" : "s",
         s->cases == 1 ? "agrees" : "agree");
  if (!isGreen(outcome) && outcome->asked)
    printf(" of %llu asked for", (unsigned long long)outcome->asked);
  printf(", seed %llu, %s compared, %.1f s, %.0f cases a second\n",
         (unsigned long long)o->choice.seed, cliBytes(bytes, (double)s->bytes), s->seconds,
         s->seconds > 0 ? (double)s->cases / s->seconds : 0);
}

/* Some number of ranks does not consist of whole nodes, as they were asked for. */
static int areUneven(const ep_check_choice_t *c) {
  int uneven = 0, least = c->minRanks ? c->minRanks : 1;
  int most = c->maxRanks ? c->maxRanks : EP_CHECK_MOST_RANKS;
  for (int R = least; c->ranksPerNode && R <= most; R++) uneven |= R % c->ranksPerNode != 0;
  return uneven;
}

int cliPrintOutcome(const ep_check_options_t *o, const ep_check_outcome_t *outcome, int json) {
  const ep_check_status_t *s = &outcome->status;
  if (json) return printJson(o, outcome);
  char bytes[CLI_NUMBER_BYTES];
  printFindings(outcome);
  if (outcome->interrupted)
    printf("interrupted (%s); so far:\n", outcome->interrupted == SIGINT ? "SIGINT" : "SIGTERM");
  printCases(o, outcome);
  if (o->outcomes)
    printf("order-free: %lld of them with rows in another order or sums rounded otherwise\n",
           (long long)numOpen(o));
  if (o->maxFindings > 0 && outcome->numFindings >= o->maxFindings &&
      outcome->status.cases + (uint64_t)outcome->numFindings < outcome->asked)
    printf("%d finding%s ended the run (--findings)\n", outcome->numFindings,
           outcome->numFindings == 1 ? "" : "s");
  if (areUneven(&o->choice))
    printf("where nodes of %d do not divide the ranks, domains were of the greatest common "
           "divisor\n",
           o->choice.ranksPerNode);
  if (o->countBytes && s->counted)
    printf("%s counted by the library as sent, by source and destination as in the plan\n",
           cliBytes(bytes, (double)s->counted));
  else if (o->countBytes && isGreen(outcome))
    printf("the library counts no bytes of its own (ncclEpCountBytes)\n");
  if (o->countBytes) cliPutsText(&s->puts, "");
  if (outcome->sharedDevices)
    printf("ranks shared %d GPU%s, a process each\n", outcome->sharedDevices,
           outcome->sharedDevices == 1 ? "" : "s");
  cliLibrariesText(&o->paths);
  return isGreen(outcome) ? CLI_OK : CLI_FAILED;
}
