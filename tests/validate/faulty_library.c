/* A library with one planted fault: forwards every call to the real one (TREFOIL_FAULT_LIBRARY) and,
 * once, spoils what the call named by TREFOIL_FAULT left behind: in stream order, on the "device". What
 * it did goes to TREFOIL_FAULT_LOG as "rank R row N", for the test to compare with the report; while
 * that file is there, it does no more. Faults that end or stop a call: faulty_ends.c. */
#include "faulty_library.h"
#include "real_library.h"

#include <nccl_ep.h>
#include <trefoil/a2sgd.h>
#include <trefoil/device.h>

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct fault_work {
  int rank;
  const char *name;
  uint8_t *data, *saved;
  size_t rowBytes, rows, bytes;
} fault_work_t;

static atomic_int seen;

static int is(const char *name) {
  const char *fault = getenv("TREFOIL_FAULT");
  return fault && !strcmp(fault, name);
}

/* Not once but each time: a fault that a replay shows again. */
int faultAlways(void) {
  return getenv("TREFOIL_FAULT_ALWAYS") != NULL;
}

int faultRecord(int rank, size_t row) {
  int fd = open(getenv("TREFOIL_FAULT_LOG"), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return faultAlways();
  dprintf(fd, "rank %d row %zu\n", rank, row);
  close(fd);
  return 1;
}

/* ---- Who is who ---- */

enum { MAX_KNOWN = 4096 };
static struct known {
  void *object;
  int rank;
} known[MAX_KNOWN];
static int numKnown;
static pthread_mutex_t knownLock = PTHREAD_MUTEX_INITIALIZER;

static void remember(void *object, int rank) {
  pthread_mutex_lock(&knownLock);
  known[numKnown++ % MAX_KNOWN] = (struct known){object, rank};
  pthread_mutex_unlock(&knownLock);
}
static int rankOf(void *object) {
  int rank = -1;
  pthread_mutex_lock(&knownLock);
  for (int i = numKnown - 1, left = MAX_KNOWN; i >= 0 && left > 0 && rank < 0; i--, left--)
    if (known[i % MAX_KNOWN].object == object) rank = known[i % MAX_KNOWN].rank;
  pthread_mutex_unlock(&knownLock);
  return rank;
}

/* ---- Spoiling ---- */

static size_t elementBytes(ncclDataType_t type) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1, 1};
  return bytes[type];
}

static void swapRows(uint8_t *a, uint8_t *b, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) {
    uint8_t x = a[i];
    a[i] = b[i];
    b[i] = x;
  }
}

/* Done once, and only where it changes something. */
static void spoil(void *context) {
  fault_work_t *w = context;
  size_t row = 0, last = w->rows - 1;
  if (w->rows == 0 || w->rowBytes == 0 || !w->data) return;
  int needsTwo = strstr(w->name, "swap") || !strcmp(w->name, "duplicate");
  if (needsTwo && (w->rows < 2 || !memcmp(w->data, w->data + w->rowBytes, w->rowBytes))) return;
  int isSkip = !strcmp(w->name, "combine-skip") || !strcmp(w->name, "drop");
  if (isSkip && !memcmp(w->data, w->saved, w->rowBytes)) return;
  if (!strcmp(w->name, "duplicate")) row = 1;
  if (!strcmp(w->name, "after")) row = w->rows;
  if (!strcmp(w->name, "stray")) row = last;
  if (!faultRecord(w->rank, row)) return;
  if (needsTwo && strcmp(w->name, "duplicate"))
    swapRows(w->data, w->data + w->rowBytes, w->rowBytes);
  else if (!strcmp(w->name, "duplicate"))
    memcpy(w->data + w->rowBytes, w->data, w->rowBytes);
  else if (!strcmp(w->name, "before"))
    w->data[-1] ^= 1;
  else if (!strcmp(w->name, "after"))
    w->data[w->bytes] ^= 1;
  else if (!strcmp(w->name, "stray"))
    w->data[last * w->rowBytes] ^= 0x40;
  else if (isSkip)
    memcpy(w->data, w->saved, w->rowBytes);
  else
    w->data[0] ^= 1;
}

static void save(void *context) {
  fault_work_t *w = context;
  if (w->rows && w->data) memcpy(w->saved, w->data, w->rowBytes);
}

static fault_work_t *newWork(const char *name, ncclEpHandle_t handle, const ncclEpTensor_t *t) {
  fault_work_t *w = calloc(1, sizeof *w);
  if (!w || !t || !t->data) {
    free(w);
    return NULL;
  }
  w->name = name;
  w->rank = rankOf(handle);
  w->data = t->data;
  w->rowBytes = elementBytes(t->datatype);
  w->rows = 1;
  if (t->ndim == 1)
    w->rows = t->sizes[0];
  else
    w->rowBytes *= t->sizes[t->ndim - 1];
  for (unsigned i = 0; t->ndim > 1 && i + 1 < t->ndim; i++) w->rows *= t->sizes[i];
  w->bytes = w->rows * w->rowBytes;
  w->saved = malloc(w->rowBytes + 1);
  return w; /* as long as the process lives: replays use it again */
}

static void queue(const char *name, ncclEpHandle_t handle, const ncclEpTensor_t *t,
                  cudaStream_t stream) {
  if (!is(name)) return;
  /* Not at once: the third time, so that not only the first case is looked at. */
  if (atomic_fetch_add(&seen, 1) < 3 && !faultAlways() && !faultSoon()) return;
  fault_work_t *w = newWork(name, handle, t);
  if (w) cudaLaunchHostFunc(stream, spoil, w);
}

/* ---- The calls ---- */

ncclResult_t ncclEpGetVersion(int *version) {
  return REAL(ncclEpGetVersion)(version);
}
ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *group, ncclComm_t comm,
                               const ncclEpGroupConfig_t *config) {
  int rank = -1;
  ncclCommUserRank(comm, &rank);
  FAULT_AT(ncclEpCreateGroup, rank, NULL);
  ncclResult_t rc = REAL(ncclEpCreateGroup)(group, comm, config);
  if (rc == ncclSuccess) remember(*group, rank);
  void *block;
  if (rc == ncclSuccess && is("leak") && rank == 1 && config->alloc.alloc_fn &&
      faultRecord(rank, 0))
    rc = config->alloc.alloc_fn(&block, 64, config->alloc.context) ? ncclSystemError : rc;
  return rc;
}
ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t group) {
  FAULT_AT(ncclEpGroupDestroy, rankOf(group), NULL);
  return REAL(ncclEpGroupDestroy)(group);
}
ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t group, ncclEpLayout_t layout,
                                 const ncclEpHandleConfig_t *config, size_t *size, int topk) {
  return REAL(ncclEpHandleMemSize)(group, layout, config, size, topk);
}
ncclResult_t ncclEpInitHandle(ncclEpHandle_t *handle, ncclEpGroup_t group, ncclEpLayout_t layout,
                              const ncclEpHandleConfig_t *config, int topk,
                              const ncclEpTensor_t *memory) {
  FAULT_AT(ncclEpInitHandle, rankOf(group), NULL);
  ncclResult_t rc = REAL(ncclEpInitHandle)(handle, group, layout, config, topk, memory);
  if (rc == ncclSuccess) remember(*handle, rankOf(group));
  return rc;
}
ncclResult_t ncclEpCreateHandle(ncclEpHandle_t *handle, ncclEpGroup_t group, ncclEpLayout_t layout,
                                const ncclEpTensor_t *idx, const ncclEpLayoutInfo_t *info,
                                const ncclEpHandleConfig_t *config, cudaStream_t stream) {
  FAULT_AT(ncclEpCreateHandle, rankOf(group), stream);
  ncclResult_t rc = REAL(ncclEpCreateHandle)(handle, group, layout, idx, info, config, stream);
  if (rc == ncclSuccess) remember(*handle, rankOf(group));
  return rc;
}
ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle) {
  FAULT_AT(ncclEpHandleDestroy, rankOf(handle), NULL);
  return REAL(ncclEpHandleDestroy)(handle);
}
ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t *idx,
                                const ncclEpLayoutInfo_t *info, cudaStream_t stream) {
  FAULT_AT(ncclEpUpdateHandle, rankOf(handle), stream);
  ncclResult_t rc = REAL(ncclEpUpdateHandle)(handle, idx, info, stream);
  if (rc != ncclSuccess || !info) return rc;
  queue("counter", handle, info->expert_counters, stream);
  queue("offset", handle, info->expert_offsets, stream);
  queue("total", handle, info->recv_total_counter, stream);
  return rc;
}
ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t *in,
                            const ncclEpDispatchOutputs_t *out, const ncclEpLayoutInfo_t *info,
                            const ncclEpDispatchConfig_t *config, cudaStream_t stream) {
  FAULT_AT(ncclEpDispatch, rankOf(handle), stream);
  int isWhole = !(config && config->send_only);
  fault_work_t *w = is("drop") && isWhole ? newWork("drop", handle, out->tokens) : NULL;
  if (w && w->data) cudaLaunchHostFunc(stream, save, w);
  ncclResult_t rc = REAL(ncclEpDispatch)(handle, in, out, info, config, stream);
  if (rc != ncclSuccess || !isWhole) return rc;
  if (w && w->data) cudaLaunchHostFunc(stream, spoil, w);
  static const char *const onTokens[] = {"flip", "swap", "stray", "before", "after", "duplicate"};
  for (size_t i = 0; i < sizeof onTokens / sizeof *onTokens; i++)
    queue(onTokens[i], handle, out->tokens, stream);
  queue("weights", handle, out->topk_weights, stream);
  queue("ids", handle, out->topk_idx, stream);
  queue("scales", handle, out->scales, stream);
  queue("input", handle, in->tokens, stream);
  if (info) queue("counter", handle, info->expert_counters, stream);
  return rc;
}
ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t *in,
                           const ncclEpCombineOutputs_t *out, const ncclEpCombineConfig_t *config,
                           cudaStream_t stream) {
  FAULT_AT(ncclEpCombine, rankOf(handle), stream);
  fault_work_t *w = is("combine-skip") ? newWork("combine-skip", handle, out->tokens) : NULL;
  if (w && w->data) cudaLaunchHostFunc(stream, save, w);
  ncclResult_t rc = REAL(ncclEpCombine)(handle, in, out, config, stream);
  if (rc != ncclSuccess || (config && config->send_only)) return rc;
  if (w && w->data) cudaLaunchHostFunc(stream, spoil, w);
  queue("combine-swap", handle, out->tokens, stream);
  queue("combine-ulp", handle, out->tokens, stream);
  return rc;
}
ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t *config,
                            cudaStream_t stream) {
  FAULT_AT(ncclEpComplete, rankOf(handle), stream);
  return REAL(ncclEpComplete)(handle, config, stream);
}
ncclResult_t ncclEpMaskQuery(ncclEpGroup_t group, int *mask, cudaStream_t stream) {
  return REAL(ncclEpMaskQuery)(group, mask, stream);
}
ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t group, const int *mask, cudaStream_t stream) {
  FAULT_AT(ncclEpMaskUpdate, rankOf(group), stream);
  return REAL(ncclEpMaskUpdate)(group, mask, stream);
}
ncclResult_t ncclEpMaskClean(ncclEpGroup_t group, cudaStream_t stream) {
  return REAL(ncclEpMaskClean)(group, stream);
}
ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t group, int *flag) {
  return REAL(ncclEpGetAsyncError)(group, flag);
}
ncclResult_t ncclEpErrorClear(ncclEpGroup_t group) {
  return REAL(ncclEpErrorClear)(group);
}
ncclResult_t ncclEpCountBytes(ncclEpGroup_t group, int on) {
  return REAL(ncclEpCountBytes)(group, on);
}
/* "puts-KIND": of this kind none are counted; of the others far too many. */
ncclResult_t ncclEpReadPuts(ncclEpGroup_t group, int kind, uint64_t *puts, cudaStream_t stream) {
  static const char *const names[] = {"puts-dispatch", "puts-combine", "puts-weights", "puts-ids"};
  static _Thread_local uint64_t others;
  int planted = 0;
  for (int k = 0; k < NCCL_EP_PUT_SIGNAL; k++) planted |= is(names[k]);
  if (!planted) return REAL(ncclEpReadPuts)(group, kind, puts, stream);
  others += 1000;
  puts[0] = kind < NCCL_EP_PUT_SIGNAL && is(names[kind]) ? 0 : others;
  return ncclSuccess;
}
/* "count": 16 bytes that rank 0 kept stand at rank 1, each time, as not all cases are compared. */
ncclResult_t ncclEpReadBytes(ncclEpGroup_t group, int kind, uint64_t *bytes, int *tiers, int reset,
                             cudaStream_t stream) {
  ncclResult_t rc = REAL(ncclEpReadBytes)(group, kind, bytes, tiers, reset, stream);
  if (rc != ncclSuccess || !is("count") || rankOf(group) != 0 || bytes[0] < 16) return rc;
  bytes[0] -= 16;
  bytes[1] += 16;
  faultRecord(0, 0);
  return rc;
}
trefoil_result_t trefoilGradGpuCreate(const trefoil_grad_config_t *c,
                                      const trefoil_grad_gpu_options_t *options, ncclComm_t comm,
                                      trefoil_grad_gpu_t *out) {
  int rank = -1;
  ncclCommUserRank(comm, &rank);
  trefoil_result_t rc = REAL(trefoilGradGpuCreate)(c, options, comm, out);
  if (rc == TREFOIL_OK) remember(*out, rank);
  return rc;
}
/* "update": a bit of the first element. */
trefoil_result_t trefoilGradGpuStep(trefoil_grad_gpu_t g, const void *grad, void *update,
                                    cudaStream_t stream) {
  trefoil_result_t rc = REAL(trefoilGradGpuStep)(g, grad, update, stream);
  size_t one = 1;
  const ncclEpTensor_t t = {.ndim = 1, .datatype = ncclUint8, .sizes = &one, .data = update};
  if (rc == TREFOIL_OK) queue("update", (ncclEpHandle_t)(void *)g, &t, stream);
  return rc;
}
/* "params": a bit of the first element. */
trefoil_result_t trefoilGradGpuSync(trefoil_grad_gpu_t g, int64_t step, void *params,
                                    cudaStream_t stream) {
  trefoil_result_t rc = REAL(trefoilGradGpuSync)(g, step, params, stream);
  size_t one = 1;
  const ncclEpTensor_t t = {.ndim = 1, .datatype = ncclUint8, .sizes = &one, .data = params};
  if (rc == TREFOIL_OK) queue("params", (ncclEpHandle_t)(void *)g, &t, stream);
  return rc;
}
/* "mask": all ranks are active. */
trefoil_result_t trefoilGradGpuGetMask(trefoil_grad_gpu_t g, int *active, cudaStream_t stream) {
  trefoil_result_t rc = REAL(trefoilGradGpuGetMask)(g, active, stream);
  if (rc == TREFOIL_OK && is("mask") && active[0] == 0 && faultRecord(rankOf(g), 0)) active[0] = 1;
  return rc;
}
trefoil_result_t trefoilGradGpuSetMask(trefoil_grad_gpu_t g, const int *active,
                                       cudaStream_t stream) {
  return REAL(trefoilGradGpuSetMask)(g, active, stream);
}
trefoil_result_t trefoilGradGpuDestroy(trefoil_grad_gpu_t g) {
  return REAL(trefoilGradGpuDestroy)(g);
}
const char *ncclEpGetLastError(void) {
  return REAL(ncclEpGetLastError)();
}
