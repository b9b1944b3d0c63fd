/* Planted faults: a library that works but for one spoiled byte, row or counter, once. The checker must
 * see each, and name the rank and the row. TREFOIL_FAULTY is that library; the real ones come from
 * TREFOIL_CPU and TREFOIL_HOST. */
#include "test.h"

#include "validate/checker.h"

#include <unistd.h>

typedef struct planted {
  const char *fault;
  unsigned modes;  /* where it can be planted */
  const char *row; /* how the report names the row: printf format of its number; NULL: not by row */
  const char *word;
} planted_t;

enum { LE = 1, LR = 2, HF = 4, HE = 8, ALL = 15 };
static const planted_t table[] = {
    {"flip", ALL, "slot %d: ", "outputs->tokens"},
    {"swap", ALL, "slot %d: ", "outputs->tokens"},
    {"duplicate", ALL, "slot %d: ", "outputs->tokens"},
    {"stray", ALL, "slot %d: ", "outputs->tokens"},
    {"before", ALL, NULL, "a guard byte"},
    {"after", ALL, NULL, "a guard byte"},
    {"counter", LE | HF | HE, "element %d: ", "expert_counters"},
    {"offset", HE, "element %d: ", "expert_offsets"},
    {"total", HF | HE, "element %d: ", "recv_total_counter"},
    {"weights", LR | HF | HE, NULL, "outputs->topk_weights"},
    {"ids", LR | HF, "row %d, ", "outputs->topk_idx"},
    {"scales", ALL, "slot %d: ", "outputs->scales"},
    {"input", ALL, NULL, "an input was overwritten"},
    {"combine-swap", ALL, "token %d of rank", "(Combine"},
    {"combine-ulp", ALL, "token %d of rank", "(Combine"},
    {"combine-skip", ALL, "token %d of rank", "(Combine"},
    {"count", ALL, "to rank %d, ", "bytes counted by the library"},
};

static ep_check_outcome_t outcome;

static ep_check_options_t optionsFor(const planted_t *p) {
  ep_check_options_t o = {
      .paths = {getenv("TREFOIL_FAULTY"), getenv("TREFOIL_HOST"), getenv("TREFOIL_HOST")},
      .numCases = 640,
      .countBytes = 1,
      .replay = "trefoil check --seed 9",
  };
  o.choice.seed = 9;
  o.choice.modes = p->modes;
  o.choice.minRanks = 2;
  o.choice.maxRanks = 4;
  return o;
}

TEST(every_planted_fault_is_seen_and_named) {
  char log[64];
  snprintf(log, sizeof log, "/tmp/trefoil-fault-%d", (int)getpid());
  setenv("TREFOIL_FAULT_LOG", log, 1);
  setenv("TREFOIL_FAULT_LIBRARY", getenv("TREFOIL_CPU"), 1);
  for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
    const planted_t *p = &table[i];
    setenv("TREFOIL_FAULT", p->fault, 1);
    unlink(log);
    ep_check_options_t o = optionsFor(p);
    REQUIRE(epCheckRun(&o, &outcome) == TREFOIL_OK, "%s: %s", p->fault, trefoilLastError());
    int rank = -1, row = -1;
    FILE *f = fopen(log, "r");
    int planted = f && fscanf(f, "rank %d row %d", &rank, &row) == 2;
    if (f) fclose(f);
    CHECK(planted, "%s was never planted: %s", p->fault, outcome.text);
    CHECK(outcome.failed, "%s was planted on rank %d, row %d, and not seen", p->fault, rank, row);
    if (!planted || !outcome.failed) continue;
    char wanted[64];
    snprintf(wanted, sizeof wanted, "rank %d%c ", rank, strcmp(p->fault, "count") ? ',' : ':');
    CHECK(strstr(outcome.text, wanted), "%s: '%s' is not in %s", p->fault, wanted, outcome.text);
    CHECK(strstr(outcome.text, p->word), "%s: '%s' is not in %s", p->fault, p->word, outcome.text);
    CHECK(strstr(outcome.text, "replay: trefoil check --seed 9 --case "), "%s", outcome.text);
    if (!p->row) continue;
    snprintf(wanted, sizeof wanted, p->row, row);
    CHECK(strstr(outcome.text, wanted), "%s: '%s' is not in %s", p->fault, wanted, outcome.text);
  }
  unlink(log);
}

/* A case that fails fails alone, too, with the same words. */
TEST(the_replay_shows_the_same) {
  static ep_check_outcome_t again;
  char log[64];
  snprintf(log, sizeof log, "/tmp/trefoil-fault-%d", (int)getpid());
  setenv("TREFOIL_FAULT_LOG", log, 1);
  setenv("TREFOIL_FAULT_LIBRARY", getenv("TREFOIL_CPU"), 1);
  setenv("TREFOIL_FAULT", "scales", 1);
  setenv("TREFOIL_FAULT_ALWAYS", "1", 1);
  ep_check_options_t o = optionsFor(&table[0]);
  REQUIRE(epCheckRun(&o, &outcome) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(outcome.failed, "not seen");
  o.firstCase = outcome.failedCase;
  o.numCases = 1;
  REQUIRE(epCheckRun(&o, &again) == TREFOIL_OK, "%s", trefoilLastError());
  unsetenv("TREFOIL_FAULT_ALWAYS");
  unlink(log);
  CHECK(again.failed && again.failedCase == outcome.failedCase, "case %d passes alone",
        (int)outcome.failedCase);
  CHECK(!strcmp(again.text, outcome.text), "'%s' then '%s'", outcome.text, again.text);
}

/* With slot order and rounding open, what is wrong is still wrong. */
TEST(order_free_sees_what_is_wrong) {
  static const char *const wrong[] = {"flip",         "before", "counter", "input",
                                      "combine-skip", "scales", "ids"};
  char log[64];
  snprintf(log, sizeof log, "/tmp/trefoil-fault-%d", (int)getpid());
  setenv("TREFOIL_FAULT_LOG", log, 1);
  setenv("TREFOIL_FAULT_LIBRARY", getenv("TREFOIL_CPU"), 1);
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    setenv("TREFOIL_FAULT", wrong[i], 1);
    ep_check_options_t o = optionsFor(&table[0]);
    o.choice.orderFree = 1;
    REQUIRE(epCheckRun(&o, &outcome) == TREFOIL_OK, "%s: %s", wrong[i], trefoilLastError());
    CHECK(access(log, F_OK) == 0, "%s was never planted", wrong[i]);
    CHECK(outcome.failed, "%s was not seen", wrong[i]);
    unlink(log);
  }
}

/* Without a fault the same library passes: what is seen above is the fault. */
TEST(without_a_fault_it_passes) {
  setenv("TREFOIL_FAULT", "none", 1);
  setenv("TREFOIL_FAULT_LIBRARY", getenv("TREFOIL_CPU"), 1);
  ep_check_options_t o = optionsFor(&table[0]);
  REQUIRE(epCheckRun(&o, &outcome) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(!outcome.failed, "%s", outcome.text);
  CHECK(outcome.status.cases == 640, "%d cases", (int)outcome.status.cases);
  CHECK(outcome.status.counted > 0, "no bytes were counted");
  o.countBytes = 0;
  REQUIRE(epCheckRun(&o, &outcome) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(!outcome.failed && outcome.status.counted == 0, "counted without being asked");
}

TEST_MAIN()
