/* What simulate found out: as text, as JSON (docs/sim.md), and every link's load as CSV. */
#include "cli/cli.h"
#include "cli/simulate.h"

#include <stdio.h>
#include <string.h>

static const char *const opNames[2] = {"dispatch", "combine"};
static const char *const tierNames[TREFOIL_NUM_TIERS] = {"self", "nvlink", "net"};

static const char *engineName(const simulated_t *s, int op) {
  return s->closedForm ? "closed-form" : trefoilEngineName(s->result.op[op].engine);
}

static const char *otherName(const simulated_t *s, int op) {
  int isQueues = s->result.op[op].engine == TREFOIL_ENGINE_QUEUES;
  return trefoilEngineName(isQueues ? TREFOIL_ENGINE_SIMGRID : TREFOIL_ENGINE_QUEUES);
}

static uint64_t larger(const trefoil_port_loads_t *l, trefoil_port_t a, trefoil_port_t b) {
  return l->maxBytes[a] > l->maxBytes[b] ? l->maxBytes[a] : l->maxBytes[b];
}

/* What binds: the resource that works longest, if for half of the time; in closed form a port. */
static const char *limitName(const simulated_t *s, int op) {
  const trefoil_sim_op_t *o = &s->result.op[op];
  if (s->closedForm) {
    trefoil_port_t port = o->closedForm.limit;
    return port == TREFOIL_PORT_NONE ? "latency" : trefoilPortName(port);
  }
  for (int i = 0; i < o->numLinks; i++) {
    const trefoil_sim_link_t *l = &o->links[i];
    if (l->kind == o->floorKind && l->index == o->floorIndex && l->busyUs >= 0.5 * o->us)
      return trefoilResourceName(l->kind);
  }
  return "latency";
}

/* ---- JSON ---- */

/* Until a rank is done, in the mean over ranks. */
static double meanRankUs(const trefoil_sim_op_t *o) {
  double sum = 0;
  if (!o->finishUs) return o->us;
  for (int rank = 0; rank < o->numRanks; rank++) sum += o->finishUs[rank];
  return sum / o->numRanks;
}

/* Links of one kind together: how many carry bytes, the busiest, and the mean. */
static json_t *linkKindJson(const trefoil_sim_op_t *o, int kind) {
  const trefoil_sim_link_t *busiest = NULL;
  int n = 0;
  double share = 0, bytes = 0;
  for (int i = 0; i < o->numLinks; i++) {
    const trefoil_sim_link_t *l = &o->links[i];
    if ((int)l->kind != kind) continue;
    n++;
    share += l->share;
    bytes += (double)l->bytes;
    if (!busiest || l->busyUs > busiest->busyUs) busiest = l;
  }
  if (!busiest) return NULL;
  return json_pack("{s:i, s:i, s:I, s:f, s:f, s:f}", "links", n, "busiest", busiest->index,
                   "busiest_bytes", (json_int_t)busiest->bytes, "mean_bytes", bytes / n,
                   "busiest_share", busiest->share, "mean_share", share / n);
}

static json_t *intervalJson(const simulated_t *s, int op) {
  if (!s->hasRecord) return json_null();
  const trefoil_interval_t *i = &s->interval[op];
  return json_pack("{s:f, s:f, s:b, s:s, s:i, s:s}", "low_seconds", i->lowUs * 1e-6, "high_seconds",
                   i->highUs * 1e-6, "covers", !i->isExtrapolated, "kind",
                   i->isExtrapolated ? "extrapolated" : "interpolated", "n", i->n, "outside",
                   i->outside);
}

static json_t *opJson(const simulated_t *s, int op) {
  const trefoil_sim_op_t *o = &s->result.op[op];
  const trefoil_port_loads_t *l = &o->loads;
  json_t *bytes = json_object();
  for (int tier = 0; tier < TREFOIL_NUM_TIERS; tier++)
    json_object_set_new(bytes, tierNames[tier], json_integer((json_int_t)l->totalBytes[tier]));
  json_t *j =
      json_pack("{s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:s, s:o, s:I, s:I}", "engine",
                engineName(s, op), "seconds", o->us * 1e-6, "first_rank_seconds", o->firstUs * 1e-6,
                "mean_rank_seconds", meanRankUs(o) * 1e-6, "bound_seconds", s->boundUs[op] * 1e-6,
                "floor_seconds", o->floorUs * 1e-6, "closed_form_seconds", o->closedForm.us * 1e-6,
                "limit", limitName(s, op), "bytes", bytes, "nvlink_port_bytes",
                (json_int_t)larger(l, TREFOIL_PORT_NVLINK_OUT, TREFOIL_PORT_NVLINK_IN),
                "nic_port_bytes", (json_int_t)larger(l, TREFOIL_PORT_NIC_OUT, TREFOIL_PORT_NIC_IN));
  json_object_set_new(j, "interval", intervalJson(s, op));
  if (s->closedForm) return j;
  json_t *links = json_object();
  for (int kind = 0; kind < TREFOIL_NUM_RESOURCES; kind++) {
    json_t *of = linkKindJson(o, kind);
    if (of) json_object_set_new(links, trefoilResourceName((trefoil_resource_t)kind), of);
  }
  json_object_set_new(j, "links", links);
  json_object_set_new(j, "floor_by",
                      json_pack("{s:s, s:i}", "resource", trefoilResourceName(o->floorKind),
                                "index", o->floorIndex));
  if (s->otherUs[op] > 0) {
    json_object_set_new(
        j, "other_engine",
        json_pack("{s:s, s:f}", "engine", otherName(s, op), "seconds", s->otherUs[op] * 1e-6));
  }
  json_object_set_new(j, "transfers", json_integer((json_int_t)o->numTransfers));
  json_object_set_new(j, "chunk_tokens", json_integer(o->chunkTokens));
  if (o->numFlows > 0) {
    json_object_set_new(j, "fair",
                        json_pack("{s:I, s:I}", "flows", (json_int_t)o->numFlows, "unlike_flows",
                                  (json_int_t)o->numUnlike));
  }
  return j;
}

static json_t *memoryJson(const memory_need_t *m) {
  if (!m->known) {
    return json_pack("{s:s, s:I}", "refused", m->why, "output_bytes", (json_int_t)m->outputBytes);
  }
  static const char *const keys[2][3] = {
      {"group_device_bytes", "group_shared_bytes", "group_host_bytes"},
      {"handle_device_bytes", "handle_shared_bytes", "handle_host_bytes"}};
  json_t *j =
      json_pack("{s:s, s:I}", "library", m->library, "output_bytes", (json_int_t)m->outputBytes);
  for (int i = 0; i < 6; i++)
    json_object_set_new(j, keys[i / 3][i % 3], json_integer((json_int_t)m->totals[i / 3][i % 3]));
  if (!strcmp(m->library, "cpu")) json_object_set_new(j, "gpu_refuses", json_string(m->why));
  return j;
}

static json_t *routingJson(const simulated_t *s) {
  if (s->args.trace) {
    return json_pack("{s:s, s:s, s:i}", "kind", "trace", "file", s->args.trace, "step", s->stepIdx);
  }
  json_t *j = json_pack("{s:s, s:I}", "kind", s->whatIf.zipf > 0 ? "zipf" : "uniform", "seed",
                        (json_int_t)s->args.seed);
  if (s->whatIf.zipf > 0) json_object_set_new(j, "skew", json_real(s->whatIf.zipf));
  if (s->args.grouped) {
    json_object_set_new(j, "groups", json_integer(s->of.moe.numGroups));
    json_object_set_new(j, "topk_groups", json_integer(s->of.moe.topkGroups));
  }
  if (s->args.maskedSelections)
    json_object_set_new(j, "masked_selections", json_integer(s->args.maskedSelections));
  return j;
}

/* The model outside its routed experts; `missing` where the file does not state it. */
static json_t *modelJson(const trefoil_moe_t *m) {
  json_t *j = json_pack("{s:i, s:i, s:i, s:i, s:i}", "weight_bits", m->weightBits, "num_groups",
                        m->numGroups, "topk_groups", m->topkGroups, "num_shared", m->numShared,
                        "num_layers", m->numLayers);
  if (!m->numLayers) {
    json_object_set_new(j, "missing", json_string(m->missing));
    return j;
  }
  json_object_update_new(j,
                         json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "dense_hidden",
                                   m->denseHidden, "shared_hidden", m->sharedHidden, "vocabulary",
                                   m->vocab, "tied_embeddings", m->tiedEmbeddings, "num_heads",
                                   m->numHeads, "num_kv_heads", m->numKvHeads, "head", m->headDim));
  json_object_update_new(j, json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "q_lora", m->qLora,
                                      "kv_lora", m->kvLora, "nope", m->nopeDim, "rope", m->ropeDim,
                                      "v", m->vDim, "window_tokens", m->windowTokens,
                                      "window_layers", m->windowLayers));
  return j;
}

static json_t *orNull(double value) {
  return value > 0 ? json_real(value) : json_null();
}

json_t *simulatedJson(const simulated_t *s) {
  const trefoil_shape_t *shape = &s->step.routing.shape;
  json_t *j = json_pack("{s:s, s:i, s:s, s:s, s:s, s:s}", "format", "trefoil-simulate", "version",
                        1, "cluster", s->of.cluster.name, "moe", s->of.moe.name, "mode",
                        s->of.isLl ? "ll" : "ht", "layout", trefoilModeName(s->of.spec.mode));
  json_t *shapes =
      json_pack("{s:i, s:i, s:i, s:i, s:I, s:i, s:i, s:i, s:i, s:i}", "gpus", s->gpus, "ep", s->ep,
                "replicas", s->gpus / s->ep, "ranks_per_node", shape->ranksPerNode, "tokens",
                (json_int_t)s->args.tokens, "hidden", s->of.moe.hidden, "experts",
                s->of.moe.numExperts, "physical_experts", shape->numExperts, "topk", shape->topk,
                "moe_layers", s->of.moe.numMoeLayers);
  json_object_update_new(
      shapes, json_pack("{s:i, s:i, s:i}", "expert_hidden", s->of.moe.expertHidden, "gpus_per_node",
                        s->of.cluster.gpusPerNode, "max_gpus", s->of.cluster.maxGpus));
  const trefoil_cluster_t *c = &s->of.cluster;
  json_object_set_new(shapes, "placement", json_string(s->step.placement));
  json_object_set_new(shapes, "gpu_memory_gb", orNull(c->gpuMemoryGb));
  json_object_set_new(shapes, "gpu_hbm_gb_per_s", orNull(c->gpuHbmGbPerS));
  json_object_set_new(shapes, "gpu_bf16_tflops", orNull(c->gpuBf16Tflops));
  json_object_set_new(shapes, "gpu_fp8_tflops", orNull(c->gpuFp8Tflops));
  json_object_set_new(shapes, "gpu_fp4_tflops", orNull(c->gpuFp4Tflops));
  json_object_set_new(shapes, "nvlink_gb_per_s", json_real(c->nvlinkGbPerS));
  json_object_set_new(shapes, "ll_fixed_us", json_real(c->llFixedUs));
  json_object_set_new(shapes, "gpu_sms", c->gpuSms ? json_integer(c->gpuSms) : json_null());
  json_object_set_new(shapes, "gpus_per_host",
                      json_integer(c->gpusPerHost ? c->gpusPerHost : c->gpusPerNode));
  json_object_set_new(shapes, "model", modelJson(&s->of.moe));
  json_object_update_new(j, shapes);
  json_t *sms = s->hasRecord ? json_integer(s->sms ? s->sms : s->record.costs.numSms) : json_null();
  json_t *how =
      json_pack("{s:s, s:s, s:s, s:I, s:I, s:s, s:o, s:o, s:o}", "dispatch_dtype",
                s->args.dispatchDtype, "combine_kind", s->args.combine, "variant", s->args.variant,
                "dispatch_row_bytes", (json_int_t)s->of.spec.dispatchRowBytes, "combine_row_bytes",
                (json_int_t)s->of.spec.combineRowBytes, "costs", s->record.costs.name, "sms", sms,
                "routing", routingJson(s), "what_if", whatIfJson(&s->whatIf));
  json_object_update_new(j, how);
  for (int op = 0; op < 2; op++) json_object_set_new(j, opNames[op], opJson(s, op));
  json_object_set_new(j, "seconds", json_real((s->result.op[0].us + s->result.op[1].us) * 1e-6));
  json_object_set_new(j, "memory", memoryJson(&s->memory));
  json_object_set_new(j, "wall_seconds", json_real(s->wallS));
  return j;
}

/* ---- Text ---- */

static void printWhat(const simulated_t *s) {
  const scenario_t *of = &s->of;
  printf("%s on %d GPU%s of %s: %s (hidden %d, top-%d of %d), %lld tokens a GPU\n",
         trefoilModeName(of->spec.mode), s->gpus, s->gpus == 1 ? "" : "s", of->cluster.name,
         of->moe.name, of->moe.hidden, of->moe.topk, of->moe.numExperts, s->args.tokens);
  printf("EP %d", s->ep);
  if (s->gpus > s->ep) printf(" (%d replicas)", s->gpus / s->ep);
  printf(", %d ranks a node", s->step.routing.shape.ranksPerNode);
  if (s->step.routing.shape.numExperts > of->moe.numExperts)
    printf(", %d physical experts", s->step.routing.shape.numExperts);
  if (strcmp(s->step.placement, "in-turn")) printf(", placement %s", s->step.placement);
  if (s->args.trace) {
    printf(", step %d of %s", s->stepIdx, s->args.trace);
  } else if (s->whatIf.zipf > 0) {
    printf(", Zipf routing of exponent %g, seed %lld", s->whatIf.zipf, s->args.seed);
  } else {
    printf(", uniform routing of seed %lld", s->args.seed);
  }
  if (s->args.grouped)
    printf(", experts of %d of %d groups", of->moe.topkGroups, of->moe.numGroups);
  if (s->args.maskedSelections)
    printf(", %lld selections of each rank are -1", s->args.maskedSelections);
  printf("; dispatch %s, combine bf16", s->args.dispatchDtype);
  if (of->isLl) printf(" (%s)", s->args.combine);
  if (strcmp(s->args.variant, "ours")) printf(", rows %s", s->args.variant);
  if (!s->closedForm) printf("; costs %s", s->record.costs.name);
  if (s->hasRecord) printf(", %d SMs", s->sms ? s->sms : s->record.costs.numSms);
  putchar('\n');
  scenarioPrintUneven(of, s->ep);
  char *changes = json_dumps(whatIfJson(&s->whatIf), JSON_COMPACT);
  if (changes && strcmp(changes, "{}")) printf("what if: %s\n", changes);
  free(changes);
}

static void printOp(const simulated_t *s, int op) {
  const trefoil_sim_op_t *o = &s->result.op[op];
  char text[6][CLI_NUMBER_BYTES];
  printf("%-9s %10s", opNames[op], cliSeconds(text[0], o->us * 1e-6));
  if (s->hasRecord) {
    char low[CLI_NUMBER_BYTES], high[CLI_NUMBER_BYTES], both[2 * CLI_NUMBER_BYTES + 5];
    snprintf(both, sizeof both, "%s - %s%s", cliSeconds(low, s->interval[op].lowUs * 1e-6),
             cliSeconds(high, s->interval[op].highUs * 1e-6),
             s->interval[op].isExtrapolated ? "*" : "");
    printf("  %-20s", both);
  }
  char bound[CLI_NUMBER_BYTES];
  printf(" %10s %10s %11s", cliSeconds(bound, s->boundUs[op] * 1e-6),
         cliSeconds(text[1], o->floorUs * 1e-6), cliSeconds(text[2], o->closedForm.us * 1e-6));
  printf("  %-10s", limitName(s, op));
  for (int tier = 0; tier < TREFOIL_NUM_TIERS; tier++)
    printf(" %9s", cliBytes(text[3 + tier], (double)o->loads.totalBytes[tier]));
  printf("  %s\n", engineName(s, op));
}

static void printMemory(const memory_need_t *m) {
  char text[4][CLI_NUMBER_BYTES];
  if (!m->known) {
    printf("\nmemory: the sizing table refuses this shape: %s\n", m->why);
    return;
  }
  const size_t(*t)[3] = m->totals;
  printf("\nmemory of a GPU: group %s, handle %s, outputs of a dispatch %s",
         cliBytes(text[0], (double)(t[0][EP_MEMORY_DEVICE] + t[0][EP_MEMORY_SHARED])),
         cliBytes(text[1], (double)(t[1][EP_MEMORY_DEVICE] + t[1][EP_MEMORY_SHARED])),
         cliBytes(text[2], (double)m->outputBytes));
  if (strcmp(m->library, "gpu"))
    printf(" (%s: %s)",
           strcmp(m->library, "cpu") ? "the GPU library's formula" : "the CPU library's", m->why);
  putchar('\n');
}

/* How many flows could not become one with others. */
static void printFlows(const trefoil_sim_op_t *o, const char *name) {
  if (o->numFlows == 0) return;
  printf(
      "%s: SimGrid's flows, fair shares by our own solver; %lld flows as %lld: no more are alike\n",
      name, (long long)o->numFlows, (long long)o->numUnlike);
}

void simulatedText(const simulated_t *s) {
  printWhat(s);
  printf("\n%-9s %10s%s %10s %10s %11s  %-10s %9s %9s %9s  %s\n", "", "time",
         s->hasRecord ? "  90 % interval       " : "", "bound", "floor", "closed form", "limit",
         "in rank", "NVLink", "network", "engine");
  for (int op = 0; op < 2; op++) printOp(s, op);
  for (int op = 0; op < 2; op++) {
    char text[CLI_NUMBER_BYTES];
    if (s->otherUs[op] <= 0) continue;
    printf("%s on %s: %s, %+.2f %%\n", opNames[op], otherName(s, op),
           cliSeconds(text, s->otherUs[op] * 1e-6),
           100 * (s->otherUs[op] / s->result.op[op].us - 1));
  }
  const trefoil_interval_t *interval = &s->interval[!s->interval[0].isExtrapolated];
  if (s->hasRecord && interval->isExtrapolated) {
    int both = s->interval[0].isExtrapolated && s->interval[1].isExtrapolated;
    const char *of = opNames[interval != s->interval];
    printf("* %s%sextrapolated, by a wider interval: %s\n", both ? "" : of, both ? "" : " ",
           interval->outside);
  }
  for (int op = 0; op < 2; op++) printFlows(&s->result.op[op], opNames[op]);
  printMemory(&s->memory);
}

/* ---- CSV ---- */

int simulatedLinks(const simulated_t *s, cli_file_t *file) {
  FILE *f = cliFileOpen(file);
  if (!f) return CLI_FAILED;
  fputs("op,kind,index,bytes,busy_seconds,share\n", f);
  for (int op = 0; op < 2; op++) {
    const trefoil_sim_op_t *o = &s->result.op[op];
    for (int i = 0; i < o->numLinks; i++) {
      const trefoil_sim_link_t *l = &o->links[i];
      fprintf(f, "%s,%s,%d,%llu,%.9g,%.6g\n", opNames[op], trefoilResourceName(l->kind), l->index,
              (unsigned long long)l->bytes, l->busyUs * 1e-6, l->share);
    }
  }
  return cliFileClose(file, f);
}
