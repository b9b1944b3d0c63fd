/* All of SimGrid: the transfers of a replay as flows of its network model.
 *
 * A stream is an actor; all streams share SMs, ports and leaves by max-min fairness, which is what row by
 * row interleaving comes to.
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
#include "sim/streams.h"

#define S_PER_FS 1e-15

typedef struct replay_run {
  const ep_flows_t *of;
  ep_streams_t streams;
  sg_sem_t *ready; /* [streams] NULL: nothing is waited for */
} replay_run_t;

typedef struct sender {
  replay_run_t *run;
  int stream;
} sender_t;

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

static void onReady(void *context, int stream) {
  replay_run_t *run = context;
  sg_sem_release(run->ready[stream]);
}

static void complete(const replay_run_t *run, int32_t move, ep_fs_t began) {
  epStreamsComplete(&run->streams, move, began, nowFs(), simgrid_get_clock());
}

/* ---- Actors ------------------------------------------------------------------------------------ */

static void sendRows(const replay_run_t *run, const ep_move_t *m, int64_t rows) {
  if (!crossesAny(run, m)) return;
  sg_host_t from, to;
  endsOf(run, m, &from, &to);
  sg_host_sendto(from, to, (double)rows * (double)run->of->replay->rowBytes);
}

static void sendAllDirect(const replay_run_t *run, int stream, ep_fs_t began) {
  const ep_stream_t *s = &run->streams.streams[stream];
  const int32_t *moves = run->streams.moves + s->first;
  sendRows(run, epStreamMove(&run->streams, stream, 0), epStreamRows(&run->streams, stream));
  for (int i = 0; i < s->numMoves; i++) complete(run, moves[i], began);
}

/* Seconds: when a transfer may begin. */
static double beginOf(const replay_run_t *run, const ep_move_t *m, int32_t move, int waits) {
  const ep_fabric_t *f = run->of->fabric;
  double begin = (double)(f->start[m->src] + f->latency[m->tier]) * S_PER_FS;
  double ready = run->streams.readyAt[move] + (double)f->latency[m->tier] * S_PER_FS;
  return waits && ready > begin ? ready : begin;
}

static void streamMain(int argc, char **argv) {
  (void)argc, (void)argv;
  const sender_t *self = sg_actor_self_get_data();
  const replay_run_t *run = self->run;
  const ep_stream_t *s = &run->streams.streams[self->stream];
  for (int i = 0; i < s->numMoves; i++) {
    if (s->waits) sg_sem_acquire(run->ready[self->stream]);
    int32_t move = run->streams.moves[s->first + i];
    const ep_move_t *m = epStreamMove(&run->streams, self->stream, i);
    double begin = beginOf(run, m, move, s->waits);
    if (begin > simgrid_get_clock()) sg_actor_sleep_until(begin);
    ep_fs_t began = nowFs() - run->of->fabric->latency[m->tier];
    if (epIsOneFlow(m)) {
      sendAllDirect(run, self->stream, began);
      return;
    }
    sendRows(run, m, m->rows);
    complete(run, move, began);
  }
}

/* 0: out of memory. */
static int createActors(replay_run_t *run) {
  size_t n = (size_t)run->streams.numStreams;
  sender_t *senders = malloc((n + 1) * sizeof *senders);
  run->ready = calloc(n + 1, sizeof *run->ready);
  if (!senders || !run->ready) return 0; // NOLINT(clang-analyzer-unix.Malloc): the process ends
  sg_host_t host = hostOf('g', 0);
  for (int i = 0; i < run->streams.numStreams; i++) {
    if (run->streams.streams[i].waits) run->ready[i] = sg_sem_init(0);
    senders[i] = (sender_t){run, i};
    sg_actor_t actor = sg_actor_init("stream", host);
    sg_actor_set_data(actor, &senders[i]);
    sg_actor_start(actor, streamMain, 0, NULL);
  }
  return 1;
}

/* ---- Flows of others --------------------------------------------------------------------------- */

/* What flows take of a port in a part of the time (flows.c) are real flows, over a link of that rate and the
 * port. They are so many that no fair share of the port is less than their part of it. */
typedef struct background {
  double begin, bytes; /* seconds */
  sg_host_t from, to;
} background_t;

static void backgroundMain(int argc, char **argv) {
  (void)argc, (void)argv;
  const background_t *b = sg_actor_self_get_data();
  if (b->begin > 0) sg_actor_sleep_until(b->begin);
  sg_host_sendto(b->from, b->to, b->bytes);
}

/* Streams that cross a port. */
static int countStreams(const replay_run_t *run, trefoil_resource_t kind, int at, char *seen) {
  const ep_replay_t *r = run->of->replay;
  int n = 0;
  memset(seen, 0, (size_t)run->streams.numStreams + 1);
  for (int64_t i = 0; i < r->numMoves; i++) {
    if (seen[run->streams.streamOf[i]] || epResourceOf(run->of->fabric, &r->moves[i], kind) != at)
      continue;
    seen[run->streams.streamOf[i]] = 1;
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
static void createBackground(const replay_run_t *run, trefoil_resource_t kind, int at, int part,
                             int numStreams, background_t *b) {
  const ep_fabric_t *f = run->of->fabric;
  double left = epLeftOf(f, kind, at, part);
  int n = 1 + (int)ceil(numStreams * (1 - left) / left), isLast = part + 1 == f->numParts;
  char name[64];
  snprintf(name, sizeof name, EP_BACKGROUND_NAME("o"), (int)kind, at, part);
  b->from = sg_host_by_name(name);
  snprintf(name, sizeof name, EP_BACKGROUND_NAME("q"), (int)kind, at, part);
  b->to = sg_host_by_name(name);
  double rate = (double)run->of->replay->rowBytes / ((double)f->row[kind][at] * S_PER_FS);
  b->begin = secondsOf(f, kind, part - 1);
  double seconds = isLast ? 1e6 : secondsOf(f, kind, part) - b->begin;
  b->bytes = rate * (1 - left) * seconds / n;
  for (int i = 0; i < n; i++) {
    sg_actor_t actor = sg_actor_init("background", b->from);
    sg_actor_set_data(actor, b);
    sg_actor_start(actor, backgroundMain, 0, NULL);
    sg_actor_daemonize(actor);
  }
}

/* NULL: out of memory. */
static background_t *createAllBackground(const replay_run_t *run) {
  const ep_fabric_t *f = run->of->fabric;
  size_t n = 1;
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
    if (epIsPort((trefoil_resource_t)k)) n += (size_t)f->count[k] * (size_t)f->numParts;
  }
  background_t *all = calloc(n, sizeof *all), *next = all;
  char *seen = malloc((size_t)run->streams.numStreams + 1);
  for (int k = 0; all && seen && k < TREFOIL_NUM_RESOURCES && f->numParts > 0; k++) {
    trefoil_resource_t kind = (trefoil_resource_t)k;
    for (int i = 0; i < f->count[k] && epIsPort(kind); i++) {
      int numStreams = countStreams(run, kind, i, seen);
      for (int p = 0; p < f->numParts && numStreams > 0; p++) {
        if (epLeftOf(f, kind, i, p) < 1) createBackground(run, kind, i, p, numStreams, next++);
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

int epSimGridReplay(const ep_flows_t *flows) {
  replay_run_t run = {.of = flows};
  if (!epStreamsBuild(&run.streams, flows->replay, flows->fabric, flows->timing)) return 0;
  run.streams.onReady = onReady;
  run.streams.context = &run;
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
  if (!createAllBackground(&run)) return 0;
  if (!createActors(&run)) return 0; // NOLINT(clang-analyzer-unix.Malloc): the process ends
  simgrid_run();
  return 1;
}
