/* Graphs: nodes in the order of capture, which is a topological order, so a launch runs them one after
 * another on the stream. An executable graph has a program: its own copies of the work. A launch holds
 * the program, so destroying or updating the executable graph does not touch launches under way.
 * Launches of one executable graph are ordered one behind another, on whatever streams they are. */
#include <stdlib.h>
#include <string.h>

#include "host_internal.h"

typedef struct CUgraphNode_st node_t;

typedef struct {
  _Atomic int refs;
  ep_stream_op_t *ops; /* copies, in order */
  size_t numOps;
  ep_user_refs_t *objects;
  uint32_t *shape; /* of each node: its type, how many it comes after, and which */
  size_t numNodes, shapeWords;
} program_t;

struct CUgraphExec_st {
  _Atomic uint32_t magic;
  program_t *program;
  unsigned long long flags;
  pthread_mutex_t lock;    /* program, last launch */
  cudaStream_t lastStream; /* of the last launch */
  uint64_t lastSeq;
  cudaGraphExec_t nextFree;
};

typedef struct {
  program_t *program;
  uint64_t tickets[];
} launch_t;

static pthread_mutex_t freeLock = PTHREAD_MUTEX_INITIALIZER;
static cudaGraphExec_t freeExecs;

cudaError_t cudaGraphCreate(cudaGraph_t *pGraph, unsigned int flags) {
  EP_CUDA_CHECK(pGraph && !flags, cudaErrorInvalidValue,
                "cudaGraphCreate: pGraph is NULL, or flags are not 0");
  cudaGraph_t graph = epGraphNew();
  EP_CUDA_CHECK(graph, cudaErrorMemoryAllocation, "cudaGraphCreate: out of memory");
  *pGraph = graph;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  EP_CUDA_TRY(epGraphGet(graph, "cudaGraphDestroy"));
  epGraphFree(graph);
  return cudaSuccess;
}

/* nodes NULL: *numNodes = their number. Else up to *numNodes are given, the rest of the array is NULL. */
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *numNodes) {
  EP_CUDA_TRY(epGraphGet(graph, "cudaGraphGetNodes"));
  EP_CUDA_CHECK(numNodes, cudaErrorInvalidValue, "cudaGraphGetNodes: numNodes is NULL");
  for (size_t i = 0; nodes && i < *numNodes; i++)
    nodes[i] = i < graph->numNodes ? graph->nodes[i] : NULL;
  if (!nodes || *numNodes > graph->numNodes) *numNodes = graph->numNodes;
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, enum cudaGraphNodeType *pType) {
  EP_CUDA_CHECK(node && node->magic == EP_NODE_MAGIC && pType, cudaErrorInvalidValue,
                "cudaGraphNodeGetType: pType is NULL, or node is no live node");
  *pType = node->op ? node->op->type : cudaGraphNodeTypeEmpty;
  return cudaSuccess;
}

/* ---- Programs ---- */

static void dropProgram(program_t *p) {
  if (!p || atomic_fetch_sub(&p->refs, 1) != 1) return;
  for (size_t i = 0; i < p->numOps; i++)
    if (p->ops[i].release) p->ops[i].release(p->ops[i].shared);
  epUserRefsDrop(p->objects);
  free(p->ops);
  free(p->shape);
  free(p);
}

static uint32_t typeOf(const node_t *node) {
  return (uint32_t)(node->op ? node->op->type : cudaGraphNodeTypeEmpty);
}

static int compareIndices(const void *a, const void *b) {
  uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  return x < y ? -1 : x > y;
}

static bool describe(program_t *p, cudaGraph_t graph) {
  size_t words = 1;
  for (size_t i = 0; i < graph->numNodes; i++) words += 2 + graph->nodes[i]->numDeps;
  p->shape = malloc(words * sizeof *p->shape);
  if (!p->shape) return false;
  p->numNodes = graph->numNodes;
  for (size_t i = 0; i < graph->numNodes; i++) {
    const node_t *node = graph->nodes[i];
    p->shape[p->shapeWords++] = typeOf(node);
    p->shape[p->shapeWords++] = (uint32_t)node->numDeps;
    for (size_t d = 0; d < node->numDeps; d++)
      p->shape[p->shapeWords + d] = (uint32_t)node->deps[d]->idx;
    qsort(p->shape + p->shapeWords, node->numDeps, sizeof *p->shape, compareIndices);
    p->shapeWords += node->numDeps;
  }
  return true;
}

static program_t *newProgram(cudaGraph_t graph, unsigned long long flags) {
  program_t *p = calloc(1, sizeof *p);
  if (!p) return NULL;
  atomic_store(&p->refs, 1);
  p->ops = calloc(graph->numNodes + 1, sizeof *p->ops);
  if (!p->ops || !describe(p, graph) || !epUserRefsCopy(graph->objects, &p->objects)) {
    dropProgram(p);
    return NULL;
  }
  for (size_t i = 0; i < graph->numNodes; i++) {
    ep_stream_op_t *op = graph->nodes[i]->op;
    if (!op) continue;
    if (op->retain) op->retain(op->shared);
    p->ops[p->numOps] = *op;
    if (op->type == cudaGraphNodeTypeMemAlloc)
      p->ops[p->numOps].u.autoFree = (flags & cudaGraphInstantiateFlagAutoFreeOnLaunch) != 0;
    p->numOps++;
  }
  return p;
}

static cudaGraphExec_t newExec(void) {
  pthread_mutex_lock(&freeLock);
  cudaGraphExec_t exec = freeExecs;
  if (exec)
    freeExecs = exec->nextFree;
  else if ((exec = calloc(1, sizeof *exec)))
    pthread_mutex_init(&exec->lock, NULL);
  pthread_mutex_unlock(&freeLock);
  if (exec) exec->lastStream = NULL;
  return exec;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *pGraphExec, cudaGraph_t graph,
                                          unsigned long long flags) {
  EP_CUDA_CHECK(pGraphExec, cudaErrorInvalidValue, "cudaGraphInstantiate: pGraphExec is NULL");
  EP_CUDA_TRY(epGraphGet(graph, "cudaGraphInstantiate"));
  EP_CUDA_CHECK(!(flags & ~0xfull) && !(flags & cudaGraphInstantiateFlagDeviceLaunch),
                cudaErrorInvalidValue, "cudaGraphInstantiate: flags 0x%llx", flags);
  program_t *program = newProgram(graph, flags);
  cudaGraphExec_t exec = program ? newExec() : NULL;
  if (!exec) dropProgram(program);
  EP_CUDA_CHECK(exec, cudaErrorMemoryAllocation, "cudaGraphInstantiate: out of memory");
  exec->program = program;
  exec->flags = flags;
  atomic_store(&exec->magic, EP_EXEC_MAGIC);
  *pGraphExec = exec;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *pGraphExec, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(pGraphExec, graph, flags);
}

static cudaError_t checkExec(cudaGraphExec_t exec, const char *func) {
  EP_CUDA_CHECK(exec && ((uintptr_t)exec & 7) == 0 && atomic_load(&exec->magic) == EP_EXEC_MAGIC,
                cudaErrorInvalidValue, "%s: %p is not a live executable graph", func, (void *)exec);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graphExec) {
  EP_CUDA_TRY(checkExec(graphExec, "cudaGraphExecDestroy"));
  pthread_mutex_lock(&graphExec->lock);
  atomic_store(&graphExec->magic, EP_DEAD_MAGIC);
  program_t *program = graphExec->program;
  graphExec->program = NULL;
  pthread_mutex_unlock(&graphExec->lock);
  pthread_mutex_lock(&freeLock);
  graphExec->nextFree = freeExecs;
  freeExecs = graphExec;
  pthread_mutex_unlock(&freeLock);
  dropProgram(program);
  return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t graphExec, cudaStream_t stream) {
  cudaStream_t s;
  EP_CUDA_TRY(epStreamResolve(stream, "cudaGraphUpload", &s));
  return checkExec(graphExec, "cudaGraphUpload");
}

/* What differs first between two programs, and in which node of the second. */
static enum cudaGraphExecUpdateResult difference(const program_t *a, const program_t *b,
                                                 size_t *node) {
  size_t at = 0;
  *node = SIZE_MAX;
  if (a->numNodes != b->numNodes) return cudaGraphExecUpdateErrorTopologyChanged;
  for (size_t i = 0; i < a->numNodes; i++) {
    const uint32_t *x = a->shape + at, *y = b->shape + at;
    *node = i;
    if (x[1] != y[1] || memcmp(x + 2, y + 2, x[1] * sizeof *x))
      return cudaGraphExecUpdateErrorTopologyChanged;
    if (x[0] != y[0]) return cudaGraphExecUpdateErrorNodeTypeChanged;
    if (x[0] == cudaGraphNodeTypeMemAlloc || x[0] == cudaGraphNodeTypeMemFree)
      return cudaGraphExecUpdateErrorNotSupported;
    at += 2 + x[1];
  }
  return cudaGraphExecUpdateSuccess;
}

/* The work of another graph of the same shape takes the place of what launches from now on run. */
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t hGraphExec, cudaGraph_t hGraph,
                                cudaGraphExecUpdateResultInfo *resultInfo) {
  EP_CUDA_CHECK(resultInfo, cudaErrorInvalidValue, "cudaGraphExecUpdate: resultInfo is NULL");
  *resultInfo = (cudaGraphExecUpdateResultInfo){cudaGraphExecUpdateError, NULL, NULL};
  EP_CUDA_TRY(checkExec(hGraphExec, "cudaGraphExecUpdate"));
  EP_CUDA_TRY(epGraphGet(hGraph, "cudaGraphExecUpdate"));
  program_t *program = newProgram(hGraph, hGraphExec->flags);
  EP_CUDA_CHECK(program, cudaErrorMemoryAllocation, "cudaGraphExecUpdate: out of memory");
  size_t node;
  pthread_mutex_lock(&hGraphExec->lock);
  enum cudaGraphExecUpdateResult result = difference(hGraphExec->program, program, &node);
  size_t before = hGraphExec->program->numNodes;
  program_t *over = program;
  if (result == cudaGraphExecUpdateSuccess) {
    over = hGraphExec->program;
    hGraphExec->program = program;
  }
  pthread_mutex_unlock(&hGraphExec->lock);
  dropProgram(over);
  resultInfo->result = result;
  if (result == cudaGraphExecUpdateSuccess) return cudaSuccess;
  if (node == SIZE_MAX)
    return epCudaFail(cudaErrorGraphExecUpdateFailure,
                      "cudaGraphExecUpdate: the executable graph has %zu nodes, the graph %zu",
                      before, hGraph->numNodes);
  resultInfo->errorNode = hGraph->nodes[node];
  return epCudaFail(cudaErrorGraphExecUpdateFailure, "cudaGraphExecUpdate: node %zu %s", node,
                    result == cudaGraphExecUpdateErrorTopologyChanged ? "comes after other nodes"
                    : result == cudaGraphExecUpdateErrorNodeTypeChanged
                        ? "has another type"
                        : "allocates or frees memory, which cannot be updated");
}

static uint64_t prepareLaunch(ep_stream_op_t *op) {
  launch_t *launch = op->shared;
  for (size_t i = 0; i < launch->program->numOps; i++) {
    ep_stream_op_t *node = &launch->program->ops[i];
    launch->tickets[i] = node->prepare ? node->prepare(node) : 0;
  }
  return 0;
}

static void runLaunch(ep_stream_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)ticket;
  launch_t *launch = op->shared;
  for (size_t i = 0; i < launch->program->numOps; i++)
    launch->program->ops[i].run(&launch->program->ops[i], stream, launch->tickets[i]);
}

static void releaseLaunch(void *shared) {
  launch_t *launch = shared;
  dropProgram(launch->program);
  free(launch);
}

static cudaError_t launchLocked(cudaGraphExec_t exec, cudaStream_t s) {
  launch_t *launch = calloc(1, sizeof *launch + exec->program->numOps * sizeof(uint64_t));
  ep_stream_op_t *op = launch ? epOpNew(cudaGraphNodeTypeGraph, runLaunch) : NULL;
  ep_stream_op_t *after = op ? epOpNew(cudaGraphNodeTypeWaitEvent, epRunAfter) : NULL;
  if (!after) {
    free(op);
    free(launch);
    return epCudaFail(cudaErrorMemoryAllocation, "cudaGraphLaunch: out of memory");
  }
  atomic_fetch_add(&exec->program->refs, 1);
  launch->program = exec->program;
  op->shared = launch;
  op->release = releaseLaunch;
  op->prepare = prepareLaunch;
  cudaError_t error = cudaSuccess;
  if (exec->lastStream && exec->lastStream != s) {
    after->u.after.stream = exec->lastStream;
    after->u.after.seq = exec->lastSeq;
    error = epEnqueue(s, after, "cudaGraphLaunch");
  } else {
    epOpFree(after);
  }
  if (error == cudaSuccess)
    error = epEnqueue(s, op, "cudaGraphLaunch");
  else
    epOpFree(op);
  if (error == cudaSuccess) {
    exec->lastStream = s;
    exec->lastSeq = atomic_load(&s->submitted);
  }
  return error;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graphExec, cudaStream_t stream) {
  cudaStream_t s;
  EP_CUDA_TRY(checkExec(graphExec, "cudaGraphLaunch"));
  EP_CUDA_TRY(epStreamResolve(stream, "cudaGraphLaunch", &s));
  EP_CUDA_CHECK(!epCapturing(s), cudaErrorNotSupported,
                "cudaGraphLaunch into a capturing stream is not implemented");
  pthread_mutex_lock(&graphExec->lock);
  cudaError_t error = launchLocked(graphExec, s);
  pthread_mutex_unlock(&graphExec->lock);
  return error;
}
