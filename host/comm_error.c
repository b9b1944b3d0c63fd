/* Failures in words: a sentence of the thread, and the names of collectives in it. */
#include <stdarg.h>

#include "comm_internal.h"

#undef epNcclFail
ncclResult_t epNcclFail(ncclResult_t code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  epSetSentenceV(format, args);
  va_end(args);
  return code;
}

const char *epTagName(uint32_t tag) {
  static const char *const names[] = {
      "nothing",       "ncclAllReduce", "ncclReduce", "ncclReduceScatter", "ncclBroadcast",
      "ncclAllGather", "ncclAlltoAll",  "ncclGather", "ncclScatter",       "ncclSend"};
  tag &= 255;
  return tag < sizeof names / sizeof names[0] ? names[tag] : "an unknown call";
}
