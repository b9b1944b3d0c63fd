/* Ports, leaves and the time of a row on each, from cluster, costs and what differs from them.
 *
 * All rows of an operation have the same bytes, so whatever a resource takes for a row (bytes at its
 * rate, a message's gap, an SM's work) is one number for each of its instances. */
#include "sim/fabric.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plan/error.h"
#include "plan/philox.h"

typedef struct work {
  ep_fabric_t *f;
  const trefoil_sim_t *sim;
  const trefoil_shape_t *shape;
  const trefoil_sim_run_t *run;
  const trefoil_costs_t *costs;
  const trefoil_op_costs_t *op;
  const ep_replay_t *replay;
  int numNodes, portsOfNode;
  double *portFactor, *nvlinkFactor, *smFactor, *lateUs; /* [ports], then [R] each */
  char *isDown;                                          /* [ports] */
} work_t;

/* Cut off where the run is refused anyway, so that nothing overflows before. */
static ep_fs_t toFs(double ns) {
  double fs = ns * EP_FS_PER_NS;
  return fs < EP_LONGEST_FS ? (ep_fs_t)llround(fs) : (ep_fs_t)EP_LONGEST_FS;
}

/* ---- What differs ------------------------------------------------------------------------------ */

typedef struct change_rule {
  const char *what;
  int isTime, isDown;
} change_rule_t;
static const change_rule_t rules[TREFOIL_NUM_CHANGES] = {
    {"network port", 0, 0}, {"rail", 0, 0},         {"rank", 0, 0}, {"rank", 0, 0},
    {"rank", 1, 0},         {"network port", 0, 1}, {"rail", 0, 1}};

static int indicesOf(const work_t *w, trefoil_change_kind_t kind) {
  if (kind == TREFOIL_CHANGE_NIC_RATE || kind == TREFOIL_CHANGE_NIC_FAIL) return w->f->numPorts;
  if (kind == TREFOIL_CHANGE_RAIL_RATE || kind == TREFOIL_CHANGE_RAIL_FAIL) {
    return w->shape->ranksPerNode;
  }
  return w->f->numRanks;
}

static void applyAt(const work_t *w, const trefoil_change_t *c, int i) {
  switch (c->kind) {
  case TREFOIL_CHANGE_NIC_RATE:
    w->portFactor[i] *= c->factor;
    break;
  case TREFOIL_CHANGE_NVLINK_RATE:
    w->nvlinkFactor[i] *= c->factor;
    break;
  case TREFOIL_CHANGE_SM_RATE:
    w->smFactor[i] *= c->factor;
    break;
  case TREFOIL_CHANGE_START_US:
    w->lateUs[i] += c->factor;
    break;
  case TREFOIL_CHANGE_NIC_FAIL:
    w->isDown[i] = 1;
    break;
  default: /* a rail: its port of every node */
    for (int node = 0; node < w->numNodes; node++) {
      int port = node * w->portsOfNode + i / w->run->cluster->gpusPerNic;
      if (c->kind == TREFOIL_CHANGE_RAIL_FAIL) {
        w->isDown[port] = 1;
      } else {
        w->portFactor[port] *= c->factor;
      }
    }
  }
}

static trefoil_result_t applyChange(const work_t *w, const trefoil_change_t *c) {
  EP_CHECK((unsigned)c->kind < TREFOIL_NUM_CHANGES, TREFOIL_INVALID_ARGUMENT,
           "change %d is not one of the %d kinds", (int)c->kind, TREFOIL_NUM_CHANGES);
  const change_rule_t *rule = &rules[c->kind];
  int n = indicesOf(w, c->kind);
  EP_CHECK(c->index >= -1 && c->index < n, TREFOIL_INVALID_ARGUMENT,
           "%s %d: must be in [0, %d), or -1 for all", rule->what, c->index, n);
  if (rule->isTime) {
    EP_CHECK(c->factor >= 0 && c->factor <= 1e9, TREFOIL_INVALID_ARGUMENT,
             "rank %d is late by %.10g us: must be in [0, 1e9]", c->index, c->factor);
  } else if (!rule->isDown) {
    EP_CHECK(c->factor >= 1e-6 && c->factor <= 1e6, TREFOIL_INVALID_ARGUMENT,
             "the rate of %s %d times %.10g: must be in [1e-6, 1e6]", rule->what, c->index,
             c->factor);
  }
  int first = c->index < 0 ? 0 : c->index, end = c->index < 0 ? n : c->index + 1;
  for (int i = first; i < end; i++) applyAt(w, c, i);
  return TREFOIL_OK;
}

/* A rank whose port is down uses the next port of its node that is not. */
static trefoil_result_t choosePorts(const work_t *w) {
  for (int r = 0; r < w->f->numRanks; r++) {
    int node = trefoilNodeOf(w->shape, r), n = w->portsOfNode;
    int own = trefoilRailOf(w->shape, r) / w->run->cluster->gpusPerNic, tries = 0;
    while (tries < n && w->isDown[node * n + (own + tries) % n]) tries++;
    EP_CHECK(tries < n || w->numNodes == 1, TREFOIL_INVALID_ARGUMENT,
             "every network port of node %d is down: one must be left", node);
    w->f->portOf[r] = node * n + (own + tries) % n;
  }
  return TREFOIL_OK;
}

/* ---- Times of a row ---------------------------------------------------------------------------- */

/* What the rows of the other direction take of a rank's port, spread over the rows of this one. */
static double backOf(const work_t *w, int64_t rows, int64_t otherRows) {
  return rows > 0 ? w->costs->nvlinkBackShare * (double)otherRows / (double)rows : 0;
}

static double smsOf(const work_t *w) {
  return w->run->numSms > 0 ? w->run->numSms : w->costs->numSms;
}

/* Whether the ranks read rows where they lie at the others. */
static int isPulled(const work_t *w) {
  int isFlat = w->replay->op == TREFOIL_OP_DISPATCH && w->sim->workload.mode == TREFOIL_HT_FLAT;
  int ofTwo = w->f->numRanks <= 2 && w->op->pullSmsOfTwo > 0;
  return isFlat && w->numNodes == 1 && smsOf(w) <= (ofTwo ? w->op->pullSmsOfTwo : w->op->pullSms);
}

/* A row with the head that the library puts before it. */
static double bytesUnderWay(const work_t *w) {
  return (double)w->replay->rowBytes + w->op->rowHeadBytes;
}

static void setPorts(const work_t *w) {
  const trefoil_cluster_t *cl = w->run->cluster;
  double bytes = bytesUnderWay(w);
  double nvlink = w->costs->nvlinkGbPerS > 0 ? w->costs->nvlinkGbPerS : cl->nvlinkGbPerS;
  double nic = w->costs->nicGbPerS > 0 ? w->costs->nicGbPerS : cl->nicGbPerS;
  double rows = w->costs->rowsPerMessage > 0 ? w->costs->rowsPerMessage : 1;
  double reading = isPulled(w) && w->op->pullPortShare > 0 ? w->op->pullPortShare : 1;
  for (int r = 0; r < w->f->numRanks; r++) {
    int64_t out = w->replay->nearOut[r], in = w->replay->nearIn[r];
    double t = bytes / (nvlink * w->nvlinkFactor[r] * reading) + w->costs->nvlinkRowNs;
    w->f->row[TREFOIL_RESOURCE_NVLINK_OUT][r] = toFs(t * (1 + backOf(w, out, in)));
    w->f->row[TREFOIL_RESOURCE_NVLINK_IN][r] = toFs(t * (1 + backOf(w, in, out)));
    w->f->gbPerS[TREFOIL_RESOURCE_NVLINK_OUT][r] = nvlink * w->nvlinkFactor[r];
    w->f->gbPerS[TREFOIL_RESOURCE_NVLINK_IN][r] = nvlink * w->nvlinkFactor[r];
  }
  for (int p = 0; p < w->f->numPorts && w->numNodes > 1; p++) {
    ep_fs_t t = toFs(bytes / (nic * w->portFactor[p]) + w->costs->netMessageNs / rows);
    w->f->row[TREFOIL_RESOURCE_NIC_OUT][p] = w->f->row[TREFOIL_RESOURCE_NIC_IN][p] = t;
    w->f->gbPerS[TREFOIL_RESOURCE_NIC_OUT][p] = nic * w->portFactor[p];
    w->f->gbPerS[TREFOIL_RESOURCE_NIC_IN][p] = nic * w->portFactor[p];
  }
}

/* What so many bytes of a row take of some SMs that share its work: ns, or 0. */
static double smRowNs(double rowNs, double gbPerS, double bytes) {
  return rowNs + (gbPerS > 0 ? bytes / gbPerS : 0);
}

/* A place of a row: of SMs that share the work, or of the memory that all have. */
static double slotNs(const trefoil_op_costs_t *op, double bytes, double sms) {
  return fmax(smRowNs(op->slotNs, op->slotGbPerSPerSm, bytes),
              sms * smRowNs(0, op->slotGbPerS, bytes));
}

/* What the SMs of each kind have to do for a row, and beside rows for tokens, places and batches: ns of one;
 * and how many there are. */
typedef struct sm_work {
  double send, take, token, slot, rest, batch, sms;
} sm_work_t;

/* A row that a rank's SMs send, with its part of the tokens (dispatch) or places (combine). */
static double sendNs(const work_t *w, const sm_work_t *c, int r) {
  int64_t rows = epRowsToSend(w->f, w->replay, r);
  int isDispatch = w->replay->op == TREFOIL_OP_DISPATCH;
  double sideNs =
      isDispatch ? (double)w->sim->numTokens[r] * c->token : (double)w->replay->slots[r] * c->slot;
  return rows > 0 ? c->send + sideNs / (double)rows : c->send;
}

static int64_t mostTokens(const work_t *w) {
  int64_t most = 0;
  for (int r = 0; r < w->f->numRanks; r++) {
    if (w->sim->numTokens[r] > most) most = w->sim->numTokens[r];
  }
  return most;
}

/* Batches of a rank: for each token number that a rank has, one for so many sources. SMs have as many each;
 * those without a row cost nothing, and the SM with the most others, two standard deviations above the
 * mean with rows spread evenly, ends last. */
static double batchesOf(const work_t *w, double sms, int r) {
  double sources = w->op->batchSources, tokens = (double)mostTokens(w), ranks = w->f->numRanks;
  if (sources == 0 || tokens == 0) return 0;
  double groups = ceil(ranks / sources), rows = (double)w->replay->takenRows[r] / (tokens * ranks);
  double each = tokens * groups / sms, share = 1 - pow(1 - fmin(rows, 1), ranks / groups);
  return sms * fmin(each, each * share + 2 * sqrt(each * share * (1 - share)));
}

/* A row that it takes, with its part of the places and batches (dispatch) or tokens (combine). */
static double takeNs(const work_t *w, const sm_work_t *c, int r) {
  int64_t rows = w->replay->takenRows[r];
  int isDispatch = w->replay->op == TREFOIL_OP_DISPATCH;
  double sideNs = isDispatch
                      ? (double)w->replay->slots[r] * c->slot + batchesOf(w, c->sms, r) * c->batch
                      : (double)w->sim->numTokens[r] * c->token;
  return rows > 0 ? c->take + sideNs / (double)rows : c->take;
}

typedef struct sm_split {
  double send, take; /* SMs */
} sm_split_t;

/* The work that the busiest rank sends, of that and the work that the busiest takes. */
static double sentShare(const work_t *w, const sm_work_t *c) {
  double sent = 0, taken = 0;
  for (int r = 0; r < w->f->numRanks; r++) {
    sent = fmax(sent, (double)epRowsToSend(w->f, w->replay, r) * sendNs(w, c, r));
    taken = fmax(taken, (double)w->replay->takenRows[r] * takeNs(w, c, r));
  }
  return sent > 0 ? sent / (sent + taken) : 0;
}

/* How many SMs send while the others receive: by the share of the costs or the work's, at least one SM
 * either side. */
static double sendSmsOf(const work_t *w, double sms, double fair) {
  double least = sms > 2 ? 1 / sms : 0.5, from = w->op->wholeSmsFrom;
  double share = w->op->sendShare > 0 ? w->op->sendShare : fmin(fmax(fair, least), 1 - least);
  double send = w->op->mostSendSms > 0 ? fmin(sms * share, w->op->mostSendSms) : sms * share;
  return from > 0 && sms > 1 ? fmin(fmax(floor(send + 1 - from + 1e-9), 1), sms - 1) : send;
}

/* Senders that are done before all work would be, evenly spread, receive the rest with the others. */
static sm_split_t splitOf(const work_t *w, const sm_work_t *c) {
  int isSplit = (w->op->sendShare > 0 || w->op->mostSendSms > 0) && !isPulled(w);
  if (!isSplit) return (sm_split_t){c->sms, c->sms};
  double fair = sentShare(w, c), send = sendSmsOf(w, c->sms, fair), even = c->sms * (1 - fair);
  return (sm_split_t){send, w->op->wholeSmsFrom > 0 ? fmax(c->sms - send, even) : c->sms - send};
}

/* ns that a rank which has fewer tokens than another takes once more; one without any expects none. */
static double missingNs(const work_t *w, int64_t most, int r) {
  int64_t own = w->sim->numTokens[r];
  return own > 0 && own < most ? w->op->missingUs * 1e3 : 0;
}

/* ns of the rounds after the first in which a rank's SMs sum its own tokens. */
static double roundsNs(const work_t *w, double sms, int r) {
  double tokens = (double)w->sim->numTokens[r];
  double bytes = tokens < w->op->fewTokens ? w->op->fewRoundBytes : w->op->roundBytes;
  if (w->replay->op != TREFOIL_OP_COMBINE || bytes <= 0 || tokens == 0) return 0;
  double rounds = ceil(tokens * (double)w->replay->rowBytes / (sms * bytes));
  return (rounds - 1) * w->op->roundUs * 1e3;
}

static sm_work_t smWorkOf(const work_t *w, double sms) {
  const trefoil_op_costs_t *op = w->op;
  double bytes = (double)w->replay->rowBytes, withHead = bytesUnderWay(w);
  sm_work_t c = {.send = smRowNs(op->sendRowNs, op->sendGbPerSPerSm, withHead),
                 .take = smRowNs(op->receiveRowNs, op->receiveGbPerSPerSm, withHead),
                 .token = op->tokenNs,
                 .slot = slotNs(op, bytes, sms),
                 .rest = smRowNs(0, op->restGbPerSPerSm, bytes),
                 .batch = smRowNs(0, op->batchGbPerSPerSm, bytes),
                 .sms = sms};
  if (!isPulled(w)) return c;
  c.send = c.token = 0;
  c.take = smRowNs(op->pullRowNs, op->pullGbPerSPerSm, withHead);
  return c;
}

static void setSms(const work_t *w) {
  const ep_replay_t *replay = w->replay;
  const trefoil_op_costs_t *op = w->op;
  int isDispatch = replay->op == TREFOIL_OP_DISPATCH;
  double share = op->forwardShare > 0 ? op->forwardShare : 0.5;
  double sms = smsOf(w);
  double forwardSms = sms * share;
  if (replay->hasNetPhases) sms -= forwardSms;
  sm_work_t c = smWorkOf(w, sms);
  sm_split_t split = splitOf(w, &c);
  int64_t most = mostTokens(w);
  for (int r = 0; r < w->f->numRanks; r++) {
    double speed = w->smFactor[r] * (w->run->hasProducts ? 1 - w->costs->productShare : 1);
    int64_t last = isDispatch ? replay->takenRows[r] : w->sim->numTokens[r];
    w->f->row[TREFOIL_RESOURCE_SEND][r] = toFs(sendNs(w, &c, r) / (split.send * speed));
    w->f->row[TREFOIL_RESOURCE_RECEIVE][r] = toFs(takeNs(w, &c, r) / (split.take * speed));
    w->f->row[TREFOIL_RESOURCE_FORWARD][r] =
        toFs((isDispatch ? c.send : c.take) / (forwardSms * speed));
    w->f->rest[r] = toFs((double)last * c.rest / (split.take * speed) +
                         roundsNs(w, split.take, r) / speed + missingNs(w, most, r));
  }
}

/* Leaves: ports of a leaf share an uplink of their sum over the oversubscription. Ports that are not
 * in the group have their own part of it. */
static trefoil_result_t setLeaves(const work_t *w) {
  const trefoil_cluster_t *cl = w->run->cluster;
  ep_fabric_t *f = w->f;
  double over = w->run->oversubscription;
  EP_CHECK(over >= 0 && over <= 1e3, TREFOIL_INVALID_ARGUMENT,
           "oversubscription %.10g: must be in (0, 1000], or 0 for the cluster's", over);
  EP_CHECK(over <= 1 || cl->nodesPerLeaf > 0, TREFOIL_INVALID_ARGUMENT,
           "cluster %s has one switch and no leaves: it cannot be oversubscribed", cl->name);
  if (over == 0) over = cl->leafOversubscription;
  int ofNode = cl->railLeaves ? w->portsOfNode : 1;
  for (int p = 0; p < f->numPorts && cl->nodesPerLeaf > 0; p++) {
    int unit = p / w->portsOfNode / cl->nodesPerLeaf;
    f->leafOf[p] = unit * ofNode + (cl->railLeaves ? p % w->portsOfNode : 0);
    if (f->leafOf[p] >= f->numLeaves) f->numLeaves = f->leafOf[p] + 1;
  }
  if (over <= 1 || w->numNodes == 1) f->numLeaves = 0;
  f->count[TREFOIL_RESOURCE_LEAF_UP] = f->count[TREFOIL_RESOURCE_LEAF_DOWN] = f->numLeaves;
  double nic = w->costs->nicGbPerS > 0 ? w->costs->nicGbPerS : cl->nicGbPerS;
  for (int leaf = 0; leaf < f->numLeaves; leaf++) {
    int ports = 0;
    for (int p = 0; p < f->numPorts; p++) ports += f->leafOf[p] == leaf && !w->isDown[p];
    if (ports == 0) continue;
    ep_fs_t t = toFs(bytesUnderWay(w) * over / (nic * ports));
    f->row[TREFOIL_RESOURCE_LEAF_UP][leaf] = f->row[TREFOIL_RESOURCE_LEAF_DOWN][leaf] = t;
    f->gbPerS[TREFOIL_RESOURCE_LEAF_UP][leaf] = nic * ports / over;
    f->gbPerS[TREFOIL_RESOURCE_LEAF_DOWN][leaf] = nic * ports / over;
  }
  return TREFOIL_OK;
}

/* ns that a rank copies its tokens to where the others read them. */
static double stageNs(const work_t *w, int r) {
  return isPulled(w) ? (double)w->sim->numTokens[r] *
                           smRowNs(0, w->op->stageGbPerS, (double)w->replay->rowBytes)
                     : 0;
}

static void setStarts(const work_t *w) {
  double fixed = trefoilCostsFixedUs(w->costs, w->replay->op, w->shape);
  for (int r = 0; r < w->f->numRanks; r++) {
    ep_philox_t p = epPhilox(w->run->seed, (uint32_t)r, 0, 0, (uint32_t)w->replay->op);
    double skew = w->run->startSkewUs * p.word[0] * 0x1p-32;
    ep_fs_t called = toFs((w->lateUs[r] + skew) * 1e3);
    w->f->start[r] = toFs(fixed * 1e3) + called + toFs(stageNs(w, r));
    if (r == 0 || called < w->f->called) w->f->called = called;
  }
}

/* The word of each rank leaves a while after its start and takes the latency of its way. */
static void setAnnounced(const work_t *w) {
  const ep_fabric_t *f = w->f;
  ep_fs_t announceFs = toFs(w->op->announceUs * 1e3);
  for (int r = 0; r < f->numRanks; r++) {
    f->announced[r] = f->start[r] + announceFs;
    for (int s = 0; s < f->numRanks && announceFs > 0; s++) {
      int isNear = trefoilNodeOf(w->shape, r) == trefoilNodeOf(w->shape, s);
      ep_fs_t word =
          f->start[s] + announceFs + f->latency[isNear ? TREFOIL_TIER_NVLINK : TREFOIL_TIER_NET];
      if (s != r && word > f->announced[r]) f->announced[r] = word;
    }
  }
}

/* ---- Together ---------------------------------------------------------------------------------- */

static trefoil_result_t checkRun(const trefoil_sim_run_t *run, const trefoil_costs_t *costs,
                                 const trefoil_shape_t *s) {
  const trefoil_cluster_t *cl = run->cluster;
  EP_TRY(trefoilCostsCheck(costs));
  EP_CHECK(cl->gpusPerNode >= 1 && cl->gpusPerNic >= 1 && cl->nvlinkGbPerS > 0,
           TREFOIL_INVALID_ARGUMENT,
           "cluster %s: GPUs a node, GPUs a network port and the NVLink rate must be positive",
           cl->name);
  EP_CHECK(s->ranksPerNode <= cl->gpusPerNode, TREFOIL_INVALID_ARGUMENT,
           "%d ranks a node do not fit cluster %s with %d GPUs a node", s->ranksPerNode, cl->name,
           cl->gpusPerNode);
  EP_CHECK(s->numRanks == s->ranksPerNode || cl->nicGbPerS > 0, TREFOIL_INVALID_ARGUMENT,
           "cluster %s has no network, but %d ranks with %d a node need one", cl->name, s->numRanks,
           s->ranksPerNode);
  EP_CHECK(run->numSms >= 0 && run->numSms <= 4096, TREFOIL_INVALID_ARGUMENT,
           "%d SMs: must be in [1, 4096], or 0 for the costs'", run->numSms);
  EP_CHECK(run->startSkewUs >= 0 && run->startSkewUs <= 1e9, TREFOIL_INVALID_ARGUMENT,
           "a skew of %.10g us: must be in [0, 1e9]", run->startSkewUs);
  EP_CHECK(run->numChanges >= 0 && (run->numChanges == 0 || run->changes), TREFOIL_INVALID_ARGUMENT,
           "%d changes%s", run->numChanges,
           run->numChanges < 0 ? ": must not be negative" : ", but the list is NULL");
  EP_CHECK(!run->hasProducts || costs->productShare > 0, TREFOIL_INVALID_ARGUMENT,
           "the costs %s do not know what background matrix products take: productShare is 0",
           costs->name);
  return TREFOIL_OK;
}

/* One block of memory behind all arrays, zeroed. */
static trefoil_result_t allocate(work_t *w) {
  ep_fabric_t *f = w->f;
  size_t R = (size_t)f->numRanks, P = (size_t)f->numPorts;
  size_t times =
      8 * R + 4 * P; /* 5 kinds of a rank, start, rest, announced; 2 of a port, 2 of a leaf */
  size_t doubles = 5 * R + 5 * P; /* 3 of a rank, 1 of a port that differ; rates of ports, leaves */
  size_t bytes = times * sizeof(ep_fs_t) + doubles * sizeof(double) + (R + P) * sizeof(int32_t) + P;
  f->memory = calloc(1, bytes);
  EP_CHECK(f->memory, TREFOIL_SYSTEM_ERROR, "out of memory: %zu bytes for a fabric", bytes);
  ep_fs_t *next = f->memory;
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
    f->row[k] = next;
    int isPort = k >= TREFOIL_RESOURCE_NIC_OUT && k <= TREFOIL_RESOURCE_NIC_IN;
    f->count[k] = isPort ? f->numPorts : f->numRanks;
    next += f->count[k];
  }
  f->start = next;
  f->rest = next + R;
  f->announced = f->rest + R;
  w->portFactor = (double *)(next + 3 * R);
  w->nvlinkFactor = w->portFactor + P;
  w->smFactor = w->nvlinkFactor + R;
  w->lateUs = w->smFactor + R;
  double *rates = w->lateUs + R;
  for (int k = TREFOIL_RESOURCE_NVLINK_OUT; k <= TREFOIL_RESOURCE_NIC_IN; k++) {
    f->gbPerS[k] = rates;
    rates += f->count[k];
  }
  f->portOf = (int32_t *)rates;
  f->leafOf = f->portOf + R;
  w->isDown = (char *)(f->leafOf + P);
  for (size_t i = 0; i < P + 2 * R; i++) w->portFactor[i] = 1;
  return TREFOIL_OK;
}

static trefoil_result_t fill(work_t *w) {
  for (int i = 0; i < w->run->numChanges; i++) EP_TRY(applyChange(w, &w->run->changes[i]));
  EP_TRY(choosePorts(w));
  w->f->ownRowsStay = w->costs->ownRowsStay;
  setPorts(w);
  setSms(w);
  EP_TRY(setLeaves(w));
  setStarts(w);
  const trefoil_cluster_t *cl = w->run->cluster;
  double net = w->costs->netLatencyNs;
  w->f->latency[TREFOIL_TIER_NVLINK] = toFs(w->costs->nvlinkLatencyNs);
  w->f->latency[TREFOIL_TIER_NET] = toFs(net < 0 ? cl->netLatencyUs * 1e3 : net);
  setAnnounced(w);
  return epFlowsApply(w->f, w->shape, w->run, w->op);
}

trefoil_result_t epFabricBuild(ep_fabric_t *fabric, const trefoil_sim_t *sim,
                               const trefoil_sim_run_t *run, trefoil_op_t op) {
  const trefoil_shape_t *s = &sim->shape;
  EP_CHECK(run->cluster, TREFOIL_INVALID_ARGUMENT, "the cluster is NULL");
  trefoil_costs_t ideal;
  EP_TRY(trefoilCostsIdeal(&ideal, run->cluster, sim->workload.mode));
  ep_fabric_t made = {.numRanks = s->numRanks};
  work_t w = {.f = &made, .sim = sim, .shape = s, .run = run, .replay = &sim->replay[op]};
  w.costs = run->costs ? run->costs : &ideal;
  w.op = &w.costs->op[op];
  EP_TRY(checkRun(run, w.costs, s));
  w.numNodes = s->numRanks / s->ranksPerNode;
  w.portsOfNode = (s->ranksPerNode + run->cluster->gpusPerNic - 1) / run->cluster->gpusPerNic;
  made.numPorts = w.numNodes * w.portsOfNode;
  EP_TRY(allocate(&w));
  trefoil_result_t result = fill(&w);
  if (result != TREFOIL_OK) {
    epFabricFree(&made);
    return result;
  }
  *fabric = made;
  return TREFOIL_OK;
}

void epFabricFree(ep_fabric_t *fabric) {
  free(fabric->flowMemory);
  free(fabric->memory);
  memset(fabric, 0, sizeof *fabric);
}
