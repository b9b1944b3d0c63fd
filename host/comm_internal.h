/* Shared by the NCCL side of host/.
 *
 * A communicator is one piece of shared memory (memfd) that every rank maps, with an entry per
 * rank and a ring of slots per ordered pair of ranks. The process that made the unique id hands the
 * memory's descriptor to a process that presents the id (comm_server.c). In it there are
 *   - the control exchange (comm_control.c): host-side calls in which every rank shows one record and
 *     reads all others' (init, split, windows);
 *   - barrier rounds (comm_round.c, plan/barrier_round.h): the same for libraries above, and one that fails
 * may be
 *     tried again;
 *   - the rings (comm_tasks.c): stream-ordered messages; every collective is made of sends and receives;
 *   - a doorbell per rank, rung whenever something changed that this rank may wait for.
 * Ranks of one process share one mapping of it. */
#ifndef TREFOIL_COMM_INTERNAL_H
#define TREFOIL_COMM_INTERNAL_H

#include "host_internal.h"
#include "nccl_device.h"
#include "plan/barrier_round.h"
#include "trefoil_host.h"

ncclResult_t epNcclFail(ncclResult_t code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
#ifdef __clang_analyzer__ /* see plan/error.h */
#define epNcclFail(code, ...) (epNcclFail((code), __VA_ARGS__), (code))
#endif
#define EP_NCCL_CHECK(cond, code, ...)                                                             \
  do {                                                                                             \
    if (!(cond)) return epNcclFail((code), __VA_ARGS__);                                           \
  } while (0)
#define EP_NCCL_TRY(expr)                                                                          \
  do {                                                                                             \
    ncclResult_t epTryResult = (expr);                                                             \
    if (epTryResult != ncclSuccess) return epTryResult;                                            \
  } while (0)

/* ---- Shared memory of a communicator (comm_shm.c) ---- */

enum {
  EP_MAX_RANKS = 1024,
  EP_RECORD_BYTES = 512, /* of a control record */
  EP_SHOWN_BYTES = 256,  /* of it for the job */
  EP_SLOT_BYTES = 16384, /* payload of a ring slot */
  EP_NUM_SLOTS = 8,
  EP_ADDRESS_BYTES = 48,
  EP_SECRET_BYTES = 16
};

typedef enum {
  EP_RANK_EXPECTED = 0, /* has not arrived */
  EP_RANK_THERE = 1,
  EP_RANK_DESTROYED = 2, /* called ncclCommDestroy */
  EP_RANK_ABORTED = 3,
  EP_RANK_FAILED = 4 /* met an error: its part of the work is not coming */
} ep_rank_state_t;

/* How to find a process: its server's abstract socket name, and the secret that its server asks for.
 * Names are listed in /proc/net/unix; the secret is in unique ids and in that memory alone. uid tells
 * processes apart. */
typedef struct {
  uint64_t uid;
  uint64_t pidSpace; /* where pid means something; 0: not known */
  int32_t pid, reserved;
  unsigned char secret[EP_SECRET_BYTES];
  char address[EP_ADDRESS_BYTES];
} ep_process_t;

typedef struct {
  _Alignas(64) _Atomic uint32_t state;
  ep_doorbell_t doorbell;
  _Atomic uint32_t shown; /* records shown so far */
  _Atomic uint64_t owner; /* random; 0: no process has joined as this rank */
  ep_process_t process;
  int32_t device, lsaSize;
  char why[200];                                 /* EP_RANK_FAILED: the sentence */
  _Alignas(16) char records[2][EP_RECORD_BYTES]; /* by parity of the exchange */
  ep_round_entry_t round;
} ep_rank_entry_t;

typedef struct {
  int32_t numRanks;
  uint64_t key;
  ep_round_shared_t round;
  ep_rank_entry_t ranks[];
} ep_comm_shm_t;

typedef struct {
  uint32_t bytes, kind; /* of this slot; which operation sent it */
  uint64_t total, at;   /* the whole message, and where this slot begins in it */
  char payload[EP_SLOT_BYTES];
} ep_slot_t;

typedef struct {
  _Alignas(64) _Atomic uint64_t head; /* slots written */
  _Alignas(64) _Atomic uint64_t tail; /* slots read */
  _Alignas(64) ep_slot_t slots[EP_NUM_SLOTS];
} ep_ring_t;

size_t epCommShmBytes(int numRanks);
ep_ring_t *epCommShmRing(ep_comm_shm_t *shm, int src, int dst);
/* Joins the shared memory of a key at a process (this one or another): maps it, or shares the mapping. */
ncclResult_t epCommShmJoin(const ep_process_t *owner, uint64_t key, int numRanks,
                           ep_comm_shm_t **out, const char *func);
void epCommShmLeave(ep_comm_shm_t *shm);
void epCommShmForked(void);

/* ---- The server of this process (comm_server.c), and asking others' (comm_ask.c) ---- */

/* This process's name; starts the server if it is not there. */
ncclResult_t epServerSelf(ep_process_t *out, const char *func);
/* A descriptor from a process's server: of the shared memory of a key, or of a memory segment. */
ncclResult_t epServerAskShm(const ep_process_t *owner, uint64_t key, int numRanks, int *fd,
                            const char *func);
ncclResult_t epServerAskSegment(const ep_process_t *owner, uint64_t segment, int *fd, size_t *bytes,
                                const char *func);
/* A descriptor that becomes readable when the process ends, for processes of another process-id namespace.
 * Says nothing: ncclRemoteError: it has ended; any other failure: it cannot be told now. */
ncclResult_t epServerWatch(const ep_process_t *owner, int *fd);
void epServerForked(void);

/* ---- Communicators ---- */

#define EP_COMM_MAGIC   0x57e4a006u
#define EP_WINDOW_MAGIC 0x57e4a007u

struct ncclComm {
  _Atomic uint32_t magic;
  uint64_t life; /* differs each time the object is used again */
  int rank, numRanks, device, lsaSize;
  bool hasGin; /* every rank has: NCCL_GIN_ENABLE */
  ep_comm_shm_t *shm;
  ep_process_t self;
  _Atomic int *watches;            /* [numRanks] of the ranks' processes, or a watch_t */
  uint32_t numExchanges;           /* control exchanges begun */
  uint32_t numShrinks;             /* ncclCommShrink called on it */
  ep_round_t round;                /* comm_round.c fills it in */
  _Atomic uint64_t issued, served; /* stream-ordered works */
  _Atomic uint32_t turn;           /* futex: served, low bits */
  _Atomic int asyncError;          /* ncclResult_t */
  _Atomic bool aborting;
  _Atomic int refs;     /* the user's, and one for each call that waits in it */
  pthread_mutex_t lock; /* sentence */
  char sentence[512];
  ncclWindow_t windows; /* live ones */
  struct ep_gin *gins;  /* of live device communicators */
  /* Set by what adds to these lists: frees what is left of them. */
  void (*freeWindows)(ncclComm_t comm);
  void (*freeGins)(ncclComm_t comm);
  ncclComm_t nextFree;
};

typedef struct ep_peer_map ep_peer_map_t;

struct ncclWindow_vidmem {
  _Atomic uint32_t magic;
  ncclComm_t comm;
  char *user;
  size_t bytes;
  int flags, numRanks;
  char **bases;         /* [numRanks], in this process */
  size_t *sizes;        /* [numRanks] */
  ep_peer_map_t **maps; /* [numRanks] NULL: same process */
  ncclWindow_t next;    /* of the communicator, or of the free ones */
};

ncclResult_t epCommGet(ncclComm_t comm, const char *func);
ep_rank_entry_t *epCommEntry(ncclComm_t comm, int rank);
bool epCommSameProcess(ncclComm_t comm, int rank);
/* Whether the rank's part can still come; if not, the sentence says why. */
bool epCommPeerThere(ncclComm_t comm, int rank);
/* After a rank's server did not answer: whether the rank is gone, which shows a moment later. */
bool epCommPeerLeft(ncclComm_t comm, int rank);
void epCommRing(ncclComm_t comm, int rank);
void epCommRingAll(ncclComm_t comm);
/* Remembers the first error of stream-ordered work and signals it to the other ranks. */
void epCommSetAsync(ncclComm_t comm, ncclResult_t result, const char *sentence);
/* The remembered error as a failure of func. */
ncclResult_t epCommUsable(ncclComm_t comm, const char *func);
/* Sleeps until this rank's doorbell is rung after it was noted, at most maxNs. */
uint32_t epCommDoorbell(ncclComm_t comm);
void epCommSleep(ncclComm_t comm, uint32_t seen, uint64_t maxNs);
void epCommsForked(void);
void epWindowsForked(void);

/* ---- Control jobs (comm_control.c): host-side collective calls, alone or many in a group ---- */

typedef struct ep_job ep_job_t;
/* A call in rounds: show(data) fills this rank's record of the round; take() sees all ranks' and says
 * whether another round follows (the same on every rank, also when it fails). A failure of one rank is
 * shown in its record, at once or in the next round, and fails the call on every rank. */
struct ep_job {
  ep_job_t *next;
  const char *func;
  ncclComm_t comm;
  int round;
  bool over, shown;
  ncclComm_t entered; /* the comm that it began with */
  ncclComm_t parent;  /* split, second round: where rank r of comm is rank members[r] */
  int *members;
  ncclResult_t result; /* of this rank so far */
  char sentence[512];
  ncclResult_t (*show)(ep_job_t *job, void *data);
  ncclResult_t (*take)(ep_job_t *job, const void *const *all, bool *more);
  void (*finish)(ep_job_t *job, ncclResult_t result); /* sets out-parameters, or cleans up */
  union {
    struct {
      ncclComm_t *out;
    } init;
    struct {
      ncclComm_t *out, made;
      int color, key, newRank, newRanks, leader;
      uint64_t shmKey;
    } split;
    struct {
      ncclWindow_t *out, made;
    } window;
  } u;
};
/* Runs the job now, or at the end of the thread's group. Takes it. */
ncclResult_t epJobSubmit(ep_job_t *job);
ncclResult_t epJobsRun(ep_job_t *jobs);
ep_job_t *epJobNew(ncclComm_t comm, const char *func);

/* ---- Communicator making (comm_init.c) ---- */

ncclResult_t epCommNew(const ep_process_t *owner, uint64_t key, int numRanks, int rank,
                       const char *func, ncclComm_t *out);
void epCommFree(ncclComm_t comm, ep_rank_state_t lastState);
/* Around what waits in a communicator, which another thread may abort meanwhile: what it holds is freed by
 * the last one to leave. epCommEnter: false: it has been freed. */
bool epCommEnter(ncclComm_t comm);
void epCommLeave(ncclComm_t comm);
ncclResult_t epInitShow(ep_job_t *job, void *data);
ncclResult_t epInitTake(ep_job_t *job, const void *const *all, bool *more);
ncclResult_t epConfigCheck(const ncclConfig_t *config, const char *func);
ncclResult_t epInitJob(ncclComm_t comm, const char *func, ncclComm_t *out);
void epWindowsFree(ncclComm_t comm);
/* comm_gin.c: ends the networks of its device communicators; whether this process may have GIN. */
void epGinsFree(ncclComm_t comm);
bool epGinEnabled(void);
/* Waits until all work issued on the communicator has run; the sentence names func. */
ncclResult_t epCommDrain(ncclComm_t comm, const char *func);

/* ---- Stream-ordered work (comm_tasks.c, comm_reduce.c, comm_group.c) ---- */

typedef enum {
  EP_TASK_SEND,
  EP_TASK_RECV,
  EP_TASK_REDUCE, /* takes the same block from every rank's ring, in rank order, and reduces it */
  EP_TASK_COPY    /* within this rank */
} ep_task_kind_t;

typedef struct {
  ep_task_kind_t kind;
  uint32_t tag; /* which operation: checked against the sender's */
  int peer;     /* SEND, RECV */
  char *dst;
  const char *src; /* SEND: the data; REDUCE: this rank's own terms; COPY */
  size_t bytes;
  ncclDataType_t type; /* REDUCE */
  ncclRedOp_t op;
  int inPlaceWith; /* REDUCE: tasks [inPlaceWith, own index) send from memory it overwrites; -1: none */
} ep_task_t;

/* A group's tasks on one communicator: immutable once issued, so a graph can run it many times. */
typedef struct {
  _Atomic int refs;
  ncclComm_t comm;
  uint64_t life;
  ep_task_t *tasks;
  int numTasks, maxTasks;
  const char *func;
} ep_work_t;

ep_work_t *epWorkNew(ncclComm_t comm, const char *func);
ep_task_t *epWorkAdd(ep_work_t *work);
void epWorkRelease(void *work);
void epWorkRetain(void *work);
/* Runs all tasks to their end, or fails with a sentence. */
ncclResult_t epWorkRun(ep_work_t *work);
/* Puts the work on the stream, in the communicator's order. Takes the work. */
ncclResult_t epWorkIssue(ep_work_t *work, cudaStream_t stream);

size_t epTypeBytes(ncclDataType_t type);
/* Which collective a message belongs to: the low byte of its tag. */
typedef enum {
  EP_TAG_ALL_REDUCE = 1,
  EP_TAG_REDUCE,
  EP_TAG_REDUCE_SCATTER,
  EP_TAG_BROADCAST,
  EP_TAG_ALL_GATHER,
  EP_TAG_ALL_TO_ALL,
  EP_TAG_GATHER,
  EP_TAG_SCATTER,
  EP_TAG_SEND
} ep_tag_t;

const char *epTagName(uint32_t tag);
bool epReducible(ncclDataType_t type, ncclRedOp_t op);
/* acc (wide terms) = the first term; then op with each further; then out. Count elements. */
typedef struct {
  _Alignas(16) char wide[EP_SLOT_BYTES * 2];
} ep_accumulator_t;
void epReduceFirst(ep_accumulator_t *acc, const void *term, size_t bytes, ncclDataType_t type);
void epReduceNext(ep_accumulator_t *acc, const void *term, size_t bytes, ncclDataType_t type,
                  ncclRedOp_t op);
void epReduceStore(const ep_accumulator_t *acc, void *out, size_t bytes, ncclDataType_t type,
                   ncclRedOp_t op, int numRanks);

/* ---- Groups (comm_group.c) ---- */

bool epInGroup(void);
/* The thread's work for (comm, stream) in the open group, or a new one outside a group. */
ncclResult_t epGroupWork(ncclComm_t comm, cudaStream_t stream, const char *func, ep_work_t **out);
/* After adding tasks: issues the work unless a group is open. */
ncclResult_t epGroupAdded(ep_work_t *work, cudaStream_t stream);
ncclResult_t epGroupRemember(ncclResult_t result);

#endif
