/* A process that makes and destroys communicators and groups for days does not grow: heap, descriptors and
 * mappings after many are what they were after a few. */
#include <dirent.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <unistd.h>

#include "team.h"
#include "test.h"

typedef struct held {
  size_t heap;
  int descriptors, mappings;
} held_t;

/* Bytes in use in all arenas: mallinfo2 looks at the main one alone. */
static size_t heapInUse(void) {
  char *text = NULL;
  size_t bytes = 0, all = 0, idle = 0, n = 0;
  FILE *f = open_memstream(&text, &bytes);
  if (!f) return 0;
  malloc_info(0, f);
  fclose(f);
  char *total = text, *at;
  while ((at = strstr(total + 1, "</heap>"))) total = at; /* sums stand behind the last arena */
  if ((at = strstr(total, "<total type=\"fast\""))) sscanf(strstr(at, "size="), "size=\"%zu", &n);
  idle += n;
  if ((at = strstr(total, "<total type=\"rest\""))) sscanf(strstr(at, "size="), "size=\"%zu", &n);
  idle += n;
  if ((at = strstr(total, "<system type=\"current\"")))
    sscanf(strstr(at, "size="), "size=\"%zu", &all);
  free(text);
  return all - idle;
}

static int countLines(const char *path) {
  FILE *f = fopen(path, "r");
  int lines = 0;
  for (int c; f && (c = getc(f)) != EOF;) lines += c == '\n';
  if (f) fclose(f);
  return lines;
}

static int countEntries(const char *path) {
  DIR *dir = opendir(path);
  int count = 0;
  while (dir && readdir(dir)) count++;
  if (dir) closedir(dir);
  return count;
}

static held_t hold(void) {
  return (held_t){heapInUse(), countEntries("/proc/self/fd"), countLines("/proc/self/maps")};
}

/* Whatever a rank makes along with a communicator. */
static void wholeLife(team_rank_t *r) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.num_experts = 4;
  config.max_dispatch_tokens_per_rank = 2;
  config.max_token_bytes = 64;
  ncclComm_t half;
  ncclWindow_t window;
  float *x;
  teamCheck(r, !cudaMalloc((void **)&x, 4096) && !cudaMemset(x, 0, 4096), "memory");
  teamCheck(r, !ncclAllReduce(x, x, 8, ncclFloat32, ncclSum, r->comm, r->stream), "sum");
  cudaStreamSynchronize(r->stream);
  teamCheck(r, !ncclCommWindowRegister(r->comm, x, 4096, &window, NCCL_WIN_COLL_SYMMETRIC),
            "window: %s", ncclGetLastError(NULL));
  teamCheck(r, !ncclCommWindowDeregister(r->comm, window), "window");
  teamCheck(r, !ncclCommSplit(r->comm, 0, r->rank, &half, NULL), "split");
  for (int i = 0; i < 3; i++) {
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    config.algorithm = i & 1 ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
    config.max_recv_tokens_per_rank = i & 1 ? 8 : 0;
    teamOk(r, ncclEpCreateGroup(&group, i == 2 ? half : r->comm, &config));
    teamOk(r, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 2, NULL));
    teamOk(r, ncclEpHandleDestroy(handle));
    teamOk(r, ncclEpGroupDestroy(group));
  }
  ncclCommDestroy(half);
  cudaFree(x);
}

static void lives(int count) {
  for (int i = 0; i < count; i++) {
    const char *error = teamThreads(1 + i % 3, wholeLife, NULL);
    REQUIRE(!*error, "%s", error);
  }
}

/* Two halves of `count` lives: a leak shows in both, a table that doubles or the cache of a thread that is
 * about to end in one. */
static void compare(const char *what, held_t before, held_t between, int count) {
  const held_t after = hold();
  const double first = (double)between.heap - (double)before.heap;
  const double second = (double)after.heap - (double)between.heap;
  const double grown = 2 * (first < second ? first : second) / count;
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  CHECK(grown < 24, "%s: %.1f bytes more for each of %d", what, grown, count);
#else
  (void)grown;
#endif
  CHECK(after.descriptors <= before.descriptors, "%s: %d descriptors, before %d", what,
        after.descriptors, before.descriptors);
  CHECK(after.mappings <= before.mappings + 8, "%s: %d mappings, before %d", what, after.mappings,
        before.mappings);
}

TEST(communicators_with_all_that_goes_with_them) {
  lives(60);
  const held_t before = hold();
  lives(150);
  const held_t between = hold();
  lives(150);
  compare("communicators", before, between, 600);
}

TEST(communicators_whose_groups_keep_progress_records) {
  char folder[] = "/tmp/trefoil-growth-XXXXXX";
  REQUIRE(mkdtemp(folder), "no folder");
  setenv("NCCL_EP_HANG_DIR", folder, 1);
  lives(60);
  const held_t before = hold();
  lives(150);
  const held_t between = hold();
  lives(150);
  compare("communicators", before, between, 600);
  unsetenv("NCCL_EP_HANG_DIR");
  CHECK(countEntries(folder) == 2, "%d records are left", countEntries(folder) - 2);
  rmdir(folder);
}

static void manyGroups(team_rank_t *r) {
  held_t before = {0}, between = {0};
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.num_experts = 4;
  config.max_dispatch_tokens_per_rank = 2;
  config.max_token_bytes = 64;
  for (int i = 0; i < 3000; i++) {
    ncclEpGroup_t group;
    teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
    teamOk(r, ncclEpGroupDestroy(group));
    if (i == 200) before = hold();
    if (i == 1600) between = hold();
  }
  compare("groups", before, between, 2800);
}

TEST(groups_of_one_communicator) {
  const char *error = teamThreads(1, manyGroups, NULL);
  CHECK(!*error, "%s", error);
}

/* Many alive at once, twice: the second time takes what the first left. */
static void crowd(void) {
  enum { MANY = 150 };
  static ncclComm_t comms[MANY];
  for (int i = 0; i < MANY; i++)
    REQUIRE(ncclCommInitAll(&comms[i], 1, NULL) == ncclSuccess, "%d: %s", i,
            ncclGetLastError(NULL));
  for (int i = 0; i < MANY; i++) ncclCommDestroy(comms[i]);
}

TEST(crowds_of_communicators) {
  crowd();
  crowd();
  const held_t before = hold();
  for (int i = 0; i < 3; i++) crowd();
  const held_t between = hold();
  for (int i = 0; i < 3; i++) crowd();
  compare("crowds", before, between, 6 * 150);
}

TEST_MAIN()
