/* The collectives with a configuration of their own. What it asks of the machine (how many CTAs, a cluster's
 * size) has no effect; what the host runtime cannot give is refused. The call's name in a sentence is
 * the plain collective's. */
#include "comm_internal.h"

static ncclResult_t check(const ncclCollConfig_t *config, const char *func) {
  if (!config) return ncclSuccess;
  EP_NCCL_CHECK(config->magic == NCCL_API_MAGIC && config->size >= sizeof *config,
                ncclInvalidArgument, "%s: the config was not set by NCCL_COLLCONFIG_INITIALIZER",
                func);
  EP_NCCL_CHECK(!config->algSelection || !config->algSelection[0] || !config->forceAlgSelection,
                ncclInvalidArgument,
                "%s: algSelection is \"%s\"; the host runtime has one algorithm, which has no name",
                func, config->algSelection);
  EP_NCCL_CHECK(!config->launchCompletionEvent || !epInGroup(), ncclInvalidUsage,
                "%s: launchCompletionEvent in a group is not implemented", func);
  return ncclSuccess;
}

/* The event of the call, which comes after it on its stream. */
static ncclResult_t record(const ncclCollConfig_t *config, cudaStream_t stream) {
  if (!config || !config->launchCompletionEvent) return ncclSuccess;
  return cudaEventRecord(config->launchCompletionEvent, stream) == cudaSuccess
             ? ncclSuccess
             : ncclUnhandledCudaError;
}

#define WITH_CONFIG(call)                                                                          \
  do {                                                                                             \
    EP_NCCL_TRY(epGroupRemember(check(config, __func__)));                                         \
    EP_NCCL_TRY(call);                                                                             \
    return record(config, stream);                                                                 \
  } while (0)

ncclResult_t ncclAllReduceConfig(const void *sendbuff, void *recvbuff, size_t count,
                                 ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                 cudaStream_t stream, const ncclCollConfig_t *config) {
  WITH_CONFIG(ncclAllReduce(sendbuff, recvbuff, count, datatype, op, comm, stream));
}

ncclResult_t ncclBroadcastConfig(const void *sendbuff, void *recvbuff, size_t count,
                                 ncclDataType_t datatype, int root, ncclComm_t comm,
                                 cudaStream_t stream, const ncclCollConfig_t *config) {
  WITH_CONFIG(ncclBroadcast(sendbuff, recvbuff, count, datatype, root, comm, stream));
}

ncclResult_t ncclReduceConfig(const void *sendbuff, void *recvbuff, size_t count,
                              ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm,
                              cudaStream_t stream, const ncclCollConfig_t *config) {
  WITH_CONFIG(ncclReduce(sendbuff, recvbuff, count, datatype, op, root, comm, stream));
}

ncclResult_t ncclAllGatherConfig(const void *sendbuff, void *recvbuff, size_t sendcount,
                                 ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream,
                                 const ncclCollConfig_t *config) {
  WITH_CONFIG(ncclAllGather(sendbuff, recvbuff, sendcount, datatype, comm, stream));
}

ncclResult_t ncclReduceScatterConfig(const void *sendbuff, void *recvbuff, size_t recvcount,
                                     ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                     cudaStream_t stream, const ncclCollConfig_t *config) {
  WITH_CONFIG(ncclReduceScatter(sendbuff, recvbuff, recvcount, datatype, op, comm, stream));
}

ncclResult_t ncclAlltoAllConfig(const void *sendbuff, void *recvbuff, size_t count,
                                ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream,
                                const ncclCollConfig_t *config) {
  WITH_CONFIG(ncclAlltoAll(sendbuff, recvbuff, count, datatype, comm, stream));
}

ncclResult_t ncclGatherConfig(const void *sendbuff, void *recvbuff, size_t count,
                              ncclDataType_t datatype, int root, ncclComm_t comm,
                              cudaStream_t stream, const ncclCollConfig_t *config) {
  WITH_CONFIG(ncclGather(sendbuff, recvbuff, count, datatype, root, comm, stream));
}

ncclResult_t ncclScatterConfig(const void *sendbuff, void *recvbuff, size_t count,
                               ncclDataType_t datatype, int root, ncclComm_t comm,
                               cudaStream_t stream, const ncclCollConfig_t *config) {
  WITH_CONFIG(ncclScatter(sendbuff, recvbuff, count, datatype, root, comm, stream));
}
