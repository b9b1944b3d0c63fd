/* Which allocation an address lies in, for libraries above that ask at every call: each thread remembers its
 * last answers until memory is allocated or freed anywhere. */
#include "host_internal.h"
#include "trefoil_host.h"

enum { EP_REMEMBERED = 64 };
static _Thread_local struct {
  const void *ptr; /* NULL: nothing */
  uint64_t changes;
  trefoil_host_memory_t memory;
} remembered[EP_REMEMBERED];

static void lookUp(const void *ptr, trefoil_host_memory_t *out) {
  static const trefoil_host_memory_kind_t kinds[] = {
      [EP_MEM_DEVICE] = trefoilHostMemoryDevice, [EP_MEM_MANAGED] = trefoilHostMemoryManaged,
      [EP_MEM_HOST] = trefoilHostMemoryPinned,   [EP_MEM_REGISTERED] = trefoilHostMemoryPinned,
      [EP_MEM_PEER] = trefoilHostMemoryPeer,
  };
  ep_mem_t mem;
  *out = (trefoil_host_memory_t){.kind = trefoilHostMemoryNone, .device = -1};
  if (epMemFind(ptr, &mem)) {
    *out = (trefoil_host_memory_t){kinds[mem.kind], mem.device, mem.base, mem.bytes};
  } else if (epMemIsFree(ptr)) {
    out->kind = trefoilHostMemoryFreed;
  }
}

void trefoilHostMemory(const void *ptr, trefoil_host_memory_t *out) {
  const size_t at = (size_t)((uintptr_t)ptr * 0x9E3779B97F4A7C15ull >> 58);
  const uint64_t changes = atomic_load_explicit(&epMemChanges, memory_order_acquire);
  if (ptr && remembered[at].ptr == ptr && remembered[at].changes == changes) {
    *out = remembered[at].memory;
    return;
  }
  lookUp(ptr, out);
  remembered[at].ptr = ptr;
  remembered[at].changes = changes;
  remembered[at].memory = *out;
}
