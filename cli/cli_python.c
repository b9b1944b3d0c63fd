/* Verbs that the Python package does: the verb's arguments go to trefoil.verb MODULE, as
 * `python -m trefoil.verb MODULE` would hand them on, but without the current directory in the module path: a
 * json.py there is not ours.
 *
 * The package lies beside the program: in share/trefoil/python of an installation, in python/ of the
 * source tree that the build folder is in. The interpreter is the first of: $TREFOIL_PYTHON; the private
 * environment that tools/tour makes in the source tree; the one that CMake found; python3 in an absolute
 * folder of $PATH. What lies beside the program must belong to the caller, to root or to the program's
 * owner, and be writable by nobody else. The module finds this program again in $TREFOIL_PROGRAM, and by
 * it the library in $TREFOIL_LIB, unless the caller has set them. */
#include "cli/cli.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { maxPath = 4096 };

/* What `python -m` does, less the folder that it puts first. From 3.11 on PYTHONSAFEPATH keeps it out, here
 * and in the interpreters that this one starts. */
static const char runModule[] = "import sys\n"
                                "if not getattr(sys.flags, 'safe_path', False):\n"
                                "    del sys.path[0]\n"
                                "module = sys.argv.pop(1)\n"
                                "import runpy\n"
                                "runpy.run_module(module, run_name='__main__', alter_sys=True)\n";

/* Whether only the caller, root and the owner of the program can have put there what path leads to. */
static int isOurs(const char *path) {
  struct stat it, program;
  if (stat(path, &it)) return 0;
  uid_t owner = stat("/proc/self/exe", &program) ? 0 : program.st_uid;
  if (it.st_uid != 0 && it.st_uid != geteuid() && it.st_uid != owner) return 0;
  if (it.st_mode & S_IWOTH) return 0;
  return !(it.st_mode & S_IWGRP) ||
         it.st_gid == it.st_uid; /* a group of one, as useradd makes it */
}

/* path = the folder of the running program + suffix; whether that exists. */
static int nextToProgram(const char *suffix, char path[maxPath]) {
  char self[maxPath];
  ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
  if (n <= 0) return 0;
  self[n] = 0;
  char *slash = strrchr(self, '/');
  if (slash) *slash = 0;
  int len = snprintf(path, maxPath, "%s%s", self, suffix);
  return len > 0 && len < maxPath && access(path, R_OK) == 0;
}

/* The environment in the source tree; a program installed elsewhere may have a stranger's at that place. */
static int ownEnvironment(char path[maxPath]) {
  char folder[maxPath];
  return nextToProgram("/../../../.venv/", folder) && isOurs(folder) &&
         nextToProgram("/../../../.venv/bin/", folder) && isOurs(folder) &&
         nextToProgram("/../../../.venv/pyvenv.cfg", folder) && isOurs(folder) &&
         nextToProgram("/../../../.venv/bin/python3", path);
}

/* python3 in a folder of $PATH, relative and empty ones left out: they are the current directory. */
static int inPath(char path[maxPath]) {
  const char *at = getenv("PATH");
  while (at && *at) {
    size_t n = strcspn(at, ":");
    int len = *at == '/' ? snprintf(path, maxPath, "%.*s/python3", (int)n, at) : 0;
    if (len > 0 && len < maxPath && access(path, X_OK) == 0) return 1;
    at += n + (at[n] == ':');
  }
  return 0;
}

const char *cliPython(char *path, size_t pathBytes) {
  setenv("PYTHONSAFEPATH", "1", 1); /* first: it may move what getenv returned */
  const char *said = getenv("TREFOIL_PYTHON");
  char found[maxPath];
  if (said && *said)
    snprintf(found, sizeof found, "%s", said);
  else if (ownEnvironment(found))
    ;
  else if (*TREFOIL_CONFIGURED_PYTHON && access(TREFOIL_CONFIGURED_PYTHON, X_OK) == 0)
    snprintf(found, sizeof found, "%s", TREFOIL_CONFIGURED_PYTHON);
  else if (!inPath(found))
    *found = 0;
  snprintf(path, pathBytes, "%s", found);
  return path;
}

/* In front of what there is, less empty elements, which stand for the current directory. */
static int prependPythonPath(const char *folder) {
  const char *old = getenv("PYTHONPATH");
  char value[2 * maxPath];
  size_t len = strlen(folder);
  if (len + (old ? strlen(old) : 0) + 2 > sizeof value) return 0;
  memcpy(value, folder, len);
  for (; old && *old; old += strspn(old, ":")) {
    size_t n = strcspn(old, ":");
    if (n) value[len++] = ':';
    memcpy(value + len, old, n);
    len += n;
    old += n;
  }
  value[len] = 0;
  return setenv("PYTHONPATH", value, 1) == 0;
}

/* The package: of an installation, else of the source tree. */
static int findPackage(char path[maxPath]) {
  return (nextToProgram("/../share/trefoil/python", path) && isOurs(path)) ||
         (nextToProgram("/../../../python", path) && isOurs(path));
}

static int setEnvironment(void) {
  char path[maxPath], library[maxPath];
  /* NumPy's matrices are small here: threads of its BLAS wait for one another, five times the time */
  if (setenv("OPENBLAS_NUM_THREADS", "1", 0)) return 0;
  if (findPackage(path) && !prependPythonPath(path)) return 0;
  ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
  if (n > 0) {
    path[n] = 0;
    if (setenv("TREFOIL_PROGRAM", path, 0)) return 0;
  }
  cliFindLibrary("libtrefoil.so.0", library, sizeof library);
  return !strchr(library, '/') || setenv("TREFOIL_LIB", library, 0) == 0;
}

int cliRunPython(const char *verb, const char *module, int argc, char **argv) {
  if (!setEnvironment()) return cliFail(verb, "the environment cannot be set for Python");
  char interpreter[maxPath];
  const char *python = cliPython(interpreter, sizeof interpreter);
  if (!*python)
    return cliFail(verb, "there is no python3 in PATH (TREFOIL_PYTHON names another interpreter)");
  char **arguments = calloc((size_t)argc + 5, sizeof *arguments);
  if (!arguments) return cliFail(verb, "out of memory");
  arguments[0] = (char *)python;
  arguments[1] = "-c";
  arguments[2] = (char *)runModule;
  arguments[3] = "trefoil.verb"; /* signals and files, then the module */
  arguments[4] = (char *)module;
  for (int i = 1; i < argc; i++) arguments[i + 4] = argv[i];
  cliHoldSignals(1); /* until the verb's handlers stand: trefoil/verb.py lets them in again */
  execvp(python, arguments);
  cliHoldSignals(0);
  int code = cliFail(verb, "%s cannot be run: %s (TREFOIL_PYTHON names another interpreter)",
                     python, strerror(errno));
  free(arguments);
  return code;
}
