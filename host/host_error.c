/* How the host runtime fails: a code for the caller, a sentence for the thread, CUDA's last error. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "host_internal.h"
#include "trefoil_host.h"

static _Thread_local char sentence[512];
static _Thread_local cudaError_t lastError;
static _Thread_local cudaError_t sentenceCode; /* what the sentence is about */

void epSetSentenceV(const char *format, va_list args) {
  char text[sizeof sentence]; /* the arguments may quote the present sentence */
  vsnprintf(text, sizeof text, format, args);
  memcpy(sentence, text, sizeof text);
  sentenceCode = cudaSuccess;
}

void epSetSentence(const char *format, ...) {
  va_list args;
  va_start(args, format);
  epSetSentenceV(format, args);
  va_end(args);
}

const char *epSentence(void) {
  return sentence;
}

const char *trefoilHostLastError(void) {
  return sentence;
}

#undef epCudaFail
cudaError_t epCudaFail(cudaError_t code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  epSetSentenceV(format, args);
  va_end(args);
  lastError = sentenceCode = code;
  return code;
}

cudaError_t cudaGetLastError(void) {
  cudaError_t error = lastError;
  lastError = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) {
  return lastError;
}

static const struct {
  cudaError_t code;
  const char *name, *text;
} errorNames[] = {
#define E(code, text)                                                                              \
  { code, #code, text }
    E(cudaSuccess, "no error"),
    E(cudaErrorInvalidValue, "invalid argument"),
    E(cudaErrorMemoryAllocation, "out of memory"),
    E(cudaErrorInitializationError, "initialization error"),
    E(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    E(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    E(cudaErrorInvalidHostPointer, "invalid host pointer"),
    E(cudaErrorInvalidDevicePointer, "invalid device pointer"),
    E(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    E(cudaErrorInsufficientDriver, "driver version is insufficient for runtime version"),
    E(cudaErrorInvalidDeviceFunction, "invalid device function"),
    E(cudaErrorNoDevice, "no device"),
    E(cudaErrorInvalidDevice, "invalid device ordinal"),
    E(cudaErrorUnsupportedLimit, "limit is not supported on this architecture"),
    E(cudaErrorPeerAccessUnsupported, "peer access is not supported between these two devices"),
    E(cudaErrorOperatingSystem, "operating system call failed"),
    E(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    E(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    E(cudaErrorSymbolNotFound, "named symbol not found"),
    E(cudaErrorNotReady, "device not ready"),
    E(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    E(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    E(cudaErrorPeerAccessNotEnabled, "peer access has not been enabled"),
    E(cudaErrorHostMemoryAlreadyRegistered, "part or all of the memory is already registered"),
    E(cudaErrorHostMemoryNotRegistered, "the pointer is not registered memory"),
    E(cudaErrorLaunchFailure, "unspecified launch failure"),
    E(cudaErrorNotPermitted, "operation not permitted"),
    E(cudaErrorNotSupported, "operation not supported"),
    E(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    E(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    E(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate captures"),
    E(cudaErrorStreamCaptureUnmatched, "capture was not ended in the stream in which it began"),
    E(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    E(cudaErrorStreamCaptureIsolation, "dependency on uncaptured work in another stream"),
    E(cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capture"),
    E(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capture"),
    E(cudaErrorStreamCaptureWrongThread, "capture ended in another thread than it began in"),
    E(cudaErrorTimeout, "wait operation timed out"),
    E(cudaErrorExternalDevice, "work failed because another rank is gone or late"),
    E(cudaErrorUnknown, "unknown error"),
#undef E
};

const char *cudaGetErrorName(cudaError_t error) {
  for (size_t i = 0; i < sizeof errorNames / sizeof errorNames[0]; i++)
    if (errorNames[i].code == error) return errorNames[i].name;
  return "unrecognized error code";
}

/* CUDA's text for the code; for the code this thread failed with last, also why. */
const char *cudaGetErrorString(cudaError_t error) {
  static _Thread_local char text[640];
  const char *plain = "unrecognized error code";
  for (size_t i = 0; i < sizeof errorNames / sizeof errorNames[0]; i++)
    if (errorNames[i].code == error) plain = errorNames[i].text;
  if (error == cudaSuccess || error == cudaErrorNotReady || error != sentenceCode || !sentence[0])
    return plain;
  snprintf(text, sizeof text, "%s (%s)", plain, sentence);
  return text;
}
