/* What the halves of `trefoil check`, and `trefoil bench`, share. */
#ifndef TREFOIL_CLI_CHECK_VERB_H
#define TREFOIL_CLI_CHECK_VERB_H

#include "cli/cli.h"
#include "validate/checker.h"
#include "validate/library.h"
#include "validate/real_shape.h"

typedef struct cli_library {
  char *library, *nccl, *cuda;
  int gpu;
} cli_library_t;

/* The options that fill it, for a verb's table. */
#define CLI_LIBRARY_OPTIONS(l)                                                                     \
  {                                                                                                \
      "library", 0, POPT_ARG_STRING, &(l)->library, 0, "the library (default: without a GPU)",     \
      "PATH"},                                                                                     \
      {"nccl", 0, POPT_ARG_STRING, &(l)->nccl, 0, "NCCL for it", "PATH"},                          \
      {"cuda", 0, POPT_ARG_STRING, &(l)->cuda, 0, "CUDA runtime for it", "PATH"}, {                \
    "gpu", 0, POPT_ARG_NONE, &(l)->gpu, 0,                                                         \
        "the library is for GPUs: libnccl.so.2 and libcudart.so", NULL                             \
  }

typedef struct cli_check {
  long long numCases, seed, firstCase, timeoutMs, tokens, hidden;
  double seconds, limit;
  char *modes, *ranks, *level, *profile, *moe;
  int processes, jobs, json, experts, topk, ranksPerNode, gpuCases, countBytes, findings;
  cli_library_t library;
} cli_check_t;

int cliCheckRandom(const cli_check_t *v);
int cliCheckReal(const cli_check_t *v);

/* Adds to each finding whether the case fails alone; prints what it all came to, returns the exit code. */
void cliConfirmFindings(const ep_check_options_t *options, ep_check_outcome_t *outcome);
int cliPrintOutcome(const ep_check_options_t *options, const ep_check_outcome_t *outcome, int json);

/* Fills what the options say about a real shape; -1, or an exit code after the sentence. */
int cliRealOptions(const char *verb, const cli_check_t *v, unsigned *modes, ep_real_options_t *o);

/* Puts between NVLink domains by kind, beside the least for the rows; nothing where none were counted. */
void cliPutsJson(json_t *into, const ep_puts_t *puts);
void cliPutsText(const ep_puts_t *puts, const char *indent);

/* How a real shape agrees, in words: bit for bit, or with what in another order. */
const char *cliAgreement(const ep_real_options_t *o, const ep_real_result_t *r);

/* -1, or CLI_FAILED after the sentence: the shape in o needs more memory than is free. */
int cliRealFits(const char *verb, const ep_real_options_t *o);

/* "ll,ht-flat" into a bit per trefoil_mode_t; 0: not understood. */
int cliModes(const char *text, unsigned *modes);
/* Of random cases: "a2sgd" is EP_MODE_A2SGD. */
int cliCaseModes(const char *text, unsigned *modes);
/* "4" or "2-8"; 0: not understood. */
int cliRange(const char *text, int *low, int *high);
/* -1, or CLI_USAGE after the sentence: a launcher started this, and the ranks are threads here. */
int cliNoLaunch(const char *verb);
/* Where the three libraries are; paths hold the text. -1, or CLI_USAGE after the sentence. */
int cliLibraries(const char *verb, const cli_library_t *l, char paths[3][4096],
                 ep_library_paths_t *out);
/* "library", "nccl" and "cuda" of what was checked, into a result; the same as a line of text. */
void cliLibrariesJson(json_t *into, const ep_library_paths_t *paths);
void cliLibrariesText(const ep_library_paths_t *paths);

/* trefoil bench on GPUs (bench_gpu.c): every variant at every number of tokens. */
typedef struct cli_gpu_bench {
  ep_real_options_t base; /* shape, libraries, seed */
  unsigned modes;
  const char *variants; /* "plain,e4m3,partial", or NULL: all */
  const char *tokens;   /* "1,8,32", or NULL */
  const char *plot;     /* a picture's file, or NULL */
  int json;
  int isGpu; /* else, for cliBenchAgainst alone, on the CPU */
} cli_gpu_bench_t;
int cliBenchGpu(const cli_gpu_bench_t *b);
/* trefoil bench --against (bench_against.c): base.against in turn with the library. */
int cliBenchAgainst(const cli_gpu_bench_t *b);
enum { CLI_MAX_TOKENS = 32 };
/* "1,8,128" into tokens [CLI_MAX_TOKENS]; how many, 0: not understood. */
int cliTakeTokens(const char *text, long long *tokens);
/* A module of the Python package draws what --json prints; an exit code. */
int cliDraw(const char *module, const char *path, const json_t *all);
/* One measured shape, and the GPUs, as JSON. */
json_t *cliGpuRunJson(const ep_real_options_t *o, const ep_real_result_t *r);
json_t *cliGpuFactsJson(const ep_gpu_times_t *t, int ranks);
/* "plain", "e4m3", ...; 0: not understood. Kinds of routing, background work; -1: no such. */
int cliTakeVariant(const char *word, ep_real_options_t *o);
int cliRoutingOf(const char *word);
int cliBackgroundOf(const char *word);

/* trefoil bench --points (bench_points.c): points of a file, a line of JSON as each is done. base has the
 * ranks, libraries, time limit of the operations and repeats. */
int cliBenchPoints(const char *path, double minutes, const ep_real_options_t *base);

#endif
