/* Loads by one pass over the transfers. */
#include "sim/resource_loads.h"

#include <stdlib.h>
#include <string.h>

#include "plan/error.h"

trefoil_result_t epLoadsCount(ep_loads_t *loads, const ep_replay_t *replay,
                              const ep_fabric_t *fabric) {
  size_t n = 0;
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) n += (size_t)fabric->count[k];
  int64_t *next = calloc(n, sizeof *next);
  EP_CHECK(next, TREFOIL_SYSTEM_ERROR, "out of memory for the loads of %zu resources", n);
  loads->memory = next;
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
    loads->rows[k] = next;
    next += fabric->count[k];
  }
  for (int64_t i = 0; i < replay->numMoves; i++) {
    const ep_move_t *m = &replay->moves[i];
    for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
      if (fabric->count[k] == 0) continue;
      int at = epResourceOf(fabric, m, (trefoil_resource_t)k);
      if (at >= 0) loads->rows[k][at] += m->rows;
    }
  }
  return TREFOIL_OK;
}

void epLoadsFree(ep_loads_t *loads) {
  free(loads->memory);
  memset(loads, 0, sizeof *loads);
}

/* Of a row's way, before it comes to a port in or after it has left another. */
static ep_fs_t latencyOf(const ep_fabric_t *f, int kind) {
  if (kind == TREFOIL_RESOURCE_NVLINK_OUT || kind == TREFOIL_RESOURCE_NVLINK_IN) {
    return f->latency[TREFOIL_TIER_NVLINK];
  }
  return epIsPort((trefoil_resource_t)kind) ? f->latency[TREFOIL_TIER_NET] : 0;
}

ep_floor_t epFloor(const ep_loads_t *loads, const ep_fabric_t *f, const trefoil_shape_t *s) {
  ep_fs_t earliest = f->start[0], latest = f->start[0];
  for (int r = 1; r < f->numRanks; r++) {
    if (f->start[r] < earliest) earliest = f->start[r];
    if (f->start[r] > latest) latest = f->start[r];
  }
  ep_floor_t least = {latest, TREFOIL_RESOURCE_SEND, -1};
  /* the flag of the last rank to start */
  if (s->ranksPerNode > 1) least.time += f->latency[TREFOIL_TIER_NVLINK];
  if (s->numRanks > s->ranksPerNode) {
    ep_fs_t far = latest + f->latency[TREFOIL_TIER_NET];
    if (far > least.time) least.time = far;
  }
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
    int ofRank = k != TREFOIL_RESOURCE_NIC_OUT && k != TREFOIL_RESOURCE_NIC_IN &&
                 k != TREFOIL_RESOURCE_LEAF_UP && k != TREFOIL_RESOURCE_LEAF_DOWN &&
                 k != TREFOIL_RESOURCE_NVLINK_IN;
    for (int i = 0; i < f->count[k]; i++) {
      if (loads->rows[k][i] == 0 || f->row[k][i] == 0) continue;
      ep_fs_t begin = ofRank ? f->start[i] : earliest, busy;
      if (k == TREFOIL_RESOURCE_RECEIVE) begin = f->announced[i];
      if (__builtin_mul_overflow(loads->rows[k][i], f->row[k][i], &busy) || busy > EP_LONGEST_FS) {
        busy = (ep_fs_t)EP_LONGEST_FS;
      }
      int isIn = k == TREFOIL_RESOURCE_NVLINK_IN || k == TREFOIL_RESOURCE_NIC_IN;
      ep_fs_t before = isIn ? latencyOf(f, k) : 0, after = latencyOf(f, k) - before;
      ep_fs_t end = epServed(f, (trefoil_resource_t)k, i, begin + before, busy) + after;
      if (end > least.time) least = (ep_floor_t){end, (trefoil_resource_t)k, i};
    }
  }
  return least;
}

static void addPort(uint64_t *bytes, trefoil_port_t port, int numRanks, int at, uint64_t n) {
  bytes[(size_t)port * (size_t)numRanks + (size_t)at] += n;
}

trefoil_result_t epPortLoads(const ep_replay_t *replay, const trefoil_shape_t *s, int gpusPerNic,
                             trefoil_port_loads_t *loads) {
  int R = s->numRanks, ofNode = (s->ranksPerNode + gpusPerNic - 1) / gpusPerNic;
  uint64_t *bytes = calloc((size_t)R * TREFOIL_NUM_PORTS, sizeof *bytes);
  EP_CHECK(bytes, TREFOIL_SYSTEM_ERROR, "out of memory for the ports of %d ranks", R);
  trefoil_port_loads_t found = {{0}, {0}, {0}};
  for (int64_t i = 0; i < replay->numMoves; i++) {
    const ep_move_t *m = &replay->moves[i];
    uint64_t n = (uint64_t)m->rows * replay->rowBytes;
    found.totalBytes[m->tier] += n;
    if (m->tier == TREFOIL_TIER_NVLINK) {
      addPort(bytes, TREFOIL_PORT_NVLINK_OUT, R, m->src, n);
      addPort(bytes, TREFOIL_PORT_NVLINK_IN, R, m->dst, n);
    } else if (m->tier == TREFOIL_TIER_NET) {
      int out = trefoilNodeOf(s, m->src) * ofNode + trefoilRailOf(s, m->src) / gpusPerNic;
      int in = trefoilNodeOf(s, m->dst) * ofNode + trefoilRailOf(s, m->dst) / gpusPerNic;
      addPort(bytes, TREFOIL_PORT_NIC_OUT, R, out, n);
      addPort(bytes, TREFOIL_PORT_NIC_IN, R, in, n);
    }
  }
  for (int port = 0; port < TREFOIL_NUM_PORTS; port++) {
    found.busiest[port] = -1;
    for (int i = 0; i < R; i++) {
      uint64_t n = bytes[(size_t)port * (size_t)R + (size_t)i];
      if (n <= found.maxBytes[port]) continue;
      found.maxBytes[port] = n;
      found.busiest[port] = i;
    }
  }
  free(bytes);
  *loads = found;
  return TREFOIL_OK;
}
