/* Arguments through popt, one way for all verbs. */
#include "cli/cli.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef cliUsage
#undef cliFail
int cliUsage(const char *verb, const char *format, ...) {
  va_list ap;
  va_start(ap, format);
  cliProgressEnd();
  fprintf(stderr, "trefoil %s: ", verb);
  vfprintf(stderr, format, ap);
  fprintf(stderr, "; see trefoil %s --help\n", verb);
  va_end(ap);
  return CLI_USAGE;
}

int cliFail(const char *verb, const char *format, ...) {
  va_list ap;
  va_start(ap, format);
  cliProgressEnd();
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

/* A table that popt may keep, each entry's val being its place + 1: so the parser learns which option
 * was given, default or not. */
static struct poptOption *numbered(const struct poptOption *options) {
  int n = 0;
  while (options[n].longName || options[n].shortName || options[n].arg) n++;
  struct poptOption *copy = malloc((size_t)(n + 1) * sizeof *copy);
  if (!copy) return NULL;
  memcpy(copy, options, (size_t)(n + 1) * sizeof *copy);
  for (int i = 0; i < n; i++) copy[i].val = i + 1;
  return copy;
}

/* Is the number that was given in the range that the option's val asks for? -1, or CLI_USAGE. */
static int checkNumber(const char *verb, const struct poptOption *o) {
  int kind = (int)(o->argInfo & POPT_ARG_MASK);
  if (kind == POPT_ARG_DOUBLE) {
    double value = *(const double *)o->arg;
    int low = o->val == CLI_POSITIVE ? value <= 0 : o->val == CLI_NOT_NEGATIVE && value < 0;
    if (isfinite(value) && !low) return -1;
    return cliUsage(verb, "--%s %g: expected a number%s", o->longName, value,
                    o->val == CLI_POSITIVE       ? " above 0"
                    : o->val == CLI_NOT_NEGATIVE ? ", 0 or more"
                                                 : "");
  }
  if (kind != POPT_ARG_INT && kind != POPT_ARG_LONGLONG) return -1;
  long long value = kind == POPT_ARG_INT ? *(const int *)o->arg : *(const long long *)o->arg;
  int low = o->val == CLI_POSITIVE ? 1 : 0;
  if ((o->val != CLI_POSITIVE && o->val != CLI_NOT_NEGATIVE) || value >= low) return -1;
  return cliUsage(verb, "--%s %lld: expected a whole number, %d or more", o->longName, value, low);
}

int cliParse(const cli_args_t *args, const struct poptOption *options, int argc, char **argv,
             const char *const **operands) {
  static const char *const none[] = {NULL};
  /* The context is kept: operands and strings borrow from it until the program ends. */
  char *name = malloc(strlen(args->verb) + 9);
  struct poptOption *table = numbered(options);
  if (!name || !table) return cliFail(args->verb, "out of memory"); // NOLINT: the program ends
  sprintf(name, "trefoil %s", args->verb);
  argv[0] = name;
  poptContext context = poptGetContext(NULL, argc, (const char **)argv, table, 0);
  if (!context) return cliFail(args->verb, "out of memory");
  char *usage = malloc(16 + (args->operands ? strlen(args->operands) : 0));
  if (usage) {
    sprintf(usage, "[OPTIONS] %s", args->operands ? args->operands : "");
    poptSetOtherOptionHelp(context, usage);
  }
  int rc; // NOLINT(clang-analyzer-unix.Malloc): usage is kept, too
  while ((rc = poptGetNextOpt(context)) > 0) {
    const struct poptOption *given = &options[rc - 1];
    if (given->val == CLI_HELP_VALUE) {
      printHelp(args, context);
      return CLI_OK;
    }
    int code = checkNumber(args->verb, given);
    if (code >= 0) return code;
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
