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
  char value[320];
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

/* Where ranks on GPUs meet, and NCCL's processes share buffers. */
static void addShm(facts_t *f) {
  struct statvfs shm;
  char text[200];
  if (statvfs("/dev/shm", &shm) != 0) {
    add(f, "/dev/shm", countGpus() ? FACT_BAD : FACT_ABSENT, strerror(errno),
        countGpus() ? "mount a tmpfs on /dev/shm: groups on GPUs meet there" : "");
    return;
  }
  double total = 1e-6 * (double)shm.f_frsize * (double)shm.f_blocks;
  int isSmall = countGpus() && total < 128;
  snprintf(text, sizeof text,
           "%.0f MB, %.0f MB free; used where groups on GPUs meet (4 kB each), by NCCL between "
           "processes, and "
           "where NCCL_EP_HANG_DIR says so; device memory without a GPU is memfd",
           total, 1e-6 * (double)shm.f_frsize * (double)shm.f_bavail);
  add(f, "/dev/shm", isSmall ? FACT_ABSENT : FACT_FINE, text,
      isSmall ? "in a container: --shm-size=1g or --ipc=host" : "");
}

/* The newest CUDA that the driver runs, 13000 for 13.0; 0: no driver. */
static int driverCuda(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void *symbol = driver ? dlsym(driver, "cuDriverGetVersion") : NULL;
  int (*ask)(int *) = NULL, version = 0;
  memcpy(&ask, &symbol, sizeof symbol);
  int ok = ask && ask(&version) == 0;
  if (driver) dlclose(driver);
  return ok ? version : 0;
}

static void addGpus(facts_t *f) {
  char text[200], line[160] = "";
  int n = countGpus(), newest = driverCuda();
  snprintf(text, sizeof text, "%d", n);
  add(f, "gpus", n ? FACT_FINE : FACT_ABSENT, n ? text : "none (/dev/nvidia0 is not there)", "");
  FILE *version = fopen("/proc/driver/nvidia/version", "r");
  if (version && fgets(line, sizeof line, version)) line[strcspn(line, "\n")] = 0;
  if (version) fclose(version);
  if (!*line && !newest) {
    add(f, "driver", n ? FACT_BAD : FACT_ABSENT, "none",
        n ? "load the NVIDIA driver: there are GPUs, but /proc/driver/nvidia is missing" : "");
    return;
  }
  int isOld = newest < EP_LIBRARY_OLDEST_CUDA;
  snprintf(text, sizeof text, "%s%sruns CUDA up to %d.%d", line, *line ? "; " : "", newest / 1000,
           newest % 1000 / 10);
  add(f, "driver", isOld ? FACT_ABSENT : FACT_FINE, text,
      isOld ? "for GPUs, a driver that runs CUDA 13.0: 580 or newer" : "");
}

/* What trefoil check --gpu would take, and whether it is new enough. */
static void addRuntime(facts_t *f, const char *name, const char *path, int oldest,
                       const char *advice) {
  int isNccl = oldest == EP_LIBRARY_OLDEST_NCCL;
  void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  int version = isNccl ? epNcclVersion(handle) : epCudaVersion(handle);
  void *function = handle ? dlsym(handle, isNccl ? "ncclGetVersion" : "cudaGetDeviceCount") : NULL;
  char text[200] = "not found";
  if (handle && isNccl)
    snprintf(text, sizeof text, "%d.%d.%d (%.150s)", version / 10000, version / 100 % 100,
             version % 100, epLibraryFile(function));
  else if (handle)
    snprintf(text, sizeof text, "%d.%d (%.150s)", version / 1000, version % 1000 / 10,
             epLibraryFile(function));
  int isBad = version < oldest;
  add(f, name, isBad ? FACT_ABSENT : FACT_FINE, text,
      isBad && (handle || countGpus()) ? advice : "");
  if (handle) dlclose(handle);
}

static void addCuda(facts_t *f) {
  static const char *const olds[] = {"libcudart.so.12", "libcudart.so.11.0"};
  const char *cuda = epLibraryFindCuda();
  for (int i = 0; i < 2; i++) { /* named if there is nothing better */
    void *found = dlopen(cuda, RTLD_NOW | RTLD_LOCAL), *old = NULL;
    if (!found) old = dlopen(olds[i], RTLD_NOW | RTLD_LOCAL);
    if (old) cuda = olds[i];
    if (found) dlclose(found);
    if (old) dlclose(old);
  }
  addRuntime(f, "cuda runtime", cuda, EP_LIBRARY_OLDEST_CUDA,
             "for GPUs, CUDA 13's: pip install nvidia-cuda-runtime, or LD_LIBRARY_PATH; an older "
             "libcudart does not serve");
  addRuntime(f, "nccl", epLibraryFindNccl(), EP_LIBRARY_OLDEST_NCCL,
             "for GPUs, 2.30.7 or newer: pip install nvidia-nccl-cu13");
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
  addShm(&f);
  addGpus(&f);
  addCuda(&f);
  addPrograms(&f);
  return printFacts(&f, json);
}
