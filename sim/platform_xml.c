/* Writes a fabric as a platform file.
 *
 * One zone with switches as routers: an NVLink switch a node; leaf switches and a spine where leaves
 * block, else one network switch. A route is found from edges (host - switch - host), so the file
 * grows with the ranks and not with their pairs. Every link has no latency: SimGrid shares a link
 * among flows by their latency, and NVLink and network flows would not get what ports give them;
 * latency is added where flows start. A link's bandwidth is what it carries of this operation's rows,
 * gaps and SM time included: row bytes / time of a row. */
#include "sim/platform_xml.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>

#include "plan/error.h"

typedef struct xml {
  FILE *file;
  const ep_fabric_t *f;
  const trefoil_shape_t *s;
  size_t rowBytes;
  int hasNet, hasForward;
} xml_t;

static void put(const xml_t *x, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(const xml_t *x, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(x->file, format, arguments);
  va_end(arguments);
}

static const char *const linkNames[TREFOIL_NUM_RESOURCES] = {"send",      "forward", "nvlink-out",
                                                             "nvlink-in", "nic-out", "leaf-up",
                                                             "leaf-down", "nic-in",  "receive"};

static void writeLinks(const xml_t *x) {
  for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
    for (int i = 0; i < x->f->count[k]; i++) {
      if (x->f->row[k][i] == 0) continue;
      double rate = (double)x->rowBytes * 1e15 / (double)x->f->row[k][i];
      put(x, "    <link id=\"%s-%d\" bandwidth=\"%.17gBps\" latency=\"0s\"/>\n", linkNames[k], i,
          rate);
    }
  }
}

/* An edge that crosses up to two resources; those that do not limit are no links. */
typedef struct crossing {
  trefoil_resource_t kind;
  int index; /* -1: none */
} crossing_t;

static int limits(const xml_t *x, crossing_t by) {
  return by.index >= 0 && x->f->row[by.kind][by.index] > 0;
}

static void writeEdge(const xml_t *x, const char *from, const char *to, const crossing_t *by) {
  if (!limits(x, by[0]) && !limits(x, by[1])) return; /* SimGrid takes no route without links */
  put(x, "    <route src=\"%s\" dst=\"%s\" symmetrical=\"NO\">", from, to);
  for (int i = 0; i < 2; i++) {
    if (!limits(x, by[i])) continue;
    put(x, "<link_ctn id=\"%s-%d\"/>", linkNames[by[i].kind], by[i].index);
  }
  fputs("</route>\n", x->file);
}

typedef struct name {
  char text[32];
} name_t;
static name_t nameOf(const char *kind, int i) {
  name_t n;
  snprintf(n.text, sizeof n.text, "%s%d", kind, i);
  return n;
}

#define EDGE(from, to, k0, i0, k1, i1)                                                             \
  writeEdge(x, (from).text, (to).text,                                                             \
            (const crossing_t[2]){{TREFOIL_RESOURCE_##k0, (i0)}, {TREFOIL_RESOURCE_##k1, (i1)}})

static void writeNvlinkEdges(const xml_t *x, int r) {
  name_t sw = nameOf("nvswitch", trefoilNodeOf(x->s, r)), g = nameOf("g", r), f = nameOf("f", r);
  name_t taken = nameOf("s", r), summed = nameOf("u", r);
  EDGE(g, sw, SEND, r, NVLINK_OUT, r);
  EDGE(sw, g, NVLINK_IN, r, RECEIVE, r);
  EDGE(g, taken, SEND, x->f->ownRowsStay ? -1 : r, RECEIVE, r);
  if (!x->hasForward) return;
  EDGE(f, sw, FORWARD, r, NVLINK_OUT, r);
  EDGE(sw, f, NVLINK_IN, r, FORWARD, r);
  EDGE(f, taken, FORWARD, r, RECEIVE, r);
  EDGE(g, summed, SEND, r, FORWARD, r);
}

static void writeNetEdges(const xml_t *x, int r) {
  int port = x->f->portOf[r];
  int leaf = x->f->numLeaves ? x->f->leafOf[port] : 0;
  name_t sw = nameOf("netswitch", leaf), n = nameOf("n", r), b = nameOf("b", r);
  EDGE(n, sw, SEND, r, NIC_OUT, port);
  EDGE(sw, n, NIC_IN, port, RECEIVE, r);
  if (!x->hasForward) return;
  EDGE(b, sw, SEND, -1, NIC_OUT, port);
  EDGE(sw, b, NIC_IN, port, RECEIVE, -1);
}

/* Calls back for each port and part of the time of which flows beside take something. */
static void forTaken(const xml_t *x, void (*each)(const xml_t *, int kind, int at, int part)) {
  for (int p = 0; p < x->f->numParts; p++) {
    for (int k = 0; k < TREFOIL_NUM_RESOURCES; k++) {
      if (!epIsPort((trefoil_resource_t)k)) continue;
      for (int i = 0; i < x->f->count[k]; i++) {
        if (epLeftOf(x->f, (trefoil_resource_t)k, i, p) < 1 && x->f->row[k][i] > 0)
          each(x, k, i, p);
      }
    }
  }
}

static void writeBackgroundHosts(const xml_t *x, int kind, int at, int part) {
  put(x, "    <host id=\"" EP_BACKGROUND_NAME("o") "\" speed=\"1f\"/>\n", kind, at, part);
  put(x, "    <host id=\"" EP_BACKGROUND_NAME("q") "\" speed=\"1f\"/>\n", kind, at, part);
}

static void writeBackgroundLink(const xml_t *x, int kind, int at, int part) {
  double taken = 1 - epLeftOf(x->f, (trefoil_resource_t)kind, at, part);
  double rate = (double)x->rowBytes * 1e15 / (double)x->f->row[kind][at] * taken;
  put(x,
      "    <link id=\"" EP_BACKGROUND_NAME(
          "background") "\" bandwidth=\"%.17gBps\" latency=\"0s\"/>\n",
      kind, at, part, rate);
}

static void writeBackgroundRoute(const xml_t *x, int kind, int at, int part) {
  put(x,
      "    <route src=\"" EP_BACKGROUND_NAME("o") "\" dst=\"" EP_BACKGROUND_NAME(
          "q") "\" "
               "symmetrical=\"NO\"><link_ctn id=\"" EP_BACKGROUND_NAME("background") "\"/>",
      kind, at, part, kind, at, part, kind, at, part);
  put(x, "<link_ctn id=\"%s-%d\"/></route>\n", linkNames[kind], at);
}

static void writeHosts(const xml_t *x) {
  static const char *const kinds[] = {"g", "s", "n", "f", "u", "b"};
  int numKinds = x->hasForward ? 6 : x->hasNet ? 3 : 2;
  for (int r = 0; r < x->f->numRanks; r++) {
    for (int k = 0; k < numKinds; k++) {
      put(x, "    <host id=\"%s%d\" speed=\"1f\"/>\n", kinds[k], r);
    }
  }
  for (int m = 0; m < x->s->numRanks / x->s->ranksPerNode; m++) {
    put(x, "    <router id=\"nvswitch%d\"/>\n", m);
  }
  for (int l = 0; x->hasNet && l < (x->f->numLeaves ? x->f->numLeaves : 1); l++) {
    put(x, "    <router id=\"netswitch%d\"/>\n", l);
  }
  if (x->f->numLeaves) fputs("    <router id=\"spine0\"/>\n", x->file);
}

int epPlatformWrite(FILE *file, const ep_fabric_t *f, const ep_replay_t *replay,
                    const trefoil_shape_t *s) {
  xml_t writer = {.file = file, .f = f, .s = s, .rowBytes = replay->rowBytes};
  const xml_t *x = &writer;
  writer.hasNet = s->numRanks > s->ranksPerNode;
  writer.hasForward = replay->hasNetPhases;
  fputs("<?xml version=\"1.0\"?>\n"
        "<!DOCTYPE platform SYSTEM \"https://simgrid.org/simgrid.dtd\">\n"
        "<platform version=\"4.1\">\n  <zone id=\"cluster\" routing=\"DijkstraCache\">\n",
        file);
  writeHosts(x);
  forTaken(x, writeBackgroundHosts);
  writeLinks(x);
  forTaken(x, writeBackgroundLink);
  forTaken(x, writeBackgroundRoute);
  for (int r = 0; r < f->numRanks; r++) writeNvlinkEdges(x, r);
  for (int r = 0; r < f->numRanks && x->hasNet; r++) writeNetEdges(x, r);
  for (int l = 0; l < f->numLeaves; l++) {
    EDGE(nameOf("netswitch", l), nameOf("spine", 0), LEAF_UP, l, SEND, -1);
    EDGE(nameOf("spine", 0), nameOf("netswitch", l), LEAF_DOWN, l, SEND, -1);
  }
  fputs("  </zone>\n</platform>\n", file);
  return fflush(file) == 0 && !ferror(file);
}

trefoil_result_t trefoilSimWritePlatform(const trefoil_sim_t *sim, const trefoil_sim_run_t *run,
                                         trefoil_op_t op, const char *path) {
  EP_CHECK(sim && run && path, TREFOIL_INVALID_ARGUMENT, "the %s is NULL",
           !sim   ? "simulation"
           : !run ? "run"
                  : "path");
  EP_CHECK(op == TREFOIL_OP_DISPATCH || op == TREFOIL_OP_COMBINE, TREFOIL_INVALID_ARGUMENT,
           "operation %d is neither dispatch (0) nor combine (1)", (int)op);
  ep_fabric_t fabric;
  EP_TRY(epFabricBuild(&fabric, sim, run, op));
  FILE *file = fopen(path, "w");
  int isWritten = file && epPlatformWrite(file, &fabric, &sim->replay[op], &sim->shape);
  int why = errno;
  if (file && fclose(file) != 0 && isWritten) isWritten = 0, why = errno;
  epFabricFree(&fabric);
  EP_CHECK(isWritten, TREFOIL_SYSTEM_ERROR, "cannot write %s: %s", path, strerror(why));
  return TREFOIL_OK;
}
