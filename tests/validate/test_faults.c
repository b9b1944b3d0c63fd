/* Planted faults: a library that works but for one spoiled byte, row or counter, once. The checker must
 * see each, and name the rank and the row. TREFOIL_FAULTY is that library; the real ones come from
 * TREFOIL_CPU and TREFOIL_HOST. */
#include "test.h"

#include "validate/check_report.h"
#include "validate/checker.h"
#include "validate/real_shape.h"

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
    {"drop", ALL, "slot %d: ", "found a row that is nobody's"},
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

/* Where the library says that it planted one. */
static char log[64];
static int readLog(int *rank, int *row) {
  FILE *f = fopen(log, "r");
  int planted = f && fscanf(f, "rank %d row %d", rank, row) == 2;
  if (f) fclose(f);
  unlink(log);
  return planted;
}

static void plant(const char *fault) {
  snprintf(log, sizeof log, "/tmp/trefoil-fault-%d", (int)getpid());
  setenv("TREFOIL_FAULT_LOG", log, 1);
  setenv("TREFOIL_FAULT_LIBRARY", getenv("TREFOIL_CPU"), 1);
  setenv("TREFOIL_FAULT", fault, 1);
  unlink(log);
}

static void expectNamed(const planted_t *p, int processes) {
  plant(p->fault);
  ep_check_options_t o = optionsFor(p);
  o.processes = processes;
  REQUIRE(epCheckRun(&o, &outcome) == TREFOIL_OK, "%s: %s", p->fault, trefoilLastError());
  int rank = -1, row = -1;
  int planted = readLog(&rank, &row);
  CHECK(planted, "%s was never planted: %s", p->fault, outcome.text);
  CHECK(outcome.failed, "%s was planted on rank %d, row %d, and not seen", p->fault, rank, row);
  if (!planted || !outcome.failed) return;
  char wanted[64];
  snprintf(wanted, sizeof wanted, "rank %d%c ", rank, strcmp(p->fault, "count") ? ',' : ':');
  CHECK(strstr(outcome.text, wanted), "%s: '%s' is not in %s", p->fault, wanted, outcome.text);
  CHECK(strstr(outcome.text, p->word), "%s: '%s' is not in %s", p->fault, p->word, outcome.text);
  CHECK(strstr(outcome.text, "replay: trefoil check --seed 9 --case "), "%s", outcome.text);
  const ep_check_finding_t *f = &outcome.findings[0];
  CHECK(f->rank == rank && f->outcome == EP_CASE_WRONG, "%s: rank %d, %s", p->fault, f->rank,
        epOutcomeName(f->outcome));
  if (!p->row) return;
  snprintf(wanted, sizeof wanted, p->row, row);
  CHECK(strstr(outcome.text, wanted), "%s: '%s' is not in %s", p->fault, wanted, outcome.text);
}

TEST(every_planted_fault_is_seen_and_named) {
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    for (int processes = 0; processes < 2; processes++) expectNamed(&table[i], processes);
}

/* In a real shape: what is named, and how the row is. */
static const struct real {
  const char *fault;
  trefoil_mode_t mode;
  int toE4m3;
  const char *word, *row;
} realTable[] = {
    {"flip", TREFOIL_LL_EXPERT_MAJOR, 0, "Dispatch", "slot %d: "},
    {"swap", TREFOIL_HT_FLAT, 0, "found the row of (rank ", "slot %d: "},
    {"drop", TREFOIL_HT_FLAT, 0, "found a row that is nobody's", "slot %d: "},
    {"duplicate", TREFOIL_HT_EXPERT_MAJOR, 0, "found the row of (rank ", "slot %d: "},
    {"stray", TREFOIL_LL_RANK_MAJOR, 0, "Dispatch", "slot %d: "},
    {"after", TREFOIL_HT_FLAT, 0, "past its end was written", NULL},
    {"counter", TREFOIL_LL_EXPERT_MAJOR, 0, "counters, row 0, element 0: expected ", NULL},
    {"counter", TREFOIL_HT_FLAT, 0, "counters, row 0, element 0: expected ", NULL},
    {"weights", TREFOIL_HT_FLAT, 0, "received weights, row 0, element 0: expected 0x", NULL},
    {"ids", TREFOIL_LL_RANK_MAJOR, 0, "received topk_idx, row ", NULL},
    {"scales", TREFOIL_LL_EXPERT_MAJOR, 1, "received scales, row ", NULL},
    {"input", TREFOIL_LL_EXPERT_MAJOR, 0, "inputs->tokens, row 0: an input was overwritten", NULL},
    {"combine-swap", TREFOIL_HT_FLAT, 0, "combined tokens", "row %d, element "},
    {"combine-ulp", TREFOIL_LL_EXPERT_MAJOR, 0, "combined tokens", "row %d, element "},
    {"combine-skip", TREFOIL_HT_EXPERT_MAJOR, 0, "combined tokens", "row %d, element "},
};

TEST(faults_in_a_real_shape_are_named) {
  static ep_real_result_t result;
  setenv("TREFOIL_FAULT_SOON", "1", 1);
  for (size_t i = 0; i < sizeof realTable / sizeof *realTable; i++) {
    const struct real *f = &realTable[i];
    const char *paths[] = {getenv("TREFOIL_FAULTY"), getenv("TREFOIL_HOST")};
    ep_real_options_t o = {.paths = {paths[0], paths[1], paths[1]},
                           .mode = f->mode,
                           .shape = {3, 3, 6, 2, 8},
                           .hidden = 512,
                           .toE4m3 = f->toE4m3,
                           .seed = 1,
                           .timeoutNs = 20000000000u};
    plant(f->fault);
    REQUIRE(epRealRun(&o, &result) == TREFOIL_OK, "%s: %s", f->fault, trefoilLastError());
    int rank = -1, row = -1;
    char wanted[64];
    CHECK(readLog(&rank, &row), "%s was never planted", f->fault);
    CHECK(!result.ok && result.outcome == EP_CASE_WRONG, "%s was not seen", f->fault);
    snprintf(wanted, sizeof wanted, "rank %d, ", rank);
    CHECK(strstr(result.difference, wanted), "%s: '%s' is not in %s", f->fault, wanted,
          result.difference);
    CHECK(strstr(result.difference, f->word), "%s: '%s' is not in %s", f->fault, f->word,
          result.difference);
    if (!f->row) continue;
    snprintf(wanted, sizeof wanted, f->row, row);
    CHECK(strstr(result.difference, wanted), "%s: '%s' is not in %s", f->fault, wanted,
          result.difference);
  }
  unsetenv("TREFOIL_FAULT_SOON");
}

/* Bits as a number, not as memory has them, and what they are worth. */
TEST(values_are_numbers) {
  static const struct {
    trefoil_dtype_t dtype;
    uint64_t bits;
    const char *text;
  } values[] = {{TREFOIL_BF16, 0xcfee, "0xcfee (-7.986e+09)"},
                {TREFOIL_BF16, 0x3f80, "0x3f80 (1)"},
                {TREFOIL_F16, 0x3c01, "0x3c01 (1.001)"},
                {TREFOIL_F32, 0x3f800000, "0x3f800000 (1)"},
                {TREFOIL_E4M3, 0x7e, "0x7e (448)"},
                {TREFOIL_E5M2, 0x3c, "0x3c (1)"},
                {TREFOIL_FP4X2, 0x7f, "0x7f (-6 and 6)"},
                {TREFOIL_INT32, 0xffffffff, "-1"},
                {TREFOIL_INT64, 1234567890123, "1234567890123"}};
  char text[EP_VALUE_TEXT];
  for (size_t i = 0; i < sizeof values / sizeof *values; i++)
    CHECK(!strcmp(epFormatValue(text, values[i].dtype, &values[i].bits), values[i].text),
          "'%s' is not '%s'", text, values[i].text);
}

/* A case that fails fails alone, too, with the same words. */
TEST(the_replay_shows_the_same) {
  static ep_check_outcome_t again;
  plant("scales");
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

/* With slot order and rounding open, what is wrong is still wrong (in high throughput a fault may lie past
 * the slots that arrive, which is open; check_conform.py has those that do not). */
TEST(order_free_sees_what_is_wrong) {
  static const char *const wrong[] = {"flip",         "before", "counter", "input",
                                      "combine-skip", "scales", "ids"};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    plant(wrong[i]);
    ep_check_options_t o = optionsFor(&table[0]);
    o.choice.orderFree = 1;
    o.choice.modes = LE | LR;
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
