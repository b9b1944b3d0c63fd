#include "gpu_script.h"

#include "plan/error.h"
#include "validate/check_report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- By hand ---- */

trefoil_result_t scriptBegin(ep_check_case_t *c, const ep_check_group_t *group, uint64_t seed,
                             int numRounds) {
  ep_rng_t rng = epRng(seed, 11, 0);
  memset(c, 0, sizeof *c);
  c->group = group;
  c->index = seed;
  c->numRounds = numRounds;
  c->captured = numRounds > 1;
  c->numRoutings = EP_MAX_ROUTINGS;
  for (int i = 0; i < EP_MAX_ROUTINGS; i++) {
    c->routings[i].topk = group->shape.topk;
    EP_TRY(epMakeRouting(c, i, &rng));
  }
  return TREFOIL_OK;
}

ep_check_op_t *scriptAdd(ep_check_case_t *c, ep_op_kind_t kind, int handle) {
  ep_check_op_t *op = &c->ops[c->numOps];
  *op = (ep_check_op_t){.kind = kind,
                        .handle = handle,
                        .routing = -1,
                        .from = -1,
                        .dtype = TREFOIL_BF16,
                        .payload = EP_PAYLOAD_FINITE,
                        .payloadKey = epMix(c->index * 131 + (uint64_t)c->numOps)};
  for (int i = c->numOps - 1; i >= 0 && op->routing < 0; i--) /* bound by its last Update */
    if (c->ops[i].handle == handle) op->routing = c->ops[i].routing;
  for (int i = 0; i < EP_NUM_TENSORS; i++) op->region[i] = -1;
  if (kind == EP_OP_DISPATCH || kind == EP_OP_COMBINE)
    op->width = (int64_t)(c->group->maxTokenBytes / 2);
  op->wantCounters = kind == EP_OP_DISPATCH;
  c->numOps++;
  return op;
}

ep_check_op_t *scriptUpdate(ep_check_case_t *c, int handle, int routing) {
  ep_check_op_t *op = scriptAdd(c, EP_OP_UPDATE, handle);
  op->routing = routing;
  return op;
}

trefoil_result_t scriptEnd(ep_check_case_t *c) {
  ep_rng_t rng = epRng(c->index, 12, 0);
  EP_TRY(epCountSlots(c));
  EP_CHECK(epPlaceTensors(c, &rng), TREFOIL_INTERNAL_ERROR, "the script does not fit its image");
  return TREFOIL_OK;
}

/* ---- Many of them ---- */

trefoil_result_t scriptListBegin(script_list_t *list, const ep_check_group_t *group, int numCases) {
  *list = (script_list_t){.group = group, .numCases = numCases};
  list->cases = calloc((size_t)numCases, sizeof *list->cases);
  list->offsets = calloc((size_t)numCases + 1, sizeof *list->offsets);
  EP_CHECK(list->cases && list->offsets, TREFOIL_SYSTEM_ERROR, "out of memory for cases");
  return TREFOIL_OK;
}

static int runsAlone(const ep_check_case_t *c) {
  if (c->captured || c->freshHandle || c->numMasks || c->trapped) return 0;
  for (int i = 0; i < c->numOps; i++)
    if (c->ops[i].kind == EP_OP_SYNC) return 0;
  return 1;
}

trefoil_result_t scriptListGenerate(script_list_t *list, uint64_t seed) {
  uint64_t index = seed * 1000003;
  for (int i = 0; i < list->numCases; index++) {
    ep_check_case_t *c = &list->cases[i];
    EP_TRY(epMakeCase(c, list->group, index));
    if (runsAlone(c))
      i++;
    else
      epFreeCase(c);
  }
  return TREFOIL_OK;
}

typedef struct share {
  script_list_t *list;
  int first, end;
  trefoil_result_t result;
  char why[400];
} share_t;

static trefoil_result_t expectOne(script_list_t *list, int i) {
  const ep_check_case_t *c = &list->cases[i];
  for (int round = 0; round < c->numRounds; round++) {
    uint8_t *expected[EP_MAX_RANKS];
    for (int r = 0; r < list->group->shape.numRanks; r++) {
      uint8_t *initial = list->initial[round][r] + list->offsets[i];
      expected[r] = list->expected[round][r] + list->offsets[i];
      epFillImage(c, round, r, initial);
      if (list->change) list->change(c, i, r, initial);
      memcpy(expected[r], initial, c->usedBytes);
    }
    EP_TRY(epExpect(c, round, expected));
  }
  return TREFOIL_OK;
}

static void *expectShare(void *argument) {
  share_t *s = argument;
  for (int i = s->first; i < s->end && s->result == TREFOIL_OK; i++)
    s->result = expectOne(s->list, i);
  if (s->result != TREFOIL_OK) snprintf(s->why, sizeof s->why, "%s", trefoilLastError());
  return NULL;
}

trefoil_result_t scriptListExpect(script_list_t *list) {
  enum { MAX_THREADS = 32 };
  int numRounds = 1;
  for (int i = 0; i < list->numCases; i++) {
    list->offsets[i + 1] = list->offsets[i] + ((list->cases[i].usedBytes + 255) & ~(size_t)255);
    if (list->cases[i].numRounds > numRounds) numRounds = list->cases[i].numRounds;
  }
  for (int round = 0; round < numRounds; round++)
    for (int r = 0; r < list->group->shape.numRanks; r++) {
      list->initial[round][r] = malloc(list->offsets[list->numCases]);
      list->expected[round][r] = malloc(list->offsets[list->numCases]);
      EP_CHECK(list->initial[round][r] && list->expected[round][r], TREFOIL_SYSTEM_ERROR,
               "out of memory for images");
    }
  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  int n = cores > MAX_THREADS ? MAX_THREADS : cores < 1 ? 1 : (int)cores;
  pthread_t threads[MAX_THREADS];
  share_t shares[MAX_THREADS];
  for (int i = 0; i < n; i++) {
    shares[i] = (share_t){.list = list,
                          .first = (int)((int64_t)list->numCases * i / n),
                          .end = (int)((int64_t)list->numCases * (i + 1) / n)};
    EP_CHECK(pthread_create(&threads[i], NULL, expectShare, &shares[i]) == 0, TREFOIL_SYSTEM_ERROR,
             "a thread could not be started");
  }
  for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
  for (int i = 0; i < n; i++)
    EP_CHECK(shares[i].result == TREFOIL_OK, shares[i].result, "%s", shares[i].why);
  return TREFOIL_OK;
}

void scriptListFree(script_list_t *list) {
  for (int i = 0; list->cases && i < list->numCases; i++) epFreeCase(&list->cases[i]);
  for (int round = 0; round < EP_MAX_ROUNDS; round++)
    for (int r = 0; r < EP_MAX_RANKS; r++) {
      free(list->initial[round][r]);
      free(list->expected[round][r]);
    }
  free(list->cases);
  free(list->offsets);
  *list = (script_list_t){0};
}

int scriptListOps(const script_list_t *list, ep_op_kind_t kind) {
  int n = 0;
  for (int i = 0; i < list->numCases; i++)
    for (int j = 0; j < list->cases[i].numOps; j++) n += list->cases[i].ops[j].kind == kind;
  return n;
}

trefoil_result_t scriptCompare(const script_list_t *list, int caseIdx, int round, int rank,
                               const uint8_t *result) {
  const ep_check_case_t *c = &list->cases[caseIdx];
  uint8_t *expected[EP_MAX_RANKS];
  char what[1024] = "", script[1024] = "";
  for (int r = 0; r < list->group->shape.numRanks; r++)
    expected[r] = list->expected[round][r] + list->offsets[caseIdx];
  if (!memcmp(expected[rank], result, c->usedBytes)) return TREFOIL_OK;
  ep_check_images_t images = {expected, result};
  epDescribeDifference(c, round, rank, &images, what, sizeof what);
  epDescribeScript(c, script, sizeof script);
  return epFail(TREFOIL_INTERNAL_ERROR, "case %d: %s\n%s", caseIdx, what, script);
}

trefoil_result_t scriptListRun(gpu_rank_t *rank, const script_list_t *list,
                               script_before_t before) {
  ep_check_rank_t *k = &rank->rank;
  const ep_library_t *lib = k->lib;
  void *kept = k->image, *base = NULL;
  size_t bytes = list->offsets[list->numCases];
  uint8_t *result = malloc(bytes);
  EP_CHECK(result, TREFOIL_SYSTEM_ERROR, "out of memory for results");
  k->doing = "cudaMalloc";
  EP_TRY_CUDA(k, lib->cudaMalloc(&base, bytes));
  EP_TRY_CUDA(k, lib->cudaMemcpyAsync(base, list->initial[0][k->rank], bytes,
                                      cudaMemcpyHostToDevice, k->stream));
  EP_TRY_CUDA(k, lib->cudaStreamSynchronize(k->stream));
  gpuBarrier(rank);
  trefoil_result_t rc = TREFOIL_OK;
  for (int i = 0; i < list->numCases && rc == TREFOIL_OK; i++) {
    const ep_check_case_t *c = &list->cases[i];
    k->image = (uint8_t *)base + list->offsets[i];
    for (int j = 0; j < c->numOps && rc == TREFOIL_OK; j++) {
      if (before) rc = before(rank, list, i, j);
      if (rc == TREFOIL_OK) rc = epCallOp(k, c, &c->ops[j]);
    }
  }
  k->image = kept;
  k->doing = "cudaMemcpyAsync";
  if (rc == TREFOIL_OK) {
    EP_TRY_CUDA(k, lib->cudaMemcpyAsync(result, base, bytes, cudaMemcpyDeviceToHost, k->stream));
    EP_TRY_CUDA(k, lib->cudaStreamSynchronize(k->stream));
  }
  for (int i = 0; i < list->numCases && rc == TREFOIL_OK; i++)
    rc = scriptCompare(list, i, 0, k->rank, result + list->offsets[i]);
  free(result);
  if (rc == TREFOIL_OK) EP_TRY_CUDA(k, lib->cudaFree(base));
  return rc;
}
