/* trefoil fit: the Python package fits costs to measured tables. */
#include "cli/cli.h"

int cmdFit(int argc, char **argv) {
  return cliRunPython("fit", "trefoil.fit", argc, argv);
}
