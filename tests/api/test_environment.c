/* Environment variables with a typing error: what would change results is refused, what would not is
 * told in the debug log, and without the log nothing is printed. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "test.h"
#include "team.h"

static ncclResult_t createGroup(team_rank_t *r) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.num_experts = 4;
  config.max_dispatch_tokens_per_rank = 4;
  config.max_token_bytes = 64;
  ncclEpGroup_t g = (ncclEpGroup_t)(void *)&config;
  ncclResult_t result = ncclEpCreateGroup(&g, r->comm, &config);
  if (result == ncclSuccess) return ncclEpGroupDestroy(g);
  if ((void *)g != (void *)&config) teamFail(r, "a refused group was written");
  return result;
}

static void legalWords(team_rank_t *r) {
  const struct {
    const char *name, *value;
    int legal;
  } words[] = {{"NCCL_EP_LL_COMBINE", "exact", 1},   {"NCCL_EP_LL_COMBINE", "partial", 1},
               {"NCCL_EP_LL_COMBINE", "Partial", 0}, {"NCCL_EP_LL_COMBINE", "1", 0},
               {"NCCL_EP_LL_COMBINE", "bogus", 0},   {"NCCL_EP_LL_COMBINE", "partial ", 0},
               {"NCCL_EP_LL_COMBINE", "", 1},        {"NCCL_EP_LL_DISPATCH", "mesh", 1},
               {"NCCL_EP_LL_DISPATCH", "rails", 1},  {"NCCL_EP_LL_DISPATCH", "rail", 0},
               {"NCCL_EP_LL_DISPATCH", "1", 0},      {"NCCL_EP_LL_DISPATCH", "", 1}};
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    const char *name = words[i].name, *value = words[i].value;
    setenv(name, value, 1);
    ncclResult_t got = createGroup(r);
    teamCheck(r, got == (words[i].legal ? ncclSuccess : ncclInvalidArgument), "'%s' gave %d: %s",
              value, (int)got, ncclEpGetLastError());
    if (words[i].legal) continue;
    const char *sentence = ncclEpGetLastError();
    teamCheck(r, strstr(sentence, name) && strstr(sentence, value), "'%s': %s", value, sentence);
  }
}

TEST(legal_words) {
  const char *error = teamThreads(1, legalWords, NULL);
  unsetenv("NCCL_EP_LL_COMBINE");
  unsetenv("NCCL_EP_LL_DISPATCH");
  CHECK(!*error, "%s", error);
}

/* What one group writes on stderr. */
static void groupLog(team_rank_t *r, char *out, size_t bytes) {
  FILE *file = tmpfile();
  int stderrFd = dup(STDERR_FILENO);
  dup2(fileno(file), STDERR_FILENO);
  ncclResult_t got = createGroup(r);
  dup2(stderrFd, STDERR_FILENO);
  close(stderrFd);
  rewind(file);
  out[fread(out, 1, bytes - 1, file)] = 0;
  fclose(file);
  teamCheck(r, got == ncclSuccess, "%s", ncclEpGetLastError());
}

static void ignoredValues(team_rank_t *r) {
  char log[4000];
  groupLog(r, log, sizeof log);
  teamCheck(r, strstr(log, "NCCL_EP_TIMEOUT_MS is '5 minutes'"), "%s", log);
  teamCheck(r, strstr(log, "NCCL_EP_HANG_DIR: cannot write /no/such/directory/"), "%s", log);
  unsetenv("NCCL_EP_DEBUG");
  groupLog(r, log, sizeof log);
  teamCheck(r, !*log, "without NCCL_EP_DEBUG: %s", log);
}

TEST(ignored_values_are_told) {
  setenv("NCCL_EP_DEBUG", "1", 1);
  setenv("NCCL_EP_TIMEOUT_MS", "5 minutes", 1);
  setenv("NCCL_EP_HANG_DIR", "/no/such/directory", 1);
  const char *error = teamThreads(1, ignoredValues, NULL);
  unsetenv("NCCL_EP_TIMEOUT_MS");
  unsetenv("NCCL_EP_HANG_DIR");
  CHECK(!*error, "%s", error);
}

TEST_MAIN()
