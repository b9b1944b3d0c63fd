/* trefoil report: the Python package makes the page. */
#include "cli/cli.h"

int cmdReport(int argc, char **argv) {
  return cliRunPython("report", "trefoil.report", argc, argv);
}
