/* Groups transfers by stream, and finds what waits for what. */
#include "sim/streams.h"

#include <stdlib.h>
#include <string.h>

static int waits(const ep_move_t *m) {
  return !epCrossesSend(m);
}

/* NET_OUT and RETURN, or FORWARD and NET_BACK, may have the ends of a DIRECT. */
static int classOf(const ep_move_t *m) {
  if (m->phase == TREFOIL_PHASE_DIRECT) return 0;
  return waits(m) ? 2 : 1;
}

static void countMoves(ep_streams_t *w, int32_t *table) {
  const ep_replay_t *r = w->replay;
  size_t R = (size_t)w->fabric->numRanks;
  for (int64_t i = 0; i < r->numMoves; i++) {
    const ep_move_t *m = &r->moves[i];
    int32_t *at = &table[((size_t)classOf(m) * R + (size_t)m->src) * R + (size_t)m->dst];
    if (*at == 0) *at = ++w->numStreams;
    w->streamOf[i] = *at - 1;
  }
}

static void placeStreams(ep_streams_t *w) {
  const ep_replay_t *r = w->replay;
  for (int64_t i = 0; i < r->numMoves; i++) {
    ep_stream_t *s = &w->streams[w->streamOf[i]];
    s->numMoves++;
    s->waits = waits(&r->moves[i]);
    s->one = (int32_t)i;
  }
  int sum = 0;
  for (int s = 0; s < w->numStreams; s++) {
    w->streams[s].first = sum;
    sum += w->streams[s].numMoves;
  }
}

/* Moves of a stream in the order of their issue; a stream that waits fills its part as it goes. */
static void groupMoves(ep_streams_t *w) {
  const ep_replay_t *r = w->replay;
  for (int64_t i = 0; i < r->numSegments; i++) {
    int32_t segment = r->issued[i];
    int32_t move = r->segments ? r->segments[segment].move : segment;
    ep_stream_t *s = &w->streams[w->streamOf[move]];
    if (s->waits || w->readyAt[move] < 0) continue;
    w->readyAt[move] = -1; /* an LL move has many segments */
    w->moves[s->first + s->numReady++] = move;
  }
}

static void countWaiting(ep_streams_t *w) {
  const ep_replay_t *r = w->replay;
  for (int64_t i = 0; i < r->numMoves; i++) {
    if (r->partner[i] < 0) continue;
    if (r->moves[i].phase == TREFOIL_PHASE_RETURN) w->pending[r->partner[i]]++;
    if (r->moves[i].phase == TREFOIL_PHASE_FORWARD) w->firstChild[r->partner[i] + 1]++;
  }
  for (int64_t i = 0; i < r->numMoves; i++) w->firstChild[i + 1] += w->firstChild[i];
}

static void linkWaiting(ep_streams_t *w) {
  const ep_replay_t *r = w->replay;
  countWaiting(w);
  for (int64_t i = 0; i < r->numMoves; i++) {
    if (r->moves[i].phase != TREFOIL_PHASE_FORWARD) continue;
    w->children[w->firstChild[r->partner[i]]++] = (int32_t)i;
  }
  for (int64_t i = r->numMoves; i > 0; i--) w->firstChild[i] = w->firstChild[i - 1];
  w->firstChild[0] = 0;
}

static int allocate(ep_streams_t *w) {
  size_t n = (size_t)w->replay->numMoves;
  w->streamOf = malloc((n + 1) * sizeof *w->streamOf);
  w->moves = malloc((n + 1) * sizeof *w->moves);
  w->pending = calloc(n + 1, sizeof *w->pending);
  w->firstChild = calloc(n + 2, sizeof *w->firstChild);
  w->children = malloc((n + 1) * sizeof *w->children);
  w->readyAt = calloc(n + 1, sizeof *w->readyAt);
  return w->streamOf && w->moves && w->pending && w->firstChild && w->children && w->readyAt;
}

static int findStreams(ep_streams_t *w) {
  size_t R = (size_t)w->fabric->numRanks;
  int32_t *table = calloc(3 * R * R, sizeof *table);
  if (!table) return 0;
  countMoves(w, table);
  free(table);
  w->streams = calloc((size_t)w->numStreams + 1, sizeof *w->streams);
  return w->streams != NULL;
}

int epStreamsBuild(ep_streams_t *streams, const ep_replay_t *replay, const ep_fabric_t *fabric,
                   ep_timing_t *timing) {
  *streams = (ep_streams_t){.replay = replay, .fabric = fabric, .timing = timing};
  if (!allocate(streams) || !findStreams(streams)) return 0;
  placeStreams(streams);
  groupMoves(streams);
  if (replay->partner) linkWaiting(streams);
  return 1;
}

void epStreamsFree(ep_streams_t *s) {
  void *all[] = {s->streams,    s->streamOf, s->moves,  s->pending,
                 s->firstChild, s->children, s->readyAt};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
  memset(s, 0, sizeof *s);
}

int64_t epStreamRows(const ep_streams_t *w, int stream) {
  int64_t rows = 0;
  for (int i = 0; i < w->streams[stream].numMoves; i++) rows += epStreamMove(w, stream, i)->rows;
  return rows;
}

static void makeReady(const ep_streams_t *w, int32_t move, double at) {
  ep_stream_t *s = &w->streams[w->streamOf[move]];
  w->readyAt[move] = at;
  w->moves[s->first + s->numReady++] = move;
  w->onReady(w->context, w->streamOf[move]);
}

static void recordTimes(const ep_streams_t *w, int32_t move, ep_fs_t began, ep_fs_t now) {
  const ep_move_t *m = &w->replay->moves[move];
  if (w->timing->moves && move < w->timing->numTimes) {
    ep_fs_t sent = now - w->fabric->latency[m->tier];
    w->timing->moves[move] = (ep_move_times_t){began, sent, now};
  }
  int ends = m->phase == TREFOIL_PHASE_RETURN || epCrossesReceive(m);
  if (ends && w->timing->finish[m->dst] < now) w->timing->finish[m->dst] = now;
}

void epStreamsComplete(const ep_streams_t *w, int32_t move, ep_fs_t began, ep_fs_t now,
                       double readyAt) {
  const ep_replay_t *r = w->replay;
  int phase = r->moves[move].phase;
  recordTimes(w, move, began, now);
  if (phase == TREFOIL_PHASE_NET_OUT) {
    for (int32_t c = w->firstChild[move]; c < w->firstChild[move + 1]; c++) {
      makeReady(w, w->children[c], readyAt);
    }
  } else if (phase == TREFOIL_PHASE_RETURN && --w->pending[r->partner[move]] == 0) {
    makeReady(w, r->partner[move], readyAt);
  }
}
