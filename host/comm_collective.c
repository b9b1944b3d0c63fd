/* The collectives and point to point, written as tasks. Peers are addressed starting behind the own rank,
 * so that not all ranks begin with rank 0. */
#include "comm_internal.h"

/* One call: what all of them have. */
typedef struct {
  const char *func;
  ep_tag_t tag;
  const char *send;
  char *recv;
  size_t bytes; /* of one block */
  ncclDataType_t type;
  ncclRedOp_t op;
  int root; /* or peer */
  ncclComm_t comm;
  cudaStream_t stream;
  ep_work_t *work;
} call_t;

static call_t callOf(const char *func, ep_tag_t tag, const void *send, void *recv,
                     ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm) {
  return (call_t){func, tag, send, recv, 0, type, op, root, comm, NULL, NULL};
}

static uint32_t fullTag(const call_t *c) {
  return (uint32_t)c->tag | (uint32_t)c->op << 8 | (uint32_t)c->type << 16;
}

/* Adds a task; NULL when out of memory, which finish() reports. */
static ep_task_t *add(call_t *c, ep_task_kind_t kind, int peer) {
  ep_task_t *task = c->work ? epWorkAdd(c->work) : NULL;
  if (!task) {
    c->bytes = 0;
    return NULL;
  }
  task->kind = kind;
  task->tag = fullTag(c);
  task->peer = peer;
  task->bytes = c->bytes;
  task->type = c->type;
  task->op = c->op;
  return task;
}

static void addSend(call_t *c, int peer, const char *src) {
  ep_task_t *task = add(c, EP_TASK_SEND, peer);
  if (task) task->src = src;
}

static void addRecv(call_t *c, int peer, char *dst) {
  ep_task_t *task = add(c, EP_TASK_RECV, peer);
  if (task) task->dst = dst;
}

static void addCopy(call_t *c, char *dst, const char *src) {
  ep_task_t *task = add(c, EP_TASK_COPY, -1);
  if (!task) return;
  task->dst = dst;
  task->src = src;
}

/* Own terms at src, result at dst; sendsFrom: first of the tasks that send from dst, or -1. */
static void addReduce(call_t *c, char *dst, const char *src, int sendsFrom) {
  ep_task_t *task = add(c, EP_TASK_REDUCE, -1);
  if (!task) return;
  task->dst = dst;
  task->src = src;
  task->inPlaceWith = sendsFrom;
}

static ncclResult_t checkBuffer(const call_t *c, const void *buffer, size_t blocks,
                                const char *name) {
  ep_mem_t mem;
  EP_NCCL_CHECK(buffer, ncclInvalidArgument, "%s: %s is NULL", c->func, name);
  if (!epMemFind(buffer, &mem)) return ncclSuccess;
  size_t at = (size_t)((const char *)buffer - mem.base);
  EP_NCCL_CHECK(c->bytes <= (mem.bytes - at) / blocks, ncclInvalidArgument,
                "%s: %zu x %zu bytes of %s at offset %zu do not fit its allocation of %zu bytes",
                c->func, blocks, c->bytes, name, at, mem.bytes);
  return ncclSuccess;
}

/* The stream a handle names on the communicator's device. */
static ncclResult_t resolve(call_t *c, cudaStream_t handle) {
  int current = epCurrentDevice();
  (void)cudaSetDevice(c->comm->device);
  cudaError_t error = epStreamResolve(handle, c->func, &c->stream);
  (void)cudaSetDevice(current);
  return error == cudaSuccess ? ncclSuccess : ncclInvalidArgument;
}

/* Everything common to all calls; *empty: zero elements, nothing to do. */
static ncclResult_t begin(call_t *c, size_t count, cudaStream_t stream, bool *empty) {
  EP_NCCL_TRY(epCommUsable(c->comm, c->func));
  EP_NCCL_CHECK(!epInHostFunc(), ncclInvalidUsage, "%s was called from a host function", c->func);
  size_t each = epTypeBytes(c->type);
  EP_NCCL_CHECK(each, ncclInvalidArgument, "%s: %d is not a data type", c->func, (int)c->type);
  EP_NCCL_CHECK(count <= EP_DEVICE_BYTES / each, ncclInvalidArgument,
                "%s: %zu elements are more than a device holds", c->func, count);
  EP_NCCL_CHECK(c->root >= 0 && c->root < c->comm->numRanks, ncclInvalidArgument,
                "%s: rank %d is not in [0, %d)", c->func, c->root, c->comm->numRanks);
  EP_NCCL_TRY(resolve(c, stream));
  c->bytes = count * each;
  *empty = count == 0;
  return ncclSuccess;
}

static ncclResult_t checkReduction(const call_t *c) {
  EP_NCCL_CHECK(epReducible(c->type, c->op), ncclInvalidArgument,
                "%s: operation %d on data type %d is not implemented by the host runtime", c->func,
                (int)c->op, (int)c->type);
  return ncclSuccess;
}

static ncclResult_t finish(call_t *c) {
  size_t bytes = c->bytes;
  if (!bytes) { /* a task could not be added */
    if (!epInGroup()) epWorkRelease(c->work);
    return epNcclFail(ncclSystemError, "%s: out of memory", c->func);
  }
  return epGroupAdded(c->work, c->stream);
}

static ncclResult_t open(call_t *c) {
  return epGroupWork(c->comm, c->stream, c->func, &c->work);
}

/* Peers of the call in the order rank + 1, rank + 2, ... */
#define FOR_PEERS(c, p)                                                                            \
  for (int i_ = 1, p;                                                                              \
       i_ < (c)->comm->numRanks && (p = ((c)->comm->rank + i_) % (c)->comm->numRanks, true); i_++)

static ncclResult_t allReduce(call_t *c, size_t count, cudaStream_t stream) {
  bool empty;
  EP_NCCL_TRY(begin(c, count, stream, &empty));
  EP_NCCL_TRY(checkReduction(c));
  if (empty) return ncclSuccess;
  EP_NCCL_TRY(checkBuffer(c, c->send, 1, "sendbuff"));
  EP_NCCL_TRY(checkBuffer(c, c->recv, 1, "recvbuff"));
  EP_NCCL_TRY(open(c));
  int first = c->work->numTasks;
  FOR_PEERS(c, p) addSend(c, p, c->send);
  addReduce(c, c->recv, c->send, c->send == c->recv ? first : -1);
  return finish(c);
}

ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  call_t c = callOf("ncclAllReduce", EP_TAG_ALL_REDUCE, sendbuff, recvbuff, datatype, op, 0, comm);
  return epGroupRemember(allReduce(&c, count, stream));
}

static ncclResult_t reduceTo(call_t *c, size_t count, cudaStream_t stream) {
  bool empty;
  EP_NCCL_TRY(begin(c, count, stream, &empty));
  EP_NCCL_TRY(checkReduction(c));
  if (empty) return ncclSuccess;
  bool root = c->root == c->comm->rank;
  EP_NCCL_TRY(checkBuffer(c, c->send, 1, "sendbuff"));
  if (root) EP_NCCL_TRY(checkBuffer(c, c->recv, 1, "recvbuff"));
  EP_NCCL_TRY(open(c));
  if (root)
    addReduce(c, c->recv, c->send, -1);
  else
    addSend(c, c->root, c->send);
  return finish(c);
}

ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  call_t c = callOf("ncclReduce", EP_TAG_REDUCE, sendbuff, recvbuff, datatype, op, root, comm);
  return epGroupRemember(reduceTo(&c, count, stream));
}

static ncclResult_t reduceScatter(call_t *c, size_t count, cudaStream_t stream) {
  bool empty;
  EP_NCCL_TRY(begin(c, count, stream, &empty));
  EP_NCCL_TRY(checkReduction(c));
  if (empty) return ncclSuccess;
  EP_NCCL_TRY(checkBuffer(c, c->send, (size_t)c->comm->numRanks, "sendbuff"));
  EP_NCCL_TRY(checkBuffer(c, c->recv, 1, "recvbuff"));
  EP_NCCL_TRY(open(c));
  FOR_PEERS(c, p) addSend(c, p, c->send + (size_t)p * c->bytes);
  addReduce(c, c->recv, c->send + (size_t)c->comm->rank * c->bytes, -1);
  return finish(c);
}

ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  call_t c =
      callOf("ncclReduceScatter", EP_TAG_REDUCE_SCATTER, sendbuff, recvbuff, datatype, op, 0, comm);
  return epGroupRemember(reduceScatter(&c, recvcount, stream));
}

static ncclResult_t broadcast(call_t *c, size_t count, cudaStream_t stream) {
  bool empty;
  EP_NCCL_TRY(begin(c, count, stream, &empty));
  if (empty) return ncclSuccess;
  bool root = c->root == c->comm->rank;
  if (root) EP_NCCL_TRY(checkBuffer(c, c->send, 1, "sendbuff"));
  EP_NCCL_TRY(checkBuffer(c, c->recv, 1, "recvbuff"));
  EP_NCCL_TRY(open(c));
  if (root) {
    FOR_PEERS(c, p) addSend(c, p, c->send);
    addCopy(c, c->recv, c->send);
  } else {
    addRecv(c, c->root, c->recv);
  }
  return finish(c);
}

ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  call_t c =
      callOf("ncclBroadcast", EP_TAG_BROADCAST, sendbuff, recvbuff, datatype, ncclSum, root, comm);
  return epGroupRemember(broadcast(&c, count, stream));
}

ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  call_t c = callOf("ncclBcast", EP_TAG_BROADCAST, buff, buff, datatype, ncclSum, root, comm);
  return epGroupRemember(broadcast(&c, count, stream));
}

static ncclResult_t allGather(call_t *c, size_t count, cudaStream_t stream) {
  bool empty;
  EP_NCCL_TRY(begin(c, count, stream, &empty));
  if (empty) return ncclSuccess;
  EP_NCCL_TRY(checkBuffer(c, c->send, 1, "sendbuff"));
  EP_NCCL_TRY(checkBuffer(c, c->recv, (size_t)c->comm->numRanks, "recvbuff"));
  EP_NCCL_TRY(open(c));
  addCopy(c, c->recv + (size_t)c->comm->rank * c->bytes, c->send);
  FOR_PEERS(c, p) addSend(c, p, c->send);
  FOR_PEERS(c, p) addRecv(c, p, c->recv + (size_t)p * c->bytes);
  return finish(c);
}

ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
  call_t c =
      callOf("ncclAllGather", EP_TAG_ALL_GATHER, sendbuff, recvbuff, datatype, ncclSum, 0, comm);
  return epGroupRemember(allGather(&c, sendcount, stream));
}

static ncclResult_t allToAll(call_t *c, size_t count, cudaStream_t stream) {
  bool empty;
  EP_NCCL_TRY(begin(c, count, stream, &empty));
  if (empty) return ncclSuccess;
  EP_NCCL_TRY(checkBuffer(c, c->send, (size_t)c->comm->numRanks, "sendbuff"));
  EP_NCCL_TRY(checkBuffer(c, c->recv, (size_t)c->comm->numRanks, "recvbuff"));
  EP_NCCL_TRY(open(c));
  size_t own = (size_t)c->comm->rank * c->bytes;
  addCopy(c, c->recv + own, c->send + own);
  FOR_PEERS(c, p) addSend(c, p, c->send + (size_t)p * c->bytes);
  FOR_PEERS(c, p) addRecv(c, p, c->recv + (size_t)p * c->bytes);
  return finish(c);
}

ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count,
                          ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
  call_t c =
      callOf("ncclAlltoAll", EP_TAG_ALL_TO_ALL, sendbuff, recvbuff, datatype, ncclSum, 0, comm);
  return epGroupRemember(allToAll(&c, count, stream));
}

static ncclResult_t gatherTo(call_t *c, size_t count, cudaStream_t stream) {
  bool empty;
  EP_NCCL_TRY(begin(c, count, stream, &empty));
  if (empty) return ncclSuccess;
  bool root = c->root == c->comm->rank;
  EP_NCCL_TRY(checkBuffer(c, c->send, 1, "sendbuff"));
  if (root) EP_NCCL_TRY(checkBuffer(c, c->recv, (size_t)c->comm->numRanks, "recvbuff"));
  EP_NCCL_TRY(open(c));
  if (root) {
    addCopy(c, c->recv + (size_t)c->root * c->bytes, c->send);
    FOR_PEERS(c, p) addRecv(c, p, c->recv + (size_t)p * c->bytes);
  } else {
    addSend(c, c->root, c->send);
  }
  return finish(c);
}

ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  call_t c = callOf("ncclGather", EP_TAG_GATHER, sendbuff, recvbuff, datatype, ncclSum, root, comm);
  return epGroupRemember(gatherTo(&c, count, stream));
}

static ncclResult_t scatterFrom(call_t *c, size_t count, cudaStream_t stream) {
  bool empty;
  EP_NCCL_TRY(begin(c, count, stream, &empty));
  if (empty) return ncclSuccess;
  bool root = c->root == c->comm->rank;
  if (root) EP_NCCL_TRY(checkBuffer(c, c->send, (size_t)c->comm->numRanks, "sendbuff"));
  EP_NCCL_TRY(checkBuffer(c, c->recv, 1, "recvbuff"));
  EP_NCCL_TRY(open(c));
  if (root) {
    FOR_PEERS(c, p) addSend(c, p, c->send + (size_t)p * c->bytes);
    addCopy(c, c->recv, c->send + (size_t)c->root * c->bytes);
  } else {
    addRecv(c, c->root, c->recv);
  }
  return finish(c);
}

ncclResult_t ncclScatter(const void *sendbuff, void *recvbuff, size_t count,
                         ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream) {
  call_t c =
      callOf("ncclScatter", EP_TAG_SCATTER, sendbuff, recvbuff, datatype, ncclSum, root, comm);
  return epGroupRemember(scatterFrom(&c, count, stream));
}

static ncclResult_t sendOrRecv(call_t *c, size_t count, cudaStream_t stream) {
  bool empty;
  EP_NCCL_TRY(begin(c, count, stream, &empty));
  if (empty) return ncclSuccess;
  EP_NCCL_TRY(checkBuffer(c, c->send ? c->send : c->recv, 1, c->send ? "sendbuff" : "recvbuff"));
  EP_NCCL_TRY(open(c));
  if (c->send)
    addSend(c, c->root, c->send);
  else
    addRecv(c, c->root, c->recv);
  return finish(c);
}

ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  call_t c = callOf("ncclSend", EP_TAG_SEND, sendbuff, NULL, datatype, ncclSum, peer, comm);
  return epGroupRemember(sendOrRecv(&c, count, stream));
}

ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  call_t c = callOf("ncclRecv", EP_TAG_SEND, NULL, recvbuff, datatype, ncclSum, peer, comm);
  return epGroupRemember(sendOrRecv(&c, count, stream));
}
