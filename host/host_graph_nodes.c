/* Graphs as objects: their nodes, in the order of capture. */
#include <stdlib.h>
#include <string.h>

#include "host_internal.h"

typedef struct CUgraphNode_st node_t;

static pthread_mutex_t freeLock = PTHREAD_MUTEX_INITIALIZER;
static cudaGraph_t freeGraphs;

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

node_t *epGraphAdd(cudaGraph_t graph, ep_stream_op_t *op, node_t **deps, size_t numDeps) {
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

bool epGraphHas(cudaGraph_t graph, const node_t *node) {
  for (size_t i = 0; i < graph->numNodes; i++)
    if (graph->nodes[i] == node) return true;
  return false;
}

void epGraphFree(cudaGraph_t graph) {
  atomic_store(&graph->magic, EP_DEAD_MAGIC);
  for (size_t i = 0; i < graph->numNodes; i++) {
    node_t *node = graph->nodes[i];
    if (node->op) epOpFree(node->op);
    free(node->deps);
    free(node);
  }
  epUserRefsDrop(graph->objects);
  graph->objects = NULL;
  free(graph->nodes);
  graph->nodes = NULL;
  graph->numNodes = graph->maxNodes = 0;
  pthread_mutex_lock(&freeLock);
  graph->nextFree = freeGraphs;
  freeGraphs = graph;
  pthread_mutex_unlock(&freeLock);
}
