/* The host side of NCCL's Device API that libtrefoil_host implements: communicator properties, window
 * lookups and teams, with NCCL 2.32.3's names, values and layouts. There is no device code here. */
#ifndef TREFOIL_NCCL_DEVICE_H
#define TREFOIL_NCCL_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <nccl.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef enum {
  NCCL_GIN_CONNECTION_NONE,
  NCCL_GIN_CONNECTION_FULL,
  NCCL_GIN_CONNECTION_RAIL,
  NCCL_GIN_CONNECTION_CUSTOM_STRIDE
} ncclGinConnectionType_t;

typedef enum {
  NCCL_GIN_TYPE_NONE = 0,
  NCCL_GIN_TYPE_PROXY = 2,
  NCCL_GIN_TYPE_GDAKI = 3,
  NCCL_GIN_TYPE_GPI = 4,
  NCCL_GIN_TYPE_EFA_GDA = 5,
  NCCL_GIN_MAX_TYPES = 6
} ncclGinType_t;

typedef struct ncclCommProperties {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int rank;
  int nRanks;
  int cudaDev;
  int nvmlDev;
  bool deviceApiSupport; /* true: windows can be looked up, although no kernel will use them */
  bool multimemSupport;  /* false */
  ncclGinType_t ginType; /* NONE */
  int nLsaTeams;         /* NCCL_LSA_TEAM_SIZE splits the ranks into this many pretended nodes */
  bool hostRmaSupport;
  ncclGinType_t railedGinType;
  uint64_t commHash; /* the same on all ranks of a communicator */
  int ginMinStride;
  ncclGinConnectionType_t ginConnectionType;
  bool ginSupport[64];
  size_t devCommRuntimeVersionSize;
  bool cftSupport;
  bool cftMulticastSupport;
  bool cftCountedSupport;
} ncclCommProperties_t;

#ifdef __cplusplus
#define NCCL_COMM_PROPERTIES_INITIALIZER                                                           \
  { sizeof(ncclCommProperties_t), NCCL_API_MAGIC, NCCL_VERSION_CODE, }
#else
#define NCCL_COMM_PROPERTIES_INITIALIZER                                                           \
  { .size = sizeof(ncclCommProperties_t), .magic = NCCL_API_MAGIC, .version = NCCL_VERSION_CODE }
#endif

/* Ranks rank, rank + stride, ...: member i of a team is world rank
 * worldRank + (i - rank) * stride. */
struct ncclTeam {
  int nRanks, rank, stride;
};
typedef struct ncclTeam ncclTeam_t;

ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t *props);

/* Addresses of a peer's window memory in this process. lsaRank counts within this rank's node; peer is
 * a world rank, and a peer on another (pretended) node gives NULL. */
ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t window, size_t offset, int lsaRank,
                                     void **outPtr);
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void **outPtr);

ncclTeam_t ncclTeamWorld(ncclComm_t comm);
ncclTeam_t ncclTeamLsa(ncclComm_t comm);  /* the ranks of this node */
ncclTeam_t ncclTeamRail(ncclComm_t comm); /* same place on every node */
int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank);
int ncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
