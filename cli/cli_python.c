/* Verbs that the Python package does: the verb's arguments go to `python -m trefoil.verb
 * MODULE`.
 *
 * The package lies beside the program: in share/trefoil/python of an installation, in python/ of the
 * source tree that the build folder is in. The interpreter is $TREFOIL_PYTHON, else the private
 * environment that tools/tour makes in the source tree, else python3. The module finds this program
 * again in $TREFOIL_PROGRAM, and by it the library in $TREFOIL_LIB, unless the caller has set them. */
#include "cli/cli.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { maxPath = 4096 };

/* path = the folder of the running program + suffix; whether that exists. */
static int besideProgram(const char *suffix, char path[maxPath]) {
  char self[maxPath];
  ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
  if (n <= 0) return 0;
  self[n] = 0;
  char *slash = strrchr(self, '/');
  if (slash) *slash = 0;
  int len = snprintf(path, maxPath, "%s%s", self, suffix);
  return len > 0 && len < maxPath && access(path, R_OK) == 0;
}

static int prependPythonPath(const char *folder) {
  const char *old = getenv("PYTHONPATH");
  char value[2 * maxPath];
  int len = snprintf(value, sizeof value, "%s%s%s", folder, old && *old ? ":" : "", old ? old : "");
  if (len < 0 || (size_t)len >= sizeof value) return 0;
  return setenv("PYTHONPATH", value, 1) == 0;
}

const char *cliPython(char *path, size_t pathBytes) {
  const char *said = getenv("TREFOIL_PYTHON");
  char own[maxPath];
  if (!said || !*said) said = besideProgram("/../../../.venv/bin/python3", own) ? own : "python3";
  snprintf(path, pathBytes, "%s", said);
  return path;
}

static int setPaths(void) {
  char path[maxPath], library[maxPath];
  if (besideProgram("/../share/trefoil/python", path) || besideProgram("/../../../python", path))
    if (!prependPythonPath(path)) return 0;
  ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
  if (n > 0) {
    path[n] = 0;
    if (setenv("TREFOIL_PROGRAM", path, 0)) return 0;
  }
  cliFindLibrary("libtrefoil.so.0", library, sizeof library);
  return !strchr(library, '/') || setenv("TREFOIL_LIB", library, 0) == 0;
}

int cliRunPython(const char *verb, const char *module, int argc, char **argv) {
  if (!setPaths()) return cliFail(verb, "the environment cannot be set for Python");
  char interpreter[maxPath];
  const char *python = cliPython(interpreter, sizeof interpreter);
  char **arguments = calloc((size_t)argc + 4, sizeof *arguments);
  if (!arguments) return cliFail(verb, "out of memory");
  arguments[0] = (char *)python;
  arguments[1] = "-m";
  arguments[2] = "trefoil.verb"; /* signals and files, then the module */
  arguments[3] = (char *)module;
  for (int i = 1; i < argc; i++) arguments[i + 3] = argv[i];
  cliHoldSignals(1); /* until the verb's handlers stand: trefoil/verb.py lets them in again */
  execvp(python, arguments);
  cliHoldSignals(0);
  int code = cliFail(verb, "%s cannot be run: %s (TREFOIL_PYTHON names another interpreter)",
                     python, strerror(errno));
  free(arguments);
  return code;
}
