/* Arguments through popt, one way for all verbs. */
#include "cli/cli.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cliUsage(const char *verb, const char *format, ...) {
  va_list ap;
  va_start(ap, format);
  fprintf(stderr, "trefoil %s: ", verb);
  vfprintf(stderr, format, ap);
  fprintf(stderr, "; see trefoil %s --help\n", verb);
  va_end(ap);
  return CLI_USAGE;
}

int cliFail(const char *verb, const char *format, ...) {
  va_list ap;
  va_start(ap, format);
  fprintf(stderr, "trefoil %s: ", verb);
  vfprintf(stderr, format, ap);
  fputc('\n', stderr);
  va_end(ap);
  return CLI_FAILED;
}

int cliIsSub(int argc, char **argv, const char *name) {
  return argc > 1 && !strcmp(argv[1], name);
}

static void printHelp(const cli_args_t *args, poptContext context) {
  poptPrintHelp(context, stdout, 0);
  printf("\n%s\n", args->about);
}

int cliParse(const cli_args_t *args, const struct poptOption *options, int argc, char **argv,
             const char *const **operands) {
  static const char *const none[] = {NULL};
  /* The context is kept: operands and strings borrow from it until the program ends. */
  char *name = malloc(strlen(args->verb) + 9);
  if (!name) return cliFail(args->verb, "out of memory");
  sprintf(name, "trefoil %s", args->verb);
  argv[0] = name;
  poptContext context = poptGetContext(NULL, argc, (const char **)argv, options, 0);
  if (!context) return cliFail(args->verb, "out of memory");
  char *usage = malloc(16 + (args->operands ? strlen(args->operands) : 0));
  if (usage) {
    sprintf(usage, "[OPTIONS] %s", args->operands ? args->operands : "");
    poptSetOtherOptionHelp(context, usage);
  }
  int rc;
  while ((rc = poptGetNextOpt(context)) > 0) {
    if (rc == CLI_HELP_VALUE) {
      printHelp(args, context);
      return CLI_OK;
    }
  }
  if (rc < -1) {
    int code = cliUsage(args->verb, "%s: %s", poptBadOption(context, POPT_BADOPTION_NOALIAS),
                        poptStrerror(rc));
    return code;
  }
  const char *const *left = (const char *const *)poptGetArgs(context);
  if (left && !args->operands) {
    int code = cliUsage(args->verb, "'%s' is not an option, and no operands are taken", left[0]);
    return code;
  }
  if (operands) *operands = left ? left : none;
  return -1;
}
