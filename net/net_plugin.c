/* What NCCL calls: a table of functions over net_comm.h. Errors go through NCCL's logger. */
#include <stdlib.h>

#include "nccl_rma.h"
#include "net_comm.h"

#define MOST_BYTES ((size_t)1 << 40)

/* Of one communicator of NCCL. */
typedef struct {
  ep_net_settings_t settings;
  rma_logger_t log;
} instance_t;

/* Has what connect needs: NCCL 2.30 to 2.32 pass connect the context of its network plugin, not ours. */
typedef struct {
  instance_t instance;
  ep_net_listener_t *net;
} listener_t;

typedef struct {
  ep_net_comm_t *net;
  rma_logger_t log;
} comm_t;

typedef struct {
  comm_t *comm;
  int first, count;
  bool logged; /* of a failure in progress: it is called again and again */
} contexts_t;

#define SAY(log, level, subsystems, ...)                                                           \
  do {                                                                                             \
    if (log) (log)(level, subsystems, "net_plugin.c", __LINE__, __VA_ARGS__);                      \
  } while (0)

/* The result of a call, with its sentence in the log. */
static rma_result_t resultOf(int failed, rma_logger_t log, const char *why) {
  if (failed) SAY(log, RMA_LOG_WARN, RMA_LOG_ALL, "NET/Trefoil: %s", why);
  return failed ? RMA_SYSTEM_ERROR : RMA_SUCCESS;
}

static rma_result_t init(void **context, uint64_t commId, rma_logger_t log) {
  (void)commId;
  char why[EP_NET_WHY] = "no memory for a communicator of the network";
  instance_t *i = calloc(1, sizeof *i);
  if (!i || epNetSettings(getenv, &i->settings, why)) {
    free(i);
    return resultOf(-1, log, why);
  }
  i->log = log;
  SAY(log, RMA_LOG_INFO, RMA_LOG_NET, "NET/Trefoil: carrier %s, seed %lld",
      i->settings.carrier == EP_NET_TCP ? "tcp" : "copy", (long long)i->settings.seed);
  *context = i;
  return RMA_SUCCESS;
}

static rma_result_t finalize(void *context) {
  free(context);
  return RMA_SUCCESS;
}

static rma_result_t devices(int *count) {
  *count = 1;
  return RMA_SUCCESS;
}

static rma_result_t getProperties(int device, rma_properties_t *out) {
  static char name[] = "trefoil0";
  *out = (rma_properties_t){
      .name = name, .ptrSupport = RMA_PTR_HOST | RMA_PTR_CUDA, .speedMbps = 200000};
  out->guid = 0x74726566;
  out->port = 1;
  out->maxComms = 1 << 20;
  out->maxRecvs = EP_NET_DEPTH / 32;
  out->netDeviceType = RMA_DEVICE_PROXY;
  out->virtualDevice = (rma_virtual_device_t){1, {device}};
  out->maxP2pBytes = out->maxCollBytes = MOST_BYTES;
  out->maxMultiRequestSize = 1;
  out->railId = out->planeId = -1;
  return RMA_SUCCESS;
}

/* ---- Communicators ---- */

static rma_result_t listenFor(void *context, int device, void *handle, void **listener) {
  (void)device;
  instance_t *i = context;
  char why[EP_NET_WHY] = "no memory for a listener of the network";
  listener_t *l = calloc(1, sizeof *l);
  if (!l || epNetListen(&i->settings, handle, &l->net, why)) {
    free(l);
    return resultOf(-1, i->log, why);
  }
  l->instance = *i;
  *listener = l;
  return RMA_SUCCESS;
}

static rma_result_t closeListen(void *listener) {
  listener_t *l = listener;
  epNetListenClose(l->net);
  free(l);
  return RMA_SUCCESS;
}

static rma_result_t connectAll(void *context, void *handles[], int numRanks, int rank,
                               void *listener, void **out) {
  (void)context;
  const listener_t *l = listener;
  const instance_t *i = &l->instance;
  char why[EP_NET_WHY] = "no memory for a communicator of the network";
  comm_t *c = calloc(1, sizeof *c);
  if (!c || epNetConnect(&i->settings, l->net, handles, numRanks, rank, &c->net, why)) {
    free(c);
    return resultOf(-1, i->log, why);
  }
  c->log = i->log;
  *out = c;
  return RMA_SUCCESS;
}

static rma_result_t closeColl(void *comm) {
  comm_t *c = comm;
  epNetClose(c->net);
  free(c);
  return RMA_SUCCESS;
}

static rma_result_t createContext(void *comm, rma_config_t *config, void **out) {
  comm_t *c = comm;
  char why[EP_NET_WHY] = "no memory for a communicator of the network";
  contexts_t *x = calloc(1, sizeof *x);
  if (!x || epNetContexts(c->net, config->numContexts, &x->first, why)) {
    free(x);
    return resultOf(-1, c->log, why);
  }
  x->comm = c;
  x->count = config->numContexts;
  *out = x;
  return RMA_SUCCESS;
}

static rma_result_t destroyContext(void *rma) {
  contexts_t *x = rma;
  epNetForget(x->comm->net, x->first, x->count);
  free(x);
  return RMA_SUCCESS;
}

static rma_result_t regMrSym(void *comm, void *data, size_t bytes, int ptrType, uint64_t flags,
                             void **region) {
  comm_t *c = comm;
  char why[EP_NET_WHY];
  ep_net_region_t *r = NULL;
  const ep_net_memory_t memory = {data, bytes, ptrType == RMA_PTR_CUDA,
                                  (flags & RMA_SIGNAL_NEVER_RESET) != 0};
  int failed = epNetRegister(c->net, &memory, &r, why);
  if (!failed) *region = r;
  return resultOf(failed, c->log, why);
}

static rma_result_t deregMrSym(void *comm, void *region) {
  epNetDeregister(((comm_t *)comm)->net, region);
  return RMA_SUCCESS;
}

/* ---- Requests ---- */

static rma_result_t post(void *rma, int context, const ep_net_post_t *p, void **request) {
  contexts_t *x = rma;
  char why[EP_NET_WHY];
  ep_net_request_t *r = NULL;
  int failed = context < 0 || context >= x->count
                   ? epNetFail(why, "context %d is not in [0, %d)", context, x->count)
                   : epNetPost(x->comm->net, x->first + context, p, &r, why);
  if (!failed) *request = r;
  return resultOf(failed, x->comm->log, why);
}

static rma_result_t iput(void *rma, int context, uint64_t fromOffset, void *from, size_t bytes,
                         uint64_t toOffset, void *to, uint32_t rank, void **request) {
  ep_net_post_t p = {.local = from, .remote = to};
  p.op = (ep_net_op_t){.kind = EP_NET_PUT, .peer = (int)rank, .bytes = bytes};
  p.op.localOffset = fromOffset;
  p.op.remoteOffset = toOffset;
  return post(rma, context, &p, request);
}

static rma_result_t iputSignal(void *rma, int context, uint64_t fromOffset, void *from,
                               size_t bytes, uint64_t toOffset, void *to, uint32_t rank,
                               uint64_t signalOffset, void *signal, uint64_t value, uint32_t op,
                               bool strong, void **request) {
  ep_net_post_t p = {.local = from, .remote = to, .signal = signal};
  p.op = (ep_net_op_t){.kind = EP_NET_PUT, .peer = (int)rank, .bytes = bytes};
  p.op.localOffset = fromOffset;
  p.op.remoteOffset = toOffset;
  p.op.hasSignal = true;
  p.op.strong = strong;
  p.op.signalOffset = signalOffset;
  p.op.add = op == RMA_SIGNAL_INC ? 1 : value;
  return post(rma, context, &p, request);
}

static rma_result_t iget(void *rma, int context, uint64_t remoteOffset, void *remote, size_t bytes,
                         uint64_t localOffset, void *local, uint32_t rank, void **request) {
  ep_net_post_t p = {.local = local, .remote = remote};
  p.op = (ep_net_op_t){.kind = EP_NET_GET, .peer = (int)rank, .bytes = bytes};
  p.op.localOffset = localOffset;
  p.op.remoteOffset = remoteOffset;
  return post(rma, context, &p, request);
}

static rma_result_t iflush(void *rma, int context, void *region, uint32_t rank, void **request) {
  (void)region;
  const ep_net_post_t p = {.op = {.kind = EP_NET_FLUSH, .peer = (int)rank}};
  return post(rma, context, &p, request);
}

static rma_result_t test(void *comm, void *request, int *done) {
  char why[EP_NET_WHY];
  bool is = false;
  int failed = epNetTest(((comm_t *)comm)->net, request, &is, why);
  *done = is;
  return failed ? RMA_SYSTEM_ERROR : RMA_SUCCESS; /* progress has logged why */
}

static rma_result_t progress(void *rma) {
  contexts_t *x = rma;
  char why[EP_NET_WHY];
  if (!epNetProgress(x->comm->net, why)) return RMA_SUCCESS;
  rma_result_t result = x->logged ? RMA_SYSTEM_ERROR : resultOf(-1, x->comm->log, why);
  x->logged = true;
  return result;
}

static rma_result_t queryLastError(void *rma, bool *failed) {
  *failed = epNetFailed(((contexts_t *)rma)->comm->net);
  return RMA_SUCCESS;
}

extern const rma_plugin_t ncclRmaPlugin_v14;
__attribute__((visibility("default"))) const rma_plugin_t ncclRmaPlugin_v14 = {
    "Trefoil",  init, devices,    getProperties,  listenFor, connectAll,     createContext,
    regMrSym,   NULL, deregMrSym, destroyContext, closeColl, closeListen,    iput,
    iputSignal, iget, iflush,     test,           progress,  queryLastError, finalize};
