/* Files that verbs write, and what a signal leaves behind: nothing.
 *
 * A file is written beside itself and renamed when it is whole, so that a failure leaves what was
 * there. Opening comes first, before anything is computed: where a file cannot be written, it is said
 * at once. SIGINT and SIGTERM remove what is unfinished and end the verb with one sentence. */
#include "cli/cli.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { maxFiles = 4 };

static cli_file_t *unfinished[maxFiles]; /* read by the handler */
static char interruptedSentence[96], endedSentence[96];
static pid_t owner;

/* In the order in which a handler may do it: no memory, no locks. */
static void onSignal(int number) {
  if (getpid() != owner) _exit(128 + number); /* a child that only computes */
  for (int i = 0; i < maxFiles; i++) {
    if (unfinished[i]) (void)unlink(unfinished[i]->writing);
  }
  const char *sentence = number == SIGINT ? interruptedSentence : endedSentence;
  ssize_t written = write(STDERR_FILENO, sentence, strlen(sentence));
  (void)written;
  _exit(128 + number);
}

void cliCatchSignals(const char *verb) {
  owner = getpid();
  snprintf(interruptedSentence, sizeof interruptedSentence, "%strefoil %s: interrupted\n",
           isatty(STDERR_FILENO) ? "\n" : "", verb);
  snprintf(endedSentence, sizeof endedSentence, "trefoil %s: ended by SIGTERM\n", verb);
  const int signals[] = {SIGINT, SIGTERM};
  for (int i = 0; i < 2; i++) {
    struct sigaction before, action = {.sa_handler = onSignal};
    sigemptyset(&action.sa_mask);
    if (sigaction(signals[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN) {
      (void)sigaction(signals[i], &action, NULL);
    }
  }
}

static void dropAll(void) {
  for (int i = 0; i < maxFiles && getpid() == owner; i++) {
    if (unfinished[i]) cliFileDrop(unfinished[i]);
  }
}

static int failToWrite(const char *verb, const char *path, const char *why) {
  return cliFail(verb, "%s: cannot be written: %s", path, why);
}

/* A name beside the file that it will be, in f->writing, and the file itself, empty. */
static int createTemporary(cli_file_t *f, const struct stat *there) {
  char *slash = strrchr(f->path, '/');
  int folderLength = slash ? (int)(slash - f->path) + 1 : 0;
  int n = snprintf(f->writing, sizeof f->writing, "%.*s.%s.XXXXXX", folderLength, f->path,
                   f->path + folderLength);
  if (n < 0 || (size_t)n >= sizeof f->writing) {
    errno = ENAMETOOLONG;
    return 0;
  }
  int fd = mkstemp(f->writing);
  if (fd < 0) return 0;
  mode_t mask = umask(0);
  umask(mask);
  (void)fchmod(fd, there ? there->st_mode & 07777 : 0666 & ~mask);
  close(fd);
  return 1;
}

int cliFileBegin(cli_file_t *f, const char *verb, const char *path) {
  *f = (cli_file_t){.verb = verb};
  struct stat there;
  int exists = stat(path, &there) == 0, slot = 0;
  char *resolved = exists ? realpath(path, NULL) : NULL; /* a link stays one */
  int n = snprintf(f->path, sizeof f->path, "%s", resolved ? resolved : path);
  free(resolved);
  if (n < 0 || (size_t)n >= sizeof f->path) return failToWrite(verb, path, strerror(ENAMETOOLONG));
  if (!*path) return cliUsage(verb, "name one file");
  if (exists && S_ISDIR(there.st_mode)) return failToWrite(verb, path, strerror(EISDIR));
  if (exists && access(path, W_OK)) return failToWrite(verb, path, strerror(errno));
  if (exists && !S_ISREG(there.st_mode)) { /* a device or a pipe: written as it is */
    snprintf(f->writing, sizeof f->writing, "%s", f->path);
    return -1;
  }
  while (slot < maxFiles && unfinished[slot]) slot++;
  if (slot == maxFiles) return failToWrite(verb, path, "too many files at once");
  if (!owner) cliCatchSignals(verb);
  if (!createTemporary(f, exists ? &there : NULL)) return failToWrite(verb, path, strerror(errno));
  static int registered;
  if (!registered) registered = atexit(dropAll) == 0;
  f->isTemporary = 1;
  unfinished[slot] = f;
  return -1;
}

static void forget(const cli_file_t *f) {
  for (int i = 0; i < maxFiles; i++)
    if (unfinished[i] == f) unfinished[i] = NULL;
}

void cliFileDrop(cli_file_t *f) {
  if (f->isTemporary) (void)unlink(f->writing);
  forget(f);
  f->isTemporary = 0;
}

int cliFileKeep(cli_file_t *f) {
  if (f->isTemporary && rename(f->writing, f->path)) {
    int why = errno;
    cliFileDrop(f);
    return failToWrite(f->verb, f->path, strerror(why));
  }
  forget(f);
  f->isTemporary = 0;
  return -1;
}

int cliFileClose(cli_file_t *f, FILE *stream) {
  int why = ferror(stream) ? errno : 0;
  if (fclose(stream) && !why) why = errno;
  if (!why) return cliFileKeep(f);
  cliFileDrop(f);
  return failToWrite(f->verb, f->path, strerror(why));
}

FILE *cliFileOpen(cli_file_t *f) {
  FILE *stream = fopen(f->writing, "w");
  if (stream) return stream;
  failToWrite(f->verb, f->path, strerror(errno));
  cliFileDrop(f);
  return NULL;
}

void cliHoldSignals(int hold) {
  sigset_t both;
  sigemptyset(&both);
  sigaddset(&both, SIGINT);
  sigaddset(&both, SIGTERM);
  (void)sigprocmask(hold ? SIG_BLOCK : SIG_UNBLOCK, &both, NULL);
}

void cliStart(void) {
  signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is an error of write, with a sentence */
  if (getenv("TREFOIL_END_WITH_PARENT")) prctl(PR_SET_PDEATHSIG, SIGTERM);
}
