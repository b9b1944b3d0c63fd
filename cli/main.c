/* `trefoil VERB [OPTIONS]`: finds the verb and runs it. */
#include "cli/cli.h"

#include <locale.h>
#include <stdio.h>
#include <string.h>

static const struct {
  const char *name;
  int (*run)(int argc, char **argv);
  const char *about;
} verbs[] = {
    {"check", cmdCheck, "does a library do what the reference says, byte for byte"},
    {"conform", cmdConform, "what of the interface a library does, feature by feature"},
    {"bench", cmdBench, "times of what passes its check, beside the rate of a plain copy"},
    {"validate", cmdValidate, "do all legs agree: results, bytes, and times with measurements"},
    {"compare", cmdCompare, "measurements beside predictions: errors, slow links and ranks"},
    {"trace", cmdTrace, "routing as files: generate, import, describe"},
    {"simulate", cmdSimulate, "dispatch and combine on a cluster, replayed in time"},
    {"plan", cmdPlan, "what a cluster would take, from 8 to 1024 GPUs"},
    {"gradients", cmdGradients, "averaging gradients: bytes, time, beside dispatch and combine"},
    {"fit", cmdFit, "costs from measured tables, scored on rows held out"},
    {"export", cmdExport, "predictions, figures and plans in the forms of other tools"},
    {"report", cmdReport, "one HTML page from the results of check and plan"},
    {"doctor", cmdDoctor, "what is on this machine, what is missing; who hangs"},
};
enum { numVerbs = sizeof verbs / sizeof *verbs };

#ifdef __SANITIZE_ADDRESS__
/* popt's context and strings live as long as the command: the leak checker ignores them. */
#define SANITIZER_HOOK __attribute__((visibility("default"))) const char *
SANITIZER_HOOK __lsan_default_suppressions(void);
SANITIZER_HOOK __lsan_default_options(void);
const char *__lsan_default_suppressions(void) {
  return "leak:libpopt\nleak:cliParse\n";
}
const char *__lsan_default_options(void) {
  return "print_suppressions=0";
}
#endif

static void printHelp(FILE *to) {
  fputs("usage: trefoil VERB [OPTIONS]\n\n", to);
  for (int i = 0; i < numVerbs; i++) fprintf(to, "  %-9s %s\n", verbs[i].name, verbs[i].about);
  fputs("\nEvery verb takes --help and --json. Exit codes: 0 fine, 1 a disagreement or failure,\n"
        "2 a wrong command line.\n",
        to);
}

int main(int argc, char **argv) {
  cliStart();
  setlocale(LC_CTYPE, "");
  if (argc < 2) {
    printHelp(stderr);
    return CLI_USAGE;
  }
  const char *verb = argv[1];
  if (!strcmp(verb, "--help") || !strcmp(verb, "-h") || !strcmp(verb, "help")) {
    printHelp(stdout);
    return cliFinish(CLI_OK);
  }
  if (!strcmp(verb, "--version")) {
    puts("trefoil " TREFOIL_VERSION);
    return cliFinish(CLI_OK);
  }
  for (int i = 0; i < numVerbs; i++)
    if (!strcmp(verb, verbs[i].name)) return cliFinish(verbs[i].run(argc - 1, argv + 1));
  fprintf(stderr, "trefoil: there is no verb '%s'; the verbs are", verb);
  for (int i = 0; i < numVerbs; i++) fprintf(stderr, "%s %s", i ? "," : "", verbs[i].name);
  fputc('\n', stderr);
  return CLI_USAGE;
}
