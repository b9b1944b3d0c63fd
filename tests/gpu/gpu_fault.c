#include "gpu_fault.h"

#include "plan/error.h"

#include <errno.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

void faultSleep(int64_t ms) {
  struct timespec t = {ms / 1000, ms % 1000 * 1000000};
  while (nanosleep(&t, &t) != 0 && errno == EINTR) {
  }
}

/* ---- Scripts: an Update, a Dispatch, a Combine ---- */

static trefoil_result_t makeScript(ep_check_case_t *c, const ep_check_group_t *g, uint64_t seed,
                                   int without) {
  EP_TRY(scriptBegin(c, g, seed, 1));
  scriptUpdate(c, 0, 0);
  scriptAdd(c, EP_OP_DISPATCH, 0);
  scriptAdd(c, EP_OP_COMBINE, 0);
  if (without >= 0) {
    int R = g->shape.numRanks;
    c->numMasks = 1;
    for (int r = 0; r < R; r++)
      for (int q = 0; q < R; q++) c->active[r * R + q] = (r == without) == (q == without);
  }
  return scriptEnd(c);
}

trefoil_result_t faultScripts(fault_t *f, const ep_check_group_t *g) {
  EP_TRY(scriptListBegin(&f->list, g, 3));
  EP_TRY(makeScript(&f->list.cases[0], g, 1, -1));
  EP_TRY(makeScript(&f->list.cases[1], g, 2, g->highThroughput ? -1 : f->victim)); /* masks: LL */
  EP_TRY(makeScript(&f->list.cases[2], g, 3, -1));
  return scriptListExpect(&f->list);
}

trefoil_result_t faultCall(ep_check_rank_t *k, const ep_check_case_t *c) {
  for (int i = 0; i < c->numOps; i++) EP_TRY(epCallOp(k, c, &c->ops[i]));
  k->doing = "cudaStreamSynchronize";
  EP_TRY_CUDA(k, k->lib->cudaStreamSynchronize(k->stream));
  return TREFOIL_OK;
}

static trefoil_result_t move(ep_check_rank_t *k, void *to, const void *from, size_t bytes,
                             enum cudaMemcpyKind kind) {
  k->doing = "cudaMemcpyAsync";
  EP_TRY_CUDA(k, k->lib->cudaMemcpyAsync(to, from, bytes, kind, k->stream));
  EP_TRY_CUDA(k, k->lib->cudaStreamSynchronize(k->stream));
  return TREFOIL_OK;
}

trefoil_result_t faultWork(ep_check_rank_t *k, const script_list_t *list, int i, int compare) {
  const ep_check_case_t *c = &list->cases[i];
  EP_TRY(move(k, k->image, list->initial[0][k->rank] + list->offsets[i], c->usedBytes,
              cudaMemcpyHostToDevice));
  EP_TRY(faultCall(k, c));
  if (!compare) return TREFOIL_OK;
  uint8_t *result = malloc(c->usedBytes);
  EP_CHECK(result, TREFOIL_SYSTEM_ERROR, "out of memory for a result");
  trefoil_result_t rc = move(k, result, k->image, c->usedBytes, cudaMemcpyDeviceToHost);
  if (rc == TREFOIL_OK) rc = scriptCompare(list, i, 0, k->rank, result);
  free(result);
  return rc;
}

/* ---- The doctor ---- */

void doctorAsk(doctor_t *d) {
  char command[700];
  snprintf(command, sizeof command, "%.400s doctor --hang %s/*.hang 2>&1", getenv("TREFOIL_CLI"),
           d->folder);
  FILE *pipe = popen(command, "r");
  if (!pipe) return;
  size_t n = fread(d->output, 1, sizeof d->output - 1, pipe);
  d->output[n] = 0;
  d->code = WEXITSTATUS(pclose(pipe));
}

int doctorOpen(doctor_t *d) {
  *d = (doctor_t){.code = -1};
  snprintf(d->folder, sizeof d->folder, "%s/trefoil-hang-XXXXXX",
           access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
  if (!getenv("TREFOIL_CLI") || !mkdtemp(d->folder)) return 0;
  setenv("NCCL_EP_HANG_DIR", d->folder, 1);
  return 1;
}

void doctorClose(doctor_t *d) {
  char pattern[96];
  glob_t found;
  unsetenv("NCCL_EP_HANG_DIR");
  snprintf(pattern, sizeof pattern, "%s/*", d->folder);
  if (glob(pattern, 0, NULL, &found) == 0)
    for (size_t i = 0; i < found.gl_pathc; i++) unlink(found.gl_pathv[i]);
  globfree(&found);
  rmdir(d->folder);
}

trefoil_result_t faultMask(ep_check_rank_t *k, int victim, int wantedFlag) {
  const ep_library_t *lib = k->lib;
  int mask[EP_MAX_RANKS] = {0}, flag = -1;
  k->doing = "ncclEpMaskQuery";
  EP_TRY_EP(k, lib->ncclEpMaskQuery(k->epGroup, k->image, k->stream));
  EP_TRY(move(k, mask, k->image, sizeof(int) * (size_t)k->group->shape.numRanks,
              cudaMemcpyDeviceToHost));
  for (int q = 0; q < k->group->shape.numRanks; q++)
    EP_CHECK(mask[q] == (q != victim), TREFOIL_INTERNAL_ERROR, "rank %d is %s, victim %d", q,
             mask[q] ? "active" : "masked", victim);
  k->doing = "ncclEpGetAsyncError";
  EP_TRY_EP(k, lib->ncclEpGetAsyncError(k->epGroup, &flag));
  EP_CHECK(flag == wantedFlag, TREFOIL_INTERNAL_ERROR, "the async error is %d, expected %d", flag,
           wantedFlag);
  k->doing = "ncclEpErrorClear";
  EP_TRY_EP(k, lib->ncclEpErrorClear(k->epGroup));
  return TREFOIL_OK;
}
