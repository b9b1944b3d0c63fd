/* Graphs: nodes in the order of capture, which is a topological order, so a launch runs them one after
 * another on the stream. An executable graph holds its own copies of the work; a launch holds the
 * executable graph, so destroying it does not touch launches under way. Launches of one executable
 * graph are ordered one behind another, on whatever streams they are. */
#include <stdlib.h>
#include <string.h>

#include "host_internal.h"

typedef struct CUgraphNode_st node_t;

struct CUgraphExec_st {
  _Atomic uint32_t magic;
  _Atomic int refs;
  ep_op_t *ops; /* copies, in order */
  size_t numOps;
  pthread_mutex_t lock;
  cudaStream_t lastStream; /* of the last launch */
  uint64_t lastSeq;
  cudaGraphExec_t nextFree;
};

typedef struct {
  cudaGraphExec_t exec;
  uint64_t tickets[];
} launch_t;

static pthread_mutex_t freeLock = PTHREAD_MUTEX_INITIALIZER;
static cudaGraph_t freeGraphs;
static cudaGraphExec_t freeExecs;

cudaGraph_t epGraphNew(void) {
  pthread_mutex_lock(&freeLock);
  cudaGraph_t graph = freeGraphs;
  if (graph) freeGraphs = graph->nextFree;
  pthread_mutex_unlock(&freeLock);
  if (!graph && !(graph = calloc(1, sizeof *graph))) return NULL;
  graph->numNodes = 0;
  atomic_store(&graph->magic, EP_GRAPH_MAGIC);
  return graph;
}

node_t *epGraphAdd(cudaGraph_t graph, ep_op_t *op, node_t **deps, size_t numDeps) {
  if (graph->numNodes == graph->maxNodes) {
    size_t more = graph->maxNodes ? graph->maxNodes * 2 : 16;
    node_t **grown = realloc(graph->nodes, more * sizeof *grown);
    if (!grown) return NULL;
    graph->nodes = grown;
    graph->maxNodes = more;
  }
  node_t *node = calloc(1, sizeof *node);
  node_t **copies = malloc((numDeps + 1) * sizeof *copies);
  if (!node || !copies) {
    free(node);
    free(copies);
    return NULL;
  }
  if (numDeps) memcpy(copies, deps, numDeps * sizeof *copies);
  *node = (node_t){EP_NODE_MAGIC, graph->numNodes, op, copies, numDeps};
  graph->nodes[graph->numNodes++] = node;
  return node;
}

void epGraphFree(cudaGraph_t graph) {
  atomic_store(&graph->magic, EP_DEAD_MAGIC);
  for (size_t i = 0; i < graph->numNodes; i++) {
    node_t *node = graph->nodes[i];
    if (node->op) epOpFree(node->op);
    free(node->deps);
    free(node);
  }
  free(graph->nodes);
  graph->nodes = NULL;
  graph->numNodes = graph->maxNodes = 0;
  pthread_mutex_lock(&freeLock);
  graph->nextFree = freeGraphs;
  freeGraphs = graph;
  pthread_mutex_unlock(&freeLock);
}

static cudaError_t checkGraph(cudaGraph_t graph, const char *func) {
  EP_CUDA_CHECK(graph && ((uintptr_t)graph & 7) == 0 &&
                    atomic_load(&graph->magic) == EP_GRAPH_MAGIC,
                cudaErrorInvalidValue, "%s: %p is not a live graph", func, (void *)graph);
  return cudaSuccess;
}

cudaError_t cudaGraphCreate(cudaGraph_t *pGraph, unsigned int flags) {
  EP_CUDA_CHECK(pGraph && !flags, cudaErrorInvalidValue,
                "cudaGraphCreate: pGraph is NULL, or flags are not 0");
  cudaGraph_t graph = epGraphNew();
  EP_CUDA_CHECK(graph, cudaErrorMemoryAllocation, "cudaGraphCreate: out of memory");
  *pGraph = graph;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  EP_CUDA_TRY(checkGraph(graph, "cudaGraphDestroy"));
  epGraphFree(graph);
  return cudaSuccess;
}

/* nodes NULL: *numNodes = their number. Else up to *numNodes are given, the rest of the array is NULL. */
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *numNodes) {
  EP_CUDA_TRY(checkGraph(graph, "cudaGraphGetNodes"));
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

static void dropExec(cudaGraphExec_t exec) {
  if (atomic_fetch_sub(&exec->refs, 1) != 1) return;
  for (size_t i = 0; i < exec->numOps; i++)
    if (exec->ops[i].release) exec->ops[i].release(exec->ops[i].shared);
  free(exec->ops);
  exec->ops = NULL;
  exec->numOps = 0;
  pthread_mutex_lock(&freeLock);
  exec->nextFree = freeExecs;
  freeExecs = exec;
  pthread_mutex_unlock(&freeLock);
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
  EP_CUDA_TRY(checkGraph(graph, "cudaGraphInstantiate"));
  EP_CUDA_CHECK(!(flags & ~0xfull) && !(flags & cudaGraphInstantiateFlagDeviceLaunch),
                cudaErrorInvalidValue, "cudaGraphInstantiate: flags 0x%llx", flags);
  ep_op_t *ops = calloc(graph->numNodes + 1, sizeof *ops);
  cudaGraphExec_t exec = ops ? newExec() : NULL;
  if (!exec) free(ops);
  EP_CUDA_CHECK(exec, cudaErrorMemoryAllocation, "cudaGraphInstantiate: out of memory");
  for (size_t i = 0; i < graph->numNodes; i++) {
    ep_op_t *op = graph->nodes[i]->op;
    if (!op) continue;
    if (op->retain) op->retain(op->shared);
    ops[exec->numOps++] = *op;
  }
  exec->ops = ops;
  atomic_store(&exec->refs, 1);
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
  atomic_store(&graphExec->magic, EP_DEAD_MAGIC);
  dropExec(graphExec);
  return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t graphExec, cudaStream_t stream) {
  cudaStream_t s;
  EP_CUDA_TRY(epStreamResolve(stream, "cudaGraphUpload", &s));
  return checkExec(graphExec, "cudaGraphUpload");
}

static uint64_t prepareLaunch(ep_op_t *op) {
  launch_t *launch = op->shared;
  for (size_t i = 0; i < launch->exec->numOps; i++) {
    ep_op_t *node = &launch->exec->ops[i];
    launch->tickets[i] = node->prepare ? node->prepare(node) : 0;
  }
  return 0;
}

static void runLaunch(ep_op_t *op, cudaStream_t stream, uint64_t ticket) {
  (void)ticket;
  launch_t *launch = op->shared;
  for (size_t i = 0; i < launch->exec->numOps; i++)
    launch->exec->ops[i].run(&launch->exec->ops[i], stream, launch->tickets[i]);
}

static void releaseLaunch(void *shared) {
  launch_t *launch = shared;
  dropExec(launch->exec);
  free(launch);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graphExec, cudaStream_t stream) {
  cudaStream_t s;
  EP_CUDA_TRY(checkExec(graphExec, "cudaGraphLaunch"));
  EP_CUDA_TRY(epStreamResolve(stream, "cudaGraphLaunch", &s));
  EP_CUDA_CHECK(!epCapturing(s), cudaErrorNotSupported,
                "cudaGraphLaunch into a capturing stream is not implemented");
  launch_t *launch = calloc(1, sizeof *launch + graphExec->numOps * sizeof(uint64_t));
  ep_op_t *op = launch ? epOpNew(cudaGraphNodeTypeGraph, runLaunch) : NULL;
  ep_op_t *after = op ? epOpNew(cudaGraphNodeTypeWaitEvent, epRunAfter) : NULL;
  if (!after) {
    free(op);
    free(launch);
    return epCudaFail(cudaErrorMemoryAllocation, "cudaGraphLaunch: out of memory");
  }
  atomic_fetch_add(&graphExec->refs, 1);
  launch->exec = graphExec;
  op->shared = launch;
  op->release = releaseLaunch;
  op->prepare = prepareLaunch;
  cudaError_t error = cudaSuccess;
  pthread_mutex_lock(&graphExec->lock);
  if (graphExec->lastStream && graphExec->lastStream != s) {
    after->u.after.stream = graphExec->lastStream;
    after->u.after.seq = graphExec->lastSeq;
    error = epEnqueue(s, after, "cudaGraphLaunch");
  } else {
    epOpFree(after);
  }
  if (error == cudaSuccess)
    error = epEnqueue(s, op, "cudaGraphLaunch");
  else
    epOpFree(op);
  if (error == cudaSuccess) {
    graphExec->lastStream = s;
    graphExec->lastSeq = atomic_load(&s->submitted);
  }
  pthread_mutex_unlock(&graphExec->lock);
  return error;
}
