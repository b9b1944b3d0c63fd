/* The closed form. A dispatch or combine takes
 *
 *   fixed(mode) + (net latency, if bytes cross the net) + max over ports (bytes of the port / rate)
 *
 * where a port is one direction of a GPU's NVLink or of a network port, and its bytes are summed
 * over all phases: HT's phases are pipelined by chunks, so each port works all the time that the
 * busiest one needs, and the fill of the pipeline is left out. On a fabric that does not block, with
 * everything ready at the start, a fluid simulation gives the same. */
#include "trefoil/models.h"

#include "plan/error.h"

const char *trefoilPortName(trefoil_port_t port) {
  switch (port) {
  case TREFOIL_PORT_NONE:
    return "none";
  case TREFOIL_PORT_NVLINK_OUT:
    return "nvlink-out";
  case TREFOIL_PORT_NVLINK_IN:
    return "nvlink-in";
  case TREFOIL_PORT_NIC_OUT:
    return "nic-out";
  case TREFOIL_PORT_NIC_IN:
    return "nic-in";
  }
  return "unknown";
}

trefoil_result_t trefoilClosedForm(const trefoil_cluster_t *cluster, trefoil_mode_t mode,
                                   const trefoil_port_loads_t *loads,
                                   trefoil_closed_form_t *closed) {
  EP_CHECK(cluster && loads && closed, TREFOIL_INVALID_ARGUMENT, "the %s is NULL",
           !cluster ? "cluster"
           : !loads ? "loads"
                    : "output");
  EP_CHECK((unsigned)mode < TREFOIL_NUM_MODES, TREFOIL_INVALID_ARGUMENT,
           "mode %d is not one of the %d modes", (int)mode, TREFOIL_NUM_MODES);
  int usesNet = loads->maxBytes[TREFOIL_PORT_NIC_OUT] > 0;
  EP_CHECK(!usesNet || cluster->nicGbPerS > 0, TREFOIL_INVALID_ARGUMENT,
           "cluster %s has no network, but bytes cross nodes", cluster->name);
  int ht = mode == TREFOIL_HT_FLAT || mode == TREFOIL_HT_EXPERT_MAJOR;
  trefoil_closed_form_t found = {0, ht ? cluster->htFixedUs : cluster->llFixedUs,
                                 TREFOIL_PORT_NONE};
  if (usesNet) found.fixedUs += cluster->netLatencyUs;
  double longest = 0;
  for (int port = TREFOIL_PORT_NVLINK_OUT; port < TREFOIL_NUM_PORTS; port++) {
    if (loads->maxBytes[port] == 0) continue;
    double rate = port < TREFOIL_PORT_NIC_OUT ? cluster->nvlinkGbPerS : cluster->nicGbPerS;
    double us = (double)loads->maxBytes[port] / (rate * 1e3);
    if (us <= longest) continue;
    longest = us;
    found.limit = (trefoil_port_t)port;
  }
  found.us = found.fixedUs + longest;
  *closed = found;
  return TREFOIL_OK;
}

double trefoilLineBoundUs(const trefoil_cluster_t *cluster, const trefoil_port_loads_t *loads,
                          int usesNic) {
  double longest = 0;
  int end = usesNic ? TREFOIL_NUM_PORTS : TREFOIL_PORT_NIC_OUT;
  for (int port = TREFOIL_PORT_NVLINK_OUT; port < end; port++) {
    double line = cluster->nvlinkLineGbPerS > cluster->nvlinkGbPerS ? cluster->nvlinkLineGbPerS
                                                                    : cluster->nvlinkGbPerS;
    if (port >= TREFOIL_PORT_NIC_OUT) line = cluster->nicGbPerS;
    double us = line > 0 ? (double)loads->maxBytes[port] / (line * 1e3) : 0;
    if (us > longest) longest = us;
  }
  return longest;
}

static int largestDivisor(int n, int most) {
  for (int d = most < n ? most : n; d > 1; d--) {
    if (n % d == 0) return d;
  }
  return 1;
}

int trefoilEpSize(int numGpus, int numExperts, int wanted) {
  int most = wanted > 0 && wanted < numExperts ? wanted : numExperts;
  return largestDivisor(numGpus, most);
}

static int ceilDiv(int a, int b) {
  return a / b + (a % b > 0);
}

int trefoilRanksPerNode(int epSize, int gpusPerNode) {
  if (epSize < 1 || gpusPerNode < 1) return 1;
  int least = ceilDiv(epSize, gpusPerNode);
  for (int n = gpusPerNode < epSize ? gpusPerNode : epSize; n > 1; n--) {
    int perNode = gpusPerNode / n * n; /* whole domains alone */
    if (epSize % n == 0 && ceilDiv(epSize, perNode) == least) return n;
  }
  return 1;
}
