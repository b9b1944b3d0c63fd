/* One way to fail: record a sentence for this thread, return a code. */
#ifndef TREFOIL_PLAN_ERROR_H
#define TREFOIL_PLAN_ERROR_H

#include "trefoil/base.h"

/* Records the sentence (printf-style, at most 511 characters) and returns code. */
trefoil_result_t epFail(trefoil_result_t code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
#ifdef __clang_analyzer__ /* which does not see that what is returned is the code */
#define epFail(code, ...) (epFail((code), __VA_ARGS__), (code))
#endif

/* if (!cond) return epFail(code, "sentence"): bad input is checked in every build. */
#define EP_CHECK(cond, code, ...)                                                                  \
  do {                                                                                             \
    if (!(cond)) return epFail((code), __VA_ARGS__);                                               \
  } while (0)
/* Passes a failure on; its sentence stands. */
#define EP_TRY(expr)                                                                               \
  do {                                                                                             \
    trefoil_result_t epTryResult = (expr);                                                         \
    if (epTryResult != TREFOIL_OK) return epTryResult;                                             \
  } while (0)

#endif
