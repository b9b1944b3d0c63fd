/* User objects: a pointer and its destructor, counted. Graphs hold references; what was instantiated from a
 * graph holds as many of its own, until it is destroyed and its launches have run. The destructor runs
 * in whichever thread gives the last reference back, and may not call CUDA, as with CUDA. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "host_internal.h"

#define OBJECT_MAGIC 0x57e4a008u

struct CUuserObject_st {
  uint32_t magic; /* these under the lock */
  uint64_t refs;
  void *ptr;
  cudaHostFn_t destroy;
  cudaUserObject_t nextFree;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static cudaUserObject_t freeObjects;

static bool live(cudaUserObject_t object) {
  return object && ((uintptr_t)object & 7) == 0 && object->magic == OBJECT_MAGIC;
}

/* Gives references back; the last one destroys. */
static bool drop(cudaUserObject_t object, uint64_t count) {
  cudaHostFn_t destroy = NULL;
  void *ptr = NULL;
  pthread_mutex_lock(&lock);
  bool good = live(object) && object->refs >= count;
  if (good && (object->refs -= count) == 0) {
    destroy = object->destroy;
    ptr = object->ptr;
    object->magic = EP_DEAD_MAGIC;
    object->nextFree = freeObjects;
    freeObjects = object;
  }
  pthread_mutex_unlock(&lock);
  if (destroy) destroy(ptr);
  return good;
}

static bool hold(cudaUserObject_t object, uint64_t count) {
  pthread_mutex_lock(&lock);
  bool good = live(object);
  if (good) object->refs += count;
  pthread_mutex_unlock(&lock);
  return good;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t *object_out, void *ptr, cudaHostFn_t destroy,
                                 unsigned int initialRefcount, unsigned int flags) {
  EP_CUDA_CHECK(object_out && destroy && initialRefcount && initialRefcount <= INT_MAX,
                cudaErrorInvalidValue, "cudaUserObjectCreate: %s",
                !object_out ? "object_out is NULL"
                : !destroy  ? "destroy is NULL"
                            : "initialRefcount is not in [1, INT_MAX]");
  EP_CUDA_CHECK(flags == cudaUserObjectNoDestructorSync, cudaErrorInvalidValue,
                "cudaUserObjectCreate: flags must be cudaUserObjectNoDestructorSync");
  pthread_mutex_lock(&lock);
  cudaUserObject_t object = freeObjects;
  if (object)
    freeObjects = object->nextFree;
  else
    object = calloc(1, sizeof *object);
  if (object) *object = (struct CUuserObject_st){OBJECT_MAGIC, initialRefcount, ptr, destroy, NULL};
  pthread_mutex_unlock(&lock);
  EP_CUDA_CHECK(object, cudaErrorMemoryAllocation, "cudaUserObjectCreate: out of memory");
  *object_out = object;
  return cudaSuccess;
}

static cudaError_t checkCount(unsigned count, const char *func) {
  EP_CUDA_CHECK(count && count <= INT_MAX, cudaErrorInvalidValue,
                "%s: count is not in [1, INT_MAX]", func);
  return cudaSuccess;
}

cudaError_t cudaUserObjectRetain(cudaUserObject_t object, unsigned int count) {
  EP_CUDA_TRY(checkCount(count, "cudaUserObjectRetain"));
  EP_CUDA_CHECK(hold(object, count), cudaErrorInvalidValue,
                "cudaUserObjectRetain: %p is not a live user object", (void *)object);
  return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned int count) {
  EP_CUDA_TRY(checkCount(count, "cudaUserObjectRelease"));
  EP_CUDA_CHECK(drop(object, count), cudaErrorInvalidValue,
                "cudaUserObjectRelease: %p is not a live user object with %u references",
                (void *)object, count);
  return cudaSuccess;
}

/* ---- Graphs ---- */

cudaError_t epGraphGet(cudaGraph_t graph, const char *func) {
  EP_CUDA_CHECK(graph && ((uintptr_t)graph & 7) == 0 &&
                    atomic_load(&graph->magic) == EP_GRAPH_MAGIC,
                cudaErrorInvalidValue, "%s: %p is not a live graph", func, (void *)graph);
  return cudaSuccess;
}

static ep_user_refs_t *find(ep_user_refs_t *first, cudaUserObject_t object) {
  while (first && first->object != object) first = first->next;
  return first;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object,
                                      unsigned int count, unsigned int flags) {
  const char *func = "cudaGraphRetainUserObject";
  EP_CUDA_TRY(epGraphGet(graph, func));
  EP_CUDA_TRY(checkCount(count, func));
  EP_CUDA_CHECK(!(flags & ~(unsigned)cudaGraphUserObjectMove), cudaErrorInvalidValue,
                "%s: flags 0x%x", func, flags);
  ep_user_refs_t *refs = find(graph->objects, object);
  ep_user_refs_t *fresh = refs ? NULL : calloc(1, sizeof *fresh);
  EP_CUDA_CHECK(refs || fresh, cudaErrorMemoryAllocation, "%s: out of memory", func);
  bool good = hold(object, count);
  if (good && flags == cudaGraphUserObjectMove) drop(object, count); /* the caller's */
  if (!good) free(fresh);
  EP_CUDA_CHECK(good, cudaErrorInvalidValue, "%s: %p is not a live user object", func,
                (void *)object);
  if (fresh) {
    *fresh = (ep_user_refs_t){graph->objects, object, 0};
    graph->objects = refs = fresh;
  }
  refs->count += count;
  return cudaSuccess;
}

cudaError_t cudaGraphReleaseUserObject(cudaGraph_t graph, cudaUserObject_t object,
                                       unsigned int count) {
  const char *func = "cudaGraphReleaseUserObject";
  EP_CUDA_TRY(epGraphGet(graph, func));
  EP_CUDA_TRY(checkCount(count, func));
  ep_user_refs_t *refs = find(graph->objects, object), **at = &graph->objects;
  EP_CUDA_CHECK(refs && refs->count >= count, cudaErrorInvalidValue,
                "%s: the graph has no %u references to %p", func, count, (void *)object);
  refs->count -= count;
  if (!refs->count) {
    while (*at != refs) at = &(*at)->next;
    *at = refs->next;
    free(refs);
  }
  drop(object, count);
  return cudaSuccess;
}

bool epUserRefsCopy(const ep_user_refs_t *from, ep_user_refs_t **out) {
  *out = NULL;
  for (; from; from = from->next) {
    ep_user_refs_t *copy = calloc(1, sizeof *copy);
    if (!copy) {
      epUserRefsDrop(*out);
      *out = NULL;
      return false;
    }
    *copy = (ep_user_refs_t){*out, from->object, from->count};
    *out = copy;
    hold(copy->object, copy->count);
  }
  return true;
}

void epUserRefsDrop(ep_user_refs_t *first) {
  while (first) {
    ep_user_refs_t *next = first->next;
    drop(first->object, first->count);
    free(first);
    first = next;
  }
}

void epUserObjectsForked(void) {
  pthread_mutex_init(&lock, NULL);
}
