/* trefoil check --moe / --hidden: one real shape, mode after mode. */
#include "cli/check_verb.h"

#include "trefoil/models.h"
#include "validate/real_shape.h"

#include <math.h>
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

const char *cliAgreement(const ep_real_options_t *o, const ep_real_result_t *r) {
  if (!r->ok)
    return r->outcome == EP_CASE_HANGS    ? "HANGS"
           : r->outcome == EP_CASE_ABORTS ? "ABORTS"
                                          : "DIFFERENT";
  if (!o->open) return "every byte agrees";
  return r->rowsMoved && r->sumsMoved
             ? "agrees with order open (rows in another order, sums within their bounds)"
         : r->rowsMoved ? "agrees with order open (rows in another order, sums bit for bit)"
         : r->sumsMoved ? "agrees with order open (rows bit for bit, sums within their bounds)"
                        : "every byte agrees, though order is open";
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
  json_t *j = json_pack("{s:s, s:s, s:s, s:i, s:i, s:I, s:I, s:i, s:i, s:s, s:b, s:s, s:I}", "mode",
                        mode, "algorithm", o->mode < TREFOIL_HT_FLAT ? "ll" : "ht", "layout",
                        mode + 3, "ranks", s->numRanks, "ranks_per_node", s->ranksPerNode, "tokens",
                        (json_int_t)s->maxTokens, "hidden", (json_int_t)o->hidden, "experts",
                        s->numExperts, "topk", s->topk, "dtype", "bf16", "ok", r->ok, "outcome",
                        epOutcomeName(r->outcome), "bytes_compared", (json_int_t)r->bytesCompared);
  if (r->ok) /* what is wrong has no times */
    json_object_update_new(j, json_pack("{s:f, s:f, s:f, s:f}", "update_s", r->updateS,
                                        "dispatch_s", r->dispatchS, "combine_s", r->combineS,
                                        "reference_s", r->referenceS));
  json_object_set_new(j, "dispatch_bytes", matrixJson(r->dispatchBytes, s->numRanks));
  json_object_set_new(j, "combine_bytes", matrixJson(r->combineBytes, s->numRanks));
  json_object_set_new(j, "tiers", tiers);
  json_object_set_new(j, "received_rows", received);
  cliPutsJson(j, &r->puts);
  if (!r->ok) json_object_set_new(j, "difference", json_string(r->difference));
  json_object_set_new(j, "level", json_string(o->open ? "order-free" : "strict"));
  if (o->open) json_object_set_new(j, "rows_in_other_order", json_boolean(r->rowsMoved));
  if (o->open) json_object_set_new(j, "sums_rounded_otherwise", json_boolean(r->sumsMoved));
  return j;
}

static void printMatrix(const char *what, const uint64_t *bytes, const trefoil_shape_t *s) {
  uint64_t tiers[TREFOIL_NUM_TIERS] = {0}, most = 0;
  size_t numPairs = (size_t)s->numRanks * (size_t)s->numRanks;
  for (size_t i = 0; i < numPairs; i++) most = bytes[i] > most ? bytes[i] : most;
  const char *unit = most < 1000 ? "B" : most < 1000000 ? "kB" : "MB";
  double factor = most < 1000 ? 1 : most < 1000000 ? 1e-3 : 1e-6;
  printf("  %s, %s from rank (row) to rank (column); self in (), net in []:\n", what, unit);
  for (int a = 0; a < s->numRanks; a++) {
    printf("   ");
    for (int b = 0; b < s->numRanks; b++) {
      trefoil_tier_t tier = epTierOf(s, a, b);
      uint64_t count = bytes[a * s->numRanks + b];
      tiers[tier] += count;
      printf(" %c%7.*f%c", "( ["[tier], most < 1000 ? 0 : 2, factor * (double)count, ") ]"[tier]);
    }
    putchar('\n');
  }
  char text[3][CLI_NUMBER_BYTES];
  printf("    in all: self %s, nvlink %s, net %s\n", cliBytes(text[0], (double)tiers[0]),
         cliBytes(text[1], (double)tiers[1]), cliBytes(text[2], (double)tiers[2]));
}

static void printRun(const ep_real_options_t *o, const ep_real_result_t *r) {
  const trefoil_shape_t *s = &o->shape;
  printf("%s, %d ranks (%d per node), %lld tokens a rank, hidden %lld, top-%d of %d: %s\n",
         trefoilModeName(o->mode), s->numRanks, s->ranksPerNode, (long long)s->maxTokens,
         (long long)o->hidden, s->topk, s->numExperts, cliAgreement(o, r));
  if (!r->ok) {
    printf("  %s\n", r->difference);
    return;
  }
  printf("  rows received:");
  for (int a = 0; a < s->numRanks; a++) printf(" %lld", (long long)r->receivedRows[a]);
  char t[5][CLI_NUMBER_BYTES];
  printf(
      "\n  update %s, dispatch %s, combine %s; the reference and the comparison took %s for %s\n",
      cliSeconds(t[0], r->updateS), cliSeconds(t[1], r->dispatchS), cliSeconds(t[2], r->combineS),
      cliSeconds(t[3], r->referenceS), cliBytes(t[4], (double)r->bytesCompared));
  printMatrix("dispatch", r->dispatchBytes, s);
  printMatrix("combine", r->combineBytes, s);
  cliPutsText(&r->puts, "  ");
}

static void showStep(void *context, const char *what, uint64_t done, uint64_t total) {
  (void)context;
  cliProgress(what, done, total, "");
}

/* A model's layer by name; nonzero after the sentence. */
static int takeMoe(const char *verb, const char *name, ep_real_options_t *o) {
  trefoil_moe_t moe;
  if (trefoilMoeLoad(&moe, name) != TREFOIL_OK) return cliUsage(verb, "%s", trefoilLastError());
  o->hidden = moe.hidden;
  o->shape.numExperts = moe.numExperts;
  o->shape.topk = moe.topk;
  return 0;
}

int cliRealOptions(const char *verb, const cli_check_t *v, unsigned *modes, ep_real_options_t *o) {
  int low = 8, high = 8;
  *modes = 15u;
  *o = (ep_real_options_t){.hidden = v->hidden, .seed = (uint64_t)v->seed, .progress = showStep};
  o->shape.numExperts = v->experts;
  o->shape.topk = v->topk;
  if (v->moe && takeMoe(verb, v->moe, o)) return CLI_USAGE;
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
  if (v->tokens > 1 << 20) return cliUsage(verb, "--tokens %lld: expected 1 to 1048576", v->tokens);
  o->shape.numRanks = low;
  o->shape.ranksPerNode = v->ranksPerNode ? v->ranksPerNode : low;
  if (o->shape.ranksPerNode < 1 || low % o->shape.ranksPerNode)
    return cliUsage(verb, "--ranks-per-node %d: expected a divisor of %d", o->shape.ranksPerNode,
                    low);
  o->limitNs = (uint64_t)(v->limit * 1e9);
  if (v->level && strcmp(v->level, "strict") && strcmp(v->level, "order-free"))
    return cliUsage(verb, "--level %s: expected strict or order-free", v->level);
  if (v->level && !strcmp(v->level, "order-free")) o->open = EP_OPEN_LL_ROWS;
  o->timeoutNs = v->timeoutMs > 0 ? (uint64_t)v->timeoutMs * 1000000u : 100000000000u;
  return -1;
}

/* What the kernel thinks can be allocated without swapping, or 0: unknown. */
static double freeBytes(void) {
  double kilobytes = 0;
  char line[256];
  FILE *f = fopen("/proc/meminfo", "r");
  while (f && fgets(line, sizeof line, f) && sscanf(line, "MemAvailable: %lf", &kilobytes) != 1) {
  }
  if (f) fclose(f);
  return 1000 * kilobytes;
}

/* Tokens twice, received rows twice (as received, and on their way), with uniform routing: close to
 * what a run takes, and below it. */
int cliRealFits(const char *verb, const ep_real_options_t *o) {
  const trefoil_shape_t *s = &o->shape;
  double tokens = 2.0 * s->numRanks * (double)s->maxTokens * (double)o->hidden;
  double ranksPerToken = s->numRanks * (1 - pow(1 - 1.0 / s->numRanks, s->topk));
  double needed = tokens * (2 + 2 * ranksPerToken), there = freeBytes();
  if (there == 0 || needed <= there) return -1;
  char a[CLI_NUMBER_BYTES], b[CLI_NUMBER_BYTES];
  return cliFail(verb,
                 "%s: %d ranks of %lld tokens of %lld elements need about %s of memory, and %s are "
                 "free: take fewer --tokens",
                 trefoilModeName(o->mode), s->numRanks, (long long)s->maxTokens,
                 (long long)o->hidden, cliBytes(a, needed), cliBytes(b, there));
}

/* Refuses the options of random cases. */
static int randomOnly(const cli_check_t *v) {
  const char *option = v->numCases >= 0    ? "--cases"
                       : v->firstCase >= 0 ? "--case"
                       : v->seconds > 0    ? "--seconds"
                       : v->jobs > 0       ? "--jobs"
                       : v->processes      ? "--processes"
                       : v->profile        ? "--profile"
                       : v->findings != 5  ? "--findings"
                                           : NULL;
  if (option)
    return cliUsage("check",
                    "%s goes with random cases, not with a real shape (--moe, --hidden, "
                    "--experts, --topk, --tokens)",
                    option);
  return -1;
}

/* The command that runs this mode again. */
static void printReplay(const cli_check_t *v, const ep_real_options_t *o) {
  const trefoil_shape_t *s = &o->shape;
  printf("  replay: trefoil check --hidden %lld --experts %d --topk %d --ranks %d "
         "--ranks-per-node %d --tokens %lld --mode %s --seed %lld",
         (long long)o->hidden, s->numExperts, s->topk, s->numRanks, s->ranksPerNode,
         (long long)s->maxTokens, trefoilModeName(o->mode), v->seed);
  if (v->timeoutMs) printf(" --timeout-ms %lld", v->timeoutMs);
  if (v->limit > 0) printf(" --limit %g", v->limit);
  if (v->library.library) printf(" --library %s", v->library.library);
  if (v->library.nccl) printf(" --nccl %s", v->library.nccl);
  if (v->library.cuda) printf(" --cuda %s", v->library.cuda);
  puts(v->library.gpu ? " --gpu" : "");
}

/* One mode, which is printed; -1, or an exit code after the sentence. */
static int checkMode(const cli_check_t *v, ep_real_options_t *o, ep_real_result_t *r,
                     json_t *runs) {
  int rc = cliRealFits("check", o);
  if (rc >= 0) return rc;
  trefoil_result_t result = epRealRun(o, r);
  cliProgressEnd();
  if (result != TREFOIL_OK)
    return cliFail("check", "%s: %s", trefoilModeName(o->mode), trefoilLastError());
  if (*o->interrupted) return -1;
  if (v->json)
    json_array_append_new(runs, runJson(o, r));
  else
    printRun(o, r);
  if (!v->json && !r->ok) printReplay(v, o);
  fflush(stdout);
  return -1;
}

static int reportAll(const cli_check_t *v, const ep_real_options_t *o, json_t *runs, int failed) {
  int isStopped = *o->interrupted != 0;
  if (!v->json) {
    if (isStopped)
      printf("interrupted (%s): the modes above are done, the others not\n",
             *o->interrupted == SIGINT ? "SIGINT" : "SIGTERM");
    cliLibrariesText(&o->paths);
    json_decref(runs);
    return failed || isStopped ? CLI_FAILED : CLI_OK;
  }
  json_t *j = json_pack("{s:b, s:b, s:o, s:o}", "ok", !failed && !isStopped, "interrupted",
                        isStopped, "runs", runs, "environment", cliEnvironment());
  cliLibrariesJson(j, &o->paths);
  int rc = cliPrintJson(j);
  return failed || isStopped ? CLI_FAILED : rc;
}

int cliCheckReal(const cli_check_t *v) {
  char paths[3][4096];
  unsigned modes;
  ep_real_options_t o;
  int rc = randomOnly(v);
  if (rc < 0) rc = cliNoLaunch("check");
  if (rc < 0) rc = cliRealOptions("check", v, &modes, &o);
  if (rc < 0) rc = cliLibraries("check", &v->library, paths, &o.paths);
  if (rc >= 0) return rc;
  ep_real_result_t *r = malloc(sizeof *r);
  json_t *runs = json_array();
  if (!r) return cliFail("check", "out of memory");
  int failed = 0;
  o.interrupted = cliInterrupts();
  for (int mode = 0; mode < TREFOIL_NUM_MODES && rc < 0 && !*o.interrupted; mode++) {
    if (!(modes & (1u << mode))) continue;
    o.mode = (trefoil_mode_t)mode;
    o.shape.maxTokens = v->tokens > 0 ? v->tokens : mode < TREFOIL_HT_FLAT ? 128 : 4096;
    rc = checkMode(v, &o, r, runs);
    failed |= !r->ok;
  }
  free(r);
  if (rc < 0) return reportAll(v, &o, runs, failed);
  json_decref(runs);
  return rc;
}
