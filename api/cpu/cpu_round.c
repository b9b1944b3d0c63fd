/* All ranks agree before anything that cannot be taken back: what they call, and with what. Until
 * then nothing has been shared, so a rank that is refused, late or gone costs the others an error
 * with its sentence, and the next try finds everything as it was. */
#include <stdlib.h>
#include <string.h>

#include "api/cpu/cpu_group.h"
#include "api/cpu/cpu_round.h"
#include "api/grad_object.h"
#include "trefoil_host.h"

static const char *const functions[] = {"ncclEpCreateGroup", "ncclEpInitHandle",
                                        "trefoilGradGpuCreate", "trefoilGradGpuDestroy"};

static trefoil_result_t compare(const ep_notice_t *all, int numRanks) {
  for (int r = 1; r < numRanks; r++) {
    EP_CHECK(all[0].call == all[r].call, TREFOIL_INVALID_USAGE,
             "rank 0 calls %s, rank %d %s; all ranks make collective calls in the same order",
             functions[all[0].call], r, functions[all[r].call]);
  }
  if (all[0].call == EP_CALL_CREATE_GROUP) {
    ep_settings_t *settings = malloc((size_t)numRanks * sizeof *settings);
    EP_CHECK(settings, TREFOIL_SYSTEM_ERROR, "ncclEpCreateGroup: out of memory");
    for (int r = 0; r < numRanks; r++) settings[r] = all[r].settings;
    trefoil_result_t result = epSettingsCompare(settings, numRanks);
    free(settings);
    return result;
  }
  if (all[0].call == EP_CALL_GRAD_CREATE || all[0].call == EP_CALL_GRAD_DESTROY) {
    for (int r = 1; r < numRanks; r++) EP_TRY(epGradCompare(r, all[r].groupId == all[0].groupId));
    return TREFOIL_OK;
  }
  for (int r = 1; r < numRanks; r++) {
    EP_CHECK(
        all[0].groupId == all[r].groupId, TREFOIL_INVALID_USAGE,
        "ncclEpInitHandle: rank 0 and rank %d name different groups; all ranks make collective "
        "calls in the same order",
        r);
    EP_CHECK(all[0].arenaIdx == all[r].arenaIdx, TREFOIL_INVALID_ARGUMENT,
             "ncclEpInitHandle: layout differs: rank 0 asks for %s, rank %d for %s",
             all[0].arenaIdx ? "another than expert-major" : "expert-major", r,
             all[r].arenaIdx ? "another than expert-major" : "expert-major");
    EP_CHECK(
        all[0].topk == all[r].topk, TREFOIL_INVALID_ARGUMENT,
        "ncclEpInitHandle: num_topk differs: buffers for %lld on rank 0, %lld on rank %d; must "
        "be equal",
        (long long)all[0].topk, (long long)all[r].topk, r);
  }
  return TREFOIL_OK;
}

trefoil_result_t epCpuBarrierRound(ncclComm_t comm, int numRanks, uint64_t timeoutNs,
                                   ep_notice_t *notice) {
  ep_notice_t *all = malloc((size_t)numRanks * sizeof *all);
  EP_CHECK(all, TREFOIL_SYSTEM_ERROR, "%s: out of memory", functions[notice->call]);
  ncclResult_t met = trefoilHostBarrierRound(comm, notice, sizeof *notice, all, timeoutNs);
  trefoil_result_t result = met == ncclSuccess
                                ? compare(all, numRanks)
                                : epFail((trefoil_result_t)met, "%s: %s", functions[notice->call],
                                         trefoilHostLastError());
  *notice = all[0];
  free(all);
  return result;
}

void epCpuCallBegin(ncclComm_t comm) {
  trefoilHostCallBegin(comm);
}

void epCpuCallFail(ncclComm_t comm, trefoil_result_t code, const char *why) {
  trefoilHostCallFail(comm, (ncclResult_t)code, why);
}
