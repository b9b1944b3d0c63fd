/* Keeps the progress record (api/hang_record.h), if NCCL_EP_HANG_DIR asks for one. What cannot be
 * written is left out: diagnosis never makes a program fail. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "api/cpu/cpu_group.h"
#include "api/cpu/cpu_hang.h"
#include "api/hang_record.h"

struct ep_hang {
  ep_hang_record_t *record;
  char path[600];
};

static _Atomic uint32_t numGroups;

static uint64_t realNs(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static ep_hang_record_t *mapFile(const char *path) {
  int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return NULL;
  void *p = MAP_FAILED;
  if (ftruncate(fd, sizeof(ep_hang_record_t)) == 0) {
    p = mmap(NULL, sizeof(ep_hang_record_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  close(fd);
  return p == MAP_FAILED ? NULL : p;
}

static void fillRecord(ep_hang_record_t *r, const ep_cpu_group_t *g, uint32_t groupNo) {
  ncclCommProperties_t p;
  epCommProperties(&p);
  if (ncclCommQueryProperties(g->group->comm, &p) == ncclSuccess) r->groupId = p.commHash;
  r->version = EP_HANG_VERSION;
  r->bytes = sizeof *r;
  r->rank = g->me;
  r->numRanks = g->R;
  r->ranksPerNode = g->G;
  r->pid = (int32_t)getpid();
  r->groupNo = groupNo;
  r->algorithm = g->group->limits.algorithm;
  r->startNs = realNs();
  r->timeoutNs = g->group->timeoutNs;
  r->culprit = -1;
  gethostname(r->host, sizeof r->host - 1);
  for (int k = 0; k < EP_HANG_KINDS; k++) r->kinds[k].peer = -1;
  r->magic = EP_HANG_MAGIC;
}

void epHangOpen(ep_cpu_group_t *g) {
  const char *dir = getenv("NCCL_EP_HANG_DIR");
  if (!dir || !*dir) return;
  struct ep_hang *h = calloc(1, sizeof *h);
  if (!h) return;
  char host[64] = "host";
  gethostname(host, sizeof host - 1);
  uint32_t no = atomic_fetch_add(&numGroups, 1);
  int n = snprintf(h->path, sizeof h->path, "%s/nccl_ep.%s.%d.%u.%d.hang", dir, host, (int)getpid(),
                   no, g->me);
  h->record = n < (int)sizeof h->path ? mapFile(h->path) : NULL;
  if (!h->record) {
    epLog(g->group, "NCCL_EP_HANG_DIR: cannot write %s; no record is kept", h->path);
    free(h);
    return;
  }
  fillRecord(h->record, g, no);
  g->hang = h;
}

void epHangClose(ep_cpu_group_t *g) {
  struct ep_hang *h = g->hang;
  if (!h) return;
  if (!atomic_load(&g->failed)) unlink(h->path);
  munmap(h->record, sizeof *h->record);
  free(h);
  g->hang = NULL;
}

static void set(const ep_op_t *op, ep_hang_state_t state, int peer, const char *what) {
  if (!op->g->hang) return;
  ep_hang_record_t *r = op->g->hang->record;
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
