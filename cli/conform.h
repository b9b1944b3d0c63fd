/* trefoil conform: one table, features by modes, of how a library does. */
#ifndef TREFOIL_CLI_CONFORM_H
#define TREFOIL_CLI_CONFORM_H

#include "cli/check_verb.h"
#include "validate/checker.h"

/* Rows of the table: the plain case, each feature, and all features of the profile mixed. */
enum { CONFORM_PLAIN = 0, CONFORM_MIXED = EP_NUM_FEATURES + 1, CONFORM_ROWS };

typedef struct conform_entry {
  int exists, inside; /* the mode has the feature; the profile takes it */
  uint64_t counts[EP_CASE_NUM_OUTCOMES];
  int found;                  /* the worst outcome that has a finding, or 0 */
  ep_check_finding_t finding; /* its first */
} conform_entry_t;

typedef struct conform {
  ep_profile_t profile;
  ep_library_facts_t facts;
  ep_check_options_t check;
  int perCell, perOutside;
  ep_check_cell_t *cells; /* [numCells], a batch each; row and mode of each: */
  int *rows;
  int numCells;
  conform_entry_t table[CONFORM_ROWS][TREFOIL_NUM_MODES];
} conform_t;

/* Which cells there are for about numCases cases inside, numOutside each outside. 0: out of memory. */
int conformPlan(conform_t *c, int64_t numCases, int numOutside);
/* Runs them all, and sums up. */
trefoil_result_t conformRun(conform_t *c, ep_check_outcome_t *outcome);
void conformFree(conform_t *c);

/* The result as JSON; the same as text on stdout, and as a page. A page that cannot be written: CLI_FAILED
 * after the sentence. */
json_t *conformJson(const conform_t *c, const ep_check_outcome_t *outcome);
void conformText(const json_t *result);
const char *conformVerdict(const json_t *result); /* whether it conforms, in words */
void conformMarkdown(const json_t *result);       /* a section of docs/conformance.md */
int conformPage(const json_t *result, const char *path);

/* What an entry of "cells" says: "agrees 12, order open 4". Returns text. */
enum { CONFORM_TEXT = 128 };
const char *conformCell(const json_t *cell, char text[CONFORM_TEXT]);
/* Its class: the worst outcome there is. */
const char *conformWorst(const json_t *cell);

#endif
