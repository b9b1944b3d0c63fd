/* One real shape through the public C API: R rank threads, every received and combined byte compared
 * with the reference, rank by rank; what goes where, and times.
 *
 * Memory: the shape's own tensors, plus two ranks' worth of reference at a time. The received
 * rows are the combine's input, in place: between the two every row is changed by a value that only its
 * expert (or its rank) knows, so that a row summed twice or from the wrong slot shows. */
#ifndef TREFOIL_VALIDATE_REAL_SHAPE_H
#define TREFOIL_VALIDATE_REAL_SHAPE_H

#include "trefoil/plan.h"
#include "trefoil/ref.h"
#include "trefoil/trace.h"
#include "validate/gpu_times.h"
#include "validate/library.h"
#include "validate/real_pair.h"
#include "validate/order_free.h"
#include "validate/puts.h"
#include "validate/worker.h"

enum { EP_REAL_MAX_RANKS = 64, EP_REAL_MAX_REPEATS = 1000 };

typedef struct ep_real_result ep_real_result_t;

/* What runs on another stream of every GPU while an operation is timed. */
typedef enum ep_real_background {
  EP_REAL_BACKGROUND_NOTHING,
  EP_REAL_BACKGROUND_COPIES,        /* copy engines store to the next rank's memory */
  EP_REAL_BACKGROUND_COPIES_FROM_0, /* rank 0's alone */
  EP_REAL_BACKGROUND_GEMM,          /* matrix products on the SMs that the operation leaves */
  EP_REAL_NUM_BACKGROUND
} ep_real_background_t;

typedef struct ep_real_options {
  ep_library_paths_t paths;
  const char
      *against; /* NULL, or another library on the same NCCL and CUDA, timed in turn with `paths` */
  unsigned againstOpen; /* as `open`, for it */
  trefoil_mode_t mode;
  trefoil_shape_t shape; /* maxTokens: tokens of a full rank */
  int64_t hidden;        /* bf16 */
  int toE4m3;            /* LL: the dispatch quantises; there is no combine then */
  int partial;           /* LL expert-major: NCCL_EP_LL_COMBINE=partial */
  int fp8;               /* E4M3 rows and f32 scales of 128 elements, the caller's; no combine */
  int backward;          /* HT: gradients by the routing of the Update, and of the weights */
  int window;            /* what a dispatch writes lies in registered windows */
  trefoil_popularity_t popularity; /* which experts tokens choose (trefoil/trace.h) */
  double skew;                     /* as there, like the next two */
  double ragged;
  int numEmptyRanks;
  unsigned maxSms; /* max_num_sms; 0: the library's choice */
  unsigned open;   /* EP_OPEN_...: what the comparison leaves open (order_free.h); 0: nothing */
  uint64_t seed, timeoutNs;
  int iterations;       /* GPUs: of each measurement, at most EP_GPU_ITERATIONS; 0: that many */
  uint64_t startSkewNs; /* GPUs: the last rank starts each operation so much later */
  ep_real_background_t background; /* GPUs */
  int repeats;      /* timed dispatches and combines after the check; 0: only the check's own */
  double seconds;   /* options[0]'s: no run starts later than that; 0: no limit */
  uint64_t limitNs; /* a call that takes longer hangs; 0: as in checker.h */
  const volatile sig_atomic_t *interrupted; /* options[0]'s: NULL, or a signal once it came */
  void (*progress)(void *context, const char *what, uint64_t done, uint64_t total);
  void (*finished)(void *context, int runIdx, const ep_real_result_t *result); /* options[0]'s */
  void *context;
} ep_real_options_t;

struct ep_real_result {
  int ok;
  ep_case_outcome_t outcome; /* agrees, order open, different (or failed), aborts, hangs */
  char difference[2048];     /* the first one, if not ok */
  int rowsMoved, sumsMoved;  /* with options.open: rows in another order, sums rounded otherwise */
  double updateS, dispatchS, combineS, referenceS;
  uint64_t bytesCompared;
  int64_t receivedRows[EP_REAL_MAX_RANKS];                       /* padding included */
  uint64_t dispatchBytes[EP_REAL_MAX_RANKS * EP_REAL_MAX_RANKS]; /* [src * R + dst], by the plan */
  uint64_t combineBytes[EP_REAL_MAX_RANKS * EP_REAL_MAX_RANKS];
  ep_puts_t
      puts; /* of all ranks for an Update, a dispatch and a combine, where the library counts them */
  int numRepeats; /* done; only of what passed its check */
  double dispatchTimes[EP_REAL_MAX_REPEATS], combineTimes[EP_REAL_MAX_REPEATS];
  double copyRate;      /* bytes a second of all ranks copying at once; with repeats */
  ep_gpu_times_t gpu;   /* with repeats, on GPUs, in place of the times above */
  ep_pair_times_t pair; /* with options.against, in place of all of them */
};

/* Runs in a process of its own. TREFOIL_OK: it took place, result->ok says how it ended; a crash, an
 * exit() and a hang of the library are such ends, too. */
trefoil_result_t epRealRun(const ep_real_options_t *options, ep_real_result_t *result);
/* The same for several shapes of the same ranks and libraries (options[0]'s), one after another in one
 * process; after one that could not be done, or differs, the rest is not run: *numDone. Interrupted:
 * TREFOIL_OK with *numDone so far. */
trefoil_result_t epRealRunAll(const ep_real_options_t *options, int numRuns,
                              ep_real_result_t *results, int *numDone);

/* 1: the shape has a combine; rows that were quantised have none. */
int epRealHasCombine(const ep_real_options_t *options);

/* Tier of a pair of ranks. */
trefoil_tier_t epTierOf(const trefoil_shape_t *shape, int src, int dst);

#endif
