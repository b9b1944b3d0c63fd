/* The sizing table: every buffer that a group and a handle ask for, with its formula. This file has
 * the CPU library's column; the GPU library's is in api/gpu/gpu_sizing.c, where kernels/ is in reach.
 *
 * One table serves the allocators (they allocate what it says, at the offsets it says) and the
 * preflight (it sums it), so the two cannot differ. Pure: no communicator, no allocation. Letters
 * as in trefoil/shape.h; S = slots of a ring that is reused by turns (LL 2, HT dispatch 1, HT
 * combine 2), C = tokens of a chunk (LL N, HT 64), M = nodes. */
#ifndef TREFOIL_PLAN_SIZING_H
#define TREFOIL_PLAN_SIZING_H

#include "trefoil/layout.h"

/* Objects of fixed size: asserted against the structs where those are defined. */
#define EP_GROUP_OBJECT_BYTES  6144
#define EP_HANDLE_OBJECT_BYTES 2048
#define EP_CONTROL_HEAD_BYTES  1024 /* fixed part of a rank's control block */

#define EP_MAX_RANKS       TREFOIL_LAYOUT_MAX_RANKS
#define EP_MAX_EXPERTS     (1 << 20)
#define EP_MAX_TOKENS      (1 << 24)
#define EP_MAX_TOPK        1024
#define EP_MAX_TOKEN_BYTES (1u << 30)
#define EP_UNNAMED_TOPK    32 /* HT handle made with num_topk -1 in a group that names no bound */
#define EP_HT_CHUNK_TOKENS 64

/* Narrower on GPUs: asserted against kernels/ll/ll.h in api/gpu. */
#define EP_LL_GPU_MAX_RANKS       64
#define EP_LL_GPU_MAX_LOCAL       65534u /* local experts */
#define EP_HT_GPU_MAX_LOCAL       4096u  /* the same in high throughput */
#define EP_LL_GPU_MAX_TOKENS      (1u << 20)
#define EP_LL_GPU_MAX_TOPK        64
#define EP_LL_GPU_MAX_TOKEN_BYTES ((1u << 26) - 16)

typedef enum ep_backend_kind { EP_BACKEND_CPU = 0, EP_BACKEND_GPU = 1 } ep_backend_kind_t;

typedef struct ep_sizing_config {
  ep_backend_kind_t backend;
  trefoil_mode_t mode;
  trefoil_shape_t shape; /* topk = bound on K */
  size_t maxTokenBytes;
  int zeroCopyOn; /* the caller's dispatch outputs lie in windows */
  int anyRanks;   /* low latency on GPUs: sizes of more ranks than it takes, too */
  int maxSms;     /* on GPUs: most SMs of a launch; 0: the library's choice */
} ep_sizing_config_t;

typedef enum ep_memory {
  EP_MEMORY_DEVICE = 0, /* not registered: the caller's allocator, if there is one */
  EP_MEMORY_SHARED = 1, /* registered with NCCL: peers read it */
  EP_MEMORY_HOST = 2
} ep_memory_t;

typedef enum ep_buffer_id {
  /* group, shared: one window, in this order */
  EP_BUFFER_CONTROL = 0,      /* counters, doorbells, failure notice */
  EP_BUFFER_ROUTING,          /* topk_idx as published */
  EP_BUFFER_DISPATCH_HEAD,    /* tokens and mask of a dispatch */
  EP_BUFFER_DISPATCH_ROWS,    /* rows as exposed to receivers */
  EP_BUFFER_DISPATCH_WEIGHTS, /* topk_weights next to them */
  EP_BUFFER_FORWARD_ROWS,     /* HT, M > 1: net rows on their way to the node's ranks */
  EP_BUFFER_COMBINE_WEIGHTS,  /* LL expert-major: weights for partial sums */
  EP_BUFFER_COMBINE_RINGS,    /* rows on their way back, one ring per origin (and relay) */
  /* group, device and host */
  EP_BUFFER_SCRATCH,      /* fp32 accumulators of a row, two operations */
  EP_BUFFER_GROUP_OBJECT, /* */
  EP_BUFFER_PEER_TABLES,  /* peers' addresses, masks */
  /* handle */
  EP_BUFFER_HANDLE_MEM,    /* routing of all ranks as copied */
  EP_BUFFER_HANDLE_OBJECT, /* */
  EP_BUFFER_LAYOUT,        /* slots of every routed row (trefoil_layout_t) */
  /* GPU only */
  EP_BUFFER_EXCHANGE, /* group, shared: what peers store into (kernels/ll/ll.h) */
  EP_BUFFER_RECORD,   /* group, host: what waits tell, mapped to the device */
  EP_BUFFER_MESSAGES, /* group, shared, behind exchange: what the network takes and brings (relay.h) */
  EP_BUFFER_MIRRORS, /* group, device: what is stored for far ranks */
  EP_BUFFER_RELAY,   /* group, device: control memory of the relay */
  EP_NUM_BUFFERS
} ep_buffer_id_t;

typedef struct ep_buffer {
  const char *name;    /* "dispatch rows" */
  const char *formula; /* "S * N * stride" */
  ep_memory_t memory;
  int ofHandle;  /* 0 group, 1 handle */
  size_t bytes;  /* 0: not needed */
  size_t offset; /* into the group's window (shared) or handle_mem */
} ep_buffer_t;

typedef struct ep_sizing {
  ep_sizing_config_t config;
  ep_buffer_t buffers[EP_NUM_BUFFERS];
  size_t rowStride;         /* bytes from row to row: maxTokenBytes, 16-byte aligned */
  int dispatchSlots;        /* S of dispatch */
  int combineSlots;         /* S of combine */
  int64_t chunkTokens;      /* C of combine */
  int64_t ringRows;         /* rows of one combine slot: C * rows per token */
  int numRings;             /* R, and in HT M - 1 relays on top */
  size_t ringTagBytes;      /* offsets within a combine slot: head | tags | weights | rows */
  size_t ringWeightBytes;   /* */
  size_t ringSlotBytes;     /* all of it */
  size_t dispatchHeadBytes; /* of one dispatch slot */
  size_t routingBytes;      /* of one published topk_idx */
  size_t weightBytes;       /* of one published topk_weights */
  size_t totals[2][3];      /* [of handle][memory] */
} ep_sizing_t;

/* A column: fills the table. epSizing: of the CPU library. TREFOIL_INVALID_ARGUMENT with a sentence if
 * the bytes do not fit 63 bits. */
trefoil_result_t epSizing(const ep_sizing_config_t *config, ep_sizing_t *out);
typedef trefoil_result_t (*ep_sizing_fn_t)(const ep_sizing_config_t *config, ep_sizing_t *out);

/* For columns: adds a buffer and its bytes to the totals; shared buffers get the next offset, rounded
 * up to 256 bytes. Refuses totals of 2^62 bytes and more. Arithmetic saturates. */
void epSizingAdd(ep_sizing_t *table, ep_buffer_id_t id, ep_buffer_t buffer);
trefoil_result_t epSizingCheck(const ep_sizing_t *table);

#endif
