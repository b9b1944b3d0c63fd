/* What the halves of `trefoil check`, and `trefoil bench`, share. */
#ifndef TREFOIL_CLI_CHECK_VERB_H
#define TREFOIL_CLI_CHECK_VERB_H

#include "cli/cli.h"
#include "validate/library.h"
#include "validate/real_shape.h"

typedef struct cli_library {
  char *library, *nccl, *cuda;
  int gpu;
} cli_library_t;

typedef struct cli_check {
  long long numCases, seed, firstCase, timeoutMs, tokens, hidden;
  int numCasesGiven;
  double seconds;
  char *modes, *ranks, *level, *moe;
  int processes, jobs, json, experts, topk, ranksPerNode;
  cli_library_t library;
} cli_check_t;

int cliCheckRandom(const cli_check_t *v);
int cliCheckReal(const cli_check_t *v);

/* Fills what the options say about a real shape; -1, or an exit code after the sentence. */
int cliRealOptions(const char *verb, const cli_check_t *v, unsigned *modes, ep_real_options_t *o);
/* A model's layer by name; nonzero after the sentence. */
int cliMoeShape(const char *verb, const char *name, ep_real_options_t *o);

/* "ll,ht-flat" into a bit per trefoil_mode_t; 0: not understood. */
int cliModes(const char *text, unsigned *modes);
/* "4" or "2-8"; 0: not understood. */
int cliRange(const char *text, int *low, int *high);
/* Where the three libraries are; paths hold the text. Returns whether they are for GPUs. */
int cliLibraries(const cli_library_t *l, char paths[3][4096], ep_library_paths_t *out);

#endif
