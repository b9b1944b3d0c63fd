/* Which objects are alive: a hash set of addresses behind one lock. A pointer that is not in it is
 * refused without being touched, so use after destroy is an error and not a crash (unless the
 * address was given out again for an object of the same kind). */
#include <pthread.h>
#include <stdlib.h>

#include "api/object.h"

typedef struct entry {
  uintptr_t address; /* 0 free, 1 removed */
  int kind;
} entry_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static entry_t *table;
static size_t capacity, used; /* used counts removed ones too */

static size_t startOf(uintptr_t address, size_t size) {
  return (size_t)((address >> 4) * 0x9E3779B97F4A7C15ull >> 20) & (size - 1);
}

static entry_t *find(uintptr_t address) {
  if (!capacity) return NULL;
  for (size_t i = startOf(address, capacity);; i = (i + 1) & (capacity - 1)) {
    if (table[i].address == address) return &table[i];
    if (!table[i].address) return NULL;
  }
}

static void place(entry_t *to, size_t size, uintptr_t address, int kind) {
  size_t i = startOf(address, size);
  while (to[i].address > 1) i = (i + 1) & (size - 1);
  to[i] = (entry_t){address, kind};
}

static int grow(void) {
  size_t live = 0, size = 64;
  for (size_t i = 0; i < capacity; i++) live += table[i].address > 1;
  while (size < 4 * (live + 1)) size *= 2;
  entry_t *bigger = calloc(size, sizeof *bigger);
  if (!bigger) return 0;
  for (size_t i = 0; i < capacity; i++) {
    if (table[i].address > 1) place(bigger, size, table[i].address, table[i].kind);
  }
  free(table);
  table = bigger;
  capacity = size;
  used = live;
  return 1;
}

trefoil_result_t epRegister(const void *object, ep_object_kind_t kind) {
  pthread_mutex_lock(&lock);
  int room = 2 * (used + 1) <= capacity || grow();
  if (room) {
    place(table, capacity, (uintptr_t)object, (int)kind);
    used++;
  }
  pthread_mutex_unlock(&lock);
  EP_CHECK(room, TREFOIL_SYSTEM_ERROR, "out of memory: the table of live objects");
  return TREFOIL_OK;
}

int epUnregister(const void *object, ep_object_kind_t kind) {
  pthread_mutex_lock(&lock);
  entry_t *e = find((uintptr_t)object);
  int there = e && e->kind == (int)kind;
  if (there) e->address = 1;
  pthread_mutex_unlock(&lock);
  return there;
}

int epIsLive(const void *object, ep_object_kind_t kind) {
  pthread_mutex_lock(&lock);
  entry_t *e = find((uintptr_t)object);
  int live = e && e->kind == (int)kind;
  pthread_mutex_unlock(&lock);
  return live;
}

trefoil_result_t epCheckGroup(ncclEpGroup_t group, const char *function) {
  EP_CHECK(group, TREFOIL_INVALID_ARGUMENT, "%s: group is NULL", function);
  EP_CHECK(epIsLive(group, EP_OBJECT_GROUP), TREFOIL_INVALID_ARGUMENT,
           "%s: group %p is not a live group; was it destroyed?", function, (void *)group);
  return TREFOIL_OK;
}

trefoil_result_t epCheckHandle(ncclEpHandle_t handle, const char *function) {
  EP_CHECK(handle, TREFOIL_INVALID_ARGUMENT, "%s: handle is NULL", function);
  EP_CHECK(epIsLive(handle, EP_OBJECT_HANDLE), TREFOIL_INVALID_ARGUMENT,
           "%s: handle %p is not a live handle; was it destroyed?", function, (void *)handle);
  return TREFOIL_OK;
}
