/* Processes that were started together: by mpirun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
 * (torchrun, srun with those exported). MPI itself is not linked: the ranks meet over sockets.
 *
 *   found in the environment          where the ranks meet
 *   all ranks on this host            a socket named after user and launch; nothing to configure
 *   several hosts                     MASTER_ADDR, port MASTER_PORT + 1 (torchrun's store has MASTER_PORT)
 *
 * Called by one thread of each process, all in the same order. A process that ends is noticed by all. */
#ifndef TREFOIL_VALIDATE_LAUNCH_H
#define TREFOIL_VALIDATE_LAUNCH_H

#include "trefoil/base.h"

#include <stddef.h>

enum { EP_LAUNCH_MAX_RANKS = 64 };

typedef struct ep_launch {
  int rank, numRanks;
  int localRank, numLocal;          /* on this host */
  int sockets[EP_LAUNCH_MAX_RANKS]; /* rank 0: of each other rank; else [0]: of rank 0 */
  int isOpen;
} ep_launch_t;

/* What the environment says; numRanks 1 if it says nothing. TREFOIL_INVALID_ARGUMENT with a sentence:
 * half of it, or numbers that do not fit. */
trefoil_result_t epLaunchFind(ep_launch_t *launch);
/* Connects the ranks, waiting 60 s at most. TREFOIL_REMOTE_ERROR names who did not come. */
trefoil_result_t epLaunchOpen(ep_launch_t *launch);
/* all [numRanks][bytes]: what each rank gave. TREFOIL_REMOTE_ERROR: a process ended. */
trefoil_result_t epLaunchGather(ep_launch_t *launch, const void *mine, void *all, size_t bytes);
void epLaunchClose(ep_launch_t *launch);

#endif
