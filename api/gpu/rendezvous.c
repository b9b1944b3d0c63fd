/* The rendezvous of a communicator's ranks.
 *
 * NCCL's own collective calls (window registration among them) wait for ever for a rank that does not
 * come, and do not name it. So ranks first meet here, with a time limit, and go on to NCCL only when
 * all have come with the same call. plan/barrier_round.h holds the barrier rounds, at a site of
 * rendezvous_site.h; here are the rendezvous of this process, and the comparison of calls. */
#include "api/gpu/rendezvous.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "api/gpu/gpu.h"
#include "api/gpu/rendezvous_site.h"

/* For the other ranks, by one whose call has failed before the ranks had a place to meet. */
#define FAIL_WAIT_NS 10000000000ull

_Static_assert(sizeof(ep_rendezvous_word_t) <= EP_ROUND_BYTES, "a word fits into a record");

struct ep_rendezvous {
  struct ep_rendezvous *next;
  ncclComm_t comm;
  uint64_t hash;
  int numRanks, users;
  int haveMet; /* no rank can come to this rendezvous any more */
  uint64_t rounds;
  ep_site_t *site;
};

static pthread_mutex_t listLock = PTHREAD_MUTEX_INITIALIZER;
static struct ep_rendezvous *rendezvousList;

static void take(struct ep_rendezvous *b) {
  struct ep_rendezvous **link = &rendezvousList;
  while (*link != b) link = &(*link)->next;
  *link = b->next;
}

static void drop(struct ep_rendezvous *b) {
  if (!b) return;
  b->site->kind->close(b->site);
  free(b);
}

/* Under listLock. */
static struct ep_rendezvous *find(ncclComm_t comm, uint64_t hash) {
  for (struct ep_rendezvous *b = rendezvousList; b; b = b->next) {
    if (b->comm == comm && b->hash == hash) return b;
  }
  return NULL;
}

/* Under listLock: one of a former communicator at the same address that is not in use, off the list. */
static struct ep_rendezvous *takeStale(ncclComm_t comm, uint64_t hash) {
  for (struct ep_rendezvous *b = rendezvousList; b; b = b->next) {
    if (b->comm != comm || b->hash == hash || b->users) continue;
    take(b);
    return b;
  }
  return NULL;
}

static trefoil_result_t openLocked(ncclComm_t comm, uint64_t hash, int rank, int numRanks,
                                   int domains, struct ep_rendezvous **out) {
  struct ep_rendezvous *b = find(comm, hash);
  if (!b) {
    ep_site_t *site;
    EP_TRY(domains > 1 ? epNetSiteOpen(comm, rank, numRanks, &site)
                       : epSharedSiteOpen(hash, rank, numRanks, &site));
    b = malloc(sizeof *b);
    if (!b) {
      site->kind->close(site);
      return epFail(TREFOIL_SYSTEM_ERROR, "out of memory");
    }
    *b = (struct ep_rendezvous){
        .next = rendezvousList, .comm = comm, .hash = hash, .numRanks = numRanks, .site = site};
    rendezvousList = b;
  }
  b->users++;
  *out = b;
  return TREFOIL_OK;
}

/* It stays in the list: the next try goes on with it. */
static void leave(struct ep_rendezvous *b) {
  pthread_mutex_lock(&listLock);
  b->users--;
  pthread_mutex_unlock(&listLock);
}

trefoil_result_t epRendezvousOpen(ncclComm_t comm, int rank, int numRanks, int domains,
                                  uint64_t timeoutNs, struct ep_rendezvous **out) {
  uint64_t hash = epGpuCommHash(comm);
  EP_CHECK(hash && numRanks <= EP_KERNEL_MAX_RANKS, TREFOIL_INVALID_ARGUMENT,
           "ncclEpCreateGroup: comm is not usable");
  pthread_mutex_lock(&listLock);
  struct ep_rendezvous *stale = takeStale(comm, hash);
  trefoil_result_t result = openLocked(comm, hash, rank, numRanks, domains, out);
  pthread_mutex_unlock(&listLock);
  drop(stale);
  if (result != TREFOIL_OK) return result;
  result = (*out)->site->kind->await((*out)->site, timeoutNs);
  if (result != TREFOIL_OK) leave(*out);
  return result;
}

/* Before all have met it stays open, for the next try: it counts this rank's calls. */
void epRendezvousClose(struct ep_rendezvous *b) {
  if (!b) return;
  pthread_mutex_lock(&listLock);
  int isLast = --b->users == 0 && b->haveMet;
  if (isLast) take(b);
  pthread_mutex_unlock(&listLock);
  if (isLast) drop(b);
}

void epRendezvousAllCame(struct ep_rendezvous *b) {
  b->site->kind->allCame(b->site);
  pthread_mutex_lock(&listLock);
  b->haveMet = 1;
  pthread_mutex_unlock(&listLock);
}

/* ---- round --------------------------------------------------------------------------------- */

static const char *const callNames[] = {"",
                                        "ncclEpCreateGroup",
                                        "ncclEpCreateGroup",
                                        "ncclEpInitHandle",
                                        "ncclEpInitHandle",
                                        "ncclEpInitHandle",
                                        "ncclEpGroupDestroy",
                                        "ncclEpGroupDestroy",
                                        "trefoilGradGpuCreate",
                                        "trefoilGradGpuCreate",
                                        "trefoilGradGpuDestroy",
                                        "ncclEpInitHandle"};

static trefoil_result_t checkSameCall(const ep_rendezvous_word_t *all, int numRanks) {
  for (int r = 1; r < numRanks; r++) {
    EP_CHECK(all[0].call == all[r].call, TREFOIL_INVALID_USAGE,
             "rank 0 calls %s, rank %d %s; all ranks make collective calls in the same order",
             callNames[all[0].call], r, callNames[all[r].call]);
  }
  return TREFOIL_OK;
}

static trefoil_result_t failGone(const struct ep_rendezvous *b, int rank, const char *call) {
  int pid = b->site->kind->processOf(b->site, rank);
  if (pid) return epFail(TREFOIL_REMOTE_ERROR, "%s: rank %d is gone (process %d)", call, rank, pid);
  return epFail(TREFOIL_REMOTE_ERROR,
                "%s: rank %d is gone (its connection to rank 0, where ranks meet, has ended)", call,
                rank);
}

static trefoil_result_t resultOf(const struct ep_rendezvous *b, const ep_round_outcome_t *o,
                                 const char *call, uint64_t timeoutNs) {
  const char *where = b->site->kind->where;
  switch (o->end) {
  case EP_ROUND_COMPLETE:
    return TREFOIL_OK;
  case EP_ROUND_GONE:
    return failGone(b, o->rank, call);
  case EP_ROUND_FAILED:
    return epFail((trefoil_result_t)o->code, "%s: it failed on rank %d: %.300s", call, o->rank,
                  o->text);
  case EP_ROUND_LATE:
    return epFail(TREFOIL_REMOTE_ERROR, "%s: rank %s did not come within %.1f s (ranks meet %s)",
                  call, o->text, (double)timeoutNs * 1e-9, where);
  case EP_ROUND_LATE_ELSEWHERE:
    return epFail(TREFOIL_REMOTE_ERROR,
                  "%s: rank %d did not come within another rank's timeout (ranks meet %s)", call,
                  o->rank, where);
  case EP_ROUND_LEFT:
  case EP_ROUND_ABORTED:
    break;
  }
  return epFail(TREFOIL_REMOTE_ERROR, "%s: another rank has stopped waiting for all to come", call);
}

trefoil_result_t epRendezvousWait(struct ep_rendezvous *b, const ep_rendezvous_word_t *mine,
                                  uint64_t timeoutNs, ep_rendezvous_word_t *all) {
  ep_round_outcome_t outcome;
  const ep_site_kind_t *kind = b->site->kind;
  if (mine->call == EP_RENDEZVOUS_DESTROY_GROUP || mine->call == EP_RENDEZVOUS_GRAD_DESTROY)
    kind->callBegin(b->site);
  kind->join(b->site, mine, sizeof *mine, all, timeoutNs, &outcome);
  EP_TRY(resultOf(b, &outcome, callNames[mine->call], timeoutNs));
  b->rounds++;
  return checkSameCall(all, b->numRanks);
}

uint64_t epRendezvousRounds(const struct ep_rendezvous *b) {
  return b->rounds;
}

/* ---- around a call --------------------------------------------------------------------------- */

void epRendezvousCallBegin(ncclComm_t comm) {
  uint64_t hash = epGpuCommHash(comm);
  pthread_mutex_lock(&listLock);
  struct ep_rendezvous *b = hash ? find(comm, hash) : NULL;
  if (b) b->users++;
  pthread_mutex_unlock(&listLock);
  if (!b) return;
  b->site->kind->callBegin(b->site);
  leave(b);
}

static int isOpen(ncclComm_t comm) {
  uint64_t hash = epGpuCommHash(comm);
  pthread_mutex_lock(&listLock);
  int found = hash && find(comm, hash);
  pthread_mutex_unlock(&listLock);
  return found;
}

void epRendezvousCallFail(ncclComm_t comm, trefoil_result_t code, const char *why) {
  int rank = 0, numRanks = 0, domains = epGpuCommDomains(comm);
  if (!domains || ncclCommUserRank(comm, &rank) != ncclSuccess ||
      ncclCommCount(comm, &numRanks) != ncclSuccess || numRanks < 2 ||
      numRanks > EP_KERNEL_MAX_RANKS) {
    return;
  }
  /* To make a place over TCP takes a broadcast, which a refused call must not begin. */
  if (domains > 1 && !isOpen(comm)) return;
  char text[400];
  snprintf(text, sizeof text, "%s", why);
  struct ep_rendezvous *b = NULL;
  if (epRendezvousOpen(comm, rank, numRanks, domains, FAIL_WAIT_NS, &b) == TREFOIL_OK) {
    b->site->kind->callFail(b->site, (int)code, text);
    leave(b);
  }
  epFail(code, "%s", text); /* opening may have recorded another sentence */
}
