/* The checker: seeded random cases against any library with this ABI.
 *
 * Work is cut into batches of 64 cases that share a group; jobs take batches in turn, each job a
 * process of its own (a crash is a finding, and the environment that a group reads is the job's),
 * its ranks threads or processes. Started by a launcher (validate/launch.h), each process is one rank
 * and takes all batches. Every rank has a device of its own. */
#ifndef TREFOIL_VALIDATE_CHECKER_H
#define TREFOIL_VALIDATE_CHECKER_H

#include <signal.h>
#include <stdatomic.h>

#include "validate/check_case.h"
#include "validate/launch.h"
#include "validate/library.h"
#include "validate/puts.h"
#include "validate/worker.h"

enum { EP_CHECK_TEXT = 8192, EP_CHECK_SENTENCE = 2048, EP_MAX_JOBS = 64, EP_KEPT_FINDINGS = 16 };

/* A case that neither agrees nor has its order open. */
typedef struct ep_check_finding {
  ep_case_outcome_t outcome;
  uint64_t caseIdx;
  uint64_t
      numCases;  /* that it stands for: 1; of a batch that could not be opened, all cases not yet
                          run; 0 where a batch was closed, whose cases have an outcome of their own */
  int rank;      /* -1: not known */
  char call[48]; /* "ncclEpDispatch", "cudaStreamSynchronize"; "" outside of calls */
  ncclResult_t result;          /* of a call of the library that failed: its code */
  char what[EP_CHECK_SENTENCE]; /* one sentence, rank and call in it */
  char replay[1024];            /* the command */
  char text[EP_CHECK_TEXT];     /* for people: case, sentence, group, script, replay */
} ep_check_finding_t;

typedef struct ep_check_status {
  uint64_t cases, bytes; /* agreed so far, on all ranks; bytes compared */
  uint64_t counted;      /* bytes that the library counted as sent, equal to the plan's */
  double seconds;
  ep_puts_t puts; /* between domains */
} ep_check_status_t;

typedef struct ep_check_options {
  ep_library_paths_t paths;
  ep_check_choice_t choice;
  uint64_t firstCase, numCases; /* numCases 0: until `seconds` are over */
  double seconds;               /* 0: no limit */
  int jobs;                     /* 0 = 1 */
  int processes;                /* ranks are processes, else threads */
  int countBytes;     /* also compare the library's counts, if it has any, with the plan */
  uint64_t timeoutNs; /* of the groups; 0 = 20 s */
  uint64_t
      limitNs; /* a call that takes longer hangs; 0: the timeout, a quarter more and 5 s, on GPUs 60 */
  int maxFindings;     /* so many end the run; 0 = 1, -1: none does, every case gets its outcome */
  int numDevices;      /* devices here; 0: ask. More ranks share them, as processes */
  ep_launch_t *launch; /* NULL, or open: this process is one of its ranks */
  const char *replay;  /* start of the replay command: "trefoil check --seed 1" */
  void (*progress)(void *context, const ep_check_status_t *status);
  void (*found)(void *context, const ep_check_finding_t *finding); /* each, as it comes; or NULL */
  void *context;
  uint8_t *outcomes; /* NULL, or [numCases]: filled with an ep_case_outcome_t each */
  const volatile sig_atomic_t
      *interrupted; /* NULL, or a signal's number once it came: the run ends */
} ep_check_options_t;

typedef struct ep_check_outcome {
  ep_check_status_t status;
  uint64_t asked;           /* cases; 0: as many as the time allowed */
  int interrupted;          /* the signal, or 0 */
  int failed;               /* there are findings, or not all that was asked was done */
  int sharedDevices;        /* GPUs that more ranks than there are share; 0: each has its own */
  uint64_t failedCase;      /* of the first finding */
  char text[EP_CHECK_TEXT]; /* the first finding's; or why the run is not whole */
  int numFindings;          /* in all; kept, by case: */
  ep_check_finding_t findings[EP_KEPT_FINDINGS];
} ep_check_outcome_t;

/* TREFOIL_OK: the run took place, outcome->failed says how it ended (with a launch: the same on all
 * ranks; there the first finding ends it). After a finding the run goes on with the next case in a new
 * process, until maxFindings. Forks, unless launched: call it from a process without other threads. */
trefoil_result_t epCheckRun(const ep_check_options_t *options, ep_check_outcome_t *outcome);

/* ---- inside: what a job tells its parent (shared memory) ---- */
typedef enum ep_rank_end {
  EP_RANK_AT_WORK,
  EP_RANK_DONE,
  EP_RANK_TOLD /* what failed */
} ep_rank_end_t;

typedef struct ep_check_job {
  ep_watch_t watch;
  _Atomic uint64_t cases, bytes, counted;
  _Atomic uint64_t puts[NCCL_EP_PUT_KINDS], leastPuts[NCCL_EP_PUT_KINDS];
  _Atomic uint64_t batch;                 /* at work */
  _Atomic uint64_t settled;               /* bit per case of the batch that has its outcome */
  _Atomic uint8_t passed[EP_BATCH_CASES]; /* ranks that are through a case, and agree */
  _Atomic uint8_t open[EP_BATCH_CASES];   /* a rank used what order-free leaves open */
  _Atomic uint8_t rankDone[EP_MAX_RANKS]; /* processes: an ep_rank_end_t */
  _Atomic int started;                    /* it has a batch */
  _Atomic int finished, timeOver;         /* all that was asked of it, or the time is over */
  _Atomic int stop;
  _Atomic int failing;        /* claimed by the first failure */
  _Atomic int failed;         /* the finding is complete */
  ep_check_finding_t finding; /* text and replay are the parent's to write */
  _Atomic uint64_t
      numArrived; /* processes at a barrier round, over all barrier rounds of a batch */
  _Atomic int idReady;
  ncclUniqueId id; /* processes: from rank 0 */
} ep_check_job_t;

typedef struct ep_check_team {
  const ep_library_t *lib;
  const ep_check_options_t *options;
  ep_check_group_t group;
  ep_check_job_t *job;
  uint64_t firstCase, numCases;     /* within the batch */
  double deadline;                  /* CLOCK_MONOTONIC seconds, or 0 */
  uint64_t limitNs;                 /* of a call */
  struct ep_check_buffers *buffers; /* of epTeamThreads, from batch to batch; NULL at first */
  struct ep_check_comms *comms; /* NULL, or communicators that serve all batches: making one on GPUs
                                       takes longer than a batch */
  /* Launched, at the last barrier round: */
  uint64_t bytesOfAll, countedOfAll, leastOfAll; /* cases of the slowest */
  ep_puts_t putsOfAll;
  int sharedDevices; /* as in the outcome */
} ep_check_team_t;

typedef struct ep_check_comms {
  ncclComm_t of[EP_MAX_RANKS + 1][EP_MAX_RANKS]; /* [ranks][rank] */
} ep_check_comms_t;

/* What failed, for epTeamFail. */
typedef struct ep_check_culprit {
  ep_case_outcome_t outcome;
  int rank; /* -1: not known */
  const char *call;
  ncclResult_t result;
  uint64_t caseIdx, numCases; /* as in a finding */
} ep_check_culprit_t;

/* ---- check_team.c, check_rank_process.c ---- */
/* Runs a part of a batch with threads; nonzero after a failure, when the process should end. */
int epTeamThreads(ep_check_team_t *team);
void epTeamFree(ep_check_team_t *team);
/* Runs one rank of it in this process. */
int epTeamProcess(ep_check_team_t *team, int rank);
/* Records the first failure. */
void epTeamFail(ep_check_team_t *team, const ep_check_culprit_t *culprit, const char *what);
/* A rank gave up waiting: is there one that still has not returned? Then the parent ends this process. */
void epTeamAwaitHanging(ep_check_team_t *team);

/* ---- check_job.c ---- */
typedef struct ep_job_range {
  int numJobs;
  uint64_t firstBatch;
  double deadline;
} ep_job_range_t;
/* A worker's whole life; returns its exit code. */
int epCheckJob(const ep_check_options_t *options, ep_check_job_t *job, const ep_job_range_t *range);
/* Sets what a group reads from the environment. */
void epBatchEnvironment(const ep_check_group_t *g);
/* Which cases of a batch were asked for, into the team; 0: none of it. */
int epTeamCut(ep_check_team_t *team, uint64_t batch);
/* Bit per case of the cut. */
uint64_t epCutBits(const ep_check_team_t *team);

/* ---- check_finding.c ---- */
/* Completes a finding: text and replay. */
void epFindingWrite(ep_check_finding_t *finding, const ep_check_options_t *options);
/* Takes it into the outcome, in order of cases, and reports it. */
void epFindingAdd(ep_check_outcome_t *outcome, const ep_check_options_t *options,
                  const ep_check_finding_t *finding);
/* Green is only what was run: cases asked for against those that agree, where there are no findings. */
void epCompareWithAsked(const ep_check_options_t *options, int isTimeOver,
                        ep_check_outcome_t *outcome);

/* ---- check_launched.c ---- */
/* epCheckRun where options->launch is given. */
trefoil_result_t epCheckLaunched(const ep_check_options_t *options, ep_check_outcome_t *outcome);

/* ---- check_round.c ---- */
/* All ranks of the launch meet: who failed first is known to all, and whether to stop. */
void epLaunchedBarrier(ep_check_team_t *team);

#endif
