/* The costs of the closed form, and what every cost record must hold. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "plan/error.h"
#include "trefoil/costs.h"

trefoil_result_t trefoilCostsIdeal(trefoil_costs_t *costs, const trefoil_cluster_t *cluster,
                                   trefoil_mode_t mode) {
  EP_CHECK(costs && cluster, TREFOIL_INVALID_ARGUMENT, "the %s is NULL",
           costs ? "cluster" : "output");
  EP_CHECK((unsigned)mode < TREFOIL_NUM_MODES, TREFOIL_INVALID_ARGUMENT,
           "mode %d is not one of the %d modes", (int)mode, TREFOIL_NUM_MODES);
  int ht = mode == TREFOIL_HT_FLAT || mode == TREFOIL_HT_EXPERT_MAJOR;
  trefoil_costs_t made = {.numSms = 1, .netLatencyNs = -1};
  snprintf(made.name, sizeof made.name, "ideal");
  for (int op = 0; op < 2; op++) {
    made.op[op].launchUs = ht ? cluster->htFixedUs : cluster->llFixedUs;
  }
  *costs = made;
  return TREFOIL_OK;
}

typedef struct named_number {
  const char *name;
  double value;
} named_number_t;

static trefoil_result_t checkNumbers(const named_number_t *numbers, size_t n, const char *of) {
  for (size_t i = 0; i < n; i++) {
    double v = numbers[i].value;
    EP_CHECK(isfinite(v) && v >= 0 && v <= 1e9, TREFOIL_INVALID_ARGUMENT,
             "costs: %s %.10g%s: must be in [0, 1e9]", numbers[i].name, v, of);
  }
  return TREFOIL_OK;
}

static trefoil_result_t checkOp(const trefoil_op_costs_t *c, const char *of) {
  EP_CHECK(c->forwardShare >= 0 && c->forwardShare < 1, TREFOIL_INVALID_ARGUMENT,
           "costs: forwardShare %.10g%s: must be in [0, 1)", c->forwardShare, of);
  EP_CHECK(c->sendShare >= 0 && c->sendShare < 1, TREFOIL_INVALID_ARGUMENT,
           "costs: sendShare %.10g%s: must be in [0, 1)", c->sendShare, of);
  EP_CHECK(c->flowShare >= 0 && c->flowShare < 1, TREFOIL_INVALID_ARGUMENT,
           "costs: flowShare %.10g%s: must be in [0, 1)", c->flowShare, of);
  EP_CHECK(c->peersFlowShare >= 0 && c->peersFlowShare < 1, TREFOIL_INVALID_ARGUMENT,
           "costs: peersFlowShare %.10g%s: must be in [0, 1)", c->peersFlowShare, of);
  EP_CHECK(c->wholeSmsFrom >= 0 && c->wholeSmsFrom <= 1, TREFOIL_INVALID_ARGUMENT,
           "costs: wholeSmsFrom %.10g%s: must be in [0, 1]", c->wholeSmsFrom, of);
  EP_CHECK(c->pullPortShare >= 0 && c->pullPortShare <= 1, TREFOIL_INVALID_ARGUMENT,
           "costs: pullPortShare %.10g%s: must be in [0, 1]", c->pullPortShare, of);
  const named_number_t numbers[] = {
      {"launchUs", c->launchUs},
      {"tokenNs", c->tokenNs},
      {"sendRowNs", c->sendRowNs},
      {"sendGbPerSPerSm", c->sendGbPerSPerSm},
      {"receiveRowNs", c->receiveRowNs},
      {"receiveGbPerSPerSm", c->receiveGbPerSPerSm},
      {"signalNs", c->signalNs},
      {"netSignalNs", c->netSignalNs},
      {"netStartUs", c->netStartUs},
      {"nodeRoundUs", c->nodeRoundUs},
      {"mostSendSms", c->mostSendSms},
      {"slotNs", c->slotNs},
      {"announceUs", c->announceUs},
      {"slotGbPerSPerSm", c->slotGbPerSPerSm},
      {"restGbPerSPerSm", c->restGbPerSPerSm},
      {"missingUs", c->missingUs},
      {"rowHeadBytes", c->rowHeadBytes},
      {"batchSources", c->batchSources},
      {"batchGbPerSPerSm", c->batchGbPerSPerSm},
      {"slotGbPerS", c->slotGbPerS},
      {"roundUs", c->roundUs},
      {"roundBytes", c->roundBytes},
      {"fewTokens", c->fewTokens},
      {"fewRoundBytes", c->fewRoundBytes},
      {"rankRoundUs", c->rankRoundUs},
      {"flowWaitUs", c->flowWaitUs},
      {"pullSms", c->pullSms},
      {"pullSmsOfTwo", c->pullSmsOfTwo},
      {"pullRowNs", c->pullRowNs},
      {"pullGbPerSPerSm", c->pullGbPerSPerSm},
      {"stageGbPerS", c->stageGbPerS},
  };
  return checkNumbers(numbers, sizeof numbers / sizeof *numbers, of);
}

trefoil_result_t trefoilCostsCheck(const trefoil_costs_t *c) {
  EP_CHECK(c, TREFOIL_INVALID_ARGUMENT, "the costs are NULL");
  EP_CHECK(c->numSms >= 1 && c->numSms <= 4096, TREFOIL_INVALID_ARGUMENT,
           "costs: %d SMs: must be in [1, 4096]", c->numSms);
  EP_CHECK(c->nvlinkBackShare >= 0 && c->nvlinkBackShare < 1, TREFOIL_INVALID_ARGUMENT,
           "costs: nvlinkBackShare %.10g: must be in [0, 1)", c->nvlinkBackShare);
  EP_CHECK(c->productShare >= 0 && c->productShare < 1, TREFOIL_INVALID_ARGUMENT,
           "costs: productShare %.10g: must be in [0, 1)", c->productShare);
  double net = c->netLatencyNs;
  const named_number_t numbers[] = {
      {"nvlinkGbPerS", c->nvlinkGbPerS},       {"nicGbPerS", c->nicGbPerS},
      {"nvlinkLatencyNs", c->nvlinkLatencyNs}, {"netLatencyNs", net < 0 ? 0 : net},
      {"nvlinkRowNs", c->nvlinkRowNs},         {"netMessageNs", c->netMessageNs},
      {"rowsPerMessage", c->rowsPerMessage},
  };
  EP_TRY(checkNumbers(numbers, sizeof numbers / sizeof *numbers, ""));
  EP_TRY(checkOp(&c->op[TREFOIL_OP_DISPATCH], " of dispatch"));
  return checkOp(&c->op[TREFOIL_OP_COMBINE], " of combine");
}
