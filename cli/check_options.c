/* Options that several verbs share: modes, ranges, the libraries, and no launch. */
#include "cli/check_verb.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const modeNames[] = {"ll-expert-major", "ll-rank-major", "ht-flat",
                                        "ht-expert-major"};

static unsigned modeBits(const char *word) {
  for (int i = 0; i < 4; i++)
    if (!strcmp(word, modeNames[i])) return 1u << i;
  return !strcmp(word, "all") ? 15u : !strcmp(word, "ll") ? 3u : !strcmp(word, "ht") ? 12u : 0;
}

static int takeModes(const char *text, int withA2sgd, unsigned *modes) {
  unsigned set = 0;
  char *copy = strdup(text), *save = NULL;
  int ok = copy != NULL;
  for (char *word = ok ? strtok_r(copy, ",", &save) : NULL; word;
       word = strtok_r(NULL, ",", &save)) {
    unsigned bits = withA2sgd && !strcmp(word, "a2sgd") ? EP_MODE_A2SGD : modeBits(word);
    ok &= bits != 0;
    set |= bits;
  }
  free(copy);
  if (!ok || !set) return 0;
  *modes = set;
  return 1;
}

int cliModes(const char *text, unsigned *modes) {
  return takeModes(text, 0, modes);
}

int cliCaseModes(const char *text, unsigned *modes) {
  return takeModes(text, 1, modes);
}

int cliRange(const char *text, int *low, int *high) {
  char *end;
  long a = strtol(text, &end, 10), b = a;
  if (end == text) return 0;
  if (*end == '-') {
    const char *second = end + 1;
    b = strtol(second, &end, 10);
    if (end == second) return 0;
  }
  if (*end || a < 1 || b < a || b > 1 << 20) return 0;
  *low = (int)a;
  *high = (int)b;
  return 1;
}

/* What was said, else what a GPU has, else what lies beside the program. */
static void choosePath(char path[4096], const char *said, const char *onGpu, const char *bundled) {
  if (said || onGpu)
    snprintf(path, 4096, "%s", said ? said : onGpu);
  else
    cliFindLibrary(bundled, path, 4096);
}

int cliLibraries(const char *verb, const cli_library_t *l, char paths[3][4096],
                 ep_library_paths_t *out) {
  const char *set = getenv("TREFOIL_LIBRARY");
  const char *library = l->library ? l->library : set && *set ? set : NULL;
  choosePath(paths[0], library, NULL, l->gpu ? "libnccl_ep.so.0" : "libnccl_ep_cpu.so.0");
  choosePath(paths[1], l->nccl, l->gpu && !l->nccl ? epLibraryFindNccl() : NULL,
             "libtrefoil_host.so.0");
  choosePath(paths[2], l->cuda, l->gpu && !l->cuda ? epLibraryFindCuda() : NULL,
             "libtrefoil_host.so.0");
  if (l->gpu && !library && !strchr(paths[0], '/'))
    return cliUsage(
        verb, "--gpu: no libnccl_ep.so.0 lies beside this program (it is built where nvcc and NCCL "
              "are): say which library with --library or TREFOIL_LIBRARY");
  *out = (ep_library_paths_t){paths[0], paths[1], paths[2]};
  return -1;
}

void cliLibrariesJson(json_t *into, const ep_library_paths_t *paths) {
  json_object_set_new(into, "library", json_string(paths->library));
  json_object_set_new(into, "nccl", json_string(paths->nccl));
  json_object_set_new(into, "cuda", json_string(paths->cuda));
}

void cliLibrariesText(const ep_library_paths_t *paths) {
  printf("library %s, NCCL %s, CUDA %s\n", paths->library, paths->nccl, paths->cuda);
}

int cliNoLaunch(const char *verb) {
  ep_launch_t launch;
  if (epLaunchFind(&launch) != TREFOIL_OK) return cliUsage(verb, "%s", trefoilLastError());
  if (launch.numRanks == 1) return -1;
  return cliUsage(
      verb,
      "a launch of %d processes: only random cases (trefoil check without a shape) take "
      "their ranks from a launcher; here the ranks are threads of one process",
      launch.numRanks);
}
