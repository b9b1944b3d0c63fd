/* trefoil check --moe / --hidden: one real shape, mode after mode. */
#include "cli/check_verb.h"

#include "validate/real_shape.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *tierName(trefoil_tier_t tier) {
  static const char *const names[] = {"self", "nvlink", "net"};
  return names[tier];
}

static json_t *matrixJson(const uint64_t *bytes, int R) {
  json_t *rows = json_array();
  for (int s = 0; s < R; s++) {
    json_t *row = json_array();
    for (int d = 0; d < R; d++)
      json_array_append_new(row, json_integer((json_int_t)bytes[s * R + d]));
    json_array_append_new(rows, row);
  }
  return rows;
}

static json_t *runJson(const ep_real_options_t *o, const ep_real_result_t *r) {
  const trefoil_shape_t *s = &o->shape;
  const char *mode = trefoilModeName(o->mode);
  json_t *tiers = json_array(), *received = json_array();
  for (int a = 0; a < s->numRanks; a++) {
    json_t *row = json_array();
    for (int b = 0; b < s->numRanks; b++)
      json_array_append_new(row, json_string(tierName(epTierOf(s, a, b))));
    json_array_append_new(tiers, row);
    json_array_append_new(received, json_integer((json_int_t)r->receivedRows[a]));
  }
  json_t *j = json_pack(
      "{s:s, s:s, s:s, s:i, s:i, s:I, s:I, s:i, s:i, s:s, s:b, s:f, s:f, s:f, s:f, s:I}", "mode",
      mode, "algorithm", o->mode < TREFOIL_HT_FLAT ? "ll" : "ht", "layout", mode + 3, "ranks",
      s->numRanks, "ranks_per_node", s->ranksPerNode, "tokens", (json_int_t)s->maxTokens, "hidden",
      (json_int_t)o->hidden, "experts", s->numExperts, "topk", s->topk, "dtype", "bf16", "ok",
      r->ok, "update_s", r->updateS, "dispatch_s", r->dispatchS, "combine_s", r->combineS,
      "reference_s", r->referenceS, "bytes_compared", (json_int_t)r->bytesCompared);
  json_object_set_new(j, "dispatch_bytes", matrixJson(r->dispatchBytes, s->numRanks));
  json_object_set_new(j, "combine_bytes", matrixJson(r->combineBytes, s->numRanks));
  json_object_set_new(j, "tiers", tiers);
  json_object_set_new(j, "received_rows", received);
  if (!r->ok) json_object_set_new(j, "difference", json_string(r->difference));
  return j;
}

static void printMatrix(const char *what, const uint64_t *bytes, const trefoil_shape_t *s) {
  uint64_t tiers[TREFOIL_NUM_TIERS] = {0};
  printf("  %s, MB from rank (row) to rank (column); self in (), net in []:\n", what);
  for (int a = 0; a < s->numRanks; a++) {
    printf("   ");
    for (int b = 0; b < s->numRanks; b++) {
      trefoil_tier_t tier = epTierOf(s, a, b);
      tiers[tier] += bytes[a * s->numRanks + b];
      printf(" %c%7.2f%c", "( ["[tier], 1e-6 * (double)bytes[a * s->numRanks + b], ") ]"[tier]);
    }
    putchar('\n');
  }
  printf("    in all: self %.2f MB, nvlink %.2f MB, net %.2f MB\n", 1e-6 * (double)tiers[0],
         1e-6 * (double)tiers[1], 1e-6 * (double)tiers[2]);
}

static void printRun(const ep_real_options_t *o, const ep_real_result_t *r) {
  const trefoil_shape_t *s = &o->shape;
  printf("%s, %d ranks (%d per node), %lld tokens a rank, hidden %lld, top-%d of %d: %s\n",
         trefoilModeName(o->mode), s->numRanks, s->ranksPerNode, (long long)s->maxTokens,
         (long long)o->hidden, s->topk, s->numExperts, r->ok ? "every byte agrees" : "DIFFERENT");
  if (!r->ok) printf("  %s\n", r->difference);
  printf("  rows received:");
  for (int a = 0; a < s->numRanks; a++) printf(" %lld", (long long)r->receivedRows[a]);
  printf(
      "\n  update %.4f s, dispatch %.4f s, combine %.4f s; the reference and the comparison took "
      "%.2f s for %.2f GB\n",
      r->updateS, r->dispatchS, r->combineS, r->referenceS, 1e-9 * (double)r->bytesCompared);
  printMatrix("dispatch", r->dispatchBytes, s);
  printMatrix("combine", r->combineBytes, s);
}

static void showStep(void *context, const char *what, uint64_t done, uint64_t total) {
  (void)context;
  cliProgress(what, done, total, "");
}

int cliRealOptions(const char *verb, const cli_check_t *v, unsigned *modes, ep_real_options_t *o) {
  int low = 8, high = 8;
  *modes = 15u;
  *o = (ep_real_options_t){.hidden = v->hidden, .seed = (uint64_t)v->seed, .progress = showStep};
  o->shape.numExperts = v->experts;
  o->shape.topk = v->topk;
  if (v->moe && cliMoeShape(verb, v->moe, o)) return CLI_USAGE;
  if (v->hidden) o->hidden = v->hidden;
  if (v->experts) o->shape.numExperts = v->experts;
  if (v->topk) o->shape.topk = v->topk;
  if (v->modes && !cliModes(v->modes, modes))
    return cliUsage(verb,
                    "--mode %s: expected all, ll, ht, or some of ll-expert-major, "
                    "ll-rank-major, ht-flat, ht-expert-major",
                    v->modes);
  if (v->ranks && (!cliRange(v->ranks, &low, &high) || low != high || low > EP_REAL_MAX_RANKS))
    return cliUsage(verb, "--ranks %s: expected one number, at most %d", v->ranks,
                    EP_REAL_MAX_RANKS);
  if (o->hidden < 1 || o->hidden > 1 << 20)
    return cliUsage(verb, "--hidden %lld: expected 1 to 1048576", (long long)o->hidden);
  if (o->shape.numExperts < 1 || o->shape.topk < 1 || o->shape.topk > o->shape.numExperts)
    return cliUsage(verb, "--experts %d, --topk %d: expected 1 <= top-k <= experts",
                    o->shape.numExperts, o->shape.topk);
  if (v->tokens == 0 || v->tokens > 1 << 20)
    return cliUsage(verb, "--tokens %lld: expected 1 to 1048576", v->tokens);
  o->shape.numRanks = low;
  o->shape.ranksPerNode = v->ranksPerNode ? v->ranksPerNode : low;
  if (o->shape.ranksPerNode < 1 || low % o->shape.ranksPerNode)
    return cliUsage(verb, "--ranks-per-node %d: expected a divisor of %d", o->shape.ranksPerNode,
                    low);
  o->timeoutNs = v->timeoutMs > 0 ? (uint64_t)v->timeoutMs * 1000000u : 100000000000u;
  return -1;
}

int cliCheckReal(const cli_check_t *v) {
  char paths[3][4096];
  unsigned modes;
  ep_real_options_t o;
  int rc = cliRealOptions("check", v, &modes, &o);
  if (rc >= 0) return rc;
  cliLibraries(&v->library, paths, &o.paths);
  ep_real_result_t *r = malloc(sizeof *r);
  json_t *runs = json_array();
  if (!r) return cliFail("check", "out of memory");
  int failed = 0;
  for (int mode = 0; mode < TREFOIL_NUM_MODES; mode++) {
    if (!(modes & (1u << mode))) continue;
    o.mode = (trefoil_mode_t)mode;
    o.shape.maxTokens = v->tokens > 0 ? v->tokens : mode < TREFOIL_HT_FLAT ? 128 : 4096;
    trefoil_result_t result = epRealRun(&o, r);
    cliProgressEnd();
    if (result != TREFOIL_OK) {
      json_decref(runs);
      free(r);
      return cliFail("check", "%s: %s", trefoilModeName(o.mode), trefoilLastError());
    }
    failed |= !r->ok;
    if (v->json)
      json_array_append_new(runs, runJson(&o, r));
    else
      printRun(&o, r);
    fflush(stdout);
  }
  free(r);
  if (!v->json) {
    json_decref(runs);
    return failed ? CLI_FAILED : CLI_OK;
  }
  rc = cliPrintJson(json_pack("{s:o, s:o}", "runs", runs, "environment", cliEnvironment()));
  return failed ? CLI_FAILED : rc;
}
