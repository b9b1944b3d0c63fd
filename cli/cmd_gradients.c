/* trefoil gradients: the Python package says what averaging gradients takes on a cluster. */
#include "cli/cli.h"

int cmdGradients(int argc, char **argv) {
  return cliRunPython("gradients", "trefoil.gradients", argc, argv);
}
