/* A finding in words. The case is made again from its number: the process that found it may not have lived
 * to tell. */
#include "validate/checker.h"

#include "validate/check_report.h"

#include <stdio.h>
#include <string.h>

void epFindingWrite(ep_check_finding_t *f, const ep_check_options_t *o) {
  ep_check_group_t group;
  ep_check_case_t c = {0};
  char about[1024], script[4096] = "", many[96] = "";
  epMakeGroup(&group, &o->choice, f->caseIdx / EP_BATCH_CASES);
  epDescribeGroup(&group, about, sizeof about);
  /* opening and closing are of the whole group */
  if (f->numCases == 1 && epMakeCase(&c, &group, f->caseIdx) == TREFOIL_OK)
    epDescribeScript(&c, script, sizeof script);
  epFreeCase(&c);
  if (f->numCases > 1)
    snprintf(many, sizeof many, " (with it %llu cases of this group were not run)",
             (unsigned long long)f->numCases - 1);
  snprintf(f->replay, sizeof f->replay, "%.900s --case %llu", o->replay ? o->replay : "",
           (unsigned long long)f->caseIdx);
  snprintf(f->text, sizeof f->text, "case %llu: %s%s\n%s\n%sreplay: %s",
           (unsigned long long)f->caseIdx, f->what, many, about, script, f->replay);
}

void epFindingAdd(ep_check_outcome_t *outcome, const ep_check_options_t *o,
                  const ep_check_finding_t *f) {
  int n = outcome->numFindings < EP_KEPT_FINDINGS ? outcome->numFindings : EP_KEPT_FINDINGS, at = n;
  while (at > 0 && outcome->findings[at - 1].caseIdx > f->caseIdx) at--;
  outcome->numFindings++;
  if (at < EP_KEPT_FINDINGS) {
    int moved = (n < EP_KEPT_FINDINGS ? n : EP_KEPT_FINDINGS - 1) - at;
    memmove(&outcome->findings[at + 1], &outcome->findings[at],
            sizeof *f * (size_t)(moved > 0 ? moved : 0));
    outcome->findings[at] = *f;
  }
  uint64_t end = (f->caseIdx / EP_BATCH_CASES + 1) * EP_BATCH_CASES, left = f->numCases;
  for (uint64_t i = f->caseIdx; o->outcomes && left > 0 && i < end; i++) {
    if (i - o->firstCase >= o->numCases || o->outcomes[i - o->firstCase]) continue;
    o->outcomes[i - o->firstCase] = (uint8_t)f->outcome;
    left--;
  }
  outcome->failed = 1;
  outcome->failedCase = outcome->findings[0].caseIdx;
  memcpy(outcome->text, outcome->findings[0].text, sizeof outcome->text);
  if (o->found) o->found(o->context, f);
}

void epCompareWithAsked(const ep_check_options_t *o, int isTimeOver, ep_check_outcome_t *out) {
  uint64_t done = out->status.cases;
  out->asked = o->numCases;
  if (out->failed || out->interrupted) return;
  if (isTimeOver ? done > 0 : done == out->asked) return;
  out->failed = 1;
  out->failedCase = o->firstCase;
  if (isTimeOver)
    snprintf(out->text, sizeof out->text,
             "the time was over before a case was done: nothing was compared");
  else
    snprintf(out->text, sizeof out->text, "%llu of %llu cases were done, and nobody says why",
             (unsigned long long)done, (unsigned long long)out->asked);
}
