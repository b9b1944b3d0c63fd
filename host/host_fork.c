/* After a fork the child has none of the parent's threads, so it starts afresh: every module forgets what
 * it had. Memory of the parent stays mapped and readable, but handles made before the fork are the
 * parent's. A unique id made before the fork is served by the parent, which must stay until the ranks
 * have met. */
#include "comm_internal.h"
#include "host_kernel.h"

static void inChild(void) {
  epServerForked();
  epMemForked();
  epPoolsForked();
  epGraphMemForked();
  epUserObjectsForked();
  epSymbolsForked();
  epSymbolCopiesForked();
  epStreamsForked();
  epCaptureForked();
  epCommShmForked();
  epWindowsForked();
  epCommsForked();
}

__attribute__((constructor)) static void watchForks(void) {
  pthread_atfork(NULL, NULL, inChild);
}
