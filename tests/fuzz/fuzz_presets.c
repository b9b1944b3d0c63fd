/* Fuzzes the JSON of clusters, model shapes and cost records: within its ranges, or a sentence. */
#include <stdlib.h>
#include <string.h>

#include "trefoil/cost_record.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  trefoil_cluster_t cluster = {.maxGpus = -7};
  trefoil_moe_t moe = {.topk = -7};
  if (trefoilClusterParse(&cluster, "fuzz", (const char *)data, size)) {
    if (cluster.maxGpus != -7 || !trefoilLastError()[0]) abort();
  } else if (cluster.gpusPerNode < 1 || cluster.gpusPerNic < 1 || !(cluster.nvlinkGbPerS > 0)) {
    abort();
  }
  if (trefoilMoeParse(&moe, "fuzz", (const char *)data, size)) {
    if (moe.topk != -7 || !trefoilLastError()[0]) abort();
  } else if (moe.topk < 1 || moe.numExperts < 1 || strlen(moe.name) >= sizeof moe.name) {
    abort();
  }
  trefoil_cost_record_t record = {.isHt = -7};
  if (trefoilCostRecordParse(&record, "fuzz", (const char *)data, size)) {
    if (record.isHt != -7 || !trefoilLastError()[0]) abort();
  } else if (record.costs.numSms < 1 || !(record.inside[0].low > 0)) {
    abort();
  }
  return 0;
}
