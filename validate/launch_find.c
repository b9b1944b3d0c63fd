/* Who started this process, and as which rank of how many: what the launchers leave in the environment. */
#include "validate/launch.h"

#include "plan/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct launcher {
  const char *needs; /* set by this launcher alone, or NULL: rank and size tell it */
  const char *rank, *size, *localRank, *numLocal;
  const char *jobs[2]; /* the first that is set names the launch */
} launcher_t;

/* In this order: torchrun may run under mpirun or srun, mpirun and PMI under srun. */
static const launcher_t launchers[] = {
    {"TORCHELASTIC_RUN_ID",
     "RANK",
     "WORLD_SIZE",
     "LOCAL_RANK",
     "LOCAL_WORLD_SIZE",
     {"TORCHELASTIC_RUN_ID"}},
    {NULL,
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    {NULL, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", {NULL}},
    {NULL,
     "PMI_RANK",
     "PMI_SIZE",
     "MPI_LOCALRANKID",
     "MPI_LOCALNRANKS",
     {"PMI_JOBID", "SLURM_JOB_ID"}},
    {NULL, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", NULL, NULL, {"SLURM_JOB_ID"}},
    {NULL, "SLURM_PROCID", "SLURM_NTASKS", NULL, NULL, {"SLURM_JOB_ID"}}};

static const char *said(const char *name) {
  const char *text = name ? getenv(name) : NULL;
  return text && *text ? text : NULL;
}

/* 1: the variable is there and a number. */
static int number(const char *name, int *value) {
  const char *text = said(name);
  char *end;
  if (!text) return 0;
  long n = strtol(text, &end, 10);
  if (*end || n < 0 || n > 1 << 20) return 0;
  *value = (int)n;
  return 1;
}

/* A batch script has the variables of a task 0, but nobody started tasks. */
static int isBatchScript(void) {
  int rank = 0;
  return said("SLURM_JOB_ID") && !said("SLURM_STEP_ID") && !said("SLURM_STEPID") &&
         !said("SLURM_STEP_NUM_TASKS") && (!number("SLURM_PROCID", &rank) || rank == 0);
}

/* The launcher of this process, or NULL: none. */
static trefoil_result_t findLauncher(const launcher_t **found) {
  *found = NULL;
  const char *half = NULL, *missing = NULL;
  for (size_t i = 0; i < sizeof launchers / sizeof *launchers && !*found; i++) {
    const launcher_t *l = &launchers[i];
    if (l->needs && !said(l->needs)) continue;
    if (!strcmp(l->rank, "SLURM_PROCID") && isBatchScript()) continue;
    if (said(l->rank) && said(l->size)) *found = l;
    /* sizes alone are in every shell of an allocation */
    int isSlurm = !strncmp(l->size, "SLURM", 5);
    if (!half && (isSlurm ? said(l->rank) && !strcmp(l->size, "SLURM_NTASKS") && !said(l->size)
                          : !said(l->rank) != !said(l->size))) {
      half = said(l->rank) ? l->rank : l->size;
      missing = said(l->rank) ? l->size : l->rank;
    }
  }
  EP_CHECK(*found || !half, TREFOIL_INVALID_ARGUMENT,
           "%s is set and %s is not: a launcher sets both", half, missing);
  EP_CHECK(
      *found || !said("PMIX_RANK"), TREFOIL_INVALID_ARGUMENT,
      "PMIX_RANK=%s: a launcher started this process, but nothing says how many there are: set "
      "RANK and WORLD_SIZE on each (or env -u PMIX_RANK for a process alone)",
      said("PMIX_RANK"));
  return TREFOIL_OK;
}

/* Tasks on this node, from "4(x2),3" and the node's number; 0: not known. */
static int slurmTasksHere(void) {
  const char *at = said("SLURM_STEP_TASKS_PER_NODE");
  int node = 0, tasks, times, length;
  if (!at) at = said("SLURM_TASKS_PER_NODE");
  if (!at || !number("SLURM_NODEID", &node)) return 0;
  while (sscanf(at, "%d%n", &tasks, &length) == 1) {
    at += length;
    times = 1;
    if (sscanf(at, "(x%d)%n", &times, &length) == 1) at += length;
    if (node < times) return tasks;
    node -= times;
    if (*at++ != ',') return 0;
  }
  return 0;
}

static void findLocal(const launcher_t *by, ep_launch_t *l) {
  int slurmRank = -1;
  int isMpi = !strncmp(by->rank, "OMPI", 4) || !strncmp(by->rank, "PMI", 3);
  l->localRank = l->rank;
  l->numLocal = isMpi || !said("MASTER_ADDR") ? l->numRanks : 0;
  if (number("SLURM_PROCID", &slurmRank) && slurmRank == l->rank && !isBatchScript()) {
    int here = slurmTasksHere(), nodes = 1;
    number("SLURM_LOCALID", &l->localRank);
    if (!number("SLURM_STEP_NUM_NODES", &nodes)) number("SLURM_NNODES", &nodes);
    if (here > 0 || nodes > 1) l->numLocal = here;
  }
  number(by->localRank, &l->localRank);
  number(by->numLocal, &l->numLocal);
}

/* The process that started the ranks of this host, if one of the ancestors is MPICH's; 0: none. */
static int hydraProxy(void) {
  for (int pid = (int)getppid(), depth = 0; pid > 1 && depth < 16; depth++) {
    char path[64], line[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(line, 1, sizeof line - 1, f) : 0;
    if (f) fclose(f);
    line[n] = 0;
    if (strstr(line, "(hydra_pmi_proxy")) return pid;
    char *name = strrchr(line, ')');
    if (!name || sscanf(name, ") %*c %d", &pid) != 1) return 0;
  }
  return 0;
}

/* The command line without the program's path, as one number. */
static unsigned long long commandLine(void) {
  unsigned long long hash = 1469598103934665603u;
  FILE *f = fopen("/proc/self/cmdline", "r");
  int c, past = 0;
  while (f && (c = getc(f)) != EOF) {
    if (past) hash = (hash ^ (unsigned)c) * 1099511628211u;
    past |= c == 0;
  }
  if (f) fclose(f);
  return hash;
}

/* A launcher's own name of the launch; by hand the port and the command line, or where no port is given
 * the session, which wrappers such as `timeout` share. */
static void nameJob(const launcher_t *by, ep_launch_t *l) {
  const char *job = NULL, *port = said("MASTER_PORT"), *secret = said("TREFOIL_LAUNCH_SECRET");
  for (int i = 0; i < 2 && !job; i++) job = said(by->jobs[i]);
  int proxy = job || l->numLocal != l->numRanks || strcmp(by->rank, "PMI_RANK") ? 0 : hydraProxy();
  l->byHand = !job && !proxy;
  l->hasSecret = secret != NULL;
  int n =
      snprintf(l->job, sizeof l->job, "%s %.60s %.20s %.20s %.8s %d %.60s|", by->rank,
               job ? job : "", job && said("SLURM_STEP_ID") ? said("SLURM_STEP_ID") : "",
               job && said("TORCHELASTIC_RESTART_COUNT") ? said("TORCHELASTIC_RESTART_COUNT") : "",
               port ? port : "", proxy, secret ? secret : "");
  if (l->byHand && n > 0 && (size_t)n < sizeof l->job)
    snprintf(l->job + n, sizeof l->job - (size_t)n, "%llx %ld", commandLine(),
             port ? 0L : (long)getsid(0));
}

trefoil_result_t epLaunchFind(ep_launch_t *launch) {
  ep_launch_t l = {.numRanks = 1, .numLocal = 1, .rendezvousSeconds = 60, .gatherSeconds = 600};
  const launcher_t *by;
  EP_TRY(findLauncher(&by));
  if (by) {
    EP_CHECK(number(by->rank, &l.rank) && number(by->size, &l.numRanks), TREFOIL_INVALID_ARGUMENT,
             "%s=%s, %s=%s: expected whole numbers", by->rank, said(by->rank), by->size,
             said(by->size));
    EP_CHECK(l.numRanks >= 1 && l.numRanks <= EP_LAUNCH_MAX_RANKS && l.rank < l.numRanks,
             TREFOIL_INVALID_ARGUMENT,
             "rank %d of %d processes: expected a rank below their number, and at most %d", l.rank,
             l.numRanks, EP_LAUNCH_MAX_RANKS);
    findLocal(by, &l);
    nameJob(by, &l);
  }
  *launch = l;
  return TREFOIL_OK;
}
