/* NVTX 3 for machines without a toolkit: the calls that name ranges for a profiler, and do nothing, as where
 * no profiler is attached. C99 and C++. Resources and the other headers of NVTX are not here. */
#ifndef TREFOIL_NVTX_H
#define TREFOIL_NVTX_H

#include <stddef.h>
#include <stdint.h>
#include <wchar.h>

#define NVTX_VERSION                  3
#define NVTX_NO_PUSH_POP_TRACKING     ((int)-2)
#define NVTX_EVENT_ATTRIB_STRUCT_SIZE ((uint16_t)sizeof(nvtxEventAttributes_t))

typedef uint64_t nvtxRangeId_t;
typedef struct nvtxDomainRegistration_st *nvtxDomainHandle_t;
typedef struct nvtxStringRegistration_st *nvtxStringHandle_t;

typedef enum { NVTX_COLOR_UNKNOWN = 0, NVTX_COLOR_ARGB = 1 } nvtxColorType_t;
typedef enum {
  NVTX_MESSAGE_UNKNOWN = 0,
  NVTX_MESSAGE_TYPE_ASCII = 1,
  NVTX_MESSAGE_TYPE_UNICODE = 2,
  NVTX_MESSAGE_TYPE_REGISTERED = 3
} nvtxMessageType_t;
typedef enum {
  NVTX_PAYLOAD_UNKNOWN = 0,
  NVTX_PAYLOAD_TYPE_UNSIGNED_INT64 = 1,
  NVTX_PAYLOAD_TYPE_INT64 = 2,
  NVTX_PAYLOAD_TYPE_DOUBLE = 3,
  NVTX_PAYLOAD_TYPE_UNSIGNED_INT32 = 4,
  NVTX_PAYLOAD_TYPE_INT32 = 5,
  NVTX_PAYLOAD_TYPE_FLOAT = 6
} nvtxPayloadType_t;

typedef union nvtxMessageValue_t {
  const char *ascii;
  const wchar_t *unicode;
  nvtxStringHandle_t registered;
} nvtxMessageValue_t;

typedef struct nvtxEventAttributes_v2 {
  uint16_t version, size;
  uint32_t category;
  int32_t colorType;
  uint32_t color;
  int32_t payloadType, reserved0;
  union payload_t {
    uint64_t ullValue;
    int64_t llValue;
    double dValue;
    uint32_t uiValue;
    int32_t iValue;
    float fValue;
  } payload;
  int32_t messageType;
  nvtxMessageValue_t message;
} nvtxEventAttributes_t;

#define TREFOIL_NVTX(Type, name, parameters, result)                                               \
  static inline __attribute__((unused)) Type name parameters {                                     \
    return result;                                                                                 \
  }
#define TREFOIL_NVTX_VOID(name, parameters)                                                        \
  static inline __attribute__((unused)) void name parameters {}

#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#endif
TREFOIL_NVTX_VOID(nvtxInitialize, (const void *reserved))
TREFOIL_NVTX_VOID(nvtxMarkEx, (const nvtxEventAttributes_t *eventAttrib))
TREFOIL_NVTX_VOID(nvtxMarkA, (const char *message))
TREFOIL_NVTX_VOID(nvtxMarkW, (const wchar_t *message))
TREFOIL_NVTX(nvtxRangeId_t, nvtxRangeStartEx, (const nvtxEventAttributes_t *eventAttrib), 0)
TREFOIL_NVTX(nvtxRangeId_t, nvtxRangeStartA, (const char *message), 0)
TREFOIL_NVTX(nvtxRangeId_t, nvtxRangeStartW, (const wchar_t *message), 0)
TREFOIL_NVTX_VOID(nvtxRangeEnd, (nvtxRangeId_t id))
TREFOIL_NVTX(int, nvtxRangePushEx, (const nvtxEventAttributes_t *eventAttrib),
             NVTX_NO_PUSH_POP_TRACKING)
TREFOIL_NVTX(int, nvtxRangePushA, (const char *message), NVTX_NO_PUSH_POP_TRACKING)
TREFOIL_NVTX(int, nvtxRangePushW, (const wchar_t *message), NVTX_NO_PUSH_POP_TRACKING)
TREFOIL_NVTX(int, nvtxRangePop, (void), NVTX_NO_PUSH_POP_TRACKING)
TREFOIL_NVTX_VOID(nvtxNameCategoryA, (uint32_t category, const char *name))
TREFOIL_NVTX_VOID(nvtxNameCategoryW, (uint32_t category, const wchar_t *name))
TREFOIL_NVTX_VOID(nvtxNameOsThreadA, (uint32_t threadId, const char *name))
TREFOIL_NVTX_VOID(nvtxNameOsThreadW, (uint32_t threadId, const wchar_t *name))

TREFOIL_NVTX(nvtxDomainHandle_t, nvtxDomainCreateA, (const char *name), NULL)
TREFOIL_NVTX(nvtxDomainHandle_t, nvtxDomainCreateW, (const wchar_t *name), NULL)
TREFOIL_NVTX_VOID(nvtxDomainDestroy, (nvtxDomainHandle_t domain))
TREFOIL_NVTX(nvtxStringHandle_t, nvtxDomainRegisterStringA,
             (nvtxDomainHandle_t domain, const char *string), NULL)
TREFOIL_NVTX(nvtxStringHandle_t, nvtxDomainRegisterStringW,
             (nvtxDomainHandle_t domain, const wchar_t *string), NULL)
TREFOIL_NVTX_VOID(nvtxDomainMarkEx,
                  (nvtxDomainHandle_t domain, const nvtxEventAttributes_t *eventAttrib))
TREFOIL_NVTX(nvtxRangeId_t, nvtxDomainRangeStartEx,
             (nvtxDomainHandle_t domain, const nvtxEventAttributes_t *eventAttrib), 0)
TREFOIL_NVTX_VOID(nvtxDomainRangeEnd, (nvtxDomainHandle_t domain, nvtxRangeId_t id))
TREFOIL_NVTX(int, nvtxDomainRangePushEx,
             (nvtxDomainHandle_t domain, const nvtxEventAttributes_t *eventAttrib),
             NVTX_NO_PUSH_POP_TRACKING)
TREFOIL_NVTX(int, nvtxDomainRangePop, (nvtxDomainHandle_t domain), NVTX_NO_PUSH_POP_TRACKING)
TREFOIL_NVTX_VOID(nvtxDomainNameCategoryA,
                  (nvtxDomainHandle_t domain, uint32_t category, const char *name))
TREFOIL_NVTX_VOID(nvtxDomainNameCategoryW,
                  (nvtxDomainHandle_t domain, uint32_t category, const wchar_t *name))
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
#undef TREFOIL_NVTX
#undef TREFOIL_NVTX_VOID

#endif
