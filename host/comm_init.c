/* Unique ids, making communicators, ending them, and what they are. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm_internal.h"

/* What a unique id carries: where the shared memory is handed out, and its key. */
typedef struct {
  uint64_t magic, key;
  ep_process_t owner;
} unique_id_t;

#define ID_MAGIC 0x3164692d746c6674u
_Static_assert(sizeof(unique_id_t) <= NCCL_UNIQUE_ID_BYTES, "an id fits");

typedef struct {
  int32_t lsaSize, numRanks, hasGin;
} init_record_t;

ncclResult_t ncclGetVersion(int *version) {
  EP_NCCL_CHECK(version, ncclInvalidArgument, "ncclGetVersion: version is NULL");
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId) {
  EP_NCCL_CHECK(uniqueId, ncclInvalidArgument, "ncclGetUniqueId: uniqueId is NULL");
  unique_id_t id;
  memset(&id, 0, sizeof id);
  EP_NCCL_TRY(epServerSelf(&id.owner, "ncclGetUniqueId"));
  id.magic = ID_MAGIC;
  id.key = epRandom();
  memset(uniqueId, 0, sizeof *uniqueId);
  memcpy(uniqueId, &id, sizeof id);
  return ncclSuccess;
}

static int gcd(int a, int b) {
  return b ? gcd(b, a % b) : a;
}

ncclResult_t epInitShow(ep_job_t *job, void *data) {
  job->comm->hasGin = epGinEnabled();
  init_record_t record = {job->comm->lsaSize, job->comm->numRanks, job->comm->hasGin};
  memcpy(data, &record, sizeof record);
  return ncclSuccess;
}

ncclResult_t epInitTake(ep_job_t *job, const void *const *all, bool *more) {
  ncclComm_t comm = job->comm;
  *more = false;
  for (int r = 0; r < comm->numRanks; r++) {
    init_record_t record;
    memcpy(&record, all[r], sizeof record);
    EP_NCCL_CHECK(record.lsaSize == comm->lsaSize, ncclInvalidUsage,
                  "%s: NCCL_LSA_TEAM_SIZE is %d on rank %d and %d on rank %d", job->func,
                  comm->lsaSize, comm->rank, record.lsaSize, r);
    comm->hasGin = comm->hasGin && record.hasGin;
  }
  bool split = comm->lsaSize > 0 && comm->lsaSize < comm->numRanks;
  comm->lsaSize = split ? gcd(comm->lsaSize, comm->numRanks) : comm->numRanks;
  return ncclSuccess;
}

static void finishInit(ep_job_t *job, ncclResult_t result) {
  if (result != ncclSuccess) {
    epCommFree(job->comm, EP_RANK_FAILED);
    return;
  }
  atomic_store(&job->comm->magic, EP_COMM_MAGIC);
  *job->u.init.out = job->comm;
}

/* The job of a rank that has taken its entry; frees the communicator when it cannot be made. */
static ep_job_t *initJob(ncclComm_t comm, const char *func, ncclComm_t *out) {
  ep_job_t *job = epJobNew(comm, func);
  if (!job) {
    epCommFree(comm, EP_RANK_FAILED);
    return NULL;
  }
  job->show = epInitShow;
  job->take = epInitTake;
  job->finish = finishInit;
  job->u.init.out = out;
  return job;
}

ncclResult_t epInitJob(ncclComm_t comm, const char *func, ncclComm_t *out) {
  ep_job_t *job = initJob(comm, func, out);
  return job ? epJobSubmit(job) : ncclSystemError;
}

ncclResult_t epConfigCheck(const ncclConfig_t *config, const char *func) {
  if (!config) return ncclSuccess;
  EP_NCCL_CHECK(config->magic == NCCL_API_MAGIC && config->size >= offsetof(ncclConfig_t, blocking),
                ncclInvalidArgument, "%s: the config was not set by NCCL_CONFIG_INITIALIZER", func);
  return ncclSuccess;
}

static ncclResult_t initRank(ncclComm_t *comm, int nranks, const ncclUniqueId *commId, int rank,
                             const ncclConfig_t *config, const char *func) {
  unique_id_t id;
  ncclComm_t made;
  EP_NCCL_CHECK(comm, ncclInvalidArgument, "%s: comm is NULL", func);
  EP_NCCL_CHECK(nranks >= 1 && nranks <= EP_MAX_RANKS, ncclInvalidArgument,
                "%s: %d ranks; the host runtime takes 1 to %d", func, nranks, EP_MAX_RANKS);
  EP_NCCL_CHECK(rank >= 0 && rank < nranks, ncclInvalidArgument, "%s: rank %d is not in [0, %d)",
                func, rank, nranks);
  EP_NCCL_TRY(epConfigCheck(config, func));
  memcpy(&id, commId, sizeof id);
  EP_NCCL_CHECK(id.magic == ID_MAGIC, ncclInvalidArgument,
                "%s: the unique id is not one of ncclGetUniqueId of the host runtime", func);
  id.owner.address[EP_ADDRESS_BYTES - 1] = 0;
  EP_NCCL_TRY(epCommNew(&id.owner, id.key, nranks, rank, func, &made));
  return epInitJob(made, func, comm);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank) {
  return epGroupRemember(initRank(comm, nranks, &commId, rank, NULL, "ncclCommInitRank"));
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t *config) {
  return epGroupRemember(initRank(comm, nranks, &commId, rank, config, "ncclCommInitRankConfig"));
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId,
                                      ncclUniqueId *commIds, ncclConfig_t *config) {
  EP_NCCL_CHECK(nId >= 1 && commIds, ncclInvalidArgument,
                "ncclCommInitRankScalable: no unique id given");
  return epGroupRemember(
      initRank(newcomm, nranks, &commIds[0], myrank, config, "ncclCommInitRankScalable"));
}

/* Jobs that have not run, and their communicators. */
static void dropJobs(ep_job_t *jobs) {
  for (ep_job_t *next; jobs; jobs = next) {
    next = jobs->next;
    epCommFree(jobs->comm, EP_RANK_FAILED);
    free(jobs);
  }
}

ncclResult_t ncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist) {
  const char *func = "ncclCommInitAll";
  ep_process_t self;
  EP_NCCL_CHECK(comm && ndev >= 1 && ndev <= EP_MAX_RANKS, ncclInvalidArgument,
                "%s: %d devices for %p", func, ndev, (void *)comm);
  for (int r = 0; r < ndev; r++) {
    int device = devlist ? devlist[r] : r;
    EP_NCCL_CHECK(device >= 0 && device < epNumDevices(), ncclInvalidArgument,
                  "%s: device %d is not in [0, %d); TREFOIL_HOST_DEVICES sets the number", func,
                  device, epNumDevices());
  }
  EP_NCCL_TRY(epServerSelf(&self, func));
  uint64_t key = epRandom();
  ep_job_t *jobs = NULL, **tail = &jobs;
  ncclComm_t *made = calloc((size_t)ndev, sizeof *made);
  ncclResult_t result = made ? ncclSuccess : epNcclFail(ncclSystemError, "%s: out of memory", func);
  for (int r = 0; r < ndev && result == ncclSuccess; r++) {
    ncclComm_t one;
    result = epCommNew(&self, key, ndev, r, func, &one);
    if (result != ncclSuccess) break;
    one->device = devlist ? devlist[r] : r;
    if ((*tail = initJob(one, func, &made[r])))
      tail = &(*tail)->next;
    else
      result = ncclSystemError;
  }
  if (result == ncclSuccess)
    result = epJobsRun(jobs);
  else
    dropJobs(jobs);
  for (int r = 0; r < ndev && made; r++) {
    if (result == ncclSuccess)
      comm[r] = made[r];
    else if (made[r]) /* all or none */
      epCommFree(made[r], EP_RANK_FAILED);
  }
  free(made);
  return result;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  EP_NCCL_TRY(epCommGet(comm, "ncclCommFinalize"));
  return epCommDrain(comm, "ncclCommFinalize");
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  EP_NCCL_TRY(epCommGet(comm, "ncclCommDestroy"));
  EP_NCCL_TRY(epCommDrain(comm, "ncclCommDestroy"));
  epGinsFree(comm);
  epWindowsFree(comm);
  epCommFree(comm, EP_RANK_DESTROYED);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  EP_NCCL_TRY(epCommGet(comm, "ncclCommAbort"));
  atomic_store(&comm->aborting, true);
  atomic_store(&epCommEntry(comm, comm->rank)->state, EP_RANK_ABORTED);
  epCommRingAll(comm);
  EP_NCCL_TRY(epCommDrain(comm, "ncclCommAbort"));
  epCommFree(comm, EP_RANK_ABORTED);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError) {
  EP_NCCL_TRY(epCommGet(comm, "ncclCommGetAsyncError"));
  EP_NCCL_CHECK(asyncError, ncclInvalidArgument, "ncclCommGetAsyncError: asyncError is NULL");
  *asyncError = (ncclResult_t)atomic_load(&comm->asyncError);
  if (*asyncError != ncclSuccess)
    (void)epCommUsable(comm, "ncclCommGetAsyncError"); /* the sentence */
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
  EP_NCCL_TRY(epCommGet(comm, "ncclCommCount"));
  EP_NCCL_CHECK(count, ncclInvalidArgument, "ncclCommCount: count is NULL");
  *count = comm->numRanks;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
  EP_NCCL_TRY(epCommGet(comm, "ncclCommCuDevice"));
  EP_NCCL_CHECK(device, ncclInvalidArgument, "ncclCommCuDevice: device is NULL");
  *device = comm->device;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
  EP_NCCL_TRY(epCommGet(comm, "ncclCommUserRank"));
  EP_NCCL_CHECK(rank, ncclInvalidArgument, "ncclCommUserRank: rank is NULL");
  *rank = comm->rank;
  return ncclSuccess;
}

/* NCCL's text for the code; ncclGetLastError has the why. */
const char *ncclGetErrorString(ncclResult_t result) {
  switch (result) {
  case ncclSuccess:
    return "no error";
  case ncclUnhandledCudaError:
    return "unhandled cuda error";
  case ncclSystemError:
    return "unhandled system error";
  case ncclInternalError:
    return "internal error";
  case ncclInvalidArgument:
    return "invalid argument";
  case ncclInvalidUsage:
    return "invalid usage";
  case ncclRemoteError:
    return "remote process exited or there was a network error";
  case ncclInProgress:
    return "NCCL operation in progress";
  case ncclTimeout:
    return "operation timed out";
  default:
    return "unknown result code";
  }
}

const char *ncclGetLastError(ncclComm_t comm) {
  (void)comm;
  return epSentence();
}

/* ---- nccl_device.h ---- */

ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t *props) {
  EP_NCCL_TRY(epCommGet(comm, "ncclCommQueryProperties"));
  EP_NCCL_CHECK(props && props->magic == NCCL_API_MAGIC &&
                    props->size >= offsetof(ncclCommProperties_t, rank),
                ncclInvalidArgument,
                "ncclCommQueryProperties: set props to NCCL_COMM_PROPERTIES_INITIALIZER");
  ncclCommProperties_t p;
  memset(&p, 0, sizeof p);
  p.magic = NCCL_API_MAGIC;
  size_t bytes = props->size < sizeof p ? props->size : sizeof p;
  p.size = props->size;
  p.version = props->version;
  p.rank = comm->rank;
  p.nRanks = comm->numRanks;
  p.cudaDev = p.nvmlDev = comm->device;
  p.nLsaTeams = comm->numRanks / comm->lsaSize;
  p.deviceApiSupport = comm->hasGin || p.nLsaTeams == 1;
  if (comm->hasGin) {
    p.ginType = p.railedGinType = NCCL_GIN_TYPE_PROXY;
    p.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    p.ginSupport[NCCL_GIN_TYPE_PROXY] = true;
    p.ginMinStride = 1;
  }
  p.commHash = comm->shm->key;
  memcpy(props, &p, bytes);
  return ncclSuccess;
}

ncclTeam_t ncclTeamWorld(ncclComm_t comm) {
  ncclTeam_t none = {0, 0, 0};
  if (epCommGet(comm, "ncclTeamWorld") != ncclSuccess) return none;
  ncclTeam_t team = {comm->numRanks, comm->rank, 1};
  return team;
}

ncclTeam_t ncclTeamLsa(ncclComm_t comm) {
  ncclTeam_t none = {0, 0, 0};
  if (epCommGet(comm, "ncclTeamLsa") != ncclSuccess) return none;
  ncclTeam_t team = {comm->lsaSize, comm->rank % comm->lsaSize, 1};
  return team;
}

ncclTeam_t ncclTeamRail(ncclComm_t comm) {
  ncclTeam_t none = {0, 0, 0};
  if (epCommGet(comm, "ncclTeamRail") != ncclSuccess) return none;
  ncclTeam_t team = {comm->numRanks / comm->lsaSize, comm->rank / comm->lsaSize, comm->lsaSize};
  return team;
}

int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank) {
  if (epCommGet(comm, "ncclTeamRankToWorld") != ncclSuccess) return -1;
  return comm->rank + (rank - team.rank) * team.stride;
}

int ncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank) {
  if (epCommGet(comm, "ncclTeamRankToLsa") != ncclSuccess) return -1;
  return comm->rank % comm->lsaSize + (rank - team.rank) * team.stride;
}
