/* CUPTI is loaded by dlopen: only its header is needed to build. Records are kept as they come, and sorted
 * by GPU and start when they are asked for. */
#include "validate/cupti_times.h"

#include "plan/error.h"

#include <cupti.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { BUFFER_BYTES = 1 << 20, MAX_RECORDS = 1 << 20 };

typedef struct record {
  uint64_t start, end;
  int device, isCopy, isMark; /* isMark: our lockstep kernel */
} record_t;

#define CUPTI_CALLS(X)                                                                             \
  X(cuptiActivityRegisterCallbacks)                                                                \
  X(cuptiActivityEnable)                                                                           \
  X(cuptiActivityDisable)                                                                          \
  X(cuptiActivityFlushAll)                                                                         \
  X(cuptiActivityGetNextRecord)                                                                    \
  X(cuptiGetResultString)
static struct {
#define MEMBER(name) __typeof__(&name) name;
  CUPTI_CALLS(MEMBER)
} cupti;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static record_t *records;
static int numRecords, isLost;

static const CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                           CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMCPY2,
                                           CUPTI_ACTIVITY_KIND_MEMSET};
enum { NUM_KINDS = sizeof kinds / sizeof *kinds };

static void keep(const record_t *r) {
  if (numRecords < MAX_RECORDS)
    records[numRecords++] = *r;
  else
    isLost = 1;
}

static void take(const CUpti_Activity *a) {
  if (a->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL || a->kind == CUPTI_ACTIVITY_KIND_KERNEL) {
    const CUpti_ActivityKernel10 *k = (const CUpti_ActivityKernel10 *)a;
    keep(&(record_t){k->start, k->end, (int)k->deviceId, 0,
                     k->name && strstr(k->name, "lockstepKernel")});
  } else if (a->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
    const CUpti_ActivityMemcpy6 *m = (const CUpti_ActivityMemcpy6 *)a;
    keep(&(record_t){m->start, m->end, (int)m->deviceId, 1, 0});
  } else if (a->kind == CUPTI_ACTIVITY_KIND_MEMCPY2) {
    const CUpti_ActivityMemcpyPtoP4 *m = (const CUpti_ActivityMemcpyPtoP4 *)a;
    keep(&(record_t){m->start, m->end, (int)m->deviceId, 1, 0});
  } else if (a->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
    const CUpti_ActivityMemset4 *m = (const CUpti_ActivityMemset4 *)a;
    keep(&(record_t){m->start, m->end, (int)m->deviceId, 1, 0});
  }
}

static void CUPTIAPI giveBuffer(uint8_t **buffer, size_t *bytes, size_t *maxRecords) {
  *buffer = aligned_alloc(8, BUFFER_BYTES);
  *bytes = *buffer ? BUFFER_BYTES : 0;
  *maxRecords = 0;
}

static void CUPTIAPI takeBuffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t bytes,
                                size_t valid) {
  CUpti_Activity *a = NULL;
  (void)context, (void)stream, (void)bytes;
  pthread_mutex_lock(&lock);
  while (valid > 0 && cupti.cuptiActivityGetNextRecord(buffer, valid, &a) == CUPTI_SUCCESS) take(a);
  pthread_mutex_unlock(&lock);
  free(buffer);
}

static trefoil_result_t check(CUptiResult rc, const char *what) {
  const char *text = NULL;
  if (rc != CUPTI_SUCCESS) cupti.cuptiGetResultString(rc, &text);
  EP_CHECK(rc == CUPTI_SUCCESS, TREFOIL_SYSTEM_ERROR, "CUPTI, %s: %s", what,
           text ? text : "failed");
  return TREFOIL_OK;
}

trefoil_result_t epCuptiOpen(void) {
  static const char *const names[] = {"libcupti.so.13", "/usr/local/cuda/lib64/libcupti.so.13",
                                      "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.13", NULL};
  void *handle = NULL;
  for (int i = 0; names[i] && !handle; i++) handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
  EP_CHECK(handle, TREFOIL_SYSTEM_ERROR,
           "libcupti.so.13 is not there (it comes with the CUDA toolkit, or pip install "
           "nvidia-cuda-cupti; LD_LIBRARY_PATH)");
  void *symbol;
#define FIND(name)                                                                                 \
  symbol = dlsym(handle, #name);                                                                   \
  EP_CHECK(symbol, TREFOIL_SYSTEM_ERROR, "libcupti.so.13 has no function %s", #name);              \
  memcpy(&cupti.name, &symbol, sizeof symbol);
  CUPTI_CALLS(FIND)
  records = malloc(MAX_RECORDS * sizeof *records);
  EP_CHECK(records, TREFOIL_SYSTEM_ERROR, "out of memory for CUPTI's records");
  return check(cupti.cuptiActivityRegisterCallbacks(giveBuffer, takeBuffer), "its buffers");
}

trefoil_result_t epCuptiStart(void) {
  pthread_mutex_lock(&lock);
  numRecords = isLost = 0;
  pthread_mutex_unlock(&lock);
  for (int i = 0; i < NUM_KINDS; i++)
    EP_TRY(check(cupti.cuptiActivityEnable(kinds[i]), "recording"));
  return TREFOIL_OK;
}

trefoil_result_t epCuptiStop(void) {
  EP_TRY(check(cupti.cuptiActivityFlushAll(1), "its records"));
  for (int i = 0; i < NUM_KINDS; i++)
    EP_TRY(check(cupti.cuptiActivityDisable(kinds[i]), "the end of recording"));
  return TREFOIL_OK;
}

static int byDeviceAndStart(const void *a, const void *b) {
  const record_t *x = a, *y = b;
  if (x->device != y->device) return x->device - y->device;
  return (x->start > y->start) - (x->start < y->start);
}

trefoil_result_t epCuptiCalls(int device, int numCalls, ep_cupti_call_t *calls) {
  int at = -1;
  uint64_t first = 0, last = 0;
  memset(calls, 0, sizeof *calls * (size_t)numCalls);
  pthread_mutex_lock(&lock);
  qsort(records, (size_t)numRecords, sizeof *records, byDeviceAndStart);
  for (int i = 0; i < numRecords; i++) {
    const record_t *r = &records[i];
    if (r->device != device) continue;
    if (r->isMark) {
      at++;
      first = 0;
      continue;
    }
    if (at < 0 || at >= numCalls) continue;
    ep_cupti_call_t *c = &calls[at];
    if (first == 0) first = last = r->start;
    if (r->end > last) last = r->end;
    c->span = 1e-9 * (double)(last - first);
    c->sum += 1e-9 * (double)(r->end - r->start);
    if (r->isCopy)
      c->numCopies++;
    else
      c->numKernels++;
  }
  int lost = isLost;
  pthread_mutex_unlock(&lock);
  EP_CHECK(!lost && at + 1 == numCalls, TREFOIL_SYSTEM_ERROR,
           "CUPTI told %d calls of %d on GPU %d: its times are not used", at + 1, numCalls, device);
  return TREFOIL_OK;
}
