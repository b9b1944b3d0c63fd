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
