/* Which objects are alive: a hash set of addresses. A pointer that is not in it is refused without being
 * touched, so use after destroy is an error and not a crash (unless the address was given out again for
 * an object of the same kind).
 *
 * Every call asks, from the threads of many ranks at once, so asking takes no lock: an entry is one
 * word, address and kind together, and a table that was outgrown stays as it is for threads that may still
 * read it. Tables double, so the old ones together are smaller than the one in use. Changes take a lock. */
#include <pthread.h>
#include <stdlib.h>

#include "api/object.h"

#define FREE    ((uintptr_t)0)
#define REMOVED ((uintptr_t)1) /* others may lie behind it */

typedef struct table {
  struct table *older;
  size_t capacity;
  _Atomic uintptr_t entries[]; /* objects are aligned to 16 bytes: the kind is in the low bits */
} table_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(table_t *) current;
static size_t used; /* entries that are not free */

static uintptr_t entryOf(const void *object, ep_object_kind_t kind) {
  return (uintptr_t)object | (uintptr_t)kind << 1;
}

static size_t startOf(const table_t *t, uintptr_t entry) {
  return (size_t)((entry >> 4) * 0x9E3779B97F4A7C15ull >> 20) & (t->capacity - 1);
}

static size_t after(const table_t *t, size_t i) {
  return (i + 1) & (t->capacity - 1);
}

static uintptr_t load(const table_t *t, size_t i) {
  return atomic_load_explicit(&t->entries[i], memory_order_acquire);
}

static void store(table_t *t, size_t i, uintptr_t entry) {
  atomic_store_explicit(&t->entries[i], entry, memory_order_release);
}

/* The capacity if it is not there. At least half of a table is free, so this ends. */
static size_t find(const table_t *t, const void *object, ep_object_kind_t kind) {
  uintptr_t entry = entryOf(object, kind);
  if ((uintptr_t)object & 15) return t->capacity; /* none of ours */
  for (size_t i = startOf(t, entry);; i = after(t, i)) {
    uintptr_t found = load(t, i);
    if (found == entry) return i;
    if (found == FREE) return t->capacity;
  }
}

/* 1: a free entry was used. */
static int place(table_t *t, uintptr_t entry) {
  size_t i = startOf(t, entry);
  while (load(t, i) > REMOVED) i = after(t, i);
  int free = load(t, i) == FREE;
  store(t, i, entry);
  return free;
}

static int grow(void) {
  table_t *old = atomic_load(&current);
  size_t capacity = old ? 2 * old->capacity : 256, live = 0;
  table_t *t = calloc(1, sizeof *t + capacity * sizeof t->entries[0]);
  if (!t) return 0;
  t->older = old;
  t->capacity = capacity;
  for (size_t i = 0; old && i < old->capacity; i++) {
    if (load(old, i) > REMOVED) live += (size_t)place(t, load(old, i));
  }
  used = live;
  atomic_store_explicit(&current, t, memory_order_release);
  return 1;
}

trefoil_result_t epRegister(const void *object, ep_object_kind_t kind) {
  pthread_mutex_lock(&lock);
  table_t *t = atomic_load(&current);
  int room = (t && 2 * (used + 1) <= t->capacity) || grow();
  if (room) used += (size_t)place(atomic_load(&current), entryOf(object, kind));
  pthread_mutex_unlock(&lock);
  EP_CHECK(room, TREFOIL_SYSTEM_ERROR, "out of memory: the table of live objects");
  return TREFOIL_OK;
}

/* What is removed becomes free if nothing lies behind it, and so do those before it. */
static void removeAt(table_t *t, size_t i) {
  store(t, i, REMOVED);
  while (load(t, i) == REMOVED && load(t, after(t, i)) == FREE) {
    store(t, i, FREE);
    used--;
    i = (i - 1) & (t->capacity - 1);
  }
}

int epUnregister(const void *object, ep_object_kind_t kind) {
  pthread_mutex_lock(&lock);
  table_t *t = atomic_load(&current);
  size_t i = t ? find(t, object, kind) : 0;
  int there = t && i < t->capacity;
  if (there) removeAt(t, i);
  pthread_mutex_unlock(&lock);
  return there;
}

int epIsLive(const void *object, ep_object_kind_t kind) {
  const table_t *t = atomic_load_explicit(&current, memory_order_acquire);
  return t && find(t, object, kind) < t->capacity;
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
