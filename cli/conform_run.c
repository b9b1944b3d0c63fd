/* The cells of the table: for each mode the plain case, each feature alone on top of it, and all that the
 * profile takes mixed; then what became of their cases. */
#include "cli/conform.h"

#include <stdlib.h>
#include <string.h>

static int addCell(conform_t *c, int row, trefoil_mode_t mode, const ep_check_cell_t *cell) {
  ep_check_cell_t *cells = realloc(c->cells, sizeof *cells * (size_t)(c->numCells + 1));
  if (cells) c->cells = cells;
  int *rows = realloc(c->rows, sizeof *rows * (size_t)(c->numCells + 1));
  if (rows) c->rows = rows;
  if (!cells || !rows) return 0;
  cells[c->numCells] = *cell;
  rows[c->numCells++] = row;
  c->table[row][mode].exists = 1;
  return 1;
}

/* Where the profile lists shapes, a number outside of them must be known. */
static int canDraw(const ep_profile_t *p, int feature, trefoil_mode_t mode) {
  int ht = mode >= TREFOIL_HT_FLAT;
  const ep_profile_shape_t *other = &p->other[ht];
  if (!p->numShapes[ht]) return 1;
  return feature == EP_F_OTHER_HIDDEN    ? other->hidden > 0
         : feature == EP_F_OTHER_TOPK    ? other->topk > 0
         : feature == EP_F_OTHER_EXPERTS ? other->localExperts > 0
         : feature == EP_F_OTHER_TOKENS  ? other->tokens > 0
                                         : 1;
}

/* The cells of a mode within the profile, or outside of it. */
static int addFeatures(conform_t *c, trefoil_mode_t mode, int inside) {
  uint64_t takes = epProfileFeatures(&c->profile, mode);
  int hasMode = c->profile.modes >> mode & 1;
  ep_check_cell_t cell = {.mode = mode, .numCases = inside ? c->perCell : c->perOutside};
  if (!cell.numCases) return 1;
  c->table[CONFORM_PLAIN][mode].inside = hasMode;
  if (hasMode == inside && !addCell(c, CONFORM_PLAIN, mode, &cell)) return 0;
  for (int f = 0; f < EP_NUM_FEATURES; f++) {
    if (!(epFeatureModes(f) >> mode & 1) || !canDraw(&c->profile, f, mode)) continue;
    if ((int)(takes >> f & 1) != inside) continue;
    cell.allowed = cell.forced = EP_BIT(f);
    c->table[f + 1][mode].inside = inside;
    if (!addCell(c, f + 1, mode, &cell)) return 0;
  }
  return 1;
}

static int countInside(const conform_t *c) {
  int n = 0;
  for (int m = 0; m < TREFOIL_NUM_MODES; m++) {
    uint64_t takes = epProfileFeatures(&c->profile, (trefoil_mode_t)m);
    n += c->profile.modes >> m & 1;
    for (int f = 0; f < EP_NUM_FEATURES; f++) n += takes >> f & 1;
  }
  return n;
}

int conformPlan(conform_t *c, int64_t numCases, int numOutside) {
  int numInside = countInside(c), numModes = __builtin_popcount(c->profile.modes);
  int64_t perCell = numCases * 6 / 10 / numInside;
  c->perCell = numCases == 0              ? 0
               : perCell < 1              ? 1
               : perCell > EP_BATCH_CASES ? EP_BATCH_CASES
                                          : (int)perCell;
  c->perOutside = numOutside;
  for (int m = 0; m < TREFOIL_NUM_MODES; m++)
    if (!addFeatures(c, (trefoil_mode_t)m, 1)) return 0;
  int64_t left = numCases - (int64_t)c->perCell * numInside;
  for (int m = 0; m < TREFOIL_NUM_MODES && numCases > 0; m++) {
    if (!(c->profile.modes >> m & 1)) continue;
    int64_t mine = left > numModes ? left / numModes : 1;
    c->table[CONFORM_MIXED][m].inside = 1;
    for (; mine > 0; mine -= EP_BATCH_CASES) {
      ep_check_cell_t cell = {.mode = (trefoil_mode_t)m,
                              .allowed = epProfileFeatures(&c->profile, (trefoil_mode_t)m),
                              .numCases = mine < EP_BATCH_CASES ? (int)mine : EP_BATCH_CASES};
      if (!addCell(c, CONFORM_MIXED, (trefoil_mode_t)m, &cell)) return 0;
    }
  }
  for (int m = 0; m < TREFOIL_NUM_MODES; m++) /* last: what takes longest, and ends processes */
    if (!addFeatures(c, (trefoil_mode_t)m, 0)) return 0;
  return 1;
}

static conform_entry_t *entryOf(conform_t *c, int cell) {
  return &c->table[c->rows[cell]][c->cells[cell].mode];
}

static void found(void *context, const ep_check_finding_t *f) {
  conform_t *c = context;
  conform_entry_t *e = entryOf(c, (int)(f->caseIdx / EP_BATCH_CASES % (uint64_t)c->numCells));
  if ((int)f->outcome <= e->found) return;
  e->found = (int)f->outcome;
  e->finding = *f;
}

static void progress(void *context, const ep_check_status_t *s) {
  const conform_t *c = context;
  uint64_t total = 0;
  for (int i = 0; i < c->numCells; i++) total += (uint64_t)c->cells[i].numCases;
  cliProgress("conformance", s->cases, total, "cases that agree");
}

trefoil_result_t conformRun(conform_t *c, ep_check_outcome_t *outcome) {
  uint64_t numCases = (uint64_t)c->numCells * EP_BATCH_CASES;
  uint8_t *outcomes = calloc(1, numCases);
  ep_check_options_t *o = &c->check;
  if (!outcomes) return TREFOIL_SYSTEM_ERROR;
  o->choice.profile = &c->profile;
  o->choice.cells = c->cells;
  o->choice.numCells = c->numCells;
  o->firstCase = 0;
  o->numCases = numCases;
  o->maxFindings = -1;
  o->outcomes = outcomes;
  o->found = found;
  o->progress = progress;
  o->context = c;
  trefoil_result_t rc = epCheckRun(o, outcome);
  for (int i = 0; i < c->numCells; i++)
    for (int j = 0; j < c->cells[i].numCases; j++)
      entryOf(c, i)->counts[outcomes[(size_t)i * EP_BATCH_CASES + (size_t)j]]++;
  free(outcomes);
  o->outcomes = NULL;
  return rc;
}

void conformFree(conform_t *c) {
  free(c->cells);
  free(c->rows);
}
