/* Costs that were measured on one cluster, on another: a kernel drives its ports to some share of
 * what they can do, and that share is what a record knows of them. SMs, launch and latency stay. */
#include "plan/error.h"
#include "trefoil/cost_record.h"

/* 0, "the cluster's own", stays 0. */
static double shareOf(double fitted, double there, double here) {
  return there > 0 ? fitted / there * here : fitted;
}

trefoil_result_t trefoilCostRecordOnCluster(const trefoil_cost_record_t *record,
                                            const trefoil_cluster_t *cluster,
                                            trefoil_costs_t *costs, int *otherPorts) {
  EP_CHECK(record && cluster && costs, TREFOIL_INVALID_ARGUMENT, "an argument is NULL");
  trefoil_cluster_t there;
  EP_TRY(trefoilClusterLoad(&there, record->cluster));
  trefoil_costs_t made = record->costs;
  made.nvlinkGbPerS = shareOf(made.nvlinkGbPerS, there.nvlinkGbPerS, cluster->nvlinkGbPerS);
  made.nicGbPerS = shareOf(made.nicGbPerS, there.nicGbPerS, cluster->nicGbPerS);
  int network = there.nicGbPerS > 0 && cluster->nicGbPerS > 0 &&
                (there.nicGbPerS != cluster->nicGbPerS || there.gpusPerNic != cluster->gpusPerNic);
  int nvlink = there.nvlinkGbPerS != cluster->nvlinkGbPerS;
  *costs = made;
  if (otherPorts) {
    *otherPorts = (nvlink ? TREFOIL_OTHER_NVLINK : 0) | (network ? TREFOIL_OTHER_NETWORK : 0);
  }
  return TREFOIL_OK;
}
