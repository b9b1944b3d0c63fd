/* Streams: transfers of one (phase, source, destination), which are sent one after the other. DIRECT,
 * NET_OUT and RETURN streams start with their rank; FORWARD and NET_BACK take transfers as they become
 * ready: when the chunk's NET_OUT has come, when the chunk's last RETURN has. */
#ifndef TREFOIL_SIM_STREAMS_H
#define TREFOIL_SIM_STREAMS_H

#include "sim/engine.h"

typedef struct ep_stream {
  int first, numMoves; /* in moves */
  int numReady;        /* moves[first .. first + numReady) are known */
  int waits;           /* for other transfers */
  int32_t one;         /* one of its transfers: all cross the same resources */
} ep_stream_t;

typedef struct ep_streams {
  const ep_replay_t *replay;
  const ep_fabric_t *fabric;
  ep_timing_t *timing;
  int numStreams;
  ep_stream_t *streams;
  int32_t *streamOf;   /* [moves] */
  int32_t *moves;      /* [moves] grouped by stream */
  int32_t *pending;    /* [moves] RETURNs that a NET_BACK still waits for */
  int32_t *firstChild; /* [moves + 1] FORWARDs of a NET_OUT: children[firstChild[m]] on */
  int32_t *children;
  double *readyAt; /* [moves] in the engine's unit of time */
  void (*onReady)(void *context, int stream);
  void *context;
} ep_streams_t;

/* Returns 0 where memory ran out. */
int epStreamsBuild(ep_streams_t *streams, const ep_replay_t *replay, const ep_fabric_t *fabric,
                   ep_timing_t *timing);
void epStreamsFree(ep_streams_t *streams);

/* A transfer has come: notes its times, and makes ready what waited for it. */
void epStreamsComplete(const ep_streams_t *streams, int32_t move, ep_fs_t began, ep_fs_t now,
                       double readyAt);

static inline const ep_move_t *epStreamMove(const ep_streams_t *s, int stream, int i) {
  return &s->replay->moves[s->moves[s->streams[stream].first + i]];
}
/* Nothing waits for the chunks of a DIRECT stream, so all of them are one flow. */
static inline int epIsOneFlow(const ep_move_t *m) {
  return m->phase == TREFOIL_PHASE_DIRECT;
}
int64_t epStreamRows(const ep_streams_t *streams, int stream);

#endif
