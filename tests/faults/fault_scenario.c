#include "fault_scenario.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <nccl_device.h>

#include "../api/step.h"
#include "trefoil_host.h"

/* Whether a call went well; if not, the first time its sentence is kept. */
static int good(player_t *p, int ok, const char *call, const char *sentence) {
  if (ok) return 1;
  if (!p->faulty || !sentence || !*sentence) p->out->bad = 1;
  if (!p->out->sentence[0])
    snprintf(p->out->sentence, sizeof p->out->sentence, "run %d: %s: %s", p->run, call,
             sentence && *sentence ? sentence : "NO SENTENCE");
  p->out->failed = 1;
  return 0;
}

#define HOST(p, call) good((p), (call) == 0, #call, trefoilHostLastError())
#define EP(p, call)   good((p), (call) == ncclSuccess, #call, ncclEpGetLastError())
#define STEP(p, call) good((p), (call), #call, ncclEpGetLastError())

static int compared(player_t *p, const char *difference) {
  if (!*difference) return 1;
  p->out->bad = 1;
  snprintf(p->out->sentence, sizeof p->out->sentence, "run %d: differs: %s", p->run, difference);
  return 0;
}

/* Queued operations have ended; what failed is told by the group's next call. */
static int settled(player_t *p, step_data_t *d, ncclEpHandle_t h, cudaStream_t stream) {
  return HOST(p, cudaStreamSynchronize(stream)) && STEP(p, stepUpdate(d, h, stream)) &&
         HOST(p, cudaStreamSynchronize(stream));
}

static int doOperations(player_t *p, step_data_t *d, ncclEpHandle_t h, cudaStream_t stream) {
  return STEP(p, stepUpdate(d, h, stream)) && STEP(p, stepDispatch(d, h, stream)) &&
         settled(p, d, h, stream) && compared(p, stepCompareDispatch(d)) &&
         STEP(p, stepDispatch(d, h, stream)) && STEP(p, stepCombine(d, h, stream)) &&
         settled(p, d, h, stream) && compared(p, stepCompareCombine(d));
}

static void doStep(player_t *p, trefoil_mode_t mode, ncclComm_t comm, cudaStream_t stream) {
  step_case_t c = {
      .mode = mode, .topk = 2, .numExperts = 6, .maxTokens = 5, .width = 16, .seed = 9};
  if (mode >= TREFOIL_HT_FLAT) c.maxRecv = R * 5 * 2;
  faultPause(1); /* its tensors are pinned memory of the host runtime */
  step_data_t *d = stepMake(&c, p->rank, R, R);
  faultPause(0);
  ncclEpGroupConfig_t config = stepGroupConfig(&c, R);
  ncclEpGroup_t group = NULL;
  ncclEpHandle_t h = NULL;
  if (EP(p, ncclEpCreateGroup(&group, comm, &config))) {
    p->out->grouped |= p->faulty;
    if (EP(p, ncclEpInitHandle(&h, group, stepLayout(&c), NULL, 2, NULL)))
      doOperations(p, d, h, stream);
  }
  /* Destroying may be what fails: then it is done again. */
  if (h && !EP(p, ncclEpHandleDestroy(h))) (void)ncclEpHandleDestroy(h);
  if (group && !EP(p, ncclEpGroupDestroy(group))) (void)ncclEpGroupDestroy(group);
  faultPause(1);
  stepFree(d);
  faultPause(0);
}

static void doWindow(player_t *p, ncclComm_t comm, cudaStream_t stream) {
  ncclWindow_t win = NULL;
  ncclComm_t part = NULL;
  int *mem = NULL, *peer, sum = p->rank;
  if (HOST(p, ncclMemAlloc((void **)&mem, 65536)) &&
      HOST(p, ncclCommWindowRegister(comm, mem, 65536, &win, 0)) &&
      HOST(p, ncclGetPeerDevicePointer(win, 0, (p->rank + 1) % R, (void **)&peer)))
    atomic_fetch_add((_Atomic int *)peer, 1);
  if (HOST(p, ncclAllReduce(&sum, &sum, 1, ncclInt32, ncclSum, comm, stream)) &&
      HOST(p, cudaStreamSynchronize(stream)))
    good(p, sum == 3, "the sum", "is wrong");
  if (HOST(p, ncclCommSplit(comm, 0, p->rank, &part, NULL))) HOST(p, ncclCommDestroy(part));
  if (win) HOST(p, ncclCommWindowDeregister(comm, win));
  if (mem) HOST(p, ncclMemFree(mem));
}

/* A graph over two streams, with copies from pageable memory and a collective, launched twice. */
static int captureAll(player_t *p, ncclComm_t comm, cudaStream_t stream, cudaStream_t other,
                      cudaEvent_t event, int *device) {
  int host[4] = {1, 2, 3, 4};
  return HOST(p, cudaEventRecord(event, stream)) && HOST(p, cudaStreamWaitEvent(other, event, 0)) &&
         HOST(p, cudaMemcpyAsync(device, host, sizeof host, cudaMemcpyHostToDevice, other)) &&
         HOST(p, cudaEventRecord(event, other)) && HOST(p, cudaStreamWaitEvent(stream, event, 0)) &&
         HOST(p, ncclAllReduce(device, device, 4, ncclInt32, ncclMax, comm, stream));
}

static void doGraph(player_t *p, ncclComm_t comm, cudaStream_t stream, int *device) {
  cudaStream_t other = NULL;
  cudaEvent_t event = NULL;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  int host[4] = {0};
  if (HOST(p, cudaStreamCreate(&other)) && HOST(p, cudaEventCreate(&event)) &&
      HOST(p, cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed))) {
    int all = captureAll(p, comm, stream, other, event, device);
    int captured = all ? HOST(p, cudaStreamEndCapture(stream, &graph))
                       : cudaStreamEndCapture(stream, &graph) == cudaSuccess;
    if (all && captured && HOST(p, cudaGraphInstantiate(&exec, graph, 0)) &&
        HOST(p, cudaGraphLaunch(exec, stream)) && HOST(p, cudaGraphLaunch(exec, stream)) &&
        HOST(p, cudaMemcpyAsync(host, device, sizeof host, cudaMemcpyDeviceToHost, stream)) &&
        HOST(p, cudaStreamSynchronize(stream)))
      good(p, host[3] == 4, "the graph", "has a wrong result");
  }
  if (exec) HOST(p, cudaGraphExecDestroy(exec));
  if (graph) HOST(p, cudaGraphDestroy(graph));
  if (event) HOST(p, cudaEventDestroy(event));
  if (other && !HOST(p, cudaStreamDestroy(other))) (void)cudaStreamDestroy(other);
}

/* Memory of all kinds, the legacy stream, groups. */
static void doRuntime(player_t *p, ncclComm_t comm, cudaStream_t stream) {
  int *device = NULL, *pinned = NULL, *fleeting = NULL, own[64] = {0};
  cudaStream_t blocking = NULL;
  if (HOST(p, cudaMalloc((void **)&device, 256))) {
    doGraph(p, comm, stream, device);
    HOST(p, cudaMemcpyAsync(device, own, sizeof own, cudaMemcpyHostToDevice, stream));
  }
  if (HOST(p, cudaMallocHost((void **)&pinned, 9 << 20))) HOST(p, cudaFreeHost(pinned));
  if (HOST(p, cudaHostRegister(own, sizeof own, 0))) HOST(p, cudaHostUnregister(own));
  if (HOST(p, cudaMallocAsync((void **)&fleeting, 512, stream)) &&
      !HOST(p, cudaFreeAsync(fleeting, stream)))
    (void)cudaFree(fleeting);
  if (HOST(p, cudaStreamCreate(&blocking)) && device) {
    HOST(p, cudaMemsetAsync(device, 1, 256, blocking));
    HOST(p, cudaMemsetAsync(device, 2, 256, NULL)); /* after what the others have queued */
    HOST(p, cudaMemsetAsync(device, 3, 256, blocking));
    HOST(p, cudaDeviceSynchronize());
  }
  if (blocking && !HOST(p, cudaStreamDestroy(blocking))) (void)cudaStreamDestroy(blocking);
  if (HOST(p, ncclGroupStart())) {
    int peer = (p->rank + 1) % R, from = (p->rank + 2) % R;
    HOST(p, ncclSend(own, 4, ncclInt32, peer, comm, stream));
    HOST(p, ncclRecv(own + 32, 4, ncclInt32, from, comm, stream));
    HOST(p, ncclGroupEnd());
    HOST(p, cudaStreamSynchronize(stream));
  }
  if (device && !HOST(p, cudaFree(device))) (void)cudaFree(device);
}

/* A communicator within the process, and a tensor of the library's. */
static void doAlone(player_t *p) {
  ncclComm_t comms[2] = {NULL, NULL};
  ncclEpTensor_t *tensor = NULL;
  size_t sizes[2] = {3, 4};
  if (EP(p, ncclEpTensorAlloc(&tensor, 2, ncclFloat32, sizes, NULL)))
    EP(p, ncclEpTensorDestroy(tensor));
  if (HOST(p, ncclCommInitAll(comms, 2, NULL)))
    for (int i = 0; i < 2; i++)
      if (!HOST(p, ncclCommDestroy(comms[i]))) (void)ncclCommAbort(comms[i]);
}

void faultScenario(player_t *p) {
  shared_t *s = p->s;
  ncclComm_t comm = NULL;
  cudaStream_t stream = NULL;
  if (p->rank == 0)
    atomic_store(&s->idReady[p->run], HOST(p, ncclGetUniqueId(&s->ids[p->run])) ? 1 : 2);
  while (!atomic_load(&s->idReady[p->run])) usleep(200);
  if (atomic_load(&s->idReady[p->run]) == 2) return;
  int there = HOST(p, cudaStreamCreate(&stream)) &&
              HOST(p, ncclCommInitRank(&comm, R, s->ids[p->run], p->rank));
  if (there) {
    doWindow(p, comm, stream);
    doRuntime(p, comm, stream);
    doAlone(p);
    doStep(p, p->run & 1 ? TREFOIL_LL_RANK_MAJOR : TREFOIL_LL_EXPERT_MAJOR, comm, stream);
    doStep(p, p->run & 1 ? TREFOIL_HT_EXPERT_MAJOR : TREFOIL_HT_FLAT, comm, stream);
  }
  if (comm && !HOST(p, ncclCommDestroy(comm))) (void)ncclCommAbort(comm);
  if (stream && !HOST(p, cudaStreamDestroy(stream))) (void)cudaStreamDestroy(stream);
}
