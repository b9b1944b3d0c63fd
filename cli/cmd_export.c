/* trefoil export: the Python package writes tables and schedules for other tools. */
#include "cli/cli.h"

int cmdExport(int argc, char **argv) {
  return cliRunPython("export", "trefoil.export", argc, argv);
}
