/* Memory pools, and allocation in stream order. A pool is an account: what it allocates comes from
 * host_memory.c and goes back there, so a pool keeps nothing in reserve and reserved is what is used.
 * Each device has its default pool; a pool that is destroyed lives on until its last allocation is freed. */
#include <search.h>
#include <stdlib.h>
#include <string.h>

#include "host_internal.h"

#define POOL_MAGIC 0x57e4a009u

struct CUmemPoolHandle_st {
  _Atomic uint32_t magic;
  int device;
  bool isDefault;
  size_t maxBytes; /* 0: as much as the device has */
  size_t numLive;  /* these under the lock */
  uint64_t used, high, threshold;
  int reuse[3];
  cudaMemPool_t nextFree;
};

typedef struct {
  void *ptr;
  size_t bytes;
  cudaMemPool_t pool;
} entry_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static cudaMemPool_t defaults[64], chosen[64], freePools;
static void *tree; /* of entry_t, by ptr */

static int compareEntries(const void *a, const void *b) {
  const char *x = ((const entry_t *)a)->ptr, *y = ((const entry_t *)b)->ptr;
  return x < y ? -1 : x > y;
}

static cudaError_t checkPool(cudaMemPool_t pool, const char *func) {
  EP_CUDA_CHECK(pool && ((uintptr_t)pool & 7) == 0 && atomic_load(&pool->magic) == POOL_MAGIC,
                cudaErrorInvalidValue, "%s: %p is not a live memory pool", func, (void *)pool);
  return cudaSuccess;
}

static cudaError_t checkDevice(int device, const char *func) {
  EP_CUDA_CHECK(device >= 0 && device < epNumDevices(), cudaErrorInvalidDevice,
                "%s: device %d is not in [0, %d); TREFOIL_HOST_DEVICES sets the number", func,
                device, epNumDevices());
  return cudaSuccess;
}

/* Under the lock. */
static cudaMemPool_t newPool(int device) {
  cudaMemPool_t pool = freePools;
  if (pool)
    freePools = pool->nextFree;
  else
    pool = calloc(1, sizeof *pool);
  if (!pool) return NULL;
  memset(pool, 0, sizeof *pool);
  pool->device = device;
  pool->reuse[0] = pool->reuse[1] = pool->reuse[2] = 1;
  atomic_store(&pool->magic, POOL_MAGIC);
  return pool;
}

static void recycle(cudaMemPool_t pool) {
  pool->nextFree = freePools;
  freePools = pool;
}

static cudaMemPool_t defaultPool(int device) {
  if (!defaults[device] && (defaults[device] = newPool(device))) defaults[device]->isDefault = true;
  return defaults[device];
}

static cudaError_t poolOf(int device, bool current, cudaMemPool_t *out, const char *func) {
  pthread_mutex_lock(&lock);
  cudaMemPool_t pool = current && chosen[device] ? chosen[device] : defaultPool(device);
  pthread_mutex_unlock(&lock);
  EP_CUDA_CHECK(pool, cudaErrorMemoryAllocation, "%s: out of memory", func);
  *out = pool;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *memPool, int device) {
  EP_CUDA_CHECK(memPool, cudaErrorInvalidValue, "cudaDeviceGetDefaultMemPool: memPool is NULL");
  EP_CUDA_TRY(checkDevice(device, "cudaDeviceGetDefaultMemPool"));
  return poolOf(device, false, memPool, "cudaDeviceGetDefaultMemPool");
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *memPool, int device) {
  EP_CUDA_CHECK(memPool, cudaErrorInvalidValue, "cudaDeviceGetMemPool: memPool is NULL");
  EP_CUDA_TRY(checkDevice(device, "cudaDeviceGetMemPool"));
  return poolOf(device, true, memPool, "cudaDeviceGetMemPool");
}

cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t memPool) {
  EP_CUDA_TRY(checkDevice(device, "cudaDeviceSetMemPool"));
  EP_CUDA_TRY(checkPool(memPool, "cudaDeviceSetMemPool"));
  EP_CUDA_CHECK(memPool->device == device, cudaErrorInvalidValue,
                "cudaDeviceSetMemPool: the pool is of device %d, not %d", memPool->device, device);
  pthread_mutex_lock(&lock);
  chosen[device] = memPool;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *memPool, const struct cudaMemPoolProps *poolProps) {
  const char *func = "cudaMemPoolCreate";
  EP_CUDA_CHECK(memPool && poolProps, cudaErrorInvalidValue, "%s: memPool or poolProps is NULL",
                func);
  EP_CUDA_CHECK(poolProps->allocType == cudaMemAllocationTypePinned &&
                    poolProps->location.type == cudaMemLocationTypeDevice,
                cudaErrorNotSupported,
                "%s: allocation type %d at location type %d is not implemented; pinned memory of "
                "a device is",
                func, (int)poolProps->allocType, (int)poolProps->location.type);
  EP_CUDA_CHECK(poolProps->handleTypes == cudaMemHandleTypeNone, cudaErrorNotSupported,
                "%s: handle type %d is not implemented; pools are not shared between processes",
                func, (int)poolProps->handleTypes);
  EP_CUDA_TRY(checkDevice(poolProps->location.id, func));
  pthread_mutex_lock(&lock);
  cudaMemPool_t pool = newPool(poolProps->location.id);
  if (pool) pool->maxBytes = poolProps->maxSize;
  pthread_mutex_unlock(&lock);
  EP_CUDA_CHECK(pool, cudaErrorMemoryAllocation, "%s: out of memory", func);
  *memPool = pool;
  return cudaSuccess;
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t memPool) {
  EP_CUDA_TRY(checkPool(memPool, "cudaMemPoolDestroy"));
  EP_CUDA_CHECK(!memPool->isDefault, cudaErrorInvalidValue,
                "cudaMemPoolDestroy: a device's default pool");
  pthread_mutex_lock(&lock);
  atomic_store(&memPool->magic, EP_DEAD_MAGIC);
  if (chosen[memPool->device] == memPool) chosen[memPool->device] = NULL;
  if (!memPool->numLive) recycle(memPool);
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

/* ---- Attributes ---- */

static cudaError_t checkAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attr, const void *value,
                                  const char *func) {
  EP_CUDA_TRY(checkPool(pool, func));
  EP_CUDA_CHECK(value && (int)attr >= 1 && (int)attr <= 8, cudaErrorInvalidValue,
                "%s: value is NULL, or there is no attribute %d", func, (int)attr);
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t memPool, enum cudaMemPoolAttr attr, void *value) {
  const char *func = "cudaMemPoolSetAttribute";
  EP_CUDA_TRY(checkAttribute(memPool, attr, value, func));
  bool isHigh = attr == cudaMemPoolAttrUsedMemHigh || attr == cudaMemPoolAttrReservedMemHigh;
  EP_CUDA_CHECK(attr <= cudaMemPoolAttrReleaseThreshold || isHigh, cudaErrorInvalidValue,
                "%s: attribute %d can only be read", func, (int)attr);
  EP_CUDA_CHECK(!isHigh || !*(uint64_t *)value, cudaErrorInvalidValue,
                "%s: attribute %d can only be set to 0", func, (int)attr);
  pthread_mutex_lock(&lock);
  if (attr <= cudaMemPoolReuseAllowInternalDependencies)
    memPool->reuse[attr - 1] = *(int *)value != 0;
  else if (attr == cudaMemPoolAttrReleaseThreshold)
    memPool->threshold = *(uint64_t *)value;
  else
    memPool->high = memPool->used;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t memPool, enum cudaMemPoolAttr attr, void *value) {
  EP_CUDA_TRY(checkAttribute(memPool, attr, value, "cudaMemPoolGetAttribute"));
  bool isHigh = attr == cudaMemPoolAttrUsedMemHigh || attr == cudaMemPoolAttrReservedMemHigh;
  pthread_mutex_lock(&lock);
  if (attr <= cudaMemPoolReuseAllowInternalDependencies)
    *(int *)value = memPool->reuse[attr - 1];
  else
    *(uint64_t *)value = attr == cudaMemPoolAttrReleaseThreshold ? memPool->threshold
                         : isHigh                                ? memPool->high
                                                                 : memPool->used;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

/* There is nothing in reserve to give back. */
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t memPool, size_t minBytesToKeep) {
  (void)minBytesToKeep;
  return checkPool(memPool, "cudaMemPoolTrimTo");
}

/* Every device reads and writes every other's memory; it cannot be kept from it. */
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t memPool, const struct cudaMemAccessDesc *descList,
                                 size_t count) {
  const char *func = "cudaMemPoolSetAccess";
  EP_CUDA_TRY(checkPool(memPool, func));
  EP_CUDA_CHECK(descList || !count, cudaErrorInvalidValue, "%s: descList is NULL", func);
  for (size_t i = 0; i < count; i++) {
    EP_CUDA_CHECK(descList[i].location.type == cudaMemLocationTypeDevice, cudaErrorInvalidValue,
                  "%s: location type %d is not a device", func, (int)descList[i].location.type);
    EP_CUDA_TRY(checkDevice(descList[i].location.id, func));
    EP_CUDA_CHECK(descList[i].location.id != memPool->device ||
                      descList[i].flags == cudaMemAccessFlagsProtReadWrite,
                  cudaErrorInvalidDevice, "%s: the pool's own device always has access", func);
  }
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAccess(enum cudaMemAccessFlags *flags, cudaMemPool_t memPool,
                                 struct cudaMemLocation *location) {
  const char *func = "cudaMemPoolGetAccess";
  EP_CUDA_TRY(checkPool(memPool, func));
  EP_CUDA_CHECK(flags && location && location->type == cudaMemLocationTypeDevice,
                cudaErrorInvalidValue, "%s: flags is NULL, or location is not a device", func);
  EP_CUDA_TRY(checkDevice(location->id, func));
  *flags = cudaMemAccessFlagsProtReadWrite;
  return cudaSuccess;
}

/* ---- Allocation ---- */

/* Counts the bytes if they fit the pool. */
static bool charge(cudaMemPool_t pool, size_t bytes) {
  pthread_mutex_lock(&lock);
  bool fits = !pool->maxBytes || bytes <= pool->maxBytes - pool->used;
  if (fits) {
    pool->numLive++;
    pool->used += bytes;
    if (pool->used > pool->high) pool->high = pool->used;
  }
  pthread_mutex_unlock(&lock);
  return fits;
}

/* Under the lock. */
static void credit(cudaMemPool_t pool, size_t bytes) {
  pool->numLive--;
  pool->used -= bytes;
  if (!pool->numLive && atomic_load(&pool->magic) != POOL_MAGIC) recycle(pool);
}

static cudaError_t allocateFrom(cudaMemPool_t pool, void **ptr, size_t bytes, const char *func) {
  entry_t *entry = malloc(sizeof *entry);
  EP_CUDA_CHECK(entry, cudaErrorMemoryAllocation, "%s: out of memory", func);
  if (!charge(pool, bytes)) {
    free(entry);
    return epCudaFail(cudaErrorMemoryAllocation, "%s: %zu bytes exceed the pool's maxSize, %zu",
                      func, bytes, pool->maxBytes);
  }
  int current = epCurrentDevice();
  (void)cudaSetDevice(pool->device);
  cudaError_t error = epMemAlloc(ptr, bytes, 256, EP_MEM_DEVICE, 0);
  (void)cudaSetDevice(current);
  pthread_mutex_lock(&lock);
  if (error == cudaSuccess) {
    *entry = (entry_t){*ptr, bytes, pool};
    if (tsearch(entry, &tree, compareEntries)) entry = NULL;
  }
  if (entry) credit(pool, bytes); /* not allocated, or not noted: then it is not counted */
  pthread_mutex_unlock(&lock);
  free(entry);
  return error;
}

void epPoolForget(void *ptr) {
  const entry_t key = {ptr, 0, NULL};
  pthread_mutex_lock(&lock);
  void *node = tree ? tfind(&key, &tree, compareEntries) : NULL;
  entry_t *entry = node ? *(entry_t **)node : NULL;
  if (entry) {
    tdelete(entry, &tree, compareEntries);
    credit(entry->pool, entry->bytes);
  }
  pthread_mutex_unlock(&lock);
  free(entry);
}

/* The stream only orders the use of the memory, so it is there at once. pool NULL: its device's. */
static cudaError_t allocateAsync(void **ptr, size_t bytes, cudaMemPool_t pool, cudaStream_t handle,
                                 const char *func) {
  cudaStream_t stream;
  EP_CUDA_CHECK(ptr, cudaErrorInvalidValue, "%s: the pointer to fill is NULL", func);
  EP_CUDA_CHECK(!epInHostFunc(), cudaErrorNotPermitted, "%s was called from a host function", func);
  EP_CUDA_TRY(epStreamResolve(handle, func, &stream));
  if (pool)
    EP_CUDA_TRY(checkPool(pool, func));
  else
    EP_CUDA_TRY(poolOf(stream->device, true, &pool, func));
  if (epCapturing(stream)) return epGraphMalloc(ptr, bytes, stream);
  if (!bytes) {
    *ptr = NULL;
    return cudaSuccess;
  }
  return allocateFrom(pool, ptr, bytes, func);
}

cudaError_t cudaMallocAsync(void **devPtr, size_t size, cudaStream_t hStream) {
  return allocateAsync(devPtr, size, NULL, hStream, "cudaMallocAsync");
}

cudaError_t cudaMallocFromPoolAsync(void **ptr, size_t size, cudaMemPool_t memPool,
                                    cudaStream_t stream) {
  EP_CUDA_TRY(checkPool(memPool, "cudaMallocFromPoolAsync"));
  return allocateAsync(ptr, size, memPool, stream, "cudaMallocFromPoolAsync");
}

static void runFree(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)ticket;
  cudaError_t error;
  if (!epGraphMemFree(op->u.ptr, &error, "cudaFreeAsync")) {
    epPoolForget(op->u.ptr);
    error = epMemFree(op->u.ptr, false, "cudaFreeAsync");
  }
  if (error != cudaSuccess) epStreamSetError(stream, cudaErrorIllegalAddress, epSentence());
}

cudaError_t cudaFreeAsync(void *devPtr, cudaStream_t hStream) {
  cudaStream_t stream;
  if (!devPtr) return cudaSuccess;
  EP_CUDA_TRY(epStreamResolve(hStream, "cudaFreeAsync", &stream));
  if (epCapturing(stream)) return epGraphFreeNode(devPtr, stream);
  ep_mem_t mem;
  EP_CUDA_CHECK(epMemFind(devPtr, &mem) && mem.base == (char *)devPtr && mem.kind == EP_MEM_DEVICE,
                cudaErrorInvalidValue, "cudaFreeAsync: %p is not the start of a live allocation",
                devPtr);
  ep_stream_op_t *op = epOpNew(cudaGraphNodeTypeMemFree, runFree);
  EP_CUDA_CHECK(op, cudaErrorMemoryAllocation, "cudaFreeAsync: out of memory");
  op->u.ptr = devPtr;
  return epEnqueue(stream, op, "cudaFreeAsync");
}

/* In the child of a fork: the pools were the parent's. */
void epPoolsForked(void) {
  pthread_mutex_init(&lock, NULL);
  tree = NULL;
  memset(defaults, 0, sizeof defaults);
  memset(chosen, 0, sizeof chosen);
}
