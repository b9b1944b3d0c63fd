/* trefoil bench. */
#include "cli/cli.h"

int cmdBench(int argc, char **argv) {
  int json = 0;
  const struct poptOption options[] = {CLI_COMMON_OPTIONS(&json)};
  const cli_args_t args = {"bench", NULL, "..."};
  int rc = cliParse(&args, options, argc, argv, NULL);
  if (rc >= 0) return rc;
  return cliFail("bench", "this build has no checker");
}
