/* The timeline of both operations as trace events (JSON) for ui.perfetto.dev or chrome://tracing.
 *
 * Two processes an operation: its ranks and its links. A rank has a thread with the whole operation,
 * one for what it sends in each phase and one for what it receives: the stretch from the first
 * transfer's start to the last one's end. Where at most maxLanes transfers of a (rank, phase) overlap,
 * each is shown too, in as many threads as that takes. A link is a counter: its rate over time, from
 * the transfers that cross it, each spread evenly between its first row's start and its last byte's;
 * what would exceed the link's rate moves to when it is free. Combine starts where dispatch ends.
 * Times are microseconds. */
#include "cli/cli.h"
#include "cli/simulate.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { maxLanes = 16, numBins = 200, lanesOfPhase = 32, threadsOfRank = 256 };

static const char *const opNames[2] = {"dispatch", "combine"};
static const char *const phaseNames[TREFOIL_NUM_PHASES] = {"direct", "net out", "forward", "return",
                                                           "net back"};

typedef struct writer {
  FILE *f;
  const simulated_t *s;
  const trefoil_sim_op_t *o;
  int op, pid;    /* of the ranks; the links' is one more */
  double startUs; /* of this operation */
  int any;        /* an event was written */
} writer_t;

static void event(writer_t *w, const char *ph, int pid, int tid) {
  fprintf(w->f, "%s\n{\"ph\":\"%s\",\"pid\":%d,\"tid\":%d", w->any ? "," : "", ph, pid, tid);
  w->any = 1;
}

static void nameOf(writer_t *w, const char *what, int pid, int tid, const char *name) {
  event(w, "M", pid, tid);
  fprintf(w->f, ",\"name\":\"%s\",\"args\":{\"name\":\"%s\"}}", what, name);
  event(w, "M", pid, tid);
  fprintf(w->f, ",\"name\":\"%s\",\"args\":{\"sort_index\":%d}}",
          strcmp(what, "process_name") ? "thread_sort_index" : "process_sort_index",
          strcmp(what, "process_name") ? tid : pid);
}

static void slice(writer_t *w, int tid, double from, double to, const char *name) {
  event(w, "X", w->pid, tid);
  fprintf(w->f, ",\"name\":\"%s\",\"ts\":%.4f,\"dur\":%.4f", name, w->startUs + from,
          to > from ? to - from : 0);
}

/* ---- Ranks ---- */

/* What one rank sends or receives in one phase. */
typedef struct stretch {
  double from, to;
  int64_t rows;
  uint64_t bytes;
  int transfers;
} stretch_t;

static void extend(stretch_t *x, const trefoil_sim_span_t *p, double to) {
  if (x->transfers == 0 || p->startUs < x->from) x->from = p->startUs;
  if (to > x->to) x->to = to;
  x->rows += p->rows;
  x->bytes += p->bytes;
  x->transfers++;
}

static void writeStretch(writer_t *w, int tid, const stretch_t *x, const char *name) {
  slice(w, tid, x->from, x->to, name);
  fprintf(w->f, ",\"args\":{\"transfers\":%d,\"rows\":%lld,\"bytes\":%llu}}", x->transfers,
          (long long)x->rows, (unsigned long long)x->bytes);
}

/* Thread of a rank: 0 the operation, 1 + 2 phase sends, 2 + 2 phase receives, then lanes. */
static int threadOf(int rank, int which) {
  return rank * threadsOfRank + which;
}

static void writeRank(writer_t *w, int rank, stretch_t (*all)[2][TREFOIL_NUM_PHASES]) {
  char name[96];
  double from = INFINITY;
  for (int phase = 0; phase < TREFOIL_NUM_PHASES; phase++) {
    for (int in = 0; in < 2; in++) {
      const stretch_t *x = &all[rank][in][phase];
      if (x->transfers == 0) continue;
      if (!in && x->from < from) from = x->from;
      int tid = threadOf(rank, 1 + 2 * phase + in);
      snprintf(name, sizeof name, "rank %d: %s, %s", rank, phaseNames[phase],
               in ? "receives" : "sends");
      nameOf(w, "thread_name", w->pid, tid, name);
      writeStretch(w, tid, x, phaseNames[phase]);
    }
  }
  snprintf(name, sizeof name, "rank %d", rank);
  nameOf(w, "thread_name", w->pid, threadOf(rank, 0), name);
  double end = w->o->finishUs ? w->o->finishUs[rank] : w->o->us;
  slice(w, threadOf(rank, 0), isfinite(from) && from < end ? from : 0, end, opNames[w->op]);
  fputs(",\"args\":{}}", w->f);
}

/* Spans come by start: each goes to the first lane of its (rank, phase) that is free again. Returns
 * the lane, or -1 if more than maxLanes overlap. */
static int laneOf(double *ends, const trefoil_sim_span_t *p) {
  for (int lane = 0; lane < maxLanes; lane++) {
    if (ends[lane] > p->startUs) continue;
    ends[lane] = p->endUs > p->startUs ? p->endUs : p->startUs;
    return lane;
  }
  return -1;
}

static int laneThread(const trefoil_sim_span_t *p, int lane) {
  return threadOf(p->src, 1 + 2 * TREFOIL_NUM_PHASES + p->phase * lanesOfPhase + lane);
}

static void writeTransfer(writer_t *w, const trefoil_sim_span_t *p, int lane, int isNew) {
  char name[96];
  int tid = laneThread(p, lane);
  if (isNew) {
    snprintf(name, sizeof name, "rank %d: %s, transfers %d", p->src, phaseNames[p->phase], lane);
    nameOf(w, "thread_name", w->pid, tid, name);
  }
  snprintf(name, sizeof name, "to %d", p->dst);
  slice(w, tid, p->startUs, p->endUs, name);
  fprintf(w->f,
          ",\"args\":{\"origin\":%d,\"chunk\":%d,\"rows\":%lld,\"bytes\":%llu,\"sent_us\":%.4f}}",
          p->origin, p->chunk, (long long)p->rows, (unsigned long long)p->bytes,
          w->startUs + p->sentUs);
}

/* Two walks: which (rank, phase) fit into the lanes, then their transfers. Returns how many
 * transfers are shown only in stretches, or -1 out of memory. */
static int64_t writeLanes(writer_t *w) {
  size_t groups = (size_t)w->o->numRanks * TREFOIL_NUM_PHASES;
  double *ends = malloc(groups * maxLanes * sizeof *ends);
  char *full = calloc(groups, 1), *used = calloc(groups * maxLanes, 1);
  int64_t hidden = -1;
  if (ends && full && used) {
    hidden = 0;
    for (int pass = 0; pass < 2; pass++) {
      for (size_t i = 0; i < groups * maxLanes; i++) ends[i] = -INFINITY;
      for (int64_t i = 0; i < w->o->numSpans; i++) {
        const trefoil_sim_span_t *p = &w->o->spans[i];
        size_t group = (size_t)p->src * TREFOIL_NUM_PHASES + (size_t)p->phase;
        int lane = full[group] ? -1 : laneOf(ends + group * maxLanes, p);
        if (lane < 0) {
          full[group] = 1;
          hidden += pass;
        } else if (pass) {
          writeTransfer(w, p, lane, !used[group * maxLanes + (size_t)lane]);
          used[group * maxLanes + (size_t)lane] = 1;
        }
      }
    }
  }
  free(ends);
  free(full);
  free(used);
  return hidden;
}

static int64_t writeRanks(writer_t *w) {
  int R = w->o->numRanks;
  stretch_t(*all)[2][TREFOIL_NUM_PHASES] = calloc((size_t)R, sizeof *all);
  if (!all) return -1;
  for (int64_t i = 0; i < w->o->numSpans; i++) {
    const trefoil_sim_span_t *p = &w->o->spans[i];
    extend(&all[p->src][0][p->phase], p, p->sentUs);
    extend(&all[p->dst][1][p->phase], p, p->endUs);
  }
  for (int rank = 0; rank < R; rank++) writeRank(w, rank, all);
  free(all);
  return writeLanes(w);
}

/* ---- Links ---- */

/* The network port that carries a rank's rows: its own, or the node's next one that is up. */
static int portOf(const simulated_t *s, int rank) {
  const trefoil_shape_t *shape = &s->step.routing.shape;
  int perNic = s->of.cluster.gpusPerNic, ports = (shape->ranksPerNode + perNic - 1) / perNic;
  int node = trefoilNodeOf(shape, rank), rail = trefoilRailOf(shape, rank) / perNic;
  for (int tries = 0; tries < ports; tries++, rail = (rail + 1) % ports) {
    int down = 0;
    for (int i = 0; i < s->whatIf.numChanges; i++) {
      const trefoil_change_t *c = &s->whatIf.changes[i];
      down |= c->kind == TREFOIL_CHANGE_RAIL_FAIL && c->index == rail;
      down |= c->kind == TREFOIL_CHANGE_NIC_FAIL && c->index == node * ports + rail;
    }
    if (!down) break;
  }
  return node * ports + rail;
}

static void spread(double *bins, double binUs, const trefoil_sim_span_t *p) {
  double from = p->startUs, to = p->sentUs > from ? p->sentUs : from + binUs * 1e-6;
  double perUs = (double)p->bytes / (to - from);
  for (int b = (int)(from / binUs); b < numBins && b * binUs < to; b++) {
    double lo = fmax(from, b * binUs), hi = fmin(to, (b + 1) * binUs);
    if (b >= 0 && hi > lo) bins[b] += perUs * (hi - lo);
  }
}

/* Nothing above `most` a bin: what is over goes to later bins, and from the last one back. */
static void cap(double *bins, double most) {
  double over = 0;
  for (int pass = 0; pass < 2; pass++) {
    for (int i = 0; i < numBins; i++) {
      double *bin = &bins[pass ? numBins - 1 - i : i];
      over += *bin;
      *bin = fmin(over, most);
      over -= *bin;
    }
  }
  bins[0] += over;
}

/* Bytes a microsecond of a link, from what it had to do; 0: not known. */
static double rateOf(const trefoil_sim_op_t *o, trefoil_resource_t kind, int index) {
  for (int i = 0; i < o->numLinks; i++) {
    const trefoil_sim_link_t *l = &o->links[i];
    if (l->kind == kind && l->index == index && l->busyUs > 0) return (double)l->bytes / l->busyUs;
  }
  return 0;
}

/* One of the four kinds of ports: a counter for each that carried something. */
static void writePorts(writer_t *w, trefoil_resource_t kind, double *bins, double binUs) {
  for (int i = 0; i < w->o->numRanks; i++) {
    double *mine = bins + (size_t)i * numBins, last = 0, sum = 0;
    for (int b = 0; b < numBins; b++) sum += mine[b];
    if (sum <= 0) continue;
    double most = rateOf(w->o, kind, i);
    if (most > 0) cap(mine, most * binUs);
    for (int b = 0; b <= numBins; b++) {
      double rate = b < numBins ? mine[b] / binUs * 1e-3 : 0; /* bytes a microsecond to GB/s */
      if (b > 0 && b < numBins && fabs(rate - last) <= 1e-3 * fmax(rate, last)) continue;
      event(w, "C", w->pid + 1, 0);
      fprintf(w->f, ",\"name\":\"%s %d\",\"ts\":%.4f,\"args\":{\"GB/s\":%.4g}}",
              trefoilResourceName(kind), i, w->startUs + b * binUs, rate);
      last = rate;
    }
  }
}

static int isOfPort(trefoil_resource_t kind, int tier) {
  int net = kind == TREFOIL_RESOURCE_NIC_OUT || kind == TREFOIL_RESOURCE_NIC_IN;
  return tier == (net ? TREFOIL_TIER_NET : TREFOIL_TIER_NVLINK);
}

static int writeLinks(writer_t *w) {
  static const trefoil_resource_t kinds[] = {TREFOIL_RESOURCE_NVLINK_OUT,
                                             TREFOIL_RESOURCE_NVLINK_IN, TREFOIL_RESOURCE_NIC_OUT,
                                             TREFOIL_RESOURCE_NIC_IN};
  size_t cells = (size_t)w->o->numRanks * numBins;
  double *bins = malloc(cells * sizeof *bins), binUs = fmax(w->o->us, 1e-3) / numBins;
  if (!bins) return 0;
  for (int k = 0; k < 4; k++) {
    memset(bins, 0, cells * sizeof *bins);
    int out = kinds[k] == TREFOIL_RESOURCE_NVLINK_OUT || kinds[k] == TREFOIL_RESOURCE_NIC_OUT;
    for (int64_t i = 0; i < w->o->numSpans; i++) {
      const trefoil_sim_span_t *p = &w->o->spans[i];
      if (!isOfPort(kinds[k], p->tier)) continue;
      int rank = out ? p->src : p->dst, index = k < 2 ? rank : portOf(w->s, rank);
      spread(bins + (size_t)index * numBins, binUs, p);
    }
    writePorts(w, kinds[k], bins, binUs);
  }
  free(bins);
  return 1;
}

/* ---- The file ---- */

static int writeOp(writer_t *w, int64_t *hidden) {
  char name[64];
  snprintf(name, sizeof name, "%s: ranks", opNames[w->op]);
  nameOf(w, "process_name", w->pid, 0, name);
  snprintf(name, sizeof name, "%s: links", opNames[w->op]);
  nameOf(w, "process_name", w->pid + 1, 0, name);
  *hidden = writeRanks(w);
  return *hidden >= 0 && writeLinks(w);
}

int timelineWrite(const simulated_t *s, cli_file_t *file) {
  FILE *f = cliFileOpen(file);
  if (!f) return CLI_FAILED;
  writer_t w = {.f = f, .s = s};
  int64_t hidden[2] = {0, 0};
  int ok = 1;
  fputs("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[", f);
  for (w.op = 0; w.op < 2 && ok; w.op++) {
    w.o = &s->result.op[w.op];
    w.pid = 1 + 2 * w.op;
    ok = writeOp(&w, &hidden[w.op]);
    w.startUs += w.o->us;
  }
  fprintf(f, "\n],\"otherData\":{\"program\":\"trefoil simulate\",\"engine\":\"%s\"",
          trefoilEngineName(s->result.op[0].engine));
  for (int op = 0; op < 2; op++)
    fprintf(f, ",\"%s_us\":%.6f,\"%s_left_out\":%lld,\"%s_only_in_stretches\":%lld", opNames[op],
            s->result.op[op].us, opNames[op], (long long)s->result.op[op].leftOutSpans, opNames[op],
            (long long)hidden[op]);
  fputs("}}\n", f);
  if (ok) return cliFileClose(file, f);
  fclose(f);
  cliFileDrop(file);
  return cliFail("simulate", "out of memory for the timeline");
}
