/* Merges the progress records of a group's ranks (api/hang_record.h) into one sentence.
 *
 * A rank that waits names the rank that it waits for; that one may wait too. The end of the chain is the
 * rank to look at: gone, or inside an operation without waiting, or not yet there. By rails what a rank of
 * another domain sends comes through a rank that forwards it, which the chain may follow instead. Records of
 * several groups are told apart; the one that waits longest counts. */
#include "cli/hang.h"

#include "api/hang_record.h"
#include "cli/cli.h"
#include "plan/process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RECORDS = 4096 };
static const char *const kindNames[EP_HANG_KINDS] = {"Update", "Dispatch", "Combine"};

typedef struct records {
  ep_hang_record_t *list;
  int count;
} records_t;

/* Text of a file, as it may be shown: it ends, and is printable. */
static void cleanText(char *text, size_t bytes) {
  text[bytes - 1] = 0;
  for (; *text; text++)
    if (*text < ' ' || *text > '~') *text = '?';
}

/* One file; 0 and a sentence if it is none. */
static int readRecord(const char *path, ep_hang_record_t *record, char *why, size_t whyBytes) {
  struct stat info;
  int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC); /* a FIFO has no writer */
  if (fd < 0 || fstat(fd, &info)) {
    snprintf(why, whyBytes, "%s: %s", path, strerror(errno));
    if (fd >= 0) close(fd);
    return 0;
  }
  ssize_t n = S_ISREG(info.st_mode) ? pread(fd, record, sizeof *record, 0) : 0;
  close(fd);
  int ok = n == (ssize_t)sizeof *record && record->magic == EP_HANG_MAGIC &&
           record->version == EP_HANG_VERSION && record->bytes == sizeof *record &&
           record->numRanks >= 1 && record->rank >= 0 && record->rank < record->numRanks &&
           record->pid > 0;
  for (int k = 0; ok && k < EP_HANG_KINDS; k++) {
    ok = record->kinds[k].state <= EP_HANG_WAITING && record->kinds[k].peer >= -1 &&
         record->kinds[k].peer < record->numRanks;
    cleanText(record->kinds[k].what, sizeof record->kinds[k].what);
  }
  cleanText(record->host, sizeof record->host);
  if (ok)
    epHangMerge(record);
  else
    snprintf(why, whyBytes, "%s is not a progress record of this version", path);
  return ok;
}

static int sameGroup(const ep_hang_record_t *a, const ep_hang_record_t *b) {
  return a->groupId == b->groupId && a->groupNo == b->groupNo;
}

static uint64_t nowNs(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int isGone(const ep_hang_record_t *r) {
  char host[64] = "";
  gethostname(host, sizeof host - 1);
  return !strcmp(host, r->host) && epPidEnded(r->pid);
}

static const ep_hang_kind_t *waiting(const ep_hang_record_t *r) {
  const ep_hang_kind_t *longest = NULL;
  for (int k = 0; k < EP_HANG_KINDS; k++)
    if (r->kinds[k].state == EP_HANG_WAITING &&
        (!longest || r->kinds[k].sinceNs < longest->sinceNs))
      longest = &r->kinds[k];
  return longest;
}

static const ep_hang_record_t *findRank(const records_t *all, const ep_hang_record_t *like,
                                        int rank) {
  for (int i = 0; i < all->count; i++)
    if (sameGroup(&all->list[i], like) && all->list[i].rank == rank) return &all->list[i];
  return NULL;
}

/* The rank that a waiting rank waits for: the peer it names, else the one furthest behind. */
static int peerOf(const records_t *all, const ep_hang_record_t *r, const ep_hang_kind_t *kind) {
  if (kind->peer >= 0) return kind->peer;
  int k = (int)(kind - r->kinds), behind = r->rank;
  uint64_t least = kind->number;
  for (int i = 0; i < all->count; i++) {
    const ep_hang_record_t *q = &all->list[i];
    if (!sameGroup(q, r) || q->kinds[k].number >= least) continue;
    least = q->kinds[k].number;
    behind = q->rank;
  }
  return behind;
}

/* Whether a rank has sent what others wait for in this operation: it may itself wait until it may send. */
static int hasSent(const ep_hang_record_t *r, unsigned k, uint64_t number) {
  const ep_hang_kind_t *kind = &r->kinds[k];
  uint32_t phase = r->device.wait.phase;
  if (kind->number != number || kind->state != EP_HANG_WAITING) return kind->number >= number;
  return phase != EP_WAIT_BUFFER && phase != EP_WAIT_POST;
}

/* The next rank of the chain: by rails the one that forwards, if it is gone or the source has sent. */
static int nextOf(const records_t *all, const ep_hang_record_t *r, const ep_hang_kind_t *kind) {
  unsigned k = (unsigned)(kind - r->kinds);
  int peer = peerOf(all, r, kind), via = epHangVia(r, k);
  if (via < 0) return peer;
  const ep_hang_record_t *forwarder = findRank(all, r, via), *source = findRank(all, r, peer);
  if (forwarder && isGone(forwarder)) return via;
  if (!source || isGone(source)) return peer;
  return hasSent(source, k, kind->number) ? via : peer;
}

typedef struct verdict {
  const ep_hang_record_t *group; /* the record that waits longest, or NULL: none waits */
  const ep_hang_kind_t *kind;    /* its wait */
  int culprit;                   /* -1: none */
  const char *why;               /* "gone", "missing", "running", "behind", "cycle" */
} verdict_t;

/* The wait that has lasted longest, of ranks that live: one that was killed while it waited waits no more. */
static verdict_t longestWait(const records_t *all, int withGone) {
  verdict_t v = {.culprit = -1};
  for (int i = 0; i < all->count; i++) {
    const ep_hang_kind_t *w = waiting(&all->list[i]);
    if (!w || (v.kind && w->sinceNs >= v.kind->sinceNs)) continue;
    if (!withGone && isGone(&all->list[i])) continue;
    v.group = &all->list[i];
    v.kind = w;
  }
  return v;
}

static verdict_t judge(const records_t *all) {
  verdict_t v = longestWait(all, 0);
  if (!v.group) v = longestWait(all, 1);
  if (!v.group) { /* none waits: is a rank gone in the middle of something? */
    for (int i = 0; i < all->count; i++)
      for (int k = 0; k < EP_HANG_KINDS; k++)
        if (all->list[i].kinds[k].state == EP_HANG_RUNNING && isGone(&all->list[i])) {
          v = (verdict_t){&all->list[i], &all->list[i].kinds[k], all->list[i].rank, "gone"};
        }
    return v;
  }
  const ep_hang_record_t *at = v.group;
  const ep_hang_kind_t *kind = v.kind;
  for (int steps = 0; steps <= all->count; steps++) { /* more: it goes round */
    v.culprit = nextOf(all, at, kind);
    const ep_hang_record_t *next = findRank(all, at, v.culprit);
    v.why = "missing";
    if (!next) return v;
    v.why = "gone";
    if (isGone(next)) return v;
    const ep_hang_kind_t *itsKind = &next->kinds[kind - at->kinds], *its = waiting(next);
    v.why = itsKind->number < kind->number ? "behind" : "running";
    if (!its || next == at) return v;
    at = next;
    kind = its;
  }
  v.why = "cycle";
  return v;
}

static void describeCulprit(const records_t *all, const verdict_t *v, char *text, size_t bytes) {
  const ep_hang_record_t *r = findRank(all, v->group, v->culprit);
  int k = (int)(v->kind - v->group->kinds);
  const ep_hang_kind_t *its = r ? &r->kinds[k] : NULL;
  unsigned long long number = its ? (unsigned long long)its->number : 0;
  const char *name = kindNames[k];
  if (!strcmp(v->why, "missing"))
    snprintf(text, bytes,
             "rank %d left no record: it never made the group, or its file is not here",
             v->culprit);
  else if (!strcmp(v->why, "gone"))
    snprintf(text, bytes, "rank %d is gone (process %d on %s): it ended %s %s %llu", v->culprit,
             r->pid, r->host, its->state == EP_HANG_IDLE ? "after" : "in", name, number);
  else if (!strcmp(v->why, "behind") && number == 0)
    snprintf(text, bytes, "rank %d (process %d on %s) has not come to %s %llu, its first",
             v->culprit, r->pid, r->host, name, (unsigned long long)v->kind->number);
  else if (!strcmp(v->why, "behind"))
    snprintf(text, bytes, "rank %d (process %d on %s) has not come to %s %llu: it has %s %s %llu",
             v->culprit, r->pid, r->host, name, (unsigned long long)v->kind->number,
             its->state == EP_HANG_IDLE ? "finished" : "not finished", name, number);
  else if (!strcmp(v->why, "cycle"))
    snprintf(text, bytes, "the ranks wait for one another, rank %d among them", v->culprit);
  else
    snprintf(text, bytes, "rank %d (process %d on %s) is %s %s %llu and waits for nobody",
             v->culprit, r->pid, r->host, its->state == EP_HANG_IDLE ? "past" : "inside", name,
             number);
}

static json_t *recordJson(const ep_hang_record_t *r) {
  static const char *const states[] = {"idle", "running", "waiting"};
  json_t *kinds = json_object();
  for (int k = 0; k < EP_HANG_KINDS; k++) {
    const ep_hang_kind_t *h = &r->kinds[k];
    json_object_set_new(kinds, kindNames[k],
                        json_pack("{s:I, s:s, s:i, s:s}", "number", (json_int_t)h->number, "state",
                                  states[h->state], "peer", h->peer, "what", h->what));
  }
  return json_pack("{s:i, s:i, s:s, s:b, s:o}", "rank", r->rank, "pid", r->pid, "host", r->host,
                   "gone", isGone(r), "operations", kinds);
}

/* What a kernel's wait saw in place of what it expected; "" where it was no kernel's. */
static void describeFlags(const verdict_t *v, char *text, size_t bytes) {
  const ep_hang_device_t *d = &v->group->device;
  unsigned k = (unsigned)(v->kind - v->group->kinds);
  *text = 0;
  if (!d->used || d->wait.state == 0 || epHangKindOf(d->wait.kind) != k) return;
  int n = snprintf(text, bytes, " (expected flag %u", d->wait.expected);
  if (epHangHasReceived(d->wait.kind, d->wait.phase) && n > 0 && (size_t)n < bytes)
    n += snprintf(text + n, bytes - (size_t)n, ", received %u", d->wait.received);
  if (d->wait.item >= 0 && n > 0 && (size_t)n < bytes)
    n += snprintf(text + n, bytes - (size_t)n, ", item %lld", (long long)d->wait.item);
  if (n > 0 && (size_t)n < bytes) snprintf(text + n, bytes - (size_t)n, ")");
}

/* Of whom the rank waits for something. */
static void describePeer(const records_t *all, const verdict_t *v, char *text, size_t bytes) {
  int via = epHangVia(v->group, (unsigned)(v->kind - v->group->kinds));
  int n = snprintf(text, bytes, "rank %d", peerOf(all, v->group, v->kind));
  if (via >= 0 && n > 0 && (size_t)n < bytes)
    snprintf(text + n, bytes - (size_t)n, " through rank %d", via);
}

static int printVerdict(const records_t *all, int json) {
  verdict_t v = judge(all);
  char culprit[256] = "", flags[96] = "", peer[64],
       sentence[640] = "nobody waits: no rank of these records hangs";
  if (v.group) {
    describeCulprit(all, &v, culprit, sizeof culprit);
    describeFlags(&v, flags, sizeof flags);
    describePeer(all, &v, peer, sizeof peer);
    uint64_t now = nowNs();
    double since = now > v.kind->sinceNs ? 1e-9 * (double)(now - v.kind->sinceNs) : 0;
    if (v.kind->state == EP_HANG_WAITING)
      snprintf(sentence, sizeof sentence, "%s; rank %d waits in %s %llu for %s of %s%s, for %.1f s",
               culprit, v.group->rank, kindNames[v.kind - v.group->kinds],
               (unsigned long long)v.kind->number, *v.kind->what ? v.kind->what : "an answer", peer,
               flags, since);
    else
      snprintf(sentence, sizeof sentence, "%s", culprit);
  }
  if (!json) {
    puts(sentence);
    return v.group ? CLI_FAILED : CLI_OK;
  }
  json_t *ranks = json_array();
  for (int i = 0; i < all->count; i++) json_array_append_new(ranks, recordJson(&all->list[i]));
  int rc = cliPrintJson(json_pack("{s:b, s:s, s:i, s:s, s:o}", "hangs", v.group != NULL, "sentence",
                                  sentence, "culprit", v.culprit, "why", v.why ? v.why : "",
                                  "ranks", ranks));
  return v.group ? CLI_FAILED : rc;
}

int cliHang(const char *const *files, int json) {
  records_t all = {0};
  int n = 0;
  while (files[n]) n++;
  if (n > MAX_RECORDS) return cliUsage("doctor", "%d files: at most %d", n, MAX_RECORDS);
  all.list = calloc((size_t)n, sizeof *all.list);
  if (!all.list) return cliFail("doctor", "out of memory");
  for (int i = 0; i < n; i++) {
    char why[4608];
    if (!readRecord(files[i], &all.list[all.count], why, sizeof why)) {
      free(all.list);
      return cliFail("doctor", "%s", why);
    }
    all.count++;
  }
  int rc = printVerdict(&all, json);
  free(all.list);
  return rc;
}
