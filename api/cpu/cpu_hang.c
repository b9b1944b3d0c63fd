/* Keeps the progress record (api/hang_record.h), if NCCL_EP_HANG_DIR asks for one. What cannot be
 * written is left out: diagnosis never makes a program fail. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api/cpu/cpu_group.h"
#include "api/cpu/cpu_hang.h"
#include "api/hang_file.h"

struct ep_hang {
  ep_hang_file_t file;
};

static uint64_t realNs(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void epHangOpen(ep_cpu_group_t *g) {
  struct ep_hang *h = calloc(1, sizeof *h);
  if (!h) return;
  epHangFileOpen(&h->file, g->group, g->commHash, g->id);
  if (h->file.record) {
    g->hang = h;
  } else {
    free(h);
  }
}

void epHangClose(ep_cpu_group_t *g) {
  if (!g->hang) return;
  epHangFileClose(&g->hang->file, atomic_load(&g->failed));
  free(g->hang);
  g->hang = NULL;
}

static void set(const ep_op_t *op, ep_hang_state_t state, int peer, const char *what) {
  if (!op->g->hang) return;
  ep_hang_record_t *r = op->g->hang->file.record;
  ep_hang_kind_t *k = &r->kinds[op->kind];
  __atomic_fetch_add(&k->sequence, 1, __ATOMIC_SEQ_CST);
  k->state = (uint32_t)state;
  k->number = op->no;
  k->sinceNs = realNs();
  k->peer = peer;
  k->layout = op->arenaIdx;
  snprintf(k->what, sizeof k->what, "%s", what);
  if (atomic_load(&op->g->failed) && !r->failed) {
    r->failed = 1;
    uint64_t failure = epLoad(&op->g->peers[op->g->me].control->failure);
    r->culprit = failure ? (int32_t)failure - 1 : -1;
  }
  __atomic_fetch_add(&k->sequence, 1, __ATOMIC_SEQ_CST);
}

void epHangBegin(const ep_op_t *op) {
  set(op, EP_HANG_RUNNING, -1, "");
}
void epHangWait(const ep_op_t *op, int peer, const char *what) {
  set(op, EP_HANG_WAITING, peer, what);
}
void epHangGo(const ep_op_t *op) {
  set(op, EP_HANG_RUNNING, -1, "");
}
void epHangEnd(const ep_op_t *op) {
  /* a wait that failed stays to be read */
  if (!atomic_load(&op->g->failed)) set(op, EP_HANG_IDLE, -1, "");
}
