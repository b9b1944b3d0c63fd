/* trefoil compare: the Python package sets measurements beside predictions. */
#include "cli/cli.h"

int cmdCompare(int argc, char **argv) {
  return cliRunPython("compare", "trefoil.compare", argc, argv);
}
