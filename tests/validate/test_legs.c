/* The legs agree on bytes, and a leg that is wrong by one row, one phase, one tier or one link is named
 * with the place and the replay command. */
#include "test.h"

#include "validate/legs.h"

static ep_legs_outcome_t outcome;

static ep_legs_options_t optionsFor(const ep_leg_t *legs, int numLegs) {
  ep_legs_options_t o = {.numCases = 2000,
                         .legs = legs,
                         .numLegs = numLegs,
                         .replay = "trefoil validate --bytes --seed 9"};
  o.choice.seed = 9;
  return o;
}

TEST(legs_agree_on_thousands_of_cases) {
  ep_leg_t legs[EP_MAX_LEGS];
  int n = epLegsOfBuild(legs, 128);
  CHECK(n == 4 + trefoilSimHasSimGrid(), "%d legs", n);
  for (unsigned modes = 1; modes < 16; modes <<= 1) {
    ep_legs_options_t o = optionsFor(legs, n);
    o.choice.modes = modes;
    REQUIRE(epLegsRun(&o, &outcome) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(!outcome.failed, "%s", outcome.text);
    CHECK(outcome.cases == 2000 && outcome.workloads > 2000, "%d workloads",
          (int)outcome.workloads);
    CHECK(outcome.bytes > 0 && outcome.numbers > 20000, "%d numbers", (int)outcome.numbers);
    for (int i = 0; i < 4; i++)
      CHECK(outcome.tables[i] == outcome.workloads, "%s: %d tables", legs[i].name,
            (int)outcome.tables[i]);
    if (n > 4) CHECK(outcome.tables[4] > outcome.workloads / 150, "simgrid took no part");
  }
}

TEST(up_to_sixteen_ranks) {
  ep_leg_t legs[EP_MAX_LEGS];
  ep_legs_options_t o = optionsFor(legs, epLegsOfBuild(legs, 64));
  o.choice.minRanks = 9;
  o.choice.maxRanks = 16;
  o.numCases = 640;
  REQUIRE(epLegsRun(&o, &outcome) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(!outcome.failed, "%s", outcome.text);
}

/* ---- Planted ------------------------------------------------------------------------------------ */

/* A pair of different ranks that has bytes there, or -1. */
static long findPair(const ep_leg_table_t *t, int op, int tier, int phase) {
  int R = t->numRanks;
  for (long i = 0; i < (long)R * R; i++)
    if (t->bytes[epLegAt(t, op, tier, phase) + (size_t)i]) return i;
  return -1;
}

static trefoil_result_t oneRowMore(const trefoil_sim_workload_t *w, ep_leg_table_t *t) {
  trefoil_result_t result = epLegPlan(w, t);
  long at = findPair(t, TREFOIL_OP_COMBINE, TREFOIL_TIER_NET, TREFOIL_PHASE_NET_BACK);
  if (at >= 0)
    t->bytes[epLegAt(t, 1, TREFOIL_TIER_NET, TREFOIL_PHASE_NET_BACK) + (size_t)at] +=
        w->combineRowBytes;
  return result;
}

static trefoil_result_t oneByteLess(const trefoil_sim_workload_t *w, ep_leg_table_t *t) {
  trefoil_result_t result = epLegQueues(w, t);
  long at = findPair(t, TREFOIL_OP_DISPATCH, TREFOIL_TIER_NVLINK, TREFOIL_PHASE_FORWARD);
  if (at >= 0) t->bytes[epLegAt(t, 0, TREFOIL_TIER_NVLINK, TREFOIL_PHASE_FORWARD) + (size_t)at]--;
  return result;
}

/* Right bytes between the right ranks, in the wrong phase. */
static trefoil_result_t wrongPhase(const trefoil_sim_workload_t *w, ep_leg_table_t *t) {
  trefoil_result_t result = epLegPlan(w, t);
  size_t n = (size_t)t->numRanks * (size_t)t->numRanks;
  uint64_t *from = t->bytes + epLegAt(t, 0, TREFOIL_TIER_NET, TREFOIL_PHASE_NET_OUT);
  uint64_t *to = t->bytes + epLegAt(t, 0, TREFOIL_TIER_NET, TREFOIL_PHASE_FORWARD);
  memcpy(to, from, n * sizeof *to);
  memset(from, 0, n * sizeof *from);
  return result;
}

static trefoil_result_t wrongTier(const trefoil_sim_workload_t *w, ep_leg_table_t *t) {
  trefoil_result_t result = epLegPlan(w, t);
  size_t n = (size_t)t->numRanks * (size_t)t->numRanks;
  uint64_t *from = t->bytes + epLegAt(t, 0, TREFOIL_TIER_NET, TREFOIL_PHASE_DIRECT);
  uint64_t *to = t->bytes + epLegAt(t, 0, TREFOIL_TIER_NVLINK, TREFOIL_PHASE_DIRECT);
  for (size_t i = 0; i < n; i++) to[i] += from[i];
  memset(from, 0, n * sizeof *from);
  return result;
}

static trefoil_result_t wrongLink(const trefoil_sim_workload_t *w, ep_leg_table_t *t) {
  trefoil_result_t result = epLegQueues(w, t);
  uint64_t *in = t->ports + epLegPortAt(t, 0, EP_LEG_NVLINK_IN);
  if (t->numRanks > 1 && in[1]) in[1] -= 1;
  return result;
}

static trefoil_result_t swappedPair(const trefoil_sim_workload_t *w, ep_leg_table_t *t) {
  trefoil_result_t result = epLegReference(w, t);
  if (t->numRanks < 2) return result;
  uint64_t *pairs = t->bytes, x = pairs[1];
  pairs[1] = pairs[t->numRanks];
  pairs[t->numRanks] = x;
  return result;
}

/* The wrong mode: what a simulator that replays LL for HT would say. */
static trefoil_result_t otherMode(const trefoil_sim_workload_t *w, ep_leg_table_t *t) {
  trefoil_sim_workload_t other = *w;
  other.mode = w->mode == TREFOIL_HT_FLAT ? TREFOIL_LL_EXPERT_MAJOR : w->mode;
  return epLegQueues(&other, t);
}

static const struct planted {
  ep_leg_t leg;
  const char *where;
} planted[] = {
    {{"one row more", oneRowMore, 0, 1}, "combine, rank %d to rank %d, net, phase net-back"},
    {{"one byte less", oneByteLess, 0, 1}, "dispatch, rank %d to rank %d, nvlink, phase forward"},
    {{"wrong phase", wrongPhase, 0, 1}, "dispatch, rank %d to rank %d, net, phase net-out"},
    {{"wrong tier", wrongTier, 0, 1}, "dispatch, rank %d to rank %d, nvlink, phase direct"},
    {{"wrong link", wrongLink, 0, 1}, "dispatch, link nvlink-in of rank 1: "},
    {{"swapped pair", swappedPair, 1, 1}, "dispatch, rank 0 to rank 1: "},
    {{"other mode", otherMode, 0, 1}, "rank %d to rank %d"},
};

/* Whether the format matches with some ranks. */
static int hasWhere(const char *text, const char *where) {
  char wanted[128];
  for (int a = 0; a < EP_MAX_RANKS; a++)
    for (int b = 0; b < EP_MAX_RANKS; b++) {
      snprintf(wanted, sizeof wanted, where, a, b);
      if (strstr(text, wanted)) return 1;
    }
  return 0;
}

TEST(every_wrong_leg_is_seen_and_named) {
  static ep_legs_outcome_t alone;
  for (size_t i = 0; i < sizeof planted / sizeof *planted; i++) {
    const ep_leg_t legs[] = {{"routing", epLegRouting, 0, 1}, planted[i].leg};
    ep_legs_options_t o = optionsFor(legs, 2);
    REQUIRE(epLegsRun(&o, &outcome) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(outcome.failed, "%s was not seen", legs[1].name);
    CHECK(strstr(outcome.text, legs[1].name), "%s", outcome.text);
    CHECK(hasWhere(outcome.text, planted[i].where), "'%s' is not in %s", planted[i].where,
          outcome.text);
    char replay[96];
    snprintf(replay, sizeof replay, "replay: trefoil validate --bytes --seed 9 --case %llu",
             (unsigned long long)outcome.failedCase);
    CHECK(strstr(outcome.text, replay), "'%s' is not in %s", replay, outcome.text);
    /* alone it fails with the same words */
    o.firstCase = outcome.failedCase;
    o.numCases = 1;
    REQUIRE(epLegsRun(&o, &alone) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(alone.failed && !strcmp(alone.text, outcome.text), "'%s' then '%s'", outcome.text,
          alone.text);
  }
}

TEST(what_makes_no_sense_is_refused) {
  ep_leg_t legs[EP_MAX_LEGS];
  int n = epLegsOfBuild(legs, 1);
  ep_legs_options_t o = optionsFor(legs, 1);
  CHECK(epLegsRun(&o, &outcome) == TREFOIL_INVALID_ARGUMENT, "one leg");
  o = optionsFor(legs, n);
  o.numCases = 0;
  CHECK(epLegsRun(&o, &outcome) == TREFOIL_INVALID_ARGUMENT, "no cases");
  o = optionsFor(legs, n);
  o.choice.maxRanks = EP_MAX_RANKS + 1;
  CHECK(epLegsRun(&o, &outcome) == TREFOIL_INVALID_ARGUMENT, "too many ranks");
}

TEST_MAIN()
