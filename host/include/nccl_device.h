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
  bool deviceApiSupport; /* false: several LSA teams without GIN */
  bool multimemSupport;  /* false */
  ncclGinType_t ginType; /* PROXY; NONE where NCCL_GIN_ENABLE=0 */
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

/* What a device communicator needs. This library has GIN's contexts, signals and counters; barriers,
 * multicast and buffers are refused. */
typedef struct ncclDevCommRequirements {
  size_t size;
  unsigned int magic;
  unsigned int version;
  struct ncclDevResourceRequirements *resourceRequirementsList;
  struct ncclTeamRequirements *teamRequirementsList;
  bool lsaMultimem;
  int barrierCount;
  int lsaBarrierCount;
  int railGinBarrierCount;
  int lsaLLA2ABlockCount, lsaLLA2ASlotCount;
  bool ginForceEnable;
  int ginContextCount; /* a hint */
  int ginSignalCount;  /* of each context, from 0 */
  int ginCounterCount;
  ncclGinConnectionType_t ginConnectionType;
  bool ginExclusiveContexts;
  int ginQueueDepth;
  int ginTrafficClass;
  int worldGinBarrierCount;
  bool ginStrongSignalsRequired;
  bool ginVaSignalsRequired;
  int ginCustomStride;
  ncclGinType_t ginType;
  bool useRuntimeVersion;
  int cftCaps;
  int cftBarrierCount;
} ncclDevCommRequirements_t;

#define NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER                                                     \
  {                                                                                                \
    sizeof(ncclDevCommRequirements_t), NCCL_API_MAGIC, NCCL_VERSION_CODE, NULL, NULL, false, 0, 0, \
        0, 0, 0, false, 4, 0, 0, NCCL_GIN_CONNECTION_NONE, false, 0, NCCL_CONFIG_UNDEF_INT, 0,     \
        true, true, 1, NCCL_GIN_TYPE_NONE, false, 0, 0                                             \
  }

/* The size is NCCL's. What runs kernels on the CPU passes it to trefoilHostGin* (trefoil_host.h). */
typedef struct ncclDevComm {
  unsigned int magic;
  unsigned int version;
  int rank, nRanks;
  uint32_t nRanks_rcp32;
  int lsaRank, lsaSize;
  uint32_t lsaSize_rcp32;
  void *gin; /* NULL: NCCL_GIN_CONNECTION_NONE */
  uint64_t reserved[26];
} ncclDevComm_t;

/* Collective, and not inside a group. */
ncclResult_t ncclDevCommCreate(ncclComm_t comm, const ncclDevCommRequirements_t *reqs,
                               ncclDevComm_t *outDevComm);
ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const ncclDevComm_t *devComm);

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
