/* By rails a rank of another domain may be missed because it is dead, or the rank that forwards for it:
 * what the survivors' next calls say, and what `trefoil doctor --hang` says of their records. Ranks 0 and 1
 * are a domain, 2 and 3 another. */
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#include "gpu_case.h"
#include "test.h"

enum { RECEIVER = 0, FORWARDER = 1, OTHER = 2, SOURCE = 3, RANKS = 4 };

typedef struct scene {
  step_case_t c;
  int victim;
  int inMidst; /* it dies when it has dispatched all and waits for the source, of which nothing arrives */
} scene_t;

static struct shared {
  _Atomic int isThrough[RANKS], isRead;
  char sentences[RANKS][500], doctor[800];
} * shared;
static char folder[] = "/tmp/trefoil-forwarder-XXXXXX";

static void await(_Atomic int *flag) {
  for (int i = 0; i < 60000 && !*flag; i++) usleep(1000);
}

static void die(const scene_t *s) {
  if (s->inMidst) {
    await(&shared->isThrough[OTHER]);
    await(&shared->isThrough[SOURCE]);
    usleep(300000);
  }
  kill(getpid(), SIGKILL);
}

/* While the survivors live. */
static void askDoctor(const scene_t *s) {
  char command[400];
  for (int r = 0; r < RANKS; r++) {
    if (r != s->victim) await(&shared->isThrough[r]);
  }
  snprintf(command, sizeof command, "%s doctor --hang %s/*.hang; rm -f %s/*.hang",
           getenv("TREFOIL"), folder, folder);
  FILE *f = popen(command, "r");
  if (f) shared->doctor[fread(shared->doctor, 1, sizeof shared->doctor - 1, f)] = 0;
  if (f) pclose(f);
  shared->isRead = 1;
}

static void run(team_rank_t *r) {
  const scene_t *s = r->user;
  step_data_t *d = stepMake(&s->c, r->rank, r->numRanks, 1);
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  ncclEpGroupConfig_t config = stepGroupConfig(&s->c, r->numRanks);
  config.timeout_ns = 3000000000u;
  if (s->inMidst && r->rank == SOURCE) setenv("TREFOIL_NET_DEAD_RANK", "1:0", 1);
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, stepLayout(&s->c), NULL, s->c.topk, NULL));
  teamBarrier(r);
  if (r->rank == s->victim && !s->inMidst) die(s);
  teamCheck(r, stepUpdate(d, h, r->stream) && stepDispatch(d, h, r->stream), "%s",
            ncclEpGetLastError());
  if (r->rank == s->victim) die(s);
  cudaStreamSynchronize(r->stream);
  if (!stepUpdate(d, h, r->stream))
    snprintf(shared->sentences[r->rank], sizeof shared->sentences[0], "%s", ncclEpGetLastError());
  shared->isThrough[r->rank] = 1;
  if (r->rank == RECEIVER) askDoctor(s);
  await(&shared->isRead);
  _exit(0); /* nothing that would wait for the dead */
}

static void play(int victim, int inMidst) {
  scene_t s = {smallCase(TREFOIL_LL_EXPERT_MAJOR, 5), victim, inMidst};
  memset(shared, 0, sizeof *shared);
  const char *error = teamProcesses(RANKS, run, &s, 1u << victim);
  CHECK(!*error, "%s", error);
}

static void expectSentence(int rank, const char *words) {
  CHECK(strstr(shared->sentences[rank], words), "rank %d: '%s' is not in: %s", rank, words,
        shared->sentences[rank]);
}

static void expectDoctor(const char *culprit) {
  CHECK(!strncmp(shared->doctor, culprit, strlen(culprit)), "%s", shared->doctor);
}

TEST(a_forwarder_that_never_dispatches) {
  play(FORWARDER, 0);
  for (int r = 0; r < RANKS; r++) {
    if (r != FORWARDER) expectSentence(r, "rank 1");
  }
  expectSentence(SOURCE, "rank 1 did not answer within 3 s: rank 3 waited in Dispatch 1");
  expectDoctor("rank 1 is gone");
}

TEST(a_forwarder_that_dies_when_it_has_sent_all_of_its_own) {
  play(FORWARDER, 1);
  expectSentence(RECEIVER, "rank 3 (or rank 1, which forwards for it) did not answer within 3 s");
  for (int r = OTHER; r < RANKS; r++)
    CHECK(!*shared->sentences[r], "rank %d: %s", r, shared->sentences[r]);
  expectDoctor("rank 1 is gone");
  CHECK(strstr(shared->doctor, "of rank 3 through rank 1"), "%s", shared->doctor);
}

TEST(a_source_that_never_dispatches) {
  play(SOURCE, 0);
  expectSentence(RECEIVER, "rank 3 (or rank 1, which forwards for it) did not answer");
  expectSentence(FORWARDER, "rank 3 did not answer");
  expectSentence(OTHER, "rank 3");
  expectDoctor("rank 3 is gone");
}

int main(int argc, char **argv) {
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED || !getenv("TREFOIL") || !mkdtemp(folder)) return 2;
  setenv("NCCL_EP_HANG_DIR", folder, 1);
  int code = testRunAll(argc, argv);
  rmdir(folder);
  return code;
}
