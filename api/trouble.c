/* Failures of queued operations: kept in the group until the caller hears of them. The first one
 * counts; only a lost rank replaces a lesser one. */
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "api/object.h"
#include "api/range.h"

static void lockTrouble(ncclEpGroup_t g) {
  while (atomic_exchange_explicit(&g->troubleLock, 1, memory_order_acquire)) sched_yield();
}

static void unlockTrouble(ncclEpGroup_t g) {
  atomic_store_explicit(&g->troubleLock, 0, memory_order_release);
}

void epReport(ncclEpGroup_t g, ep_trouble_t trouble, trefoil_result_t code, const char *format,
              ...) {
  va_list args;
  va_start(args, format);
  lockTrouble(g);
  if ((int)trouble > atomic_load_explicit(&g->trouble, memory_order_relaxed)) {
    vsnprintf(g->troubleText, sizeof g->troubleText, format, args);
    g->troubleCode = code;
    atomic_store_explicit(&g->trouble, (int)trouble, memory_order_release);
    epLog(g, "%s", g->troubleText);
  }
  atomic_store(&g->asyncError, 1);
  unlockTrouble(g);
  va_end(args);
}

void epClearTrouble(ncclEpGroup_t g) {
  lockTrouble(g);
  if (atomic_load(&g->trouble) < EP_TROUBLE_FATAL) { /* a lost group stays lost, and says so */
    atomic_store(&g->trouble, EP_TROUBLE_NONE);
    atomic_store(&g->asyncError, 0);
  }
  unlockTrouble(g);
}

static void poll(ncclEpGroup_t g) {
  if (epBackend.poll) epBackend.poll(g);
}

trefoil_result_t epCheckTrouble(ncclEpGroup_t g) {
  EP_TRY(epBackend.checkComm(g));
  poll(g);
  if (atomic_load_explicit(&g->trouble, memory_order_acquire) < EP_TROUBLE_STICKY) {
    return TREFOIL_OK;
  }
  lockTrouble(g);
  trefoil_result_t code = epFail(g->troubleCode, "%s", g->troubleText);
  /* LL without masks has no ErrorClear: told once, then the group goes on */
  int once = !epIsHt(g) && !g->limits.enableMask && atomic_load(&g->trouble) == EP_TROUBLE_STICKY;
  if (once) atomic_store(&g->trouble, EP_TROUBLE_NONE);
  unlockTrouble(g);
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
    epClearTrouble(group);
    if (epBackend.errorCleared) epBackend.errorCleared(group);
  }
  return (ncclResult_t)result;
}
