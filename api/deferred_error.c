/* Failures of queued operations: kept in the group until a call returns them. The first one
 * counts; only a lost rank replaces a lesser one. */
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "api/object.h"
#include "api/range.h"

static void lockDeferred(ncclEpGroup_t g) {
  while (atomic_exchange_explicit(&g->deferredLock, 1, memory_order_acquire)) sched_yield();
}

static void unlockDeferred(ncclEpGroup_t g) {
  atomic_store_explicit(&g->deferredLock, 0, memory_order_release);
}

void epReport(ncclEpGroup_t g, ep_deferred_error_t error, trefoil_result_t code, const char *format,
              ...) {
  va_list args;
  va_start(args, format);
  lockDeferred(g);
  if ((int)error > atomic_load_explicit(&g->deferred, memory_order_relaxed)) {
    vsnprintf(g->deferredText, sizeof g->deferredText, format, args);
    g->deferredCode = code;
    atomic_store_explicit(&g->deferred, (int)error, memory_order_release);
    epLog(g, "%s", g->deferredText);
  }
  atomic_store(&g->asyncError, 1);
  unlockDeferred(g);
  va_end(args);
}

void epClearDeferred(ncclEpGroup_t g) {
  lockDeferred(g);
  if (atomic_load(&g->deferred) < EP_DEFERRED_FATAL) { /* a lost group stays lost, and says so */
    atomic_store(&g->deferred, EP_DEFERRED_NONE);
    atomic_store(&g->asyncError, 0);
  }
  unlockDeferred(g);
}

static void poll(ncclEpGroup_t g) {
  if (epBackend.poll) epBackend.poll(g);
}

trefoil_result_t epCheckDeferred(ncclEpGroup_t g) {
  EP_TRY(epBackend.checkComm(g));
  poll(g);
  if (atomic_load_explicit(&g->deferred, memory_order_acquire) < EP_DEFERRED_STICKY) {
    return TREFOIL_OK;
  }
  lockDeferred(g);
  trefoil_result_t code = epFail(g->deferredCode, "%s", g->deferredText);
  /* LL without masks has no ErrorClear: reported once, then the group goes on */
  int once = !epIsHt(g) && !g->limits.enableMask && atomic_load(&g->deferred) == EP_DEFERRED_STICKY;
  if (once) atomic_store(&g->deferred, EP_DEFERRED_NONE);
  unlockDeferred(g);
  return code;
}

static trefoil_result_t checkErrorCall(ncclEpGroup_t g, const char *function) {
  EP_TRY(epCheckGroup(g, function));
  EP_CHECK(epIsHt(g) || g->limits.enableMask, TREFOIL_INVALID_USAGE,
           "%s: a low-latency group has an async error only with enable_mask 1", function);
  return TREFOIL_OK;
}

static trefoil_result_t getAsyncError(ncclEpGroup_t g, int *error) {
  EP_TRY(checkErrorCall(g, "ncclEpGetAsyncError"));
  EP_CHECK(error, TREFOIL_INVALID_ARGUMENT, "ncclEpGetAsyncError: error is NULL");
  poll(g);
  *error = atomic_load(&g->asyncError);
  return TREFOIL_OK;
}

ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t group, int *error) {
  return (ncclResult_t)getAsyncError(group, error);
}

ncclResult_t ncclEpErrorClear(ncclEpGroup_t group) {
  EP_RANGE();
  trefoil_result_t result = checkErrorCall(group, "ncclEpErrorClear");
  if (result == TREFOIL_OK) {
    poll(group);
    epClearDeferred(group);
    if (epBackend.errorCleared) epBackend.errorCleared(group);
  }
  return (ncclResult_t)result;
}
