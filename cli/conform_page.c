/* The table as one HTML page without any other file. */
#include "cli/conform.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char style[] =
    "body{font:15px/1.5 system-ui,sans-serif;max-width:76em;margin:2em auto;padding:0 1em;"
    "color:#1c2330}h1{font-size:1.5em}h2{font-size:1.15em;margin-top:1.8em}"
    "table{border-collapse:collapse;width:100%;font-size:13px}"
    "th,td{border:1px solid #d5dae2;padding:.3em .6em;text-align:left;vertical-align:top}"
    "th{background:#f2f4f7;font-weight:600}td.agrees{background:#dff3e3}"
    "td.order-open{background:#e2eefb}td.refused,td.not-run{background:#f3efdf}"
    "td.aborts,td.hangs{background:#fbe3cf}td.different{background:#f8d5d5}td.none{color:#98a1ae}"
    "code{font-size:12px;word-break:break-all}li{margin:.5em 0}.sum{font-weight:600}";

static void put(FILE *f, const char *text) {
  for (; *text; text++) switch (*text) {
    case '<':
      fputs("&lt;", f);
      break;
    case '>':
      fputs("&gt;", f);
      break;
    case '&':
      fputs("&amp;", f);
      break;
    case '"':
      fputs("&quot;", f);
      break;
    default:
      fputc(*text, f);
    }
}

static const char *wordOf(const json_t *object, const char *key) {
  const char *word = json_string_value(json_object_get(object, key));
  return word ? word : "";
}

static const json_t *cellOf(const json_t *cells, const char *feature, int mode, int inside) {
  size_t i;
  json_t *cell;
  json_array_foreach(
      (json_t *)cells, i,
      cell) if (!strcmp(wordOf(cell, "feature"), feature) &&
                !strcmp(wordOf(cell, "mode"), trefoilModeName((trefoil_mode_t)mode)) &&
                json_is_true(json_object_get(cell, "inside")) == inside) return cell;
  return NULL;
}

static void putCell(FILE *f, const json_t *cell) {
  char text[CONFORM_TEXT], word[32];
  if (!cell) {
    fputs("<td class=\"none\">&ndash;</td>", f);
    return;
  }
  snprintf(word, sizeof word, "%s", conformWorst(cell));
  for (char *p = word; *p; p++)
    if (*p == ' ') *p = '-';
  fprintf(f, "<td class=\"%s\">%s</td>", word, conformCell(cell, text));
}

static void putTable(FILE *f, const json_t *cells, int inside, const char *title) {
  const char *last = "";
  size_t i;
  json_t *cell;
  fprintf(f, "<h2>%s</h2>\n<table><tr><th>feature</th>", title);
  for (int m = 0; m < TREFOIL_NUM_MODES; m++)
    fprintf(f, "<th>%s</th>", trefoilModeName((trefoil_mode_t)m));
  fputs("</tr>\n", f);
  json_array_foreach((json_t *)cells, i, cell) {
    const char *feature = wordOf(cell, "feature");
    int any = 0;
    if (!strcmp(feature, last)) continue;
    last = feature;
    for (int m = 0; m < TREFOIL_NUM_MODES; m++) any |= !!cellOf(cells, feature, m, inside);
    if (!any) continue;
    fputs("<tr><td>", f);
    put(f, wordOf(cell, "text"));
    fputs("</td>", f);
    for (int m = 0; m < TREFOIL_NUM_MODES; m++) putCell(f, cellOf(cells, feature, m, inside));
    fputs("</tr>\n", f);
  }
  fputs("</table>\n", f);
}

static void putFindings(FILE *f, const json_t *cells) {
  size_t i;
  json_t *cell;
  int first = 1;
  json_array_foreach((json_t *)cells, i, cell) {
    const json_t *found = json_object_get(cell, "finding");
    if (!found) continue;
    if (first) fputs("<h2>The first case of each that does not agree</h2>\n<ul>\n", f);
    first = 0;
    fputs("<li><b>", f);
    put(f, wordOf(cell, "mode"));
    fputs(", ", f);
    put(f, wordOf(cell, "text"));
    fputs("</b>", f);
    if (!json_is_true(json_object_get(cell, "inside"))) fputs(" (outside of the profile)", f);
    fprintf(f, ": %s. ", wordOf(found, "outcome"));
    put(f, wordOf(found, "what"));
    fputs("<br><code>", f);
    put(f, wordOf(found, "replay"));
    fputs("</code></li>\n", f);
  }
  if (!first) fputs("</ul>\n", f);
}

static void putHead(FILE *f, const json_t *r) {
  int version = (int)json_integer_value(json_object_get(r, "library_version"));
  fprintf(f,
          "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
          "<meta name=\"viewport\" content=\"width=device-width\">\n"
          "<title>Conformance of NCCL EP %d.%d.%d</title>\n<style>%s</style></head><body>\n"
          "<h1>Conformance of an NCCL EP library</h1>\n<p><code>",
          version / 10000, version / 100 % 100, version % 100, style);
  put(f, wordOf(r, "library"));
  fprintf(f, "</code>, version %d.%d.%d, profile ", version / 10000, version / 100 % 100,
          version % 100);
  put(f, wordOf(r, "profile"));
  fprintf(f, ". Random cases, seed %lld, by Trefoil %s. Compared: ",
          (long long)json_integer_value(json_object_get(r, "seed")),
          wordOf(json_object_get(r, "environment"), "trefoil"));
  put(f, wordOf(r, "compared"));
  fputs(".</p>\n<p>Each row but the last adds one feature to the plain case: bf16 rows of the full "
        "width, every rank with all its tokens, every entry used. <b>agrees</b>: every byte as "
        "specified. <b>order open</b>: another order of rows, or another rounding of sums, within "
        "what the interface leaves open. <b>refused</b>: a call returned a result code. "
        "<b>aborts</b>: the process ended, or a call failed inside. <b>hangs</b>: a call did not "
        "return. <b>different</b>: it returned, and bytes differ.</p>\n",
        f);
}

static void putSums(FILE *f, const json_t *r) {
  char text[CONFORM_TEXT];
  const json_t *totals = json_object_get(r, "totals");
  static const char *const halves[] = {"inside", "outside"};
  static const char *const words[] = {"Within the profile: ", "Outside of it: "};
  fputs("<p class=\"sum\">", f);
  for (int i = 0; i < 2; i++) {
    json_t *as = json_pack("{s:O}", "counts", json_object_get(totals, halves[i]));
    conformCell(as, text);
    fprintf(f, "%s%s. ", words[i], *text ? text : "nothing was run");
    json_decref(as);
  }
  fprintf(f, "%s.</p>\n", conformVerdict(r));
}

int conformPage(const json_t *r, const char *path) {
  char temporary[4096];
  snprintf(temporary, sizeof temporary, "%.4080s.new", path);
  FILE *f = fopen(temporary, "w");
  if (!f) return cliFail("conform", "%s cannot be written: %s", path, strerror(errno));
  const json_t *cells = json_object_get(r, "cells");
  putHead(f, r);
  putSums(f, r);
  putTable(f, cells, 1, "Within the profile");
  putTable(f, cells, 0, "Outside of it");
  putFindings(f, cells);
  fputs("</body></html>\n", f);
  int bad = ferror(f);
  bad |= fclose(f) != 0;
  bad = bad || rename(temporary, path) != 0;
  if (!bad) return CLI_OK;
  int why = errno;
  remove(temporary);
  return cliFail("conform", "%s cannot be written: %s", path, strerror(why));
}
