/* Groups: the configuration's rules first, then the backend's collective part. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/object.h"
#include "api/preflight_call.h"
#include "api/range.h"

void epLog(ncclEpGroup_t g, const char *format, ...) {
  if (!g->debug) return;
  char line[600];
  va_list args;
  va_start(args, format);
  vsnprintf(line, sizeof line, format, args);
  va_end(args);
  fprintf(stderr, "NCCL EP rank %d: %s\n", g->rank, line);
}

/* 0: the text is no number of milliseconds, as the host runtime reads it. */
static int readTimeout(const char *text, uint64_t *ns) {
  if (!text || !*text) return 1;
  char *end;
  errno = 0;
  long long ms = strtoll(text, &end, 10);
  if (errno || *end) return 0;
  if (ms > 0) *ns = ms > INT64_MAX / 1000000 ? INT64_MAX : (uint64_t)ms * 1000000u;
  return 1;
}

/* A misspelt NCCL_EP_LL_COMBINE would change the bits of sums without a word: it is refused. */
static trefoil_result_t readEnvironment(ncclEpGroup_t g) {
  const char *timeout = getenv("NCCL_EP_TIMEOUT_MS"), *partial = getenv("NCCL_EP_LL_COMBINE");
  const char *debug = getenv("NCCL_EP_DEBUG"), *way = getenv("NCCL_EP_LL_DISPATCH");
  g->llPartial = partial && !strcmp(partial, "partial");
  EP_CHECK(
      g->llPartial || !partial || !*partial || !strcmp(partial, "exact"), TREFOIL_INVALID_ARGUMENT,
      "ncclEpCreateGroup: NCCL_EP_LL_COMBINE is '%.40s'; must be exact, partial or unset", partial);
  g->llRails = way && !strcmp(way, "rails") && !g->limits.enableMask;
  EP_CHECK(!way || !*way || !strcmp(way, "rails") || !strcmp(way, "mesh"), TREFOIL_INVALID_ARGUMENT,
           "ncclEpCreateGroup: NCCL_EP_LL_DISPATCH is '%.40s'; must be mesh, rails or unset", way);
  g->debug = debug && *debug && strcmp(debug, "0") != 0;
  const char *check = getenv("NCCL_EP_CHECK_TENSORS");
  g->checkTensors =
      epBackend.kind == EP_BACKEND_CPU || (check && *check && strcmp(check, "0") != 0);
  EP_CHECK(!g->checkTensors || ncclCommCuDevice(g->comm, &g->device) == ncclSuccess,
           TREFOIL_INVALID_ARGUMENT, "ncclEpCreateGroup: comm tells no device");
  g->timeoutNs = g->config.timeout_ns ? g->config.timeout_ns : 100000000000ull;
  if (!readTimeout(timeout, &g->timeoutNs))
    epLog(g, "NCCL_EP_TIMEOUT_MS is '%.40s', no whole number of milliseconds: ignored", timeout);
  return TREFOIL_OK;
}

static void logGroup(ncclEpGroup_t g) {
  const ep_group_limits_t *l = &g->limits;
  if (g->config.version != 1 && g->config.version != 2) {
    epLog(g, "config.version is %u; this library knows 1 and 2 and goes by the struct's size",
          g->config.version);
  }
  epLog(g,
        "group %p: %s on %s, %d ranks, %d a node, experts %u, tokens %u, token bytes %u, max_recv "
        "%u%s",
        (void *)g, epIsHt(g) ? "high throughput" : "low latency", epBackend.name, g->numRanks,
        g->ranksPerNode, l->numExperts, l->maxTokens, l->maxTokenBytes, l->maxRecv,
        epIsHt(g)      ? g->numRanks > g->ranksPerNode ? ", hierarchical: more than one node"
                                                       : ", direct: one node"
        : g->llPartial ? ", partial sums: NCCL_EP_LL_COMBINE"
                       : ", exact sums: the default");
}

/* num_ranks and ranks_per_node come from the communicator: name it instead. */
static trefoil_result_t checkLimits(ncclEpGroup_t g) {
  ep_verdict_t verdict;
  if (epCheckGroupLimits(&g->limits, g->numRanks, g->ranksPerNode, &verdict)) return TREFOIL_OK;
  return epFail(verdict.code, "ncclEpCreateGroup: %s", verdict.reason);
}

static trefoil_result_t createGroup(ncclEpGroup_t *out, ncclComm_t comm,
                                    const ncclEpGroupConfig_t *config) {
  EP_CHECK(out, TREFOIL_INVALID_ARGUMENT, "ncclEpCreateGroup: group is NULL");
  EP_CHECK(comm, TREFOIL_INVALID_ARGUMENT, "ncclEpCreateGroup: comm is NULL");
  ncclEpGroupConfig_t copy;
  EP_TRY(epCopyStruct(&copy, config, EP_STRUCT(ncclEpGroupConfig_t, NCCL_EP_GROUP_CONFIG_V1_SIZE)));
  struct ncclEpGroup like = {.comm = comm, .config = copy};
  epLimitsOf(&copy, &like.limits);
  EP_TRY(epBackend.topology(comm, &like.rank, &like.numRanks, &like.ranksPerNode));
  EP_TRY(checkLimits(&like));
  EP_TRY(readEnvironment(&like));
  struct ncclEpGroup *g = calloc(1, EP_GROUP_OBJECT_BYTES);
  EP_CHECK(g, TREFOIL_SYSTEM_ERROR, "ncclEpCreateGroup: out of memory");
  memcpy(g, &like, sizeof *g);
  g->allocated[0][EP_MEMORY_HOST] = EP_GROUP_OBJECT_BYTES;
  trefoil_result_t result = epBackend.groupCreate(g);
  if (result == TREFOIL_OK) {
    result = epRegister(g, EP_OBJECT_GROUP);
    if (result != TREFOIL_OK) epBackend.groupDestroy(g);
  }
  if (result != TREFOIL_OK) {
    free(g);
    return result;
  }
  logGroup(g);
  *out = g;
  return TREFOIL_OK;
}

ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *group, ncclComm_t comm,
                               const ncclEpGroupConfig_t *config) {
  EP_RANGE();
  if (comm) epBackend.callBegin(comm);
  trefoil_result_t result = createGroup(group, comm, config);
  if (comm && result != TREFOIL_OK) epBackend.callFail(comm, result, trefoilLastError());
  return (ncclResult_t)result;
}

static trefoil_result_t destroyGroup(ncclEpGroup_t g) {
  EP_TRY(epCheckGroup(g, "ncclEpGroupDestroy"));
  EP_CHECK(g->numHandles == 0, TREFOIL_INVALID_USAGE,
           "ncclEpGroupDestroy: %d handles of the group are alive; destroy them first",
           g->numHandles);
  EP_TRY(epBackend.checkComm(g));
  trefoil_result_t result = epBackend.groupDestroy(g);
  epUnregister(g, EP_OBJECT_GROUP);
  free(g);
  return result;
}

ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t group) {
  EP_RANGE();
  return group ? (ncclResult_t)destroyGroup(group) : ncclSuccess;
}
