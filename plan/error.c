#include "plan/error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char lastError[512];

const char *trefoilLastError(void) {
  return lastError;
}

#undef epFail
trefoil_result_t epFail(trefoil_result_t code, const char *format, ...) {
  char sentence[sizeof lastError]; /* an argument may be the previous sentence */
  va_list args;
  va_start(args, format);
  vsnprintf(sentence, sizeof sentence, format, args);
  va_end(args);
  __builtin_memcpy(lastError, sentence, sizeof sentence);
  return code;
}
