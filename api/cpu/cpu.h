/* The executor on the CPU: what its files share.
 *
 * Picture. Every operation is a record queued on the caller's stream as a host function, so stream
 * order, events and graph replay come for free, and it may block there until peers come. All
 * bytes move by pull: a rank writes only its own window (arena), publishes a number, and peers read;
 * they answer with a number in their own control block when they are done. So every word has one
 * writer, a rank that is late reads old data at worst (and notices: the number has moved on),
 * and one path serves threads and processes alike.
 *
 *   dispatch    source exposes its rows in slot op % S          published >= op
 *               receivers copy the rows they need               taken[src] >= op
 *   combine     an experts' rank writes, per origin and chunk,  sent[origin] >= seq
 *               a message (tags, weights, rows) in slot seq % S
 *               of the origin's ring; the origin sums           taken[sender] >= seq
 *   more nodes  HT dispatch: the same-rail rank p of a node copies net rows into its forward area,
 *               its node reads there. HT combine: p sums its node's messages into a relay ring.
 *
 * Memory order: rows are plain stores, then a release store of the number, then the peer's
 * doorbell is rung; readers load the number with acquire. Numbers only grow. Operation numbers are
 * counted where they execute, so graph replays count.
 *
 * Two arenas per group: one per layout (expert-major, the other), each with its own counters. */
#ifndef TREFOIL_API_CPU_CPU_H
#define TREFOIL_API_CPU_CPU_H

#include <pthread.h>
#include <stdatomic.h>

#include "api/object.h"
#include "plan/clock.h"
#include "plan/doorbell.h"
#include "trefoil/layout.h"

typedef _Atomic uint64_t ep_word_t;

typedef enum ep_kind { EP_KIND_UPDATE, EP_KIND_DISPATCH, EP_KIND_COMBINE, EP_NUM_KINDS } ep_kind_t;

/* Rung when a word has changed that its owner may wait for. */
typedef struct ep_own_doorbell {
  _Alignas(64) ep_doorbell_t doorbell;
} ep_own_doorbell_t;

/* Of one arena in a control block; written by its owner only. */
typedef struct ep_arena_head {
  ep_word_t updatePublished, dispatchPublished, weightsPublished;
  int64_t updateTokens, updateTopk;
  uint64_t pad[3];
} ep_arena_head_t;

/* Start of every rank's control block; arrays of R words follow (control_words). */
typedef struct ep_control {
  ep_own_doorbell_t doorbells[EP_NUM_KINDS];
  ep_word_t failure;   /* 0, or 1 + the rank that its owner gave up on */
  ep_word_t readers;   /* operations of its owner that read others' rows where they lie, just now */
  ep_word_t withdrawn; /* 1: its owner's group has failed; its rows may be gone */
  ep_arena_head_t arenas[2];
} ep_control_t;
_Static_assert(sizeof(ep_control_t) <= EP_CONTROL_HEAD_BYTES, "EP_CONTROL_HEAD_BYTES");

/* Arrays of R words after the head. Those that are pushed are the exception to "one writer": [r] is
 * rank r's. */
typedef enum ep_array {
  EP_ARRAY_LEAVING = 0,                   /* [r] 1: rank r destroys its group */
  EP_ARRAY_CLEAN,                         /* [r] rank r's MaskCleans so far */
  EP_ARRAY_BYTES,                         /* [r] bytes that rank r took of mine: two arrays, */
  EP_ARRAY_ARENA = EP_ARRAY_BYTES + 2,    /* dispatch and combine. The rest: once per arena */
  EP_ARRAY_UPDATE_TAKEN = EP_ARRAY_ARENA, /* [src] */
  EP_ARRAY_DISPATCH_TAKEN,                /* [src] */
  EP_ARRAY_WEIGHTS_TAKEN,                 /* [origin] LL partial sums */
  EP_ARRAY_SENT,                          /* [origin] last message of that ring */
  EP_ARRAY_OWN_TAKEN,                     /* [sender] of my own tokens' rings */
  EP_ARRAY_RELAY_TAKEN,   /* [node(origin) * G + rail(sender)] of rings that I relay */
  EP_ARRAY_RELAY_SENT,    /* [node(origin)] */
  EP_ARRAY_FORWARD,       /* [node(origin)] op << 32 | chunks forwarded */
  EP_ARRAY_FORWARD_TAKEN, /* [rail(p)] */
  /* Masks, which high throughput lacks, where it has the four before: */
  EP_ARRAY_MASKED_SINCE = EP_ARRAY_RELAY_TAKEN, /* [r], three arrays, by kind: first operation of */
  EP_ARRAY_MASKED_AT = EP_ARRAY_MASKED_SINCE + 3, /* the last run that left r out; and the last */
  EP_ARRAY_LAST = EP_ARRAY_MASKED_AT + 2,
  EP_NUM_ARRAYS
} ep_array_t;
#define EP_CONTROL_ARRAYS (EP_ARRAY_ARENA + 2 * (EP_NUM_ARRAYS - EP_ARRAY_ARENA))
_Static_assert(EP_CONTROL_ARRAYS * 8 <= 256, "control bytes of the sizing table: 256 R");

typedef struct ep_peer {
  ep_control_t *control;
  char *arena[2];
  _Atomic int active;      /* this rank's mask: 1 active, 0 masked by the caller, -1 given up */
  ep_word_t rowsFrom[2];   /* rows pulled from it: dispatch, combine */
  uint64_t bytesNow[2][2]; /* [arena][dispatch, combine] taken from it, and not reported yet */
  uint64_t bytesBase[2];   /* what it had taken of mine at the last reset: dispatch, combine */
  uint64_t cleansTaken;    /* MaskCleans of its that this rank's have waited for */
  uint64_t ringSeq[2];     /* [arena] messages per ring so far, of this rank as origin */
  int64_t sendNext;        /* combine in progress: next chunk to send to this origin */
  int64_t relayNext;       /* */
  int64_t cursor;          /* combine: next row of its message */
  const char *message;     /* combine: its current message, NULL: none */
} ep_peer_t;
_Static_assert(sizeof(ep_peer_t) <= 256, "peer tables of the sizing table: 256 R");

typedef struct ep_arena {
  int ready;
  ep_sizing_t sizing;
  char *memory; /* this rank's */
  ncclWindow_t window;
  void *scratch;
  uint64_t ops[EP_NUM_KINDS]; /* executed so far */
} ep_arena_t;

struct ep_hang;

typedef struct ep_cpu_group {
  struct ncclEpGroup *group;
  int me, R, G, M; /* rank, ranks, ranks a node, nodes */
  int oneProcess;  /* all ranks are threads of this process: HT combines read rows where they lie */
  char *controlMemory;
  ncclWindow_t controlWindow;
  ep_buffer_t controlBuffer, tableBuffer;
  ep_peer_t *peers; /* [R] */
  ep_arena_t arenas[2];
  uint64_t id;       /* the same on all ranks, another for each group of the communicator */
  uint64_t commHash; /* tells its communicator from a later one at the same address */
  uint64_t cleans, numSends;
  _Atomic int counting; /* operations called now count their bytes, */
  int counted;          /* or some did */
  _Atomic int failed;   /* a rank was given up: nothing runs any more */
  pthread_mutex_t lock; /* of what follows */
  pthread_cond_t idle;
  int64_t inFlight;           /* records queued or running, all handles */
  struct ep_record *captured; /* of mask operations */
  struct ep_hang *hang;
} ep_cpu_group_t;
_Static_assert(sizeof(struct ncclEpGroup) + 64 + sizeof(ep_cpu_group_t) <= EP_GROUP_OBJECT_BYTES,
               "EP_GROUP_OBJECT_BYTES");

/* Start of handle_mem; arrays follow (cpu_handle.c). A second handle on the same memory sees it. */
typedef struct ep_mem_head {
  uint64_t magic;
  uint64_t version; /* unique per Update in this process */
  int64_t topk, mode, alignment, total;
  int64_t numRanks, numExperts, maxTokens; /* of the group that wrote it */
} ep_mem_head_t;

typedef struct ep_cpu_handle {
  struct ncclEpHandle *handle;
  ep_cpu_group_t *g;
  int arenaIdx;
  ep_mem_head_t *head;
  int64_t *numTokens;   /* [R] in handle_mem */
  uint8_t *active;      /* [R, R], LL */
  int32_t *routing;     /* [R][N * K], K of the Update, not the handle's bound */
  const int32_t **rows; /* [R] pointers into routing (epPlaceRows) */
  void *hostBlock;      /* rows and the layout's memory */
  trefoil_layout_t layout;
  uint64_t layoutVersion;
  /* LL: what Update recorded, and what the layout was made from */
  ep_update_call_t recorded;
  uint64_t recordedNo, layoutNo;
  uint64_t flightOps[EP_NUM_KINDS]; /* of an operation between its halves; 0: nothing was sent */
  struct ep_record *pendingRecord, *captured;
  uint64_t pendingNo;       /* order of send_only calls in the group */
  int pendingCaptured;      /* the send is part of a graph */
  int receivedEarly;        /* its receive was queued by a younger operation's Complete, */
  cudaStream_t earlyStream; /* on this stream, */
  cudaEvent_t earlyEvent;   /* which another one has to wait for */
  int64_t inFlight;
  uint64_t updatesQueued;
  ep_word_t updatesRun;
} ep_cpu_handle_t;
_Static_assert(sizeof(struct ncclEpHandle) + 64 + sizeof(ep_cpu_handle_t) <= EP_HANDLE_OBJECT_BYTES,
               "EP_HANDLE_OBJECT_BYTES");

typedef enum ep_stage { EP_STAGE_BOTH = 3, EP_STAGE_SEND = 1, EP_STAGE_RECEIVE = 2 } ep_stage_t;

/* A queued operation. */
typedef struct ep_record {
  void (*run)(struct ep_record *r);
  ep_cpu_group_t *g;
  ep_cpu_handle_t *h; /* NULL: of the group */
  struct ep_record *next;
  int captured; /* lives until the handle goes */
  ep_stage_t stage;
  int counts;               /* ncclEpCountBytes was on when it was called */
  ep_update_call_t routing; /* LL: the routing recorded when the operation was called */
  uint64_t routingNo;
  union {
    ep_update_call_t update;
    ep_dispatch_call_t dispatch;
    ep_combine_call_t combine;
    int *deviceMask;
  } call;
  int mask[]; /* MaskUpdate: [R] */
} ep_record_t;

/* An operation while it runs: what a wait needs to name its peer. */
typedef struct ep_op {
  ep_cpu_group_t *g;
  ep_arena_t *a;
  ep_cpu_handle_t *h;
  int arenaIdx;
  ep_kind_t kind;
  uint64_t no;
  int refuses; /* HT combine: this rank's input is unfit; its messages are empty and marked so */
  int counts;  /* what this rank sends in it is counted */
} ep_op_t;

/* ---- shared memory ---- */
static inline ep_word_t *epArray(ep_control_t *c, int R, ep_array_t array, int arenaIdx) {
  int idx = array < EP_ARRAY_ARENA
                ? (int)array
                : (int)array + arenaIdx * ((int)EP_NUM_ARRAYS - (int)EP_ARRAY_ARENA);
  return (ep_word_t *)((char *)c + EP_CONTROL_HEAD_BYTES) + (size_t)idx * (size_t)R;
}
/* Word [i] of rank r's array, for the arena of the operation. */
static inline ep_word_t *epWordOf(const ep_op_t *op, int r, ep_array_t array, int i) {
  return &epArray(op->g->peers[r].control, op->g->R, array, op->arenaIdx)[i];
}
static inline ep_arena_head_t *epHeadOf(const ep_op_t *op, int r) {
  return &op->g->peers[r].control->arenas[op->arenaIdx];
}
/* A shared buffer of rank r's arena. */
static inline char *epBufferOf(const ep_op_t *op, int r, ep_buffer_id_t id) {
  const ep_buffer_t *b = op->a->sizing.buffers;
  return op->g->peers[r].arena[op->arenaIdx] + (b[id].offset - b[EP_BUFFER_CONTROL].bytes);
}
static inline uint64_t epLoad(const ep_word_t *w) {
  return atomic_load_explicit((ep_word_t *)(uintptr_t)w, memory_order_acquire);
}
static inline void epStore(ep_word_t *w, uint64_t value) {
  atomic_store_explicit(w, value, memory_order_release);
}
static inline int epActive(const ep_cpu_group_t *g, int r) {
  return atomic_load_explicit(&g->peers[r].active, memory_order_relaxed) == 1;
}

/* ---- cpu_wait.c ---- */
void epRing(ep_cpu_group_t *g, int r, ep_kind_t kind);
void epRingAll(ep_cpu_group_t *g, ep_kind_t kind);
/* Waits until *word (rank peer's) >= value: 1; 0 if the peer is lost: then it is masked, or without
 * masks the group has failed. `what` completes "waiting for <what>". */
int epWait(const ep_op_t *op, int peer, const ep_word_t *word, uint64_t value, const char *what);
/* One sleep on this rank's own doorbell since `seen`; names peer. 0: the group has failed. */
typedef struct ep_deadline {
  uint64_t deadlineNs, nextLookNs;
  int peer; /* as the progress record has it */
} ep_deadline_t;
uint32_t epBell(const ep_op_t *op);
int epSleep(const ep_op_t *op, uint32_t seen, int peer, const char *what, ep_deadline_t *deadline);
/* A receive: was anything sent? If not (a captured send that never ran) it is reported. */
int epWasSent(const ep_op_t *op);
void epGiveUp(const ep_op_t *op, int peer, const char *how, const char *what);
/* With masks: records the ranks that this operation leaves out; and for a peer that has gone on: it left this
 * rank out already then (nothing of its is missing), or it is given up. */
void epRecordMasked(const ep_op_t *op);
/* Does a slot that operation `no` filled have to wait for rank r's reading? Not if r was given up, or
 * left out of that operation; a rank that the caller masked only since then is still read to. */
int epOwesReading(const ep_op_t *op, int r, uint64_t no);
void epWentOn(const ep_op_t *op, int peer);
/* The way out: signals all ranks, waits for all on this rank's own memory. 0: one did not come. */
int epLeave(ep_cpu_group_t *g, uint64_t timeoutNs);
int epCleanBarrier(ep_cpu_group_t *g);
/* Rank r's rows are withdrawn: the group is lost, with a sentence about r. */
void epPeerWithdrawn(const ep_op_t *op, int r);

/* ---- cpu_direct.c ---- */
/* Around every look at rows of ranks [first, first + n) that lie in the caller's memory. 0: they may
 * be gone; the group has failed. */
int epBeginReading(const ep_op_t *op, int first, int n);
void epEndReading(const ep_op_t *op);
/* This rank's group has failed: its rows are not read any more when this returns. */
void epWithdraw(ep_cpu_group_t *g);

/* ---- cpu_queue.c ---- */
trefoil_result_t epQueue(ep_record_t *record, cudaStream_t stream);
trefoil_result_t epNewRecord(ep_cpu_group_t *g, ep_cpu_handle_t *h, void (*run)(ep_record_t *),
                             ep_record_t **out);
void epWaitIdle(ep_cpu_group_t *g, ep_cpu_handle_t *h);
trefoil_result_t epIsCapturing(cudaStream_t stream, int *capturing);

/* ---- cpu_count.c: bytes per destination (trefoil/device.h) ---- */
trefoil_result_t epCpuCountBytes(ncclEpGroup_t group, int on);
trefoil_result_t epCpuReadBytes(ncclEpGroup_t group, int kind, uint64_t *bytes, int reset,
                                cudaStream_t stream);
/* Bytes taken from rank r in this operation; reported before r learns that its rows have been read. */
static inline void epTook(const ep_op_t *op, int r, uint64_t bytes) {
  op->g->peers[r].bytesNow[op->arenaIdx][op->kind == EP_KIND_COMBINE] += bytes;
}
void epForgetTaken(const ep_op_t *op);
void epPublishTaken(const ep_op_t *op);

/* ---- operations ---- */
void epRunUpdate(ep_record_t *r);
void epRunDispatch(ep_record_t *r);
void epRunCombine(ep_record_t *r);
/* Publishes the routing, reads everybody's, computes the layout. 0: failed. */
int epExchangeRouting(const ep_op_t *op, const ep_update_call_t *call);
/* The caller's ids as int32; an id out of range or a duplicate is reported and becomes -1. */
void epCopyRouting(const ep_op_t *op, const ep_update_call_t *call, int32_t *out);
int epComputeLayout(ep_cpu_handle_t *h, int topk);
void epPlaceRows(ep_cpu_handle_t *h, int topk);
/* handle_mem holds a routing that fits a group like this one. */
int epHoldsRouting(const ep_cpu_handle_t *h);
/* HT: the layout of what handle_mem holds now; the call's tokens, and its top-k if it carries weights,
 * must be the routing's. 0: reported. */
int epRefreshLayout(const ep_op_t *op, int64_t numTokens, int topk);
void epReceiveRows(const ep_op_t *op, const ep_dispatch_call_t *call);
/* What a row's bytes mean: pass, recipe and datatype in one number, which sender and receiver must have
 * alike, and in words (at most 60 bytes). */
static inline int64_t epMeaning(int backward, ep_quant_t quant, trefoil_dtype_t dtype) {
  return (int64_t)dtype << 8 | (int64_t)quant << 1 | (backward != 0);
}
const char *epMeaningName(int64_t meaning, char text[60]);
#define EP_MEANING_REFUSED (-1) /* of a message: its sender refused, no rows */
/* Combine's messages. */
typedef struct ep_message {
  int64_t count;    /* rows */
  int64_t rowBytes; /* as they travel */
  int64_t meaning;  /* epMeaning */
  int64_t counts;   /* its reader counts rows for the sender */
} ep_message_t;
int64_t epNumChunks(const ep_op_t *op, int origin);
char *epMessageAt(const ep_op_t *op, int sender, int ring, uint64_t seq);
int64_t *epMessageTags(const ep_op_t *op, char *message);
float *epMessageWeights(const ep_op_t *op, char *message);
char *epMessageRows(const ep_op_t *op, char *message);
/* Bit of a tag: the row's place holds its address, in a group of one process. */
#define EP_TAG_ADDRESS ((int64_t)1 << 62)
/* Likewise: it holds a count and the addresses of the rows whose partial sum it stands for. */
#define EP_TAG_LIST ((int64_t)1 << 61)
void epWriteMessage(const ep_op_t *op, const ep_combine_call_t *call, int origin, int64_t chunk,
                    char *message);
size_t epWireBytes(const ep_combine_call_t *call);
int epPartial(const ep_op_t *op, const ep_combine_call_t *call);
void epReduceChunk(const ep_op_t *op, const ep_combine_call_t *call, int64_t chunk);
void epRelayChunk(const ep_op_t *op, const ep_combine_call_t *call, int origin, int64_t chunk,
                  char *message);

/* ---- cpu_arena.c, cpu_mask.c, cpu_hang.c ---- */
trefoil_result_t epArenaEnsure(ep_cpu_group_t *g, int arenaIdx, const ep_sizing_t *sizing,
                               int topk);
void epArenaFree(ep_cpu_group_t *g, int arenaIdx);
/* Memory that all ranks see is made in two steps: alone, where much can fail; and together. */
/* Of a call of NCCL, with the runtime's reason. */
trefoil_result_t epNcclFailed(const char *what, ncclResult_t result);
trefoil_result_t epAllocShared(ep_cpu_group_t *g, size_t bytes, size_t zeroBytes, char **memory);
trefoil_result_t epOpenWindow(ep_cpu_group_t *g, char *memory, size_t bytes, ncclWindow_t *window);
void epFreeShared(ep_cpu_group_t *g, char *memory, size_t bytes, ncclWindow_t window);
trefoil_result_t epMaskQuery(ncclEpGroup_t group, int *deviceMask, cudaStream_t stream);
trefoil_result_t epMaskUpdate(ncclEpGroup_t group, const int *hostMask, cudaStream_t stream);
trefoil_result_t epMaskClean(ncclEpGroup_t group, cudaStream_t stream);

static inline ep_cpu_group_t *epCpu(struct ncclEpGroup *g) {
  return g->state;
}

#endif
