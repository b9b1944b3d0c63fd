/* The part of an operation's time that no row takes. */
#include <math.h>

#include "trefoil/costs.h"

double trefoilCostsFixedUs(const trefoil_costs_t *costs, trefoil_op_t op,
                           const trefoil_shape_t *shape) {
  const trefoil_op_costs_t *c = &costs->op[op];
  int nodes = shape->numRanks / shape->ranksPerNode;
  double near = shape->ranksPerNode - 1, far = shape->numRanks - shape->ranksPerNode;
  if (costs->signalsPerExpert) { /* experts of the others, shared out evenly */
    double perRank = (double)shape->numExperts / shape->numRanks;
    near *= perRank;
    far *= perRank;
  }
  double netSignalNs = c->netSignalNs > 0 ? c->netSignalNs : c->signalNs;
  double signalsNs = near * c->signalNs + far * netSignalNs;
  double netUs = nodes > 1 ? c->netStartUs + c->nodeRoundUs * log2(nodes) : 0;
  return c->launchUs + c->rankRoundUs * log2(shape->numRanks) + netUs + 1e-3 * signalsNs;
}
