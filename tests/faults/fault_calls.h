/* Calls of the system that the libraries under test make, each of which can be made to fail once. The
 * program that links fault_calls.c has malloc, open, mmap, recv and the others in front of libc's; a call
 * counts if it comes from libtrefoil_host or libnccl_ep_cpu. A place is the chain of callers there. */
#ifndef TREFOIL_TESTS_FAULT_CALLS_H
#define TREFOIL_TESTS_FAULT_CALLS_H

#include <stdatomic.h>
#include <stdint.h>

enum { FAULT_MAX_PLACES = 4096 };

typedef struct {
  uint64_t hash;
  char what[24]; /* the function that is called */
  char from[64]; /* library and offset of the call, for addr2line */
} fault_place_t;

typedef struct {
  _Atomic int count, lost; /* lost: calls of further places, for which there was no room */
  fault_place_t places[FAULT_MAX_PLACES];
} fault_places_t;

/* From now on, calls are recorded in `places` (may be NULL), and the first one of the place `hash` fails;
 * 0: none. */
void faultStart(fault_places_t *places, uint64_t hash);
/* Whether it has failed; nothing is recorded and nothing fails any more. */
int faultStop(void);
/* Calls of this thread neither fail nor are recorded while it is paused: for the program's own use of a
 * library. */
void faultPause(int paused);
/* Blocks that the libraries have allocated and nobody has freed. */
long faultLiveBlocks(void);
/* Whence most of them are: for a message about a leak. */
void faultDescribeLive(char *text, unsigned long bytes);

#endif
