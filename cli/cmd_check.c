/* trefoil check. */
#include "cli/cli.h"

int cmdCheck(int argc, char **argv) {
  int json = 0;
  const struct poptOption options[] = {CLI_COMMON_OPTIONS(&json)};
  const cli_args_t args = {"check", NULL, "..."};
  int rc = cliParse(&args, options, argc, argv, NULL);
  if (rc >= 0) return rc;
  return cliFail("check", "this build has no checker");
}
