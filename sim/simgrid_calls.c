/* All of SimGrid: the transfers of a replay as flows of its network model.
 *
 * A stream is an actor that sends the transfers of one (phase, source, destination) one after the
 * other; all streams share SMs, ports and leaves by max-min fairness, which is what row by row
 * interleaving comes to. DIRECT and NET_OUT streams and RETURN streams start with their rank. A
 * FORWARD or NET_BACK stream takes its transfers as they become ready: when the chunk's NET_OUT has
 * come, when the chunk's last RETURN has.
 *
 * The latency of a way is slept before a flow, not given to its links: a constant shift for all flows
 * of a tier, so the ports are shared as they would be, and arrivals are when they should be. */
#include "sim/simgrid_calls.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <simgrid/actor.h>
#include <simgrid/comm.h>
#include <simgrid/engine.h>
#include <simgrid/host.h>
#include <simgrid/semaphore.h>

#include "sim/platform_xml.h"

#define S_PER_FS 1e-15

typedef struct replay_run replay_run_t;

typedef struct stream {
  replay_run_t *run;
  int first, numMoves; /* in run->moves */
  int numReady;        /* of a stream that waits: moves[first .. first + numReady) are known */
  sg_sem_t ready;      /* NULL: nothing is waited for */
} stream_t;

struct replay_run {
  const ep_flows_t *of;
  int numStreams, maxStreams;
  stream_t *streams;
  int32_t *streamOf; /* [moves] */
  int32_t *moves;    /* [moves] grouped by stream */
  int32_t *pending;  /* [moves] RETURNs that a NET_BACK still waits for */
  int32_t
      *firstChild; /* [moves + 1] FORWARDs that wait for a NET_OUT: children[firstChild[m]] on */
  int32_t *children;
  double *readyAt; /* [moves] seconds */
};

static const ep_move_t *moveAt(const replay_run_t *run, int32_t i) {
  return &run->of->replay->moves[i];
}
static int waits(const ep_move_t *m) {
  return !epCrossesSend(m);
}

/* ---- Streams ----------------------------------------------------------------------------------- */

/* NET_OUT and RETURN, or FORWARD and NET_BACK, may have the ends of a DIRECT. */
static int classOf(const ep_move_t *m) {
  if (m->phase == TREFOIL_PHASE_DIRECT) return 0;
  return waits(m) ? 2 : 1;
}

static void countMoves(replay_run_t *run, int32_t *table) {
  const ep_replay_t *r = run->of->replay;
  size_t R = (size_t)run->of->shape->numRanks;
  for (int64_t i = 0; i < r->numMoves; i++) {
    const ep_move_t *m = &r->moves[i];
    int32_t *at = &table[((size_t)classOf(m) * R + (size_t)m->src) * R + (size_t)m->dst];
    if (*at == 0) *at = ++run->numStreams;
    run->streamOf[i] = *at - 1;
  }
}

/* Moves of a stream in the order of their issue; a stream that waits fills its part as it goes. */
static void groupMoves(replay_run_t *run) {
  const ep_replay_t *r = run->of->replay;
  for (int64_t i = 0; i < r->numMoves; i++) run->streams[run->streamOf[i]].numMoves++;
  int sum = 0;
  for (int s = 0; s < run->numStreams; s++) {
    run->streams[s].run = run;
    run->streams[s].first = sum;
    sum += run->streams[s].numMoves;
  }
  for (int64_t i = 0; i < r->numPieces; i++) {
    int32_t piece = r->issued[i];
    int32_t move = r->pieces ? r->pieces[piece].move : piece;
    stream_t *s = &run->streams[run->streamOf[move]];
    if (waits(moveAt(run, move)) || run->readyAt[move] < 0) continue;
    run->readyAt[move] = -1; /* an LL move has many pieces */
    run->moves[s->first + s->numReady++] = move;
  }
}

static void linkWaiting(replay_run_t *run) {
  const ep_replay_t *r = run->of->replay;
  if (!r->partner) return;
  for (int64_t i = 0; i < r->numMoves; i++) {
    if (r->partner[i] < 0) continue;
    if (r->moves[i].phase == TREFOIL_PHASE_RETURN) run->pending[r->partner[i]]++;
    if (r->moves[i].phase == TREFOIL_PHASE_FORWARD) run->firstChild[r->partner[i] + 1]++;
  }
  for (int64_t i = 0; i < r->numMoves; i++) run->firstChild[i + 1] += run->firstChild[i];
  for (int64_t i = 0; i < r->numMoves; i++) {
    if (r->moves[i].phase != TREFOIL_PHASE_FORWARD) continue;
    run->children[run->firstChild[r->partner[i]]++] = (int32_t)i;
  }
  for (int64_t i = r->numMoves; i > 0; i--) run->firstChild[i] = run->firstChild[i - 1];
  run->firstChild[0] = 0;
}

/* ---- A transfer -------------------------------------------------------------------------------- */

static sg_host_t hostOf(char kind, int rank) {
  char name[32];
  snprintf(name, sizeof name, "%c%d", kind, rank);
  return sg_host_by_name(name);
}

/* The hosts whose route has the links that the move crosses. */
static void endsOf(const replay_run_t *run, const ep_move_t *m, sg_host_t *from, sg_host_t *to) {
  int forwards = m->phase == TREFOIL_PHASE_FORWARD || m->phase == TREFOIL_PHASE_NET_BACK;
  int toForwarder = m->phase == TREFOIL_PHASE_RETURN || m->phase == TREFOIL_PHASE_NET_OUT;
  (void)run;
  if (m->tier == TREFOIL_TIER_NET) {
    *from = hostOf(forwards ? 'b' : 'n', m->src);
    *to = hostOf(toForwarder ? 'b' : 'n', m->dst);
  } else if (m->tier == TREFOIL_TIER_NVLINK) {
    *from = hostOf(forwards ? 'f' : 'g', m->src);
    *to = hostOf(toForwarder ? 'f' : 'g', m->dst);
  } else {
    *from = hostOf(forwards ? 'f' : 'g', m->src);
    *to = hostOf(toForwarder ? 'u' : 's', m->dst);
  }
}

static int crossesAny(const replay_run_t *run, const ep_move_t *m) {
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
    int at = epResourceOf(run->of->fabric, m, (trefoil_resource_t)k);
    if (at >= 0 && run->of->fabric->row[k][at] > 0) return 1;
  }
  return 0;
}

static ep_fs_t nowFs(void) {
  return (ep_fs_t)llround(simgrid_get_clock() / S_PER_FS);
}

static void makeReady(replay_run_t *run, int32_t move) {
  stream_t *s = &run->streams[run->streamOf[move]];
  run->readyAt[move] = simgrid_get_clock();
  run->moves[s->first + s->numReady++] = move;
  sg_sem_release(s->ready);
}

static void complete(replay_run_t *run, int32_t move, ep_fs_t began) {
  const ep_replay_t *r = run->of->replay;
  const ep_move_t *m = &r->moves[move];
  ep_timing_t *timing = run->of->timing;
  ep_fs_t now = nowFs();
  if (timing->moves && move < timing->numTimes) {
    ep_fs_t sent = now - run->of->fabric->latency[m->tier];
    timing->moves[move] = (ep_move_times_t){began, sent, now};
  }
  int ender = m->phase == TREFOIL_PHASE_RETURN || epCrossesReceive(m) ? m->dst : -1;
  if (ender >= 0 && timing->finish[ender] < now) timing->finish[ender] = now;
  if (m->phase == TREFOIL_PHASE_NET_OUT) {
    for (int32_t c = run->firstChild[move]; c < run->firstChild[move + 1]; c++) {
      makeReady(run, run->children[c]);
    }
  } else if (m->phase == TREFOIL_PHASE_RETURN && --run->pending[r->partner[move]] == 0) {
    makeReady(run, r->partner[move]);
  }
}

/* ---- Actors ------------------------------------------------------------------------------------ */

static void sendRows(replay_run_t *run, const ep_move_t *m, int64_t rows) {
  if (!crossesAny(run, m)) return;
  sg_host_t from, to;
  endsOf(run, m, &from, &to);
  sg_host_sendto(from, to, (double)rows * (double)run->of->replay->rowBytes);
}

/* DIRECT: nothing waits for its chunks, so all of them are one flow. */
static void sendAllDirect(stream_t *s, ep_fs_t began) {
  replay_run_t *run = s->run;
  const int32_t *moves = run->moves + s->first;
  int64_t rows = 0;
  for (int i = 0; i < s->numMoves; i++) rows += moveAt(run, moves[i])->rows;
  sendRows(run, moveAt(run, moves[0]), rows);
  for (int i = 0; i < s->numMoves; i++) complete(run, moves[i], began);
}

static void streamMain(int argc, char **argv) {
  (void)argc, (void)argv;
  stream_t *s = sg_actor_self_get_data();
  replay_run_t *run = s->run;
  const ep_fabric_t *f = run->of->fabric;
  for (int i = 0; i < s->numMoves; i++) {
    if (s->ready) sg_sem_acquire(s->ready);
    int32_t move = run->moves[s->first + i];
    const ep_move_t *m = moveAt(run, move);
    double begin = (double)(f->start[m->src] + f->latency[m->tier]) * S_PER_FS;
    if (s->ready) {
      double ready = run->readyAt[move] + (double)f->latency[m->tier] * S_PER_FS;
      if (ready > begin) begin = ready;
    }
    if (begin > simgrid_get_clock()) sg_actor_sleep_until(begin);
    ep_fs_t began = nowFs() - f->latency[m->tier];
    if (classOf(m) == 0) {
      sendAllDirect(s, began);
      return;
    }
    sendRows(run, m, m->rows);
    complete(run, move, began);
  }
}

static void createActors(replay_run_t *run) {
  sg_host_t host = hostOf('g', 0);
  for (int i = 0; i < run->numStreams; i++) {
    stream_t *s = &run->streams[i];
    if (s->numReady == 0) s->ready = sg_sem_init(0);
    sg_actor_t actor = sg_actor_init("stream", host);
    sg_actor_set_data(actor, s);
    sg_actor_start(actor, streamMain, 0, NULL);
  }
}

/* ---- Flows of others --------------------------------------------------------------------------- */

/* What flows take of a port in a part of the time (flows.c) are real flows, over a link of that rate and the
 * port. They are so many that no fair share of the port is less than their part of it. */
typedef struct beside {
  double begin, bytes; /* seconds */
  sg_host_t from, to;
} beside_t;

static void besideMain(int argc, char **argv) {
  (void)argc, (void)argv;
  const beside_t *b = sg_actor_self_get_data();
  if (b->begin > 0) sg_actor_sleep_until(b->begin);
  sg_host_sendto(b->from, b->to, b->bytes);
}

/* Streams that cross a port. */
static int countStreams(const replay_run_t *run, trefoil_resource_t kind, int at, char *seen) {
  const ep_replay_t *r = run->of->replay;
  int n = 0;
  memset(seen, 0, (size_t)run->numStreams + 1);
  for (int64_t i = 0; i < r->numMoves; i++) {
    if (seen[run->streamOf[i]] || epResourceOf(run->of->fabric, &r->moves[i], kind) != at) continue;
    seen[run->streamOf[i]] = 1;
    n++;
  }
  return n;
}

/* Rows cross all their links when they arrive, so what leaves then is seen a way's latency later. */
static double secondsOf(const ep_fabric_t *f, trefoil_resource_t kind, int part) {
  int isNear = kind == TREFOIL_RESOURCE_NVLINK_OUT || kind == TREFOIL_RESOURCE_NVLINK_IN;
  ep_fs_t shift = f->latency[isNear ? TREFOIL_TIER_NVLINK : TREFOIL_TIER_NET];
  return part < 0 ? 0 : (double)(f->until[part] + shift) * S_PER_FS;
}

/* Of one port in one part of the time. */
static void createBeside(const replay_run_t *run, trefoil_resource_t kind, int at, int part,
                         int numStreams, beside_t *b) {
  const ep_fabric_t *f = run->of->fabric;
  double left = epLeftOf(f, kind, at, part);
  int n = 1 + (int)ceil(numStreams * (1 - left) / left), isLast = part + 1 == f->numParts;
  char name[64];
  snprintf(name, sizeof name, EP_BESIDE_NAME("o"), (int)kind, at, part);
  b->from = sg_host_by_name(name);
  snprintf(name, sizeof name, EP_BESIDE_NAME("q"), (int)kind, at, part);
  b->to = sg_host_by_name(name);
  double rate = (double)run->of->replay->rowBytes / ((double)f->row[kind][at] * S_PER_FS);
  b->begin = secondsOf(f, kind, part - 1);
  double seconds = isLast ? 1e6 : secondsOf(f, kind, part) - b->begin;
  b->bytes = rate * (1 - left) * seconds / n;
  for (int i = 0; i < n; i++) {
    sg_actor_t actor = sg_actor_init("beside", b->from);
    sg_actor_set_data(actor, b);
    sg_actor_start(actor, besideMain, 0, NULL);
    sg_actor_daemonize(actor);
  }
}

/* NULL: out of memory. */
static beside_t *createAllBeside(const replay_run_t *run) {
  const ep_fabric_t *f = run->of->fabric;
  size_t n = 1;
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
    if (epIsPort((trefoil_resource_t)k)) n += (size_t)f->count[k] * (size_t)f->numParts;
  }
  beside_t *all = calloc(n, sizeof *all), *next = all;
  char *seen = malloc((size_t)run->numStreams + 1);
  for (int k = 0; all && seen && k < TREFOIL_NUM_RESOURCES && f->numParts > 0; k++) {
    trefoil_resource_t kind = (trefoil_resource_t)k;
    for (int i = 0; i < f->count[k] && epIsPort(kind); i++) {
      int numStreams = countStreams(run, kind, i, seen);
      for (int p = 0; p < f->numParts && numStreams > 0; p++) {
        if (epLeftOf(f, kind, i, p) < 1) createBeside(run, kind, i, p, numStreams, next++);
      }
    }
  }
  if (!seen) {
    free(all);
    all = NULL;
  }
  free(seen);
  return all;
}

static int allocate(replay_run_t *run, int32_t **table) {
  size_t n = (size_t)run->of->replay->numMoves, R = (size_t)run->of->shape->numRanks;
  run->streamOf = malloc((n + 1) * sizeof *run->streamOf);
  run->moves = malloc((n + 1) * sizeof *run->moves);
  run->pending = calloc(n + 1, sizeof *run->pending);
  run->firstChild = calloc(n + 2, sizeof *run->firstChild);
  run->children = malloc((n + 1) * sizeof *run->children);
  run->readyAt = calloc(n + 1, sizeof *run->readyAt);
  *table = calloc(3 * R * R, sizeof **table);
  return run->streamOf && run->moves && run->pending && run->firstChild && run->children &&
         run->readyAt && *table;
}

int epSimGridReplay(const ep_flows_t *flows) {
  replay_run_t run = {.of = flows};
  int32_t *table;
  if (!allocate(&run, &table)) return 0; // NOLINT(clang-analyzer-unix.Malloc): the process ends
  countMoves(&run, table);
  free(table);
  run.streams = calloc((size_t)run.numStreams + 1, sizeof *run.streams);
  if (!run.streams) return 0;
  groupMoves(&run);
  linkWaiting(&run);
  char *arguments[] = {"trefoil",
                       "--cfg=network/model:CM02",
                       "--cfg=network/crosstraffic:0",
                       "--cfg=network/TCP-gamma:0",
                       "--cfg=surf/precision:1e-12",
                       "--cfg=network/optim:Full",
                       "--cfg=contexts/stack-size:64",
                       "--cfg=contexts/guard-size:0", /* a mapping a stack: too many for Linux */
                       "--log=root.thres:error",
                       NULL};
  int count = (int)(sizeof arguments / sizeof *arguments) - 1;
  simgrid_init(&count, arguments);
  simgrid_load_platform(flows->platform);
  if (!createAllBeside(&run)) return 0;
  createActors(&run);
  simgrid_run();
  return 1;
}
