/* Device variables by the symbols that stand for them in the program: the program's own variable is the
 * memory, and counts as registered host memory from its first use here. What value the source gives a
 * variable is in device code, which is not read: without a launcher, whose kernels may set it, a
 * variable that was not written is not read. */
#include <search.h>
#include <stdlib.h>

#include "host_kernel.h"

typedef struct {
  const void *host;
  bool written;
} used_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *tree; /* of used_t, by host */

static int compareUsed(const void *a, const void *b) {
  uintptr_t x = (uintptr_t)((const used_t *)a)->host, y = (uintptr_t)((const used_t *)b)->host;
  return (x > y) - (x < y);
}

/* Under the lock: the symbol's entry, made at its first use. */
static used_t *entryOf(const ep_symbol_t *symbol) {
  used_t key = {symbol->host, false}, *entry;
  used_t **node = tfind(&key, &tree, compareUsed);
  if (node) return *node;
  const ep_mem_t mem = {.base = (char *)(uintptr_t)symbol->host,
                        .bytes = symbol->bytes,
                        .kind = EP_MEM_REGISTERED,
                        .device = epCurrentDevice()};
  if (!(entry = malloc(sizeof *entry))) return NULL;
  *entry = key;
  if (!tsearch(entry, &tree, compareUsed)) {
    free(entry);
    return NULL;
  }
  ep_mem_t known;
  if (!epMemFind(mem.base, &known)) (void)epMemAdd(&mem);
  return entry;
}

typedef struct {
  char *base;
  size_t bytes;
} variable_t;

/* writes: the caller may write it. A managed variable is named by its memory. */
static cudaError_t find(const void *symbol, bool writes, bool reads, variable_t *out,
                        const char *func) {
  ep_symbol_t found;
  ep_mem_t mem;
  if (!epSymbolFind(symbol, &found) || !found.bytes) {
    EP_CUDA_CHECK(symbol && epMemFind(symbol, &mem) && mem.kind == EP_MEM_MANAGED,
                  cudaErrorInvalidSymbol, "%s: %p is not a device variable of this program", func,
                  symbol);
    *out = (variable_t){mem.base, mem.bytes};
    return cudaSuccess;
  }
  pthread_mutex_lock(&lock);
  used_t *entry = entryOf(&found);
  bool unknown = entry && reads && !entry->written && !epHasLauncher();
  if (entry && writes) entry->written = true;
  pthread_mutex_unlock(&lock);
  EP_CUDA_CHECK(entry, cudaErrorMemoryAllocation, "%s: out of memory", func);
  EP_CUDA_CHECK(!unknown, cudaErrorNotSupported,
                "%s: variable %s was not written, and the value that its source gives it lies in "
                "device code, which the host runtime does not read",
                func, found.name);
  *out = (variable_t){(char *)(uintptr_t)found.host, found.bytes};
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **devPtr, const void *symbol) {
  variable_t v;
  EP_CUDA_CHECK(devPtr, cudaErrorInvalidValue, "cudaGetSymbolAddress: devPtr is NULL");
  EP_CUDA_TRY(find(symbol, true, false, &v, "cudaGetSymbolAddress"));
  *devPtr = v.base;
  return cudaSuccess;
}

cudaError_t cudaGetSymbolSize(size_t *size, const void *symbol) {
  variable_t v;
  EP_CUDA_CHECK(size, cudaErrorInvalidValue, "cudaGetSymbolSize: size is NULL");
  EP_CUDA_TRY(find(symbol, false, false, &v, "cudaGetSymbolSize"));
  *size = v.bytes;
  return cudaSuccess;
}

typedef struct {
  const void *symbol;
  size_t offset;
  cudaStream_t stream;
  bool to, sync;
  const char *func;
} at_t;

static cudaError_t copy(const at_t *at, const void *other, size_t count, enum cudaMemcpyKind kind) {
  variable_t v;
  int wrong = at->to ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
  EP_CUDA_CHECK((int)kind != wrong && kind != cudaMemcpyHostToHost, cudaErrorInvalidMemcpyDirection,
                "%s: direction %d does not fit a symbol", at->func, (int)kind);
  EP_CUDA_TRY(find(at->symbol, at->to, !at->to, &v, at->func));
  EP_CUDA_CHECK(at->offset <= v.bytes && count <= v.bytes - at->offset, cudaErrorInvalidValue,
                "%s: %zu bytes at offset %zu do not fit the variable of %zu bytes", at->func, count,
                at->offset, v.bytes);
  char *mine = v.base + at->offset, *theirs = (char *)(uintptr_t)other;
  ep_copy_t c = {
      at->to ? mine : theirs, at->to ? theirs : mine, count, count, 0, 0, count, 1, 1, kind};
  return epCopy(&c, at->stream, at->sync, at->func);
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *src, size_t count, size_t offset,
                               enum cudaMemcpyKind kind) {
  at_t at = {symbol, offset, NULL, true, true, "cudaMemcpyToSymbol"};
  return copy(&at, src, count, kind);
}

cudaError_t cudaMemcpyFromSymbol(void *dst, const void *symbol, size_t count, size_t offset,
                                 enum cudaMemcpyKind kind) {
  at_t at = {symbol, offset, NULL, false, true, "cudaMemcpyFromSymbol"};
  return copy(&at, dst, count, kind);
}

cudaError_t cudaMemcpyToSymbol_ptds(const void *symbol, const void *src, size_t count,
                                    size_t offset, enum cudaMemcpyKind kind) {
  at_t at = {symbol, offset, cudaStreamPerThread, true, true, "cudaMemcpyToSymbol"};
  return copy(&at, src, count, kind);
}

cudaError_t cudaMemcpyFromSymbol_ptds(void *dst, const void *symbol, size_t count, size_t offset,
                                      enum cudaMemcpyKind kind) {
  at_t at = {symbol, offset, cudaStreamPerThread, false, true, "cudaMemcpyFromSymbol"};
  return copy(&at, dst, count, kind);
}

cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *src, size_t count,
                                    size_t offset, enum cudaMemcpyKind kind, cudaStream_t stream) {
  at_t at = {symbol, offset, stream, true, false, "cudaMemcpyToSymbolAsync"};
  return copy(&at, src, count, kind);
}

cudaError_t cudaMemcpyFromSymbolAsync(void *dst, const void *symbol, size_t count, size_t offset,
                                      enum cudaMemcpyKind kind, cudaStream_t stream) {
  at_t at = {symbol, offset, stream, false, false, "cudaMemcpyFromSymbolAsync"};
  return copy(&at, dst, count, kind);
}

/* In the child of a fork: nothing is registered, and nothing counts as written. */
void epSymbolCopiesForked(void) {
  pthread_mutex_init(&lock, NULL);
  tree = NULL;
}
