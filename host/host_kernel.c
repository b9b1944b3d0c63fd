/* Programs that nvcc compiled: the kernels and variables that their modules register when they start,
 * and the way of a launch `f<<<...>>>(...)` from there to the launcher (host_launch.c). A kernel's handle
 * is the address of the function that stands for it in the program. */
#include <search.h>
#include <stdlib.h>
#include <string.h>

#include "host_kernel.h"

typedef struct symbol_record {
  ep_symbol_t symbol;
  void **managed; /* the program's pointer to a managed variable; NULL: not one */
  struct symbol_record *next;
} symbol_record_t;

typedef struct module {
  void *fatCubin; /* first: what the program's handle points to */
  symbol_record_t *entries;
  struct module *next;
} module_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static module_t *modules;
static void *tree; /* of symbol_record_t, by symbol.host */

static int compareRecords(const void *a, const void *b) {
  uintptr_t x = (uintptr_t)((const symbol_record_t *)a)->symbol.host;
  uintptr_t y = (uintptr_t)((const symbol_record_t *)b)->symbol.host;
  return (x > y) - (x < y);
}

static module_t *moduleOf(void **handle) {
  module_t *m = modules;
  while (m && (void *)m != (void *)handle) m = m->next;
  return m;
}

void **__cudaRegisterFatBinary(void *fatCubin) {
  module_t *m = calloc(1, sizeof *m);
  if (!m) return NULL;
  m->fatCubin = fatCubin;
  pthread_mutex_lock(&lock);
  m->next = modules;
  modules = m;
  pthread_mutex_unlock(&lock);
  return &m->fatCubin;
}

void __cudaRegisterFatBinaryEnd(void **module) {
  (void)module;
}

/* Memory of managed variables stays: threads may use it until the process ends. */
void __cudaUnregisterFatBinary(void **module) {
  pthread_mutex_lock(&lock);
  module_t *m = moduleOf(module), **at = &modules;
  if (m) {
    while (*at != m) at = &(*at)->next;
    *at = m->next;
    for (symbol_record_t *e = m->entries, *next; e; e = next) {
      next = e->next;
      tdelete(e, &tree, compareRecords);
      free(e);
    }
    free(m);
  }
  pthread_mutex_unlock(&lock);
}

static void addRecord(void **module, const symbol_record_t *like) {
  symbol_record_t *e = malloc(sizeof *e);
  if (!e) return;
  *e = *like;
  pthread_mutex_lock(&lock);
  module_t *m = moduleOf(module);
  symbol_record_t **node = m ? tsearch(e, &tree, compareRecords) : NULL;
  bool fresh = node && *node == e;
  if (fresh) {
    e->next = m->entries;
    m->entries = e;
  }
  pthread_mutex_unlock(&lock);
  if (!fresh) free(e);
}

void __cudaRegisterFunction(void **module, const char *hostFun, char *deviceFun,
                            const char *deviceName, int threadLimit, struct uint3 *tid,
                            struct uint3 *bid, dim3 *bDim, dim3 *gDim, int *wSize) {
  (void)deviceFun, (void)threadLimit, (void)tid, (void)bid, (void)bDim, (void)gDim, (void)wSize;
  const symbol_record_t e = {.symbol = {.name = deviceName, .host = hostFun}};
  addRecord(module, &e);
}

void __cudaRegisterVar(void **module, char *hostVar, char *deviceAddress, const char *deviceName,
                       int ext, size_t size, int constant, int global) {
  (void)deviceAddress, (void)ext, (void)constant, (void)global;
  const symbol_record_t e = {.symbol = {.name = deviceName, .host = hostVar, .bytes = size}};
  addRecord(module, &e);
}

/* Zeroed: the value that the program's text gives it lies in device code, which is not read here. */
static void allocManaged(void **hostVarPtr, size_t size) {
  if (epMemAlloc(hostVarPtr, size, 256, EP_MEM_MANAGED, cudaMemAttachGlobal) == cudaSuccess)
    memset(*hostVarPtr, 0, size);
}

void __cudaRegisterManagedVar(void **module, void **hostVarPtr, char *deviceAddress,
                              const char *deviceName, int ext, size_t size, int constant,
                              int global) {
  (void)deviceAddress, (void)ext, (void)constant, (void)global;
  const symbol_record_t e = {.symbol = {.name = deviceName, .host = hostVarPtr, .bytes = size},
                             .managed = hostVarPtr};
  allocManaged(hostVarPtr, size);
  addRecord(module, &e);
}

char __cudaInitModule(void **module) {
  (void)module;
  return 1;
}

bool epSymbolFind(const void *host, ep_symbol_t *out) {
  const symbol_record_t key = {.symbol = {.host = host}};
  pthread_mutex_lock(&lock);
  symbol_record_t **node = tfind(&key, &tree, compareRecords);
  if (node) *out = (*node)->symbol;
  pthread_mutex_unlock(&lock);
  return node != NULL;
}

/* In the child of a fork: the same kernels and variables, but its own managed memory. */
void epSymbolsForked(void) {
  pthread_mutex_init(&lock, NULL);
  for (module_t *m = modules; m; m = m->next) {
    for (symbol_record_t *e = m->entries; e; e = e->next) {
      if (!e->managed || !*e->managed) continue;
      void *before = *e->managed;
      allocManaged(e->managed, e->symbol.bytes);
      memcpy(*e->managed, before, e->symbol.bytes);
    }
  }
}
