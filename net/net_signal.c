#include <stdlib.h>

#include "net_comm_internal.h"

/* A driver has no 64-bit addition on a stream: values are read, added to here, and written. Signals of
 * regions that nothing else writes are not read: their values are kept here (shadow). */

void epNetSignalsFree(ep_net_comm_t *c) {
  if (c->signals.values) epNetCudaUnpin(c->cuda, c->signals.values);
  free(c->signals.items);
}

static int append(ep_net_signals_t *s, const ep_net_pending_t *item, char *why) {
  for (size_t i = s->batch; i < s->count; i++)
    if (s->items[i].address == item->address) {
      s->items[i].add += item->add;
      return 0;
    }
  if (s->count == s->room) {
    size_t room = s->room ? 2 * s->room : EP_NET_SIGNAL_BATCH;
    ep_net_pending_t *items = realloc(s->items, room * sizeof *items);
    if (!items) return epNetFail(why, "no memory for signals that have arrived");
    s->items = items;
    s->room = room;
  }
  s->items[s->count++] = *item;
  return 0;
}

int epNetSignalAdd(ep_net_comm_t *c, uint32_t region, uint64_t offset, uint64_t add, char *why) {
  ep_net_region_t *r = epNetRegionAt(c, region, offset, 8);
  if (!r || offset % 8)
    return epNetFail(why, "rank %d: a signal for region %u at %llu, which is not registered",
                     c->rank, region, (unsigned long long)offset);
  char *at = epNetAddress(r, offset);
  if (!r->memory.device) {
    __atomic_fetch_add((uint64_t *)(void *)at, add, __ATOMIC_ACQ_REL);
    return 0;
  }
  ep_net_pending_t item = {r->shadow ? r->shadow + offset / 8 : NULL, (uint64_t)(uintptr_t)at, add};
  return append(&c->signals, &item, why);
}

static int startBatch(ep_net_comm_t *c, char *why) {
  ep_net_signals_t *s = &c->signals;
  void *values = s->values;
  size_t count = s->count < EP_NET_SIGNAL_BATCH ? s->count : EP_NET_SIGNAL_BATCH;
  if (!values && epNetCudaPinned(c->cuda, EP_NET_SIGNAL_BATCH * 8, &values, why)) return -1;
  s->values = values;
  for (size_t i = 0; i < count; i++) {
    uint64_t to = (uint64_t)(uintptr_t)&s->values[i];
    if (s->items[i].shadow) continue;
    if (epNetCudaCopy(c->cuda, 0, to, s->items[i].address, 8, &s->ticket, why)) return -1;
  }
  s->batch = count;
  return 0;
}

static int finishBatch(ep_net_comm_t *c, char *why) {
  ep_net_signals_t *s = &c->signals;
  for (size_t i = 0; i < s->batch; i++) {
    ep_net_pending_t *item = &s->items[i];
    uint64_t value = item->shadow ? (*item->shadow += item->add) : s->values[i] + item->add;
    if (epNetCudaWrite(c->cuda, 0, item->address, value, why)) return -1;
  }
  for (size_t i = s->batch; i < s->count; i++) s->items[i - s->batch] = s->items[i];
  s->count -= s->batch;
  s->batch = 0;
  return 0;
}

int epNetSignalsProgress(ep_net_comm_t *c, char *why) {
  ep_net_signals_t *s = &c->signals;
  if (s->count && !s->batch && startBatch(c, why)) return -1;
  if (s->batch && epNetCudaFinished(c->cuda, 0, s->ticket)) return finishBatch(c, why);
  return 0;
}
