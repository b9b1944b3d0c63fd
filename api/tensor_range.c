/* Where the tensors of a call lie: each wholly in one live allocation that the rank's device reads and
 * writes, and what the call writes apart from everything else of it. */
#include <stdio.h>

#include "api/object.h"

static const char *kindName(const ep_place_t *place) {
  return place->kind == EP_PLACE_MANAGED  ? "managed memory"
         : place->kind == EP_PLACE_PINNED ? "pinned host memory"
                                          : "device memory";
}

static trefoil_result_t checkKind(const ep_ranges_t *r, const char *name, const void *data,
                                  const ep_place_t *place) {
  const ep_place_kind_t kind = place->kind;
  const char *what = NULL;
  char other[80];
  if (kind == EP_PLACE_NONE) {
    what = "host memory that is not pinned, or was freed";
  } else if (kind == EP_PLACE_FREED) {
    what = "memory that was freed, or past the end of an allocation";
  } else if (kind == EP_PLACE_PEER) {
    what = "another process's memory";
  } else if (kind == EP_PLACE_APART) {
    what = "host memory that the device has at another address";
  } else if (kind == EP_PLACE_DEVICE && place->device != r->group->device) {
    snprintf(other, sizeof other, "an allocation of %zu bytes on device %d", place->bytes,
             place->device);
    what = other;
  }
  EP_CHECK(!what, TREFOIL_INVALID_ARGUMENT,
           "%s: %s: data %p is %s; rank %d needs memory of its device %d (or managed, or pinned)",
           r->function, name, data, what, r->group->rank, r->group->device);
  return TREFOIL_OK;
}

static trefoil_result_t checkOverlap(const ep_ranges_t *r, const ep_extent_t *e) {
  for (int i = 0; i < r->count; i++) {
    const ep_extent_t *o = &r->extents[i];
    EP_CHECK(
        e->end <= o->first || o->end <= e->first || !(e->written || o->written),
        TREFOIL_INVALID_ARGUMENT,
        "%s: %s (%zu bytes at %p) overlaps %s (%zu bytes at %p) on rank %d; what is written must "
        "lie apart",
        r->function, e->name, (size_t)(e->end - e->first), (void *)e->first, o->name,
        (size_t)(o->end - o->first), (void *)o->first, r->group->rank);
  }
  return TREFOIL_OK;
}

trefoil_result_t epRangeCheck(ep_ranges_t *r, const char *name, const void *data, size_t bytes,
                              int written) {
  if (!bytes) return TREFOIL_OK;
  ep_place_t place;
  epBackend.findPlace(data, &place);
  EP_TRY(checkKind(r, name, data, &place));
  const ep_extent_t e = {name, (uintptr_t)data, (uintptr_t)data + bytes, written};
  EP_CHECK(e.end >= e.first && e.end <= place.base + place.bytes, TREFOIL_INVALID_ARGUMENT,
           "%s: %s: %zu bytes at %p do not fit the allocation there: %zu bytes of %s at %p, %zu "
           "before; rank %d",
           r->function, name, bytes, data, place.bytes, kindName(&place), (void *)place.base,
           (size_t)(e.first - place.base), r->group->rank);
  EP_TRY(checkOverlap(r, &e));
  if (r->count < (int)(sizeof r->extents / sizeof *r->extents)) r->extents[r->count++] = e;
  return TREFOIL_OK;
}

trefoil_result_t epRangeCheckMemory(ep_ranges_t *r, ncclEpHandle_t h) {
  if (h->ownsMem) return TREFOIL_OK;
  return epRangeCheck(r, "handle_mem", h->handleMem, h->sizing.buffers[EP_BUFFER_HANDLE_MEM].bytes,
                      1);
}

trefoil_result_t epRangeCheckHandle(ep_ranges_t *r, ncclEpHandle_t h) {
  EP_TRY(epRangeCheckMemory(r, h));
  if (epIsHt(h->group)) return TREFOIL_OK;
  return epRangeCheck(r, "topk_idx of the last ncclEpUpdateHandle", h->routing, h->routingBytes, 0);
}
