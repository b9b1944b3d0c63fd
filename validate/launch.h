/* Processes that were started together: by torchrun, Open MPI, MPICH, Slurm or PMIx, or by hand with RANK
 * and WORLD_SIZE. Nothing of them is linked: the ranks meet over sockets.
 *
 *   found in the environment          where the ranks meet
 *   all ranks on this host            a socket named after the launch; nothing to configure
 *   several hosts                     MASTER_ADDR, port MASTER_PORT + 1 (torchrun's store has MASTER_PORT)
 *
 * Both sides prove that they know the launch before a rank is admitted; within one host both also ask the
 * kernel whose process the other is, over TCP, too. Between hosts only TREFOIL_LAUNCH_SECRET keeps out who
 * knows the launch's name. What is foreign is dropped and counted. Every wait has a limit.
 *
 * Called by one thread of each process, all in the same order. A process that ends is noticed by all. */
#ifndef TREFOIL_VALIDATE_LAUNCH_H
#define TREFOIL_VALIDATE_LAUNCH_H

#include "plan/clock.h"
#include "trefoil/base.h"

#include <stddef.h>

enum { EP_LAUNCH_MAX_RANKS = 64 };

typedef struct ep_launch {
  int rank, numRanks;
  int localRank, numLocal; /* on this host; numLocal 0: not known, several hosts */
  int byHand;              /* no launcher says which launch this is */
  int hasSecret;           /* TREFOIL_LAUNCH_SECRET is set */
  int numElsewhere;        /* rank 0: ranks on other machines; else whether rank 0 is on one */
  char job[256];           /* what the processes of this launch share, and no other launch has */
  int rendezvousSeconds;   /* limit of epLaunchOpen; epLaunchFind sets 60 */
  int gatherSeconds;       /* limit of epLaunchGather; epLaunchFind sets 600 */
  int sockets[EP_LAUNCH_MAX_RANKS]; /* rank 0: of each other rank; else [0]: of rank 0 */
  int isOpen;
} ep_launch_t;

/* What the environment says; numRanks 1 if it says nothing. TREFOIL_INVALID_ARGUMENT with a sentence:
 * half of it, or numbers that do not fit. */
trefoil_result_t epLaunchFind(ep_launch_t *launch);
/* Connects the ranks. TREFOIL_REMOTE_ERROR names the ranks that did not come, and how many connections
 * were not of this launch; also if two launches cannot be told apart. */
trefoil_result_t epLaunchOpen(ep_launch_t *launch);
/* all [numRanks][bytes]: what each rank gave. TREFOIL_REMOTE_ERROR: a process ended, or did not come. */
trefoil_result_t epLaunchGather(ep_launch_t *launch, const void *mine, void *all, size_t bytes);
void epLaunchClose(ep_launch_t *launch);

/* ---- between launch.c and launch_rendezvous.c ---- */
/* All bytes out or in before `end` (epNow); 0: the other side is gone; -1: too late. */
int epLaunchMove(int socket, void *data, size_t bytes, int out, double end);

#endif
