/* What fails by name: the functions that docs/host_api.md calls "sentence". The build makes one for each of
 * its rows (HostApi.cmake); they take no notice of their arguments and end here. */
#include "comm_internal.h"

int epCudaSentence(const char *name, const char *why);
int epNcclSentence(const char *name, const char *why);

int epCudaSentence(const char *name, const char *why) {
  return epCudaFail(cudaErrorNotSupported, "%s is not implemented by the host runtime: %s", name,
                    why);
}

int epNcclSentence(const char *name, const char *why) {
  return epNcclFail(ncclInvalidUsage, "%s is not implemented by the host runtime: %s", name, why);
}

/* Those that return no code ("zero" in the page). */
#pragma GCC visibility push(default)
ncclTeam_t ncclTeamCft(ncclComm_t comm, int mode);
ncclTeam_t ncclTeamCftMultimem(ncclComm_t comm);
int ncclLLA2ACalcSlots(int maxElts, int maxEltSize);
#pragma GCC visibility pop

static ncclTeam_t noTeam(const char *name) {
  ncclTeam_t none = {0, 0, 0};
  (void)epNcclSentence(name, "no multicast or counted memory");
  return none;
}

ncclTeam_t ncclTeamCft(ncclComm_t comm, int mode) {
  (void)comm, (void)mode;
  return noTeam("ncclTeamCft");
}

ncclTeam_t ncclTeamCftMultimem(ncclComm_t comm) {
  (void)comm;
  return noTeam("ncclTeamCftMultimem");
}

int ncclLLA2ACalcSlots(int maxElts, int maxEltSize) {
  (void)maxElts, (void)maxEltSize;
  (void)epNcclSentence("ncclLLA2ACalcSlots", "no device communicators");
  return 0;
}
