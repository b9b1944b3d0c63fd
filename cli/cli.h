/* The frame of the command `trefoil`: verbs, arguments, JSON, progress.
 *
 * A verb is `int cmdX(int argc, char **argv)` in cli/cmd_x.c, with argv[0] its name, and returns an
 * exit code below. Arguments go through popt: the verb fills a poptOption table whose last entries
 * are CLI_COMMON_OPTIONS(...) and calls cliParse. What a verb finds out goes to stdout, as text or
 * (--json) as one JSON object; complaints and the progress display go to stderr. */
#ifndef TREFOIL_CLI_H
#define TREFOIL_CLI_H

#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jansson.h>
#include <popt.h>

enum {
  CLI_OK = 0,     /* done, everything agrees */
  CLI_FAILED = 1, /* a disagreement, or something could not be done */
  CLI_USAGE = 2   /* the command line is wrong; nothing was done */
};

int cmdCheck(int argc, char **argv);
int cmdConform(int argc, char **argv);
int cmdBench(int argc, char **argv);
int cmdTrace(int argc, char **argv);
int cmdSimulate(int argc, char **argv);
int cmdPlan(int argc, char **argv);
int cmdFit(int argc, char **argv);
int cmdExport(int argc, char **argv);
int cmdGradients(int argc, char **argv);
int cmdValidate(int argc, char **argv);
int cmdCompare(int argc, char **argv);
int cmdReport(int argc, char **argv);
int cmdDoctor(int argc, char **argv);

/* ---- Arguments (cli_args.c) ---- */

/* --json into an int, and --help. */
#define CLI_COMMON_OPTIONS(jsonPtr)                                                                \
  {"json", 0, POPT_ARG_NONE, (jsonPtr), 0, "print one JSON object instead of text", NULL},         \
      {"help", 'h', POPT_ARG_NONE, NULL, CLI_HELP_VALUE, "show this help and exit", NULL},         \
      POPT_TABLEEND

/* What an option's val says about its number; every number must be finite. */
enum { CLI_POSITIVE = 1, CLI_NOT_NEGATIVE = 2, CLI_HELP_VALUE = 3 };

typedef struct cli_args {
  const char *verb;     /* "check" */
  const char *operands; /* shown after the options in the usage line: "[FILE...]", or NULL: none
                           are accepted */
  const char *about;    /* one paragraph, shown by --help after the options */
} cli_args_t;

/* Parses argv by the table. Returns -1: go on, with *operands (may be NULL if args->operands is)
 * the NULL-terminated operands, valid until exit; or an exit code: the help was shown (CLI_OK), or
 * the sentence was printed (CLI_USAGE). POPT_ARG_STRING values stay allocated. */
int cliParse(const cli_args_t *args, const struct poptOption *options, int argc, char **argv,
             const char *const **operands);

/* Prints "trefoil VERB: sentence" and where to find help; returns CLI_USAGE. */
int cliUsage(const char *verb, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Prints "trefoil VERB: sentence"; returns CLI_FAILED. */
int cliFail(const char *verb, const char *format, ...) __attribute__((format(printf, 2, 3)));
#ifdef __clang_analyzer__ /* see plan/error.h */
#define cliUsage(...) (cliUsage(__VA_ARGS__), CLI_USAGE)
#define cliFail(...)  (cliFail(__VA_ARGS__), CLI_FAILED)
#endif
/* A verb that takes a sub-verb ("trace generate"): whether argv[1] is `name`. */
int cliIsSub(int argc, char **argv, const char *name);

/* ---- Output (cli_output.c) ---- */

/* Prints the object on stdout with a newline and releases it; returns CLI_OK or, when there is none,
 * CLI_FAILED. Whether stdout took it is asked once, when the verb has returned (cliFinish). */
int cliPrintJson(json_t *object);
/* The exit code after a verb's: CLI_FAILED and a sentence if stdout did not take what was printed. */
int cliFinish(int code);
/* {"cpu", "cores", "memory_bytes", "kernel", "trefoil"}: what a report should say about where its
 * numbers come from. */
json_t *cliEnvironment(void);

/* A number as people read it, three digits and a unit: "1.23 MB", "45.6 us". Returns text. */
enum { CLI_NUMBER_BYTES = 32 };
const char *cliBytes(char text[CLI_NUMBER_BYTES], double bytes);
const char *cliSeconds(char text[CLI_NUMBER_BYTES], double seconds);

/* Progress on stderr: one line, rewritten at most ten times a second, only on a terminal.
 * total 0: unknown. detail may be NULL. */
void cliProgress(const char *label, uint64_t done, uint64_t total, const char *detail);
/* Wipes the line. */
void cliProgressEnd(void);

/* ---- Files that verbs write (cli_files.c) ---- */

enum { CLI_PATH_BYTES = 4096 };

/* Written under another name in the same folder, renamed when it is whole; a device or a pipe is
 * written as it is. Lives until kept or dropped; what is neither at exit is dropped. */
typedef struct cli_file {
  const char *verb;
  char path[CLI_PATH_BYTES], writing[CLI_PATH_BYTES + 16];
  int isTemporary;
} cli_file_t;

/* Before anything is computed: f->writing can be written. -1, or an exit code. */
int cliFileBegin(cli_file_t *f, const char *verb, const char *path);
/* What was written to f->writing takes its place. -1, or an exit code. */
int cliFileKeep(cli_file_t *f);
void cliFileDrop(cli_file_t *f);
/* The same through a stream: NULL after a sentence; closing keeps the file if all was written. */
FILE *cliFileOpen(cli_file_t *f);
int cliFileClose(cli_file_t *f, FILE *stream);
/* SIGINT and SIGTERM end the verb with a sentence and 130 or 143, without unfinished files. */
void cliCatchSignals(const char *verb);
/* They wait while a library writes files of its own. */
void cliHoldSignals(int hold);
/* First thing in main: limits on file sizes are errors, not signals; with TREFOIL_END_WITH_PARENT set
 * the command ends with the process that started it. */
void cliStart(void);
/* ---- Signals (cli_signals.c) ---- */

/* From now on SIGINT and SIGTERM are noted there, and end nothing by themselves. */
const volatile sig_atomic_t *cliInterrupts(void);
/* If one came: flushes and dies of it. At the very end. */
void cliEndInterrupted(void);

/* ---- Files beside the program (cli_paths.c) ---- */

/* The path of a shared library ("libnccl_ep_cpu.so.0"): beside the program as built or installed,
 * else the bare name, which leaves it to the dynamic loader. Returns path. */
const char *cliFindLibrary(const char *name, char *path, size_t pathBytes);

/* ---- Verbs in Python (cli_python.c) ---- */

/* The interpreter that they use. Returns path. */
const char *cliPython(char *path, size_t pathBytes);
/* Becomes `python -m trefoil.verb module` with argv[1] and on; returns only if that fails: CLI_FAILED. */
int cliRunPython(const char *verb, const char *module, int argc, char **argv);

#endif
