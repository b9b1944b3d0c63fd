/* NCCL's RMA plugin interface, version 14 (NCCL 2.30.5 and newer): the layout that NCCL expects behind
 * ncclRmaPlugin_v14. NCCL's packages have no header for it. Its GIN proxy runs on such a plugin. */
#ifndef TREFOIL_NET_NCCL_RMA_H
#define TREFOIL_NET_NCCL_RMA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
  RMA_SUCCESS = 0,
  RMA_SYSTEM_ERROR = 2,
  RMA_INVALID_ARGUMENT = 4
} rma_result_t; /* ncclResult_t */

enum { RMA_PTR_HOST = 1, RMA_PTR_CUDA = 2 };
enum { RMA_SIGNAL_NEVER_RESET = 2 }; /* a registration flag */
enum { RMA_SIGNAL_INC = 1, RMA_SIGNAL_ADD = 2 };
enum { RMA_DEVICE_PROXY = 2 }; /* netDeviceType */
enum { RMA_LOG_WARN = 2, RMA_LOG_INFO = 3, RMA_LOG_NET = 16 };
#define RMA_LOG_ALL (~0ul) /* subsystems: NCCL shows a warning only if one of them is switched on */

typedef void (*rma_logger_t)(int level, unsigned long flags, const char *file, int line,
                             const char *format, ...);

typedef struct {
  int count, devices[8];
} rma_virtual_device_t;

typedef struct {
  char *name, *pciPath; /* pciPath NULL: not a PCI device */
  uint64_t guid;
  int ptrSupport; /* RMA_PTR_* */
  int regIsGlobal, forceFlush;
  int speedMbps, port;
  float latencyUs;
  int maxComms, maxRecvs; /* a queue has 32 * maxRecvs requests a context and peer */
  int netDeviceType, netDeviceVersion;
  rma_virtual_device_t virtualDevice;
  size_t maxP2pBytes, maxCollBytes;
  int maxMultiRequestSize;
  int16_t railId, planeId; /* -1: not defined */
} rma_properties_t;

typedef struct {
  int numContexts, trafficClass, rankStride;
} rma_config_t;

typedef struct {
  const char *name;
  rma_result_t (*init)(void **context, uint64_t commId, rma_logger_t log);
  rma_result_t (*devices)(int *count);
  rma_result_t (*getProperties)(int device, rma_properties_t *out);
  rma_result_t (*listen)(void *context, int device, void *handle, void **listener);
  rma_result_t (*connect)(void *context, void *handles[], int numRanks, int rank, void *listener,
                          void **comm);
  rma_result_t (*createContext)(void *comm, rma_config_t *config, void **rma);
  rma_result_t (*regMrSym)(void *comm, void *data, size_t bytes, int ptrType, uint64_t flags,
                           void **region);
  rma_result_t (*regMrSymDmaBuf)(void *comm, void *data, size_t bytes, int ptrType, uint64_t offset,
                                 int descriptor, uint64_t flags, void **region);
  rma_result_t (*deregMrSym)(void *comm, void *region);
  rma_result_t (*destroyContext)(void *rma);
  rma_result_t (*closeColl)(void *comm);
  rma_result_t (*closeListen)(void *listener);
  rma_result_t (*iput)(void *rma, int context, uint64_t fromOffset, void *from, size_t bytes,
                       uint64_t toOffset, void *to, uint32_t rank, void **request);
  rma_result_t (*iputSignal)(void *rma, int context, uint64_t fromOffset, void *from, size_t bytes,
                             uint64_t toOffset, void *to, uint32_t rank, uint64_t signalOffset,
                             void *signal, uint64_t value, uint32_t op, bool strong,
                             void **request);
  rma_result_t (*iget)(void *rma, int context, uint64_t remoteOffset, void *remote, size_t bytes,
                       uint64_t localOffset, void *local, uint32_t rank, void **request);
  rma_result_t (*iflush)(void *rma, int context, void *region, uint32_t rank, void **request);
  rma_result_t (*test)(void *comm, void *request, int *done);
  rma_result_t (*progress)(void *rma);
  rma_result_t (*queryLastError)(void *rma, bool *failed);
  rma_result_t (*finalize)(void *context);
} rma_plugin_t;

#endif
