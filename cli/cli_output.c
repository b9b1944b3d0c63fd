/* What verbs print: JSON, the environment, the progress line. */
#include "cli/cli.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "plan/clock.h"

int cliPrintJson(json_t *object) {
  if (!object) return (fputs("trefoil: out of memory for the JSON output\n", stderr), CLI_FAILED);
  (void)json_dumpf(object, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(9));
  json_decref(object);
  putchar('\n');
  return CLI_OK;
}

int cliFinish(int code) {
  int bad = fflush(stdout) != 0;
  cliEndInterrupted();
  if (!bad && !ferror(stdout)) return code;
  fprintf(stderr, "trefoil: the output could not be written%s%s\n", bad ? ": " : "",
          bad ? strerror(errno) : "");
  return code == CLI_OK ? CLI_FAILED : code;
}

static void cpuName(char *name, size_t bytes) {
  snprintf(name, bytes, "unknown");
  FILE *f = fopen("/proc/cpuinfo", "r");
  if (!f) return;
  char line[512];
  while (fgets(line, sizeof line, f)) {
    char *colon = strchr(line, ':');
    if (strncmp(line, "model name", 10) || !colon) continue;
    colon += strspn(colon, ": \t");
    colon[strcspn(colon, "\n")] = 0;
    snprintf(name, bytes, "%s", colon);
    break;
  }
  fclose(f);
}

json_t *cliEnvironment(void) {
  char cpu[256];
  struct utsname un;
  cpuName(cpu, sizeof cpu);
  if (uname(&un)) strcpy(un.release, "unknown");
  json_int_t memory = (json_int_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  return json_pack("{s:s, s:I, s:I, s:s, s:s}", "cpu", cpu, "cores",
                   (json_int_t)sysconf(_SC_NPROCESSORS_ONLN), "memory_bytes", memory, "kernel",
                   un.release, "trefoil", TREFOIL_VERSION);
}

typedef struct unit {
  double factor;
  const char *name;
} unit_t;

/* The first unit that the value fills, else the last. */
static const char *scaled(char text[CLI_NUMBER_BYTES], double value, const unit_t *units) {
  while (units[1].name && value < units->factor * 0.9995) units++;
  double x = value / units->factor;
  int digits = value == 0 || x >= 99.95 ? 0 : x >= 9.995 ? 1 : 2;
  snprintf(text, CLI_NUMBER_BYTES, "%.*f %s", digits, x, units->name);
  return text;
}

const char *cliBytes(char text[CLI_NUMBER_BYTES], double bytes) {
  static const unit_t units[] = {{1e12, "TB"}, {1e9, "GB"}, {1e6, "MB"},
                                 {1e3, "kB"},  {1, "B"},    {0, NULL}};
  return scaled(text, bytes, units);
}

const char *cliSeconds(char text[CLI_NUMBER_BYTES], double seconds) {
  static const unit_t units[] = {{1, "s"}, {1e-3, "ms"}, {1e-6, "us"}, {1e-9, "ns"}, {0, NULL}};
  return scaled(text, seconds, units);
}

static int progressShown;

void cliProgress(const char *label, uint64_t done, uint64_t total, const char *detail) {
  static double last;
  static int isTerminal = -1;
  if (isTerminal < 0) isTerminal = isatty(STDERR_FILENO);
  if (!isTerminal) return;
  double now = epNow();
  if (now - last < 0.1 && (total == 0 || done < total)) return;
  last = now;
  char bar[25];
  size_t full = total ? (size_t)(24.0 * (double)done / (double)total) : 0;
  for (size_t i = 0; i < 24; i++) bar[i] = i < full ? '#' : '.';
  bar[24] = 0;
  if (total)
    fprintf(stderr, "\r%s [%s] %3.0f%%  %s\033[K", label, bar, 100.0 * (double)done / (double)total,
            detail ? detail : "");
  else
    fprintf(stderr, "\r%s %llu  %s\033[K", label, (unsigned long long)done, detail ? detail : "");
  fflush(stderr);
  progressShown = 1;
}

void cliProgressEnd(void) {
  if (!progressShown) return;
  fputs("\r\033[K", stderr);
  fflush(stderr);
  progressShown = 0;
}
