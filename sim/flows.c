/* What flows of others leave of the ports.
 *
 * A flow has the same rate on all ports of its way: what it wants, but of no port more than its part of
 * flowShare (peersFlowShare in nodes of more than two ranks), which the flows that are there at a time share
 * alike. What it gets beyond that where the operation leaves a port idle is not worked out: it takes nothing
 * from the operation. So a port's rate is constant between the times at which flows begin or end, and both
 * engines read it from here: SMs, rows and their max-min fairness or queues then share what is left.
 *
 * Why a share, and not one more flow among the operation's: an operation has a flow to each peer, and ports
 * do not know how many those are; what they divide is the traffic of copy engines and that of SMs. */
#include <math.h>
#include <stdlib.h>

#include "plan/error.h"
#include "sim/fabric.h"

enum { MAX_FLOWS = 1024 };

typedef struct flows {
  ep_fabric_t *f;
  const trefoil_shape_t *shape;
  const trefoil_sim_run_t *run;
  double share;
  int32_t *numOn[TREFOIL_NUM_RESOURCES]; /* [count] flows on it, of a part of the time */
} flows_t;

static ep_fs_t timeOf(double us) {
  return (ep_fs_t)llround(us * EP_FS_PER_US);
}

static trefoil_result_t check(const flows_t *w, const trefoil_flow_t *flow) {
  int R = w->f->numRanks;
  EP_CHECK(flow->from >= 0 && flow->from < R && flow->to >= 0 && flow->to < R &&
               flow->from != flow->to,
           TREFOIL_INVALID_ARGUMENT, "a flow from rank %d to %d: must be two ranks in [0, %d)",
           flow->from, flow->to, R);
  EP_CHECK(flow->gbPerS >= 0 && flow->gbPerS <= 1e9, TREFOIL_INVALID_ARGUMENT,
           "a flow of %.10g GB/s: must be in [0, 1e9]", flow->gbPerS);
  EP_CHECK(flow->startUs >= 0 && flow->startUs <= 1e9 && flow->endUs <= 1e9 &&
               (flow->endUs == 0 || flow->endUs > flow->startUs),
           TREFOIL_INVALID_ARGUMENT,
           "a flow from %.10g us to %.10g us: must be in [0, 1e9], in this order, or 0: no end",
           flow->startUs, flow->endUs);
  return TREFOIL_OK;
}

/* The instance of a kind that a flow crosses, or -1. */
static int portOf(const flows_t *w, const trefoil_flow_t *flow, int kind) {
  int isNear = trefoilNodeOf(w->shape, flow->from) == trefoilNodeOf(w->shape, flow->to);
  ep_move_t m = {.src = flow->from,
                 .dst = flow->to,
                 .phase = TREFOIL_PHASE_DIRECT,
                 .tier = isNear ? TREFOIL_TIER_NVLINK : TREFOIL_TIER_NET};
  return epResourceOf(w->f, &m, (trefoil_resource_t)kind);
}

static int compareTimes(const void *a, const void *b) {
  ep_fs_t x = *(const ep_fs_t *)a, y = *(const ep_fs_t *)b;
  return (x > y) - (x < y);
}

/* The times at which something begins or ends, and the end of all. */
static void findParts(flows_t *w) {
  ep_fs_t *until = w->f->until;
  int n = 0, kept = 0;
  for (int i = 0; i < w->run->numFlows; i++) {
    const trefoil_flow_t *flow = &w->run->flows[i];
    if (flow->startUs > 0) until[n++] = timeOf(flow->startUs);
    if (flow->endUs > 0) until[n++] = timeOf(flow->endUs);
  }
  qsort(until, (size_t)n, sizeof *until, compareTimes);
  for (int i = 0; i < n; i++) {
    if (kept == 0 || until[i] > until[kept - 1]) until[kept++] = until[i];
  }
  until[kept++] = INT64_MAX;
  w->f->numParts = kept;
}

static int isThere(const trefoil_flow_t *flow, ep_fs_t begin) {
  return timeOf(flow->startUs) <= begin && (flow->endUs == 0 || timeOf(flow->endUs) > begin);
}

static double rateOf(const flows_t *w, const trefoil_flow_t *flow) {
  double rate = flow->gbPerS > 0 ? flow->gbPerS : HUGE_VAL;
  for (int k = TREFOIL_RESOURCE_NVLINK_OUT; k <= TREFOIL_RESOURCE_NIC_IN; k++) {
    int at = portOf(w, flow, k);
    if (at >= 0) rate = fmin(rate, w->share * w->f->gbPerS[k][at] / w->numOn[k][at]);
  }
  return rate;
}

static void fillPart(flows_t *w, int part) {
  ep_fs_t begin = part > 0 ? w->f->until[part - 1] : 0;
  for (int k = TREFOIL_RESOURCE_NVLINK_OUT; k <= TREFOIL_RESOURCE_NIC_IN; k++) {
    for (int i = 0; i < w->f->count[k]; i++) w->numOn[k][i] = 0;
    for (int i = 0; i < w->run->numFlows; i++) {
      int at = portOf(w, &w->run->flows[i], k);
      if (at >= 0 && isThere(&w->run->flows[i], begin)) w->numOn[k][at]++;
    }
  }
  for (int i = 0; i < w->run->numFlows; i++) {
    const trefoil_flow_t *flow = &w->run->flows[i];
    if (!isThere(flow, begin)) continue;
    double rate = rateOf(w, flow);
    for (int k = TREFOIL_RESOURCE_NVLINK_OUT; k <= TREFOIL_RESOURCE_NIC_IN; k++) {
      int at = portOf(w, flow, k);
      if (at < 0) continue;
      w->f->left[k][(size_t)part * (size_t)w->f->count[k] + (size_t)at] -=
          rate / w->f->gbPerS[k][at];
    }
  }
}

static trefoil_result_t allocate(flows_t *w) {
  ep_fabric_t *f = w->f;
  size_t most = 2 * (size_t)w->run->numFlows + 1, ports = 0;
  for (int k = TREFOIL_RESOURCE_NVLINK_OUT; k <= TREFOIL_RESOURCE_NIC_IN; k++) {
    ports += (size_t)f->count[k];
  }
  f->until = calloc(most * sizeof(ep_fs_t) + most * ports * sizeof(double), 1);
  EP_CHECK(f->until, TREFOIL_SYSTEM_ERROR, "out of memory for %d flows", w->run->numFlows);
  f->flowMemory = f->until;
  double *left = (double *)(f->until + most);
  for (size_t i = 0; i < most * ports; i++) left[i] = 1;
  for (int k = TREFOIL_RESOURCE_NVLINK_OUT; k <= TREFOIL_RESOURCE_NIC_IN; k++) {
    f->left[k] = left;
    left += most * (size_t)f->count[k];
  }
  return TREFOIL_OK;
}

/* Counts for every NVLink port the flows that are there from the start and take all that they get. */
static void countGreedy(const flows_t *w) {
  for (int k = TREFOIL_RESOURCE_NVLINK_OUT; k <= TREFOIL_RESOURCE_NVLINK_IN; k++) {
    for (int i = 0; i < w->f->count[k]; i++) w->numOn[k][i] = 0;
    for (int i = 0; i < w->run->numFlows; i++) {
      const trefoil_flow_t *flow = &w->run->flows[i];
      int at = portOf(w, flow, k);
      if (at >= 0 && flow->gbPerS == 0 && flow->startUs == 0) w->numOn[k][at]++;
    }
  }
}

/* The last word of each other rank of the node comes later, if a port on its way has such a flow. */
static void addWaits(const flows_t *w, double waitUs) {
  const int32_t *out = w->numOn[TREFOIL_RESOURCE_NVLINK_OUT];
  const int32_t *in = w->numOn[TREFOIL_RESOURCE_NVLINK_IN];
  int G = w->shape->ranksPerNode;
  countGreedy(w);
  for (int first = 0; first < w->f->numRanks; first += G) {
    int senders = 0;
    for (int r = first; r < first + G; r++) senders += out[r] > 0;
    for (int r = first; r < first + G; r++) {
      int words = in[r] > 0 ? G - 1 : senders - (out[r] > 0);
      w->f->rest[r] += timeOf(words * waitUs);
    }
  }
}

/* Of a port that flows and rows want. */
static double shareOf(const trefoil_op_costs_t *costs, int ranksPerNode) {
  if (ranksPerNode > 2 && costs->peersFlowShare > 0) return costs->peersFlowShare;
  return costs->flowShare > 0 ? costs->flowShare : 0.5;
}

trefoil_result_t epFlowsApply(ep_fabric_t *f, const trefoil_shape_t *shape,
                              const trefoil_sim_run_t *run, const trefoil_op_costs_t *costs) {
  EP_CHECK(run->numFlows >= 0 && run->numFlows <= MAX_FLOWS && (run->numFlows == 0 || run->flows),
           TREFOIL_INVALID_ARGUMENT, "%d flows: must be in [0, %d], with a list that is not NULL",
           run->numFlows, MAX_FLOWS);
  flows_t w = {.f = f, .shape = shape, .run = run, .share = shareOf(costs, shape->ranksPerNode)};
  for (int i = 0; i < run->numFlows; i++) EP_TRY(check(&w, &run->flows[i]));
  if (run->numFlows == 0) return TREFOIL_OK;
  size_t ports = 0;
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) ports += epIsPort(k) ? (size_t)f->count[k] : 0;
  int32_t *numOn = malloc((ports + 1) * sizeof *numOn), *next = numOn;
  EP_CHECK(numOn, TREFOIL_SYSTEM_ERROR, "out of memory for %d flows", run->numFlows);
  for (int k = TREFOIL_RESOURCE_NVLINK_OUT; k <= TREFOIL_RESOURCE_NIC_IN; k++) {
    w.numOn[k] = next;
    next += f->count[k];
  }
  trefoil_result_t result = allocate(&w);
  if (result == TREFOIL_OK) findParts(&w);
  for (int p = 0; p < f->numParts && result == TREFOIL_OK; p++) fillPart(&w, p);
  if (result == TREFOIL_OK) addWaits(&w, costs->flowWaitUs);
  free(numOn);
  return result;
}

/* Bytes that leave at a time are seen by ports in a way's latency later. */
static ep_fs_t shiftOf(const ep_fabric_t *f, trefoil_resource_t kind) {
  if (kind == TREFOIL_RESOURCE_NVLINK_IN) return f->latency[TREFOIL_TIER_NVLINK];
  return kind == TREFOIL_RESOURCE_NIC_IN ? f->latency[TREFOIL_TIER_NET] : 0;
}

ep_fs_t epServed(const ep_fabric_t *f, trefoil_resource_t kind, int at, ep_fs_t begin,
                 ep_fs_t work) {
  if (f->numParts == 0 || !epIsPort(kind)) return begin + work;
  ep_fs_t shift = shiftOf(f, kind);
  double rest = (double)work;
  for (int p = 0;; p++) {
    int isLast = p + 1 == f->numParts;
    if (!isLast && f->until[p] + shift <= begin) continue;
    double left = epLeftOf(f, kind, at, p);
    double done = isLast ? HUGE_VAL : (double)(f->until[p] + shift - begin) * left;
    if (rest <= done) {
      double end = (double)begin + rest / left;
      return end < EP_LONGEST_FS ? begin + (ep_fs_t)llround(rest / left) : (ep_fs_t)EP_LONGEST_FS;
    }
    rest -= done;
    begin = f->until[p] + shift;
  }
}
