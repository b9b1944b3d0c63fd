/* Every allocation and every call of the system that the host runtime and the CPU library make fails once,
 * at each place (chain of callers), on each of ranks 0 and 1 of three rank processes. A scenario is
 * everything from the unique id to the last destroy, with a window, a graph, and an LL and an HT step
 * compared with the reference (fault_scenario.c).
 * Each place is run as: the scenario with the fault, then twice without. Expected:
 *   - nobody dies by a signal and nobody hangs;
 *   - every rank ends well, with results equal to the reference, or with a sentence;
 *   - afterwards the same processes do the scenario well: nothing is left locked or half made;
 *   - no block, descriptor, mapping or file more is left than without a fault.
 *
 * argv: [--all | --places N] [--jobs N] [--only RANK:HASH] [--list]. With N
 * (default 40) places are drawn evenly. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "fault_scenario.h"
#include "test.h"

enum { LIMIT_S = 90, SHORT_MS = 600, LONG_MS = 30000, MAX_JOBS = 16 };

typedef struct {
  int rank;      /* whose call fails; -1: none, the places are recorded */
  uint64_t hash; /* which */
  char folder[64];
  shared_t *shared;
  pid_t pids[R];
  int running, statuses[R];
  double since;
} job_t;

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static outcome_t plain[R]; /* without a fault */

/* ---- One rank ---- */

static void barrier(player_t *p, int which) {
  atomic_fetch_add(&p->s->arrived[which], 1);
  for (int ms = 0; ms < 60000 && atomic_load(&p->s->arrived[which]) < R; ms++) usleep(1000);
}

static int countMappings(void) {
  char line[512];
  int n = 0;
  FILE *file = fopen("/proc/self/maps", "r");
  while (file && fgets(line, sizeof line, file)) n += strstr(line, "memfd:trefoil") != NULL;
  if (file) fclose(file);
  return n;
}

static int countDescriptors(void) {
  int n = 0;
  for (int fd = 0; fd < 1024; fd++) n += fcntl(fd, F_GETFD) >= 0;
  return n;
}

static void playRank(const job_t *job, int rank) {
  player_t p = {.s = job->shared, .rank = rank, .out = &job->shared->outcomes[rank]};
  char ms[16];
  cudaSetDevice(rank);
  setenv("NCCL_EP_HANG_DIR", job->folder, 1);
  for (p.run = 0; p.run < RUNS; p.run++) {
    p.faulty = p.run == 0 && job->rank >= 0;
    snprintf(ms, sizeof ms, "%d", p.faulty ? SHORT_MS : LONG_MS);
    setenv("NCCL_EP_TIMEOUT_MS", ms, 1);
    if (p.run == 0 && job->rank < 0) faultStart(&job->shared->places[rank], 0);
    if (p.run == 0 && job->rank == rank) faultStart(NULL, job->hash);
    faultScenario(&p);
    if (p.run == 0) p.out->hit = faultStop();
    barrier(&p, p.run);
  }
  /* Servers may still be answering;
   * a rendezvous that some rank never asked for stays for twice the timeout. */
  for (double since = seconds(); seconds() - since < 4; usleep(50000)) {
    ncclUniqueId id;
    (void)ncclGetUniqueId(&id);
    p.out->descriptors = countDescriptors();
    p.out->blocks = faultLiveBlocks();
    if (job->rank < 0 ||
        (p.out->descriptors <= plain[rank].descriptors && p.out->blocks <= plain[rank].blocks))
      break;
  }
  p.out->mappings = countMappings();
  faultDescribeLive(p.out->live, sizeof p.out->live);
  barrier(&p, RUNS);
  _exit(0);
}

/* ---- Jobs ---- */

static void startJob(job_t *job) {
  job->shared =
      mmap(NULL, sizeof *job->shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  snprintf(job->folder, sizeof job->folder, "/tmp/trefoil-faults-XXXXXX");
  if (job->shared == MAP_FAILED || !mkdtemp(job->folder)) abort();
  fflush(NULL);
  job->since = seconds();
  job->running = R;
  for (int r = 0; r < R; r++) {
    job->statuses[r] = -1;
    job->pids[r] = fork();
    if (job->pids[r] == 0) playRank(job, r);
  }
}

/* Whether all its processes have ended, or the time is over and they were killed. */
static int jobEnded(job_t *job) {
  int late = seconds() - job->since > LIMIT_S;
  for (int r = 0; r < R; r++) {
    if (job->statuses[r] != -1) continue;
    if (late) kill(job->pids[r], SIGKILL);
    if (waitpid(job->pids[r], &job->statuses[r], late ? 0 : WNOHANG) == 0)
      job->statuses[r] = -1;
    else
      job->running--;
  }
  return job->running == 0;
}

/* Files that are left; a group that was made and then failed keeps its record. */
static int emptyFolder(const job_t *job) {
  DIR *dir = opendir(job->folder);
  int n = 0;
  for (struct dirent *e; dir && (e = readdir(dir));) {
    if (e->d_name[0] == '.') continue;
    n++;
    unlinkat(dirfd(dir), e->d_name, 0);
  }
  if (dir) closedir(dir);
  rmdir(job->folder);
  return n;
}

static int checkRank(const job_t *job, int r, const char *place) {
  const outcome_t *o = &job->shared->outcomes[r], *ref = &plain[r];
  int before = testFailures;
  CHECK(WIFEXITED(job->statuses[r]) && WEXITSTATUS(job->statuses[r]) == 0,
        "%s: rank %d ended with status 0x%x%s; it said: %s", place, r, job->statuses[r],
        job->statuses[r] == SIGKILL ? " (it hangs)" : "", o->sentence);
  CHECK(!o->bad, "%s: rank %d: %s", place, r, o->sentence);
  if (testFailures > before) return 0;
  CHECK(o->blocks <= ref->blocks, "%s: rank %d: %ld blocks live, %ld without a fault: %s (%s)",
        place, r, o->blocks, ref->blocks, o->live, o->sentence);
  CHECK(o->descriptors <= ref->descriptors,
        "%s: rank %d: %ld descriptors, %ld without a fault (%s)", place, r, o->descriptors,
        ref->descriptors, o->sentence);
  CHECK(o->mappings <= ref->mappings, "%s: rank %d: %ld mappings, %ld without a fault (%s)", place,
        r, o->mappings, ref->mappings, o->sentence);
  return testFailures == before;
}

typedef struct {
  int places, told, tolerated, missed;
} counts_t;

static void judge(job_t *job, const fault_place_t *place, counts_t *counts) {
  char text[160];
  int failed = 0, grouped = 0;
  snprintf(text, sizeof text, "%s of rank %d at %s (--only %d:%016llx)", place->what, job->rank,
           place->from, job->rank, (unsigned long long)place->hash);
  for (int r = 0; r < R; r++) {
    checkRank(job, r, text);
    failed |= job->shared->outcomes[r].failed;
    grouped |= job->shared->outcomes[r].grouped;
  }
  int files = emptyFolder(job), hit = job->shared->outcomes[job->rank].hit;
  CHECK(files == 0 || (failed && grouped), "%s: %d files are left", text, files);
  counts->places++;
  counts->told += hit && failed;
  counts->tolerated += hit && !failed;
  counts->missed += !hit;
  munmap(job->shared, sizeof *job->shared);
}

/* ---- All places ---- */

typedef struct {
  int rank;
  fault_place_t place;
} task_t;
static task_t tasks[2 * FAULT_MAX_PLACES];
static int numTasks, maxPlaces = 40, maxJobs = 6, onlyRank = -1, list;
static uint64_t onlyHash;

/* The scenario without a fault: what it calls, and what is live at its end. */
static void learn(void) {
  job_t job = {.rank = -1};
  startJob(&job);
  while (!jobEnded(&job)) usleep(2000);
  for (int r = 0; r < R; r++) {
    const outcome_t *o = &job.shared->outcomes[r];
    plain[r] = *o;
    CHECK(job.statuses[r] == 0 && !o->bad && !o->failed, "without a fault: rank %d: 0x%x %s", r,
          job.statuses[r], o->sentence);
    CHECK(job.shared->places[r].lost == 0, "rank %d: more than %d places", r, FAULT_MAX_PLACES);
    for (int i = 0; r < 2 && i < job.shared->places[r].count; i++) {
      const fault_place_t *place = &job.shared->places[r].places[i];
      if (list) printf("%d %s %s\n", r, place->what, place->from);
      tasks[numTasks++] = (task_t){r, *place};
    }
  }
  CHECK(emptyFolder(&job) == 0, "files are left without a fault");
  munmap(job.shared, sizeof *job.shared);
}

static int isWanted(int i) {
  if (onlyHash) return tasks[i].rank == onlyRank && tasks[i].place.hash == onlyHash;
  if (maxPlaces >= numTasks) return 1;
  return (long)i * maxPlaces / numTasks != (long)(i + 1) * maxPlaces / numTasks;
}

TEST(each_place_fails_once) {
  job_t jobs[MAX_JOBS];
  int owner[MAX_JOBS], active = 0, next = 0;
  counts_t counts = {0};
  learn();
  REQUIRE(!testFailures && numTasks > 100, "%d places", numTasks);
  memset(jobs, 0, sizeof jobs);
  for (;;) {
    for (int j = 0; j < maxJobs; j++) {
      if (jobs[j].running && jobEnded(&jobs[j])) {
        active--;
        judge(&jobs[j], &tasks[owner[j]].place, &counts);
      }
      while (next < numTasks && !isWanted(next)) next++;
      if (jobs[j].running || next >= numTasks) continue;
      jobs[j] = (job_t){.rank = tasks[next].rank, .hash = tasks[next].place.hash};
      owner[j] = next++;
      startJob(&jobs[j]);
      active++;
    }
    if (!active && next >= numTasks) break;
    usleep(2000);
  }
  printf(
      "%d of %d places failed once each: %d ended in sentences, %d were borne, %d did not come\n",
      counts.places, numTasks, counts.told, counts.tolerated, counts.missed);
  int wanted = 0;
  for (int i = 0; i < numTasks; i++) wanted += isWanted(i);
  CHECK(counts.places == wanted && wanted > 0, "%d places were to fail", wanted);
  CHECK(counts.told > counts.places / 4, "too few faults were noticed to mean anything");
  CHECK(counts.missed <= counts.places / 5, "places do not come again");
}

int main(int argc, char **argv) {
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--list")) list = 1;
    if (!strcmp(argv[i], "--all")) maxPlaces = 2 * FAULT_MAX_PLACES;
    if (!strcmp(argv[i], "--places") && i + 1 < argc) maxPlaces = atoi(argv[++i]);
    if (!strcmp(argv[i], "--jobs") && i + 1 < argc) maxJobs = atoi(argv[++i]);
    if (!strcmp(argv[i], "--only") && i + 1 < argc)
      sscanf(argv[++i], "%d:%llx", &onlyRank, (unsigned long long *)&onlyHash);
  }
  if (maxJobs > MAX_JOBS) maxJobs = MAX_JOBS;
  return testRunAll(1, argv);
}
