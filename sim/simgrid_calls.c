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
  if (!allocate(&run, &table)) return 0;
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
  createActors(&run);
  simgrid_run();
  return 1;
}
