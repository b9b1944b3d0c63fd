/* The memory behind cudaMalloc and its kin: shared-memory segments (memfd), so that other processes can
 * map them, and a tree of the ranges handed out, so that any pointer can be looked up.
 *
 * Small blocks (up to EP_POOLED) are cut from 64 MiB sparse segments by size class and recycled through
 * free lists; larger ones have a segment each, given back on free. Every block ends in at least
 * EP_TAIL guard bytes, checked on free: a program that writes past its allocation gets an error. Fresh
 * blocks of at most 1 MiB are filled with a poison byte (TREFOIL_HOST_POISON: "off", or a byte for
 * blocks of every size), since a GPU's fresh memory is not zero either.
 *
 * ncclMemAlloc's blocks have a segment each, at addresses that ascend in a stretch of each device's
 * own: ranks that allocate alike find their windows at equal distances from one another, on all
 * ranks, as in NCCL's symmetric memory. The address is a wish; where it is taken, another does. */
#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <fcntl.h>

#include <nccl.h>

#include "host_internal.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define EP_SHUT(ptr, bytes) ASAN_POISON_MEMORY_REGION(ptr, bytes)
#define EP_OPEN(ptr, bytes) ASAN_UNPOISON_MEMORY_REGION(ptr, bytes)
#else
#define EP_SHUT(ptr, bytes) ((void)(ptr), (void)(bytes))
#define EP_OPEN(ptr, bytes) ((void)(ptr), (void)(bytes))
#endif

enum { EP_TAIL = 64, EP_GUARD_BYTE = 0xA7, EP_NUM_CLASSES = 64 };
#define EP_SEGMENT_BYTES ((size_t)64 << 20)
#define EP_POOLED        ((size_t)4 << 20)
#define EP_FIRST_STRETCH ((uintptr_t)0x200000000000)
#define EP_STRETCH_BYTES ((size_t)1 << 40)

typedef struct segment {
  struct segment *next;
  uint64_t id;
  int fd;
  char *base;
  size_t bytes, used;
  bool pooled;
} segment_t;

typedef struct range {
  ep_mem_t mem;
  size_t capacity; /* 0: not from this allocator */
  int classIdx;    /* -1: a segment of its own */
  segment_t *segment;
  struct range *nextFree;
} range_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *tree; /* of range_t, by address */
static segment_t *segments;
static range_t *freeRanges[EP_NUM_CLASSES];
static size_t usedBytes[64];
static size_t allocatedBytes[64]; /* by ncclMemAlloc, freed or not */
_Atomic uint64_t epMemChanges;

/* Ranges do not overlap; a lookup key is a range of one byte, equal to the range that contains it. */
static int compareRanges(const void *a, const void *b) {
  const ep_mem_t *x = &((const range_t *)a)->mem, *y = &((const range_t *)b)->mem;
  if (x->base + (x->bytes ? x->bytes : 1) <= y->base) return -1;
  if (y->base + (y->bytes ? y->bytes : 1) <= x->base) return 1;
  return 0;
}

static range_t *findRange(const void *ptr) {
  range_t key = {.mem = {.base = (char *)ptr, .bytes = 1}};
  void *node = tfind(&key, &tree, compareRanges);
  return node ? *(range_t **)node : NULL;
}

/* Size classes: 512, 1024, ... doubling, each with three steps between. */
static size_t classBytes(int classIdx) {
  size_t power = (size_t)512 << (classIdx / 4);
  return power + power / 4 * (size_t)(classIdx % 4);
}

static int classOf(size_t bytes) {
  int classIdx = 0;
  while (classBytes(classIdx) < bytes) classIdx++;
  return classIdx;
}

/* Where ncclMemAlloc's next block on this device is to lie; NULL: anywhere. ThreadSanitizer has its
 * own view of the address space. */
static char *nextAddress(int device, size_t bytes) {
#if defined(__SANITIZE_THREAD__)
  (void)device, (void)bytes;
  return NULL;
#else
  size_t at = allocatedBytes[device & 63];
  allocatedBytes[device & 63] += bytes;
  if (at + bytes > EP_STRETCH_BYTES) return NULL;
  return (char *)(EP_FIRST_STRETCH + (uintptr_t)(device & 63) * EP_STRETCH_BYTES + at);
#endif
}

static segment_t *newSegment(size_t bytes, bool pooled, char *address) {
  segment_t *seg = calloc(1, sizeof *seg);
  if (!seg) return NULL;
  seg->fd = epMemfdNew("trefoil-host", bytes);
  if (seg->fd < 0) goto fail;
  seg->base = mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, seg->fd, 0);
  if (seg->base == MAP_FAILED) goto fail;
  seg->bytes = bytes;
  seg->pooled = pooled;
  seg->id = epRandom(); /* not to be guessed */
  seg->next = segments;
  segments = seg;
  return seg;
fail:
  if (seg->fd >= 0) close(seg->fd);
  free(seg);
  return NULL;
}

static void dropSegment(segment_t *seg) {
  segment_t **at = &segments;
  while (*at != seg) at = &(*at)->next;
  *at = seg->next;
  EP_OPEN(seg->base, seg->bytes);
  munmap(seg->base, seg->bytes);
  close(seg->fd);
  free(seg);
}

/* A block of the class, new or recycled. Blocks of 4096 bytes and more are page-aligned. */
static range_t *takePooled(int classIdx) {
  range_t *range = freeRanges[classIdx];
  if (range) {
    freeRanges[classIdx] = range->nextFree;
    return range;
  }
  size_t bytes = classBytes(classIdx), align = bytes >= 4096 ? 4096 : 256;
  segment_t *seg = segments;
  while (seg && !(seg->pooled && ((seg->used + align - 1) & ~(align - 1)) + bytes <= seg->bytes))
    seg = seg->next;
  if (!seg) seg = newSegment(EP_SEGMENT_BYTES, true, NULL);
  range = seg ? calloc(1, sizeof *range) : NULL;
  if (!range) return NULL;
  size_t at = (seg->used + align - 1) & ~(align - 1);
  seg->used = at + bytes;
  range->segment = seg;
  range->classIdx = classIdx;
  range->capacity = bytes;
  range->mem.base = seg->base + at;
  range->mem.segmentOffset = at;
  return range;
}

static range_t *takeOwn(size_t bytes, int symmetricDevice) {
  range_t *range = calloc(1, sizeof *range);
  size_t whole = (bytes + 4095) & ~(size_t)4095;
  char *address = symmetricDevice < 0 ? NULL : nextAddress(symmetricDevice, whole);
  segment_t *seg = range ? newSegment(whole, false, address) : NULL;
  if (!seg) {
    free(range);
    return NULL;
  }
  range->segment = seg;
  range->classIdx = -1;
  range->capacity = seg->bytes;
  range->mem.base = seg->base;
  return range;
}

/* A range that is not in the tree. */
static void giveBack(range_t *range) {
  usedBytes[range->mem.device & 63] -= range->mem.bytes;
  if (range->classIdx >= 0) {
    EP_SHUT(range->mem.base, range->capacity);
    range->nextFree = freeRanges[range->classIdx];
    freeRanges[range->classIdx] = range;
  } else {
    dropSegment(range->segment);
    free(range);
  }
}

/* The poison byte for a fresh block, or -1. */
static int poisonByte(size_t bytes) {
  const char *text = getenv("TREFOIL_HOST_POISON");
  if (text && !strcmp(text, "off")) return -1;
  if (text && *text) return (int)(epEnvInt("TREFOIL_HOST_POISON", 0xCB) & 255);
  return bytes <= (1u << 20) ? 0xCB : -1;
}

cudaError_t epMemAlloc(void **ptr, size_t bytes, size_t align, ep_mem_kind_t kind, unsigned flags) {
  int device = epCurrentDevice();
  EP_CUDA_CHECK(bytes <= EP_DEVICE_BYTES, cudaErrorMemoryAllocation,
                "%zu bytes asked for, a device of the host runtime has %zu", bytes,
                EP_DEVICE_BYTES);
  size_t need = bytes + EP_TAIL;
  if (need < align) need = align;
  pthread_mutex_lock(&lock);
  int symmetric = align >= NCCL_WIN_REQUIRED_ALIGNMENT;
  range_t *range = !symmetric && need <= EP_POOLED ? takePooled(classOf(need))
                                                   : takeOwn(need, symmetric ? device : -1);
  if (range) {
    range->mem.bytes = bytes;
    range->mem.kind = kind;
    range->mem.device = device;
    range->mem.flags = flags;
    range->mem.segment = range->segment->id;
    usedBytes[device & 63] += bytes;
    if (!tsearch(range, &tree, compareRanges)) {
      giveBack(range);
      range = NULL;
    }
  }
  atomic_fetch_add(&epMemChanges, 1);
  pthread_mutex_unlock(&lock);
  EP_CUDA_CHECK(range, cudaErrorMemoryAllocation,
                "no shared memory for %zu bytes (memfd_create or mmap failed)", bytes);
  char *base = range->mem.base;
  size_t tail = range->capacity - bytes < EP_TAIL ? range->capacity - bytes : EP_TAIL;
  EP_OPEN(base, bytes + tail);
  int poison = poisonByte(bytes);
  if (poison >= 0) memset(base, poison, bytes);
  memset(base + bytes, EP_GUARD_BYTE, tail);
  EP_SHUT(base + bytes, range->capacity - bytes);
  *ptr = base;
  return cudaSuccess;
}

/* Bytes of the guard that were overwritten. */
static size_t damagedTail(range_t *range) {
  size_t room = range->capacity - range->mem.bytes, damaged = 0;
  const unsigned char *tail = (unsigned char *)range->mem.base + range->mem.bytes;
  if (room > EP_TAIL) room = EP_TAIL;
  EP_OPEN(tail, room);
  for (size_t i = 0; i < room; i++) damaged += tail[i] != EP_GUARD_BYTE;
  return damaged;
}

cudaError_t epMemFree(void *ptr, bool hostSide, const char *func) {
  pthread_mutex_lock(&lock);
  range_t *range = findRange(ptr);
  bool ours = range && range->capacity && range->mem.base == (char *)ptr &&
              (range->mem.kind == EP_MEM_HOST) == hostSide;
  size_t damaged = 0, bytes = 0;
  if (ours) {
    damaged = damagedTail(range);
    bytes = range->mem.bytes;
    tdelete(range, &tree, compareRanges);
    atomic_fetch_add(&epMemChanges, 1);
    giveBack(range);
  }
  pthread_mutex_unlock(&lock);
  EP_CUDA_CHECK(ours, cudaErrorInvalidValue,
                "%s: %p is not the start of a live allocation of this kind", func, ptr);
  EP_CUDA_CHECK(!damaged, cudaErrorIllegalAddress,
                "%s: the program wrote past the end of the %zu bytes at %p (%zu guard bytes "
                "changed); the memory was freed",
                func, bytes, ptr, damaged);
  return cudaSuccess;
}

cudaError_t epMemAdd(const ep_mem_t *mem) {
  range_t *range = calloc(1, sizeof *range);
  EP_CUDA_CHECK(range, cudaErrorMemoryAllocation, "out of memory");
  range->mem = *mem;
  range->classIdx = -1;
  pthread_mutex_lock(&lock);
  void *node = tsearch(range, &tree, compareRanges);
  bool fresh = node && *(range_t **)node == range;
  atomic_fetch_add(&epMemChanges, 1);
  pthread_mutex_unlock(&lock);
  if (!fresh) free(range);
  EP_CUDA_CHECK(fresh, cudaErrorHostMemoryAlreadyRegistered,
                "the %zu bytes at %p overlap an allocation or a registered range", mem->bytes,
                (void *)mem->base);
  return cudaSuccess;
}

bool epMemForget(void *base) {
  pthread_mutex_lock(&lock);
  range_t *range = findRange(base);
  bool found = range && !range->capacity && range->mem.base == (char *)base;
  if (found) tdelete(range, &tree, compareRanges);
  atomic_fetch_add(&epMemChanges, 1);
  pthread_mutex_unlock(&lock);
  if (found) free(range);
  return found;
}

bool epMemFind(const void *ptr, ep_mem_t *out) {
  pthread_mutex_lock(&lock);
  range_t *range = findRange(ptr);
  if (range) *out = range->mem;
  pthread_mutex_unlock(&lock);
  return range != NULL;
}

bool epMemIsFree(const void *ptr) {
  bool inside = false;
  pthread_mutex_lock(&lock);
  for (segment_t *seg = segments; seg && !inside; seg = seg->next)
    inside = (const char *)ptr >= seg->base && (const char *)ptr < seg->base + seg->used;
  inside = inside && !findRange(ptr);
  pthread_mutex_unlock(&lock);
  return inside;
}

int epSegmentFd(uint64_t segment, size_t *bytes) {
  int fd = -1;
  pthread_mutex_lock(&lock);
  for (segment_t *seg = segments; seg; seg = seg->next)
    if (seg->id == segment) {
      fd = fcntl(seg->fd, F_DUPFD_CLOEXEC, 0);
      *bytes = seg->bytes;
    }
  pthread_mutex_unlock(&lock);
  return fd;
}

size_t epMemUsed(int device) {
  pthread_mutex_lock(&lock);
  size_t used = usedBytes[device & 63];
  pthread_mutex_unlock(&lock);
  return used;
}

/* In the child of a fork: memory of the parent stays mapped but is no longer this process's. */
void epMemForked(void) {
  pthread_mutex_init(&lock, NULL);
  atomic_fetch_add(&epMemChanges, 1);
  tree = NULL;
  segments = NULL;
  memset(freeRanges, 0, sizeof freeRanges);
  memset(usedBytes, 0, sizeof usedBytes);
}
