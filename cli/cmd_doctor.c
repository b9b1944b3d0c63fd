/* trefoil doctor: facts about this machine, each with what it means; then the one thing to do. */
#include "cli/check_verb.h"
#include "cli/hang.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

typedef enum fact_state { FACT_FINE, FACT_ABSENT, FACT_BAD } fact_state_t;

typedef struct fact {
  const char *name;
  char value[200];
  fact_state_t state; /* ABSENT: something optional is not there; BAD: needed */
  char advice[240];   /* what to do about it, or "" */
} fact_t;

enum { MAX_FACTS = 24 };
typedef struct facts {
  fact_t list[MAX_FACTS];
  int count;
} facts_t;

static fact_t *add(facts_t *f, const char *name, fact_state_t state, const char *value,
                   const char *advice) {
  fact_t *fact = &f->list[f->count < MAX_FACTS - 1 ? f->count++ : MAX_FACTS - 1];
  fact->name = name;
  fact->state = state;
  snprintf(fact->value, sizeof fact->value, "%s", value);
  snprintf(fact->advice, sizeof fact->advice, "%s", advice);
  return fact;
}

/* ---- The machine ---- */

static void addMachine(facts_t *f) {
  char text[200];
  json_t *environment = cliEnvironment();
  add(f, "cpu", FACT_FINE, json_string_value(json_object_get(environment, "cpu")), "");
  json_decref(environment);
  cpu_set_t set;
  int usable = sched_getaffinity(0, sizeof set, &set) ? 0 : CPU_COUNT(&set);
  snprintf(text, sizeof text, "%d usable of %ld", usable, sysconf(_SC_NPROCESSORS_ONLN));
  add(f, "cores", FACT_FINE, text, "");
  double page = (double)sysconf(_SC_PAGESIZE);
  double total = page * (double)sysconf(_SC_PHYS_PAGES),
         available = page * (double)sysconf(_SC_AVPHYS_PAGES);
  snprintf(text, sizeof text, "%.1f GB, %.1f GB free", total / 1e9, available / 1e9);
  add(f, "memory", total < 8e9 ? FACT_ABSENT : FACT_FINE, text,
      total < 8e9 ? "the real shape (4096 tokens, hidden 7168) needs 8 GB: use --tokens 1024" : "");
}

static void addMemfd(facts_t *f) {
  int fd = memfd_create("trefoil-doctor", MFD_CLOEXEC);
  if (fd >= 0 && ftruncate(fd, 64 << 20) == 0) {
    add(f, "memfd", FACT_FINE, "works", "");
  } else {
    char text[200];
    snprintf(text, sizeof text, "memfd_create: %s", strerror(errno));
    add(f, "memfd", FACT_BAD, text,
        "allow memfd_create (seccomp profile of the container): the host runtime's device memory "
        "is made of it");
  }
  if (fd >= 0) close(fd);
}

static void addLimits(facts_t *f) {
  struct rlimit files, locked;
  char text[200];
  getrlimit(RLIMIT_NOFILE, &files);
  getrlimit(RLIMIT_MEMLOCK, &locked);
  snprintf(text, sizeof text, "%llu", (unsigned long long)files.rlim_cur);
  add(f, "open files", files.rlim_cur < 1024 ? FACT_BAD : FACT_FINE, text,
      files.rlim_cur < 1024 ? "raise the limit of open files: ulimit -n 4096" : "");
  if (locked.rlim_cur == RLIM_INFINITY)
    snprintf(text, sizeof text, "unlimited");
  else
    snprintf(text, sizeof text, "%llu kB", (unsigned long long)locked.rlim_cur / 1024);
  add(f, "locked memory", FACT_FINE, text, "");
  struct statvfs shm;
  if (statvfs("/dev/shm", &shm) == 0) {
    snprintf(text, sizeof text, "%.0f MB (not used: device memory is memfd)",
             1e-6 * (double)shm.f_frsize * (double)shm.f_blocks);
    add(f, "/dev/shm", FACT_FINE, text, "");
  }
}

/* ---- GPUs, CUDA, NCCL ---- */

static int countGpus(void) {
  int n = 0;
  DIR *dev = opendir("/dev");
  if (!dev) return 0;
  for (struct dirent *e; (e = readdir(dev)) != NULL;)
    n += !strncmp(e->d_name, "nvidia", 6) && e->d_name[6] >= '0' && e->d_name[6] <= '9';
  closedir(dev);
  return n;
}

static void addGpus(facts_t *f) {
  char text[200];
  int n = countGpus();
  snprintf(text, sizeof text, "%d", n);
  add(f, "gpus", n ? FACT_FINE : FACT_ABSENT, n ? text : "none (/dev/nvidia0 is not there)", "");
  FILE *version = fopen("/proc/driver/nvidia/version", "r");
  if (version && fgets(text, sizeof text, version)) {
    text[strcspn(text, "\n")] = 0;
    add(f, "driver", FACT_FINE, text, "");
  } else {
    add(f, "driver", n ? FACT_BAD : FACT_ABSENT, "none",
        n ? "load the NVIDIA driver: there are GPUs, but /proc/driver/nvidia is missing" : "");
  }
  if (version) fclose(version);
}

static void *openFirst(const char *const *names) {
  void *handle = NULL;
  for (; *names && !handle; names++) handle = dlopen(*names, RTLD_NOW | RTLD_LOCAL);
  return handle;
}

static int cudaVersion(void *handle) {
  int (*ask)(int *) = NULL;
  void *symbol = handle ? dlsym(handle, "cudaRuntimeGetVersion") : NULL;
  int version = 0;
  memcpy(&ask, &symbol, sizeof symbol);
  return ask && ask(&version) == 0 ? version : 0;
}

static void addCuda(facts_t *f) {
  static const char *const cudas[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so", NULL};
  static const char *const nccls[] = {"libnccl.so.2", "libnccl.so", NULL};
  char text[200];
  void *cuda = openFirst(cudas), *nccl = openFirst(nccls);
  int version = cudaVersion(cuda);
  snprintf(text, sizeof text, "%d.%d", version / 1000, version % 1000 / 10);
  add(f, "cuda runtime", cuda ? FACT_FINE : FACT_ABSENT, cuda ? text : "not found", "");
  version = epNcclVersion(nccl);
  snprintf(text, sizeof text, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
  int old = nccl && version < EP_LIBRARY_OLDEST_NCCL;
  add(f, "nccl", !nccl || old ? FACT_ABSENT : FACT_FINE, nccl ? text : "not found",
      old && countGpus() ? "for GPUs, 2.30.7 or newer: pip install nvidia-nccl-cu13" : "");
  if (cuda) dlclose(cuda);
  if (nccl) dlclose(nccl);
}

/* ---- Programs ---- */

static int firstLine(const char *command, char *text, size_t bytes) {
  FILE *p = popen(command, "r");
  int ok = p && fgets(text, (int)bytes, p) != NULL;
  if (ok) text[strcspn(text, "\n")] = 0;
  return (p && pclose(p) == 0) && ok;
}

/* Whether `python ARGUMENTS` succeeds; its first line into text. */
static int askPython(const char *python, const char *arguments, char *text, size_t bytes) {
  char command[4400];
  if (strchr(python, '\'')) return 0;
  snprintf(command, sizeof command, "'%s' %s 2>/dev/null", python, arguments);
  return firstLine(command, text, bytes);
}

static void addPrograms(facts_t *f) {
  char text[200], python[4096];
  int ok = firstLine("mpirun --version 2>/dev/null", text, sizeof text);
  add(f, "mpi", ok ? FACT_FINE : FACT_ABSENT, ok ? text : "no mpirun",
      ok ? "" : "to run a process a rank under MPI: apt-get install openmpi-bin libopenmpi-dev");
  cliPython(python, sizeof python);
  ok = askPython(python, "--version", text, sizeof text);
  char value[200];
  snprintf(value, sizeof value, ok ? "%.40s (%.140s)" : "no python3", text, python);
  add(f, "python", ok ? FACT_FINE : FACT_ABSENT, value,
      ok ? "" : "for reports and plots: apt-get install python3 python3-venv");
  if (!ok) return;
  static const char *const packages[] = {"numpy", "matplotlib", "jinja2"};
  char missing[120] = "";
  for (int i = 0; i < 3; i++) {
    char arguments[64], ignored[64];
    snprintf(arguments, sizeof arguments, "-c 'import %s; print(1)'", packages[i]);
    if (askPython(python, arguments, ignored, sizeof ignored)) continue;
    strcat(missing, *missing ? " " : "");
    strcat(missing, packages[i]);
  }
  char advice[240] = "";
  if (*missing)
    snprintf(advice, sizeof advice, "for reports: pip install %s (tools/tour does it, into .venv)",
             missing);
  snprintf(value, sizeof value, *missing ? "without %s" : "numpy matplotlib jinja2", missing);
  add(f, "python packages", *missing ? FACT_ABSENT : FACT_FINE, value, advice);
}

static void addLibraries(facts_t *f) {
  char paths[3][4096];
  ep_library_paths_t found;
  cli_library_t none = {0};
  (void)cliLibraries("doctor", &none, paths, &found);
  if (epLibraryProbe(&found, NULL) == TREFOIL_OK) {
    char text[200];
    snprintf(text, sizeof text, "%.190s", found.library);
    add(f, "nccl ep without a gpu", FACT_FINE, text, "");
  } else {
    add(f, "nccl ep without a gpu", FACT_BAD, trefoilLastError(),
        "build or install libnccl_ep_cpu.so.0 and libtrefoil_host.so.0 beside the program: "
        "cmake --build build/dev");
  }
}

/* The library for GPUs, with the NCCL and the CUDA runtime that trefoil check --gpu would take. */
static void addGpuLibrary(facts_t *f) {
  char paths[3][4096], text[200];
  ep_library_paths_t found;
  cli_library_t gpu = {.gpu = 1};
  int devices = 0, isHere = 0;
  const char *set = getenv("TREFOIL_LIBRARY");
  int isSet = set && *set;
  if (!isSet) {
    cliFindLibrary("libnccl_ep.so.0", paths[0], sizeof paths[0]);
    isHere = strchr(paths[0], '/') != NULL;
  }
  if (!isHere && !isSet) {
    add(f, "nccl ep on gpus", FACT_ABSENT, "libnccl_ep.so.0 is not beside this program",
        countGpus() ? "build it where nvcc and NCCL are: tools/gpu" : "");
    return;
  }
  if (cliLibraries("doctor", &gpu, paths, &found) >= 0) return;
  if (epLibraryProbe(&found, &devices) == TREFOIL_OK) {
    snprintf(text, sizeof text, "%.150s, %d GPU%s: trefoil check --gpu", found.library, devices,
             devices == 1 ? "" : "s");
    add(f, "nccl ep on gpus", FACT_FINE, text, "");
  } else {
    add(f, "nccl ep on gpus", FACT_ABSENT, trefoilLastError(), "");
  }
}

/* The first needed thing. What is optional has its advice on its own line. */
static const char *oneThing(const facts_t *f) {
  for (int i = 0; i < f->count; i++)
    if (f->list[i].state == FACT_BAD && *f->list[i].advice) return f->list[i].advice;
  return "nothing: trefoil check runs here";
}

static int printFacts(const facts_t *f, int json) {
  static const char *const states[] = {"ok", "absent", "missing"};
  int bad = 0;
  for (int i = 0; i < f->count; i++) bad |= f->list[i].state == FACT_BAD;
  if (json) {
    json_t *facts = json_array();
    for (int i = 0; i < f->count; i++)
      json_array_append_new(facts,
                            json_pack("{s:s, s:s, s:s, s:s}", "name", f->list[i].name, "value",
                                      f->list[i].value, "state", states[f->list[i].state], "advice",
                                      f->list[i].advice));
    int rc = cliPrintJson(json_pack("{s:b, s:o, s:s, s:o}", "ok", !bad, "facts", facts, "do",
                                    oneThing(f), "environment", cliEnvironment()));
    return bad ? CLI_FAILED : rc;
  }
  for (int i = 0; i < f->count; i++)
    printf("  %-8s %-22s %s%s%s\n", states[f->list[i].state], f->list[i].name, f->list[i].value,
           *f->list[i].advice ? "; " : "", f->list[i].advice);
  printf("\nTo do: %s\n", oneThing(f));
  return bad ? CLI_FAILED : CLI_OK;
}

int cmdDoctor(int argc, char **argv) {
  int json = 0, hang = 0;
  const struct poptOption options[] = {
      {"hang", 0, POPT_ARG_NONE, &hang, 0,
       "read progress records (NCCL_EP_HANG_DIR) and name who hangs", NULL},
      CLI_COMMON_OPTIONS(&json)};
  const cli_args_t args = {"doctor", "[FILE...]",
                           "What is on this machine, what is missing, and the one thing to do. "
                           "With --hang FILE...: the\n"
                           "progress records of a group's ranks, merged into one sentence: who, in "
                           "which phase of which\n"
                           "operation."};
  const char *const *files;
  int rc = cliParse(&args, options, argc, argv, &files);
  if (rc >= 0) return rc;
  if (hang && !*files)
    return cliUsage("doctor", "--hang needs the files that NCCL_EP_HANG_DIR holds, one a rank");
  if (!hang && *files) return cliUsage("doctor", "'%s': files go with --hang", *files);
  if (hang) return cliHang(files, json);
  facts_t f = {.count = 0};
  addMachine(&f);
  addMemfd(&f);
  addLimits(&f);
  addLibraries(&f);
  addGpuLibrary(&f);
  addGpus(&f);
  addCuda(&f);
  addPrograms(&f);
  return printFacts(&f, json);
}
