/* The table as JSON and as text. Text and page are made from the JSON, so that a kept result can be shown
 * again. */
#include "cli/conform.h"

#include <stdio.h>
#include <string.h>

static const char *rowText(int row) {
  return row == CONFORM_PLAIN   ? "plain"
         : row == CONFORM_MIXED ? "all that the profile takes, mixed"
                                : epFeatureText(row - 1);
}
static const char *rowWord(int row) {
  return row == CONFORM_PLAIN ? "plain" : row == CONFORM_MIXED ? "mixed" : epFeatureWord(row - 1);
}

static json_t *countsJson(const uint64_t *counts) {
  json_t *j = json_object();
  for (int o = 0; o < EP_CASE_NUM_OUTCOMES; o++)
    if (counts[o])
      json_object_set_new(j, epOutcomeName((ep_case_outcome_t)o),
                          json_integer((json_int_t)counts[o]));
  return j;
}

static json_t *cellJson(int row, int mode, const conform_entry_t *e) {
  json_t *j = json_pack("{s:s, s:s, s:s, s:b, s:o}", "feature", rowWord(row), "text", rowText(row),
                        "mode", trefoilModeName((trefoil_mode_t)mode), "inside", e->inside,
                        "counts", countsJson(e->counts));
  if (e->found)
    json_object_set_new(j, "finding",
                        json_pack("{s:s, s:I, s:s, s:s}", "outcome",
                                  epOutcomeName(e->finding.outcome), "case",
                                  (json_int_t)e->finding.caseIdx, "what", e->finding.what, "replay",
                                  e->finding.replay));
  return j;
}

static void levelsJson(json_t *j, const conform_t *c) {
  unsigned open = c->profile.open;
  json_object_set_new(j, "level", json_string(open ? "order-free" : "strict"));
  json_object_set_new(
      j, "compared",
      json_string(!open ? "every byte, with order and rounding as specified"
                        : "received rows as sets per (expert, source rank), what lies beside them "
                          "moved alike; sums within a bound from their own operands; all other "
                          "bytes exactly"));
}

json_t *conformJson(const conform_t *c, const ep_check_outcome_t *outcome) {
  uint64_t totals[2][EP_CASE_NUM_OUTCOMES] = {{0}};
  json_t *cells = json_array();
  for (int row = 0; row < CONFORM_ROWS; row++)
    for (int m = 0; m < TREFOIL_NUM_MODES; m++) {
      const conform_entry_t *e = &c->table[row][m];
      if (!e->exists) continue;
      json_array_append_new(cells, cellJson(row, m, e));
      for (int o = 0; o < EP_CASE_NUM_OUTCOMES; o++) totals[e->inside][o] += e->counts[o];
    }
  uint64_t bad = 0, inside = 0;
  for (int o = 0; o < EP_CASE_NUM_OUTCOMES; o++) {
    if (o != EP_CASE_AGREES && o != EP_CASE_ORDER_OPEN) bad += totals[1][o];
    inside += totals[1][o];
  }
  json_t *j = json_pack(
      "{s:b, s:b, s:s, s:I, s:i, s:I, s:b, s:i, s:i, s:f, s:I}", "ok",
      inside && !bad && !outcome->interrupted, "interrupted", outcome->interrupted != 0, "profile",
      c->profile.name, "seed", (json_int_t)c->check.choice.seed, "library_version",
      c->facts.version, "timeout_ms", (json_int_t)(c->check.timeoutNs / 1000000), "ours",
      c->facts.isOurs, "devices", c->facts.numDevices, "max_ranks", c->check.choice.maxRanks,
      "seconds", outcome->status.seconds, "bytes_compared", (json_int_t)outcome->status.bytes);
  levelsJson(j, c);
  json_object_set_new(
      j, "totals",
      json_pack("{s:o, s:o}", "inside", countsJson(totals[1]), "outside", countsJson(totals[0])));
  json_object_set_new(j, "cells", cells);
  json_object_set_new(j, "environment", cliEnvironment());
  cliLibrariesJson(j, &c->check.paths);
  return j;
}

/* ---- Text ---- */

/* The worst first. */
static const ep_case_outcome_t order[] = {EP_CASE_WRONG,   EP_CASE_HANGS,   EP_CASE_ABORTS,
                                          EP_CASE_REFUSED, EP_CASE_NOT_RUN, EP_CASE_ORDER_OPEN,
                                          EP_CASE_AGREES};
enum { NUM_ORDER = sizeof order / sizeof *order };

static json_int_t countOf(const json_t *counts, ep_case_outcome_t outcome) {
  return json_integer_value(json_object_get(counts, epOutcomeName(outcome)));
}

static const char *countsText(const json_t *counts, char text[CONFORM_TEXT]) {
  size_t n = 0;
  text[0] = 0;
  for (int i = 0; i < NUM_ORDER && n < CONFORM_TEXT; i++)
    if (countOf(counts, order[i]))
      n += (size_t)snprintf(text + n, CONFORM_TEXT - n, "%s%s %lld", n ? ", " : "",
                            epOutcomeName(order[i]), (long long)countOf(counts, order[i]));
  return text;
}

const char *conformCell(const json_t *cell, char text[CONFORM_TEXT]) {
  return countsText(json_object_get(cell, "counts"), text);
}

const char *conformWorst(const json_t *cell) {
  const json_t *counts = json_object_get(cell, "counts");
  for (int i = 0; i < NUM_ORDER; i++)
    if (countOf(counts, order[i])) return epOutcomeName(order[i]);
  return epOutcomeName(EP_CASE_NOT_RUN);
}

static const char *wordOf(const json_t *object, const char *key) {
  const char *word = json_string_value(json_object_get(object, key));
  return word ? word : "";
}

/* What the forms of the table differ in. */
typedef struct form {
  const char *first, *cell, *end; /* formats of a row's text and of a cell; the end of a row */
  const char *none;
} form_t;
static const form_t textForm = {"%-34s", "  %-26s", "\n", "-"};
static const form_t markdownForm = {"| %s", " | %s", " |\n", "&ndash;"};

static void printWords(const form_t *form, const char *first, const char *const *words) {
  printf(form->first, first);
  for (int m = 0; m < TREFOIL_NUM_MODES; m++) printf(form->cell, words[m]);
  fputs(form->end, stdout);
}

/* A feature's cells: those of its four modes that exist; 0: none in this half. */
static int printRow(const form_t *form, json_t *cells, const char *feature, int inside,
                    const char *text) {
  char said[TREFOIL_NUM_MODES][CONFORM_TEXT];
  const char *words[TREFOIL_NUM_MODES] = {form->none, form->none, form->none, form->none};
  int numSaid = 0;
  json_t *cell;
  size_t i;
  json_array_foreach(cells, i, cell) {
    if (strcmp(wordOf(cell, "feature"), feature)) continue;
    if (json_is_true(json_object_get(cell, "inside")) != inside) continue;
    for (int m = 0; m < TREFOIL_NUM_MODES; m++)
      if (!strcmp(wordOf(cell, "mode"), trefoilModeName((trefoil_mode_t)m)))
        words[m] = conformCell(cell, said[m]);
    numSaid++;
  }
  if (numSaid) printWords(form, text, words);
  return numSaid;
}

static void printHalf(const form_t *form, json_t *cells, int inside, const char *title) {
  static const char *const rule[] = {"---", "---", "---", "---"};
  const char *modes[TREFOIL_NUM_MODES], *last = "";
  json_t *cell;
  size_t i;
  for (int m = 0; m < TREFOIL_NUM_MODES; m++) modes[m] = trefoilModeName((trefoil_mode_t)m);
  putchar('\n');
  printWords(form, title, modes);
  if (form == &markdownForm) printWords(form, "---", rule);
  json_array_foreach(cells, i, cell) {
    const char *feature = wordOf(cell, "feature");
    if (strcmp(feature, last)) printRow(form, cells, feature, inside, wordOf(cell, "text"));
    last = feature;
  }
}

static void printFindings(json_t *cells) {
  json_t *cell;
  size_t i;
  int first = 1;
  json_array_foreach(cells, i, cell) {
    json_t *f = json_object_get(cell, "finding");
    if (!f) continue;
    if (first) printf("\nThe first case of each that does not agree:\n");
    first = 0;
    printf("%s, %s%s: %s: %s\n  replay: %s\n", wordOf(cell, "mode"), wordOf(cell, "text"),
           json_is_true(json_object_get(cell, "inside")) ? "" : " (outside)", wordOf(f, "outcome"),
           wordOf(f, "what"), wordOf(f, "replay"));
  }
}

const char *conformVerdict(const json_t *r) {
  if (json_is_true(json_object_get(r, "ok"))) return "CONFORMS to its profile";
  json_t *inside = json_object_get(json_object_get(r, "totals"), "inside");
  return json_object_size(inside) ? "DOES NOT CONFORM to its profile"
                                  : "NO VERDICT: no case of its profile was run";
}

void conformText(const json_t *r) {
  char text[CONFORM_TEXT];
  json_t *cells = json_object_get(r, "cells");
  const json_t *totals = json_object_get(r, "totals");
  int version = (int)json_integer_value(json_object_get(r, "library_version"));
  printf("%s, version %d.%d.%d, profile %s, level %s\ncompared: %s\n", wordOf(r, "library"),
         version / 10000, version / 100 % 100, version % 100, wordOf(r, "profile"),
         wordOf(r, "level"), wordOf(r, "compared"));
  printHalf(&textForm, cells, 1, "within the profile");
  printHalf(&textForm, cells, 0, "outside of it");
  printFindings(cells);
  countsText(json_object_get(totals, "inside"), text);
  printf("\nwithin the profile: %s\n", *text ? text : "nothing was run");
  countsText(json_object_get(totals, "outside"), text);
  printf("outside of it: %s\n", *text ? text : "nothing was run");
  printf("%s, %.0f s%s\n", conformVerdict(r), json_real_value(json_object_get(r, "seconds")),
         json_is_true(json_object_get(r, "interrupted")) ? ", interrupted" : "");
}

void conformMarkdown(const json_t *r) {
  char inside[CONFORM_TEXT], outside[CONFORM_TEXT];
  json_t *cells = json_object_get(r, "cells"), *cell;
  const json_t *totals = json_object_get(r, "totals");
  size_t i;
  int version = (int)json_integer_value(json_object_get(r, "library_version")), hasOutside = 0;
  json_array_foreach(cells, i, cell) hasOutside |= !json_is_true(json_object_get(cell, "inside"));
  countsText(json_object_get(totals, "inside"), inside);
  countsText(json_object_get(totals, "outside"), outside);
  printf("`%s`, version %d.%d.%d, profile `%s`, seed %lld. Compared: %s.\n\n"
         "Within the profile: %s. Outside of it: %s.\n",
         wordOf(r, "library"), version / 10000, version / 100 % 100, version % 100,
         wordOf(r, "profile"), (long long)json_integer_value(json_object_get(r, "seed")),
         wordOf(r, "compared"), *inside ? inside : "nothing was run",
         *outside ? outside : "nothing was run");
  if (*inside) printHalf(&markdownForm, cells, 1, "within the profile");
  if (hasOutside) printHalf(&markdownForm, cells, 0, "outside of it");
  json_array_foreach(cells, i, cell) {
    json_t *f = json_object_get(cell, "finding");
    if (f)
      printf("\n- %s, %s%s: *%s*: %s\n  `%s`\n", wordOf(cell, "mode"), wordOf(cell, "text"),
             json_is_true(json_object_get(cell, "inside")) ? "" : " (outside)",
             wordOf(f, "outcome"), wordOf(f, "what"), wordOf(f, "replay"));
  }
}
