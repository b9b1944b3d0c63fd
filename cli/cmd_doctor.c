/* trefoil doctor: what is on this machine. */
#include "cli/cli.h"

#include <stdio.h>

int cmdDoctor(int argc, char **argv) {
  int json = 0;
  const struct poptOption options[] = {CLI_COMMON_OPTIONS(&json)};
  const cli_args_t args = {"doctor", NULL, "Says what is on this machine."};
  int rc = cliParse(&args, options, argc, argv, NULL);
  if (rc >= 0) return rc;
  return cliPrintJson(cliEnvironment());
}
