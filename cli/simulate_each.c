/* Many steps, one after the other, for callers that ask for many: each in a child process, which finds
 * the libraries loaded. A step's failure is its own. */
#include "cli/simulate.h"

#include <errno.h>
#include <limits.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static const char verb[] = "simulate";

enum { maxWords = 256 };
static int isChild;

/* What a child printed, as a string of JSON; NULL: no memory. */
static json_t *textOf(int fd) {
  off_t size = lseek(fd, 0, SEEK_END);
  char *text = size >= 0 ? malloc((size_t)size + 1) : NULL;
  ssize_t n = text ? pread(fd, text, (size_t)size, 0) : -1;
  json_t *made = n < 0 ? NULL : json_stringn_nocheck(text, (size_t)n);
  free(text);
  return made;
}

static void runChild(char **argv, int argc, const int fds[2]) {
  isChild = 1;
#ifdef M_MMAP_MAX /* a replay's arrays take the memory that the one before freed */
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
#endif
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (dup2(fds[0], STDOUT_FILENO) < 0 || dup2(fds[1], STDERR_FILENO) < 0) _exit(CLI_FAILED);
  exit(cliFinish(cmdSimulate(argc, argv)));
}

/* The words of a line as an argv of the verb, or 0: it is no list of words. */
static int takeWords(const json_t *list, char *argv[maxWords]) {
  int argc = 0;
  argv[argc++] = (char *)verb;
  for (size_t i = 0; i < json_array_size(list); i++) {
    const char *word = json_string_value(json_array_get(list, i));
    if (!word || argc == maxWords - 1) return 0;
    argv[argc++] = (char *)word;
  }
  argv[argc] = NULL;
  return json_is_array(list) ? argc : 0;
}

/* -1, or an exit code. */
static int runOne(char **argv, int argc) {
  int fds[2] = {memfd_create("out", MFD_CLOEXEC), memfd_create("err", MFD_CLOEXEC)}, status = 0;
  fflush(NULL);
  pid_t child = fds[0] < 0 || fds[1] < 0 ? -1 : fork();
  if (child == 0) runChild(argv, argc, fds);
  int why = errno;
  while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  json_t *said = NULL;
  if (child > 0) {
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    said = json_pack("{s:i, s:o, s:o}", "code", code, "out", textOf(fds[0]), "err", textOf(fds[1]));
  }
  if (fds[0] >= 0) close(fds[0]);
  if (fds[1] >= 0) close(fds[1]);
  if (child < 0) return cliFail(verb, "a step has no process: %s", strerror(why));
  if (!said) return cliFail(verb, "a step's answer cannot be read");
  (void)json_dumpf(said, stdout, JSON_COMPACT);
  json_decref(said);
  putchar('\n');
  return fflush(stdout) ? CLI_FAILED : -1;
}

/* All of it, before any child: they share the file's place. NULL: no memory. */
static char *readAll(FILE *file) {
  size_t size = 0, room = 1 << 16;
  char *text = malloc(room);
  while (text) {
    size += fread(text + size, 1, room - 1 - size, file);
    if (size < room - 1) break;
    char *grown = realloc(text, room *= 2);
    if (!grown) free(text);
    text = grown;
  }
  if (text) text[size] = 0;
  return text;
}

int simulateEach(const char *path) {
  if (isChild) return cliUsage(verb, "--each stands alone");
  FILE *file = strcmp(path, "-") ? fopen(path, "r") : stdin;
  if (!file) return cliUsage(verb, "%s: cannot be opened: %s", path, strerror(errno));
  char *text = readAll(file), *argv[maxWords];
  int isRead = text && !ferror(file), rc = -1, number = 0;
  if (file != stdin) fclose(file);
  if (!isRead) rc = cliFail(verb, "%s: cannot be read", path);
  for (char *line = text, *next; rc < 0 && *line; line = next) {
    next = line + strcspn(line, "\n");
    if (*next) *next++ = 0;
    json_t *list = json_loads(line, 0, NULL);
    int argc = takeWords(list, argv);
    number++;
    rc = argc ? runOne(argv, argc)
              : cliUsage(verb, "%s: line %d is no list of words in JSON", path, number);
    json_decref(list);
  }
  free(text);
  return rc < 0 ? CLI_OK : rc;
}
