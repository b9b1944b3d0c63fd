/* Tensors in windows: whatever is no window of the group's communicator, or not wholly inside one, is
 * refused with the tensor's name before anything is queued; right ones work, by data or by offset. */
#include <string.h>

#include "test.h"
#include "team.h"

enum { E = 2, N = 4, K = 1, H = 16, R = 2, BYTES = 8192, ROWS = R * N };

typedef struct windows {
  char *memory[3];
  ncclWindow_t win[3]; /* right; not symmetric; of another communicator */
  ncclWindow_t stale;
} windows_t;

static void openWindows(team_rank_t *r, windows_t *w, ncclComm_t other) {
  for (int i = 0; i < 3; i++) {
    teamCheck(r, !ncclMemAlloc((void **)&w->memory[i], BYTES), "ncclMemAlloc");
    teamCheck(r,
              !ncclCommWindowRegister(i == 2 ? other : r->comm, w->memory[i], BYTES, &w->win[i],
                                      i == 1 ? 0 : NCCL_WIN_COLL_SYMMETRIC),
              "register");
  }
}

/* After all others: handles of windows that are gone are given out again. */
static void openStale(team_rank_t *r, windows_t *w) {
  void *more;
  teamCheck(r, !ncclMemAlloc(&more, BYTES), "ncclMemAlloc");
  teamCheck(r,
            !ncclCommWindowRegister(r->comm, more, BYTES, &w->stale, NCCL_WIN_COLL_SYMMETRIC) &&
                !ncclCommWindowDeregister(r->comm, w->stale) && !ncclMemFree(more),
            "a window that was");
}

static void closeWindows(team_rank_t *r, windows_t *w, ncclComm_t other) {
  for (int i = 0; i < 3; i++) {
    teamCheck(r, !ncclCommWindowDeregister(i == 2 ? other : r->comm, w->win[i]), "deregister");
    teamCheck(r, !ncclMemFree(w->memory[i]), "free");
  }
}

typedef struct place {
  const char *what;
  void *data;
  ncclWindow_t window;
  uint64_t offset;
  const char *sentence; /* "": it is right */
} place_t;

/* outputs->tokens of a dispatch at every place; token t of rank s has 10 * s + t everywhere. */
static void everyPlace(team_rank_t *r) {
  static float in[R][N * H], plain[R][ROWS * H];
  static int32_t ids[N * K], counts[R][E / R];
  teamPin(NULL, in, sizeof in);
  teamPin(NULL, plain, sizeof plain);
  teamPin(NULL, ids, sizeof ids);
  teamPin(NULL, counts, sizeof counts);
  ncclComm_t other;
  teamCheck(r, !ncclCommSplit(r->comm, 0, r->rank, &other, NULL), "split");
  windows_t w;
  openWindows(r, &w, other);
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.num_experts = E;
  config.max_dispatch_tokens_per_rank = N;
  config.max_token_bytes = H * 4;
  ncclEpGroup_t group;
  ncclEpHandle_t h;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  teamOk(r, ncclEpInitHandle(&h, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, K, NULL));
  openStale(r, &w);
  for (int i = 0; i < N * H; i++) in[r->rank][i] = (float)(10 * r->rank + i / H);
  ncclEpTensor_t idx = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclInt32, .data = ids,
                        .sizes = (size_t[]){N, K}};
  ncclEpTensor_t x = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclFloat32,
                      .data = in[r->rank], .sizes = (size_t[]){N, H}};
  ncclEpTensor_t count = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 1, .datatype = ncclInt32,
                          .data = counts[r->rank], .sizes = (size_t[]){E / R}};
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  inputs.tokens = &x;
  info.expert_counters = &count;
  teamOk(r, ncclEpUpdateHandle(h, &idx, NULL, r->stream));
  const size_t bytes = ROWS * H * 4, last = BYTES - bytes;
  char *mine = w.memory[0];
  const place_t places[] = {
      {"no window", plain[r->rank], NULL, 0, ""},
      {"by offset", NULL, w.win[0], 64, ""},
      {"by both", mine + 128, w.win[0], 128, ""},
      {"the last bytes", NULL, w.win[0], last, ""},
      {"a number", NULL, (ncclWindow_t)0x1238, 0, "not a live window"},
      {"a number, data given", mine, (ncclWindow_t)0x1234, 0, "not a live window"},
      {"a pointer", mine, (ncclWindow_t)(void *)mine, 0, "not a live window"},
      {"a window that was", NULL, w.stale, 0, "not a live window"},
      {"not symmetric", NULL, w.win[1], 0, "NCCL_WIN_COLL_SYMMETRIC"},
      {"another communicator's", NULL, w.win[2], 0, "not a live window"},
      {"the same, data given", w.memory[2], w.win[2], 0, "not a live window"},
      {"far past the end", NULL, w.win[0], (uint64_t)1 << 40, "win_offset"},
      {"an offset that wraps", NULL, w.win[0], UINT64_MAX - 3, "win_offset"},
      {"a row too far", NULL, w.win[0], last + 16, "win_offset"},
      {"misaligned", NULL, w.win[0], 2, "multiple of 4"},
      {"data elsewhere", plain[r->rank], w.win[0], 0, "must be equal"},
      {"data at another offset", mine + 64, w.win[0], 0, "must be equal"},
  };
  for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
    const place_t *p = &places[i];
    ncclEpTensor_t y = {NCCL_EP_TENSOR_INIT_INLINE,
                        .ndim = 3,
                        .datatype = ncclFloat32,
                        .data = p->data,
                        .win_hdl = p->window,
                        .win_offset = p->offset,
                        .sizes = (size_t[]){E / R, ROWS, H}};
    outputs.tokens = &y;
    float *out = (float *)(p->data ? p->data : (void *)(mine + (*p->sentence ? 0 : p->offset)));
    if (!*p->sentence) memset(out, 0xEE, bytes);
    ncclResult_t got = ncclEpDispatch(h, &inputs, &outputs, &info, NULL, r->stream);
    cudaStreamSynchronize(r->stream);
    if (*p->sentence) {
      const char *why = ncclEpGetLastError();
      teamCheck(r, got == ncclInvalidArgument, "%s: gave %d: %s", p->what, (int)got, why);
      teamCheck(r, strstr(why, "outputs->tokens") && strstr(why, p->sentence), "%s: %s", p->what,
                why);
      continue;
    }
    teamCheck(r, got == ncclSuccess, "%s: %s", p->what, ncclEpGetLastError());
    /* every id is 0: rank 0 has all tokens */
    teamCheck(r, counts[r->rank][0] == (r->rank ? 0 : ROWS), "%s: %d rows", p->what,
              counts[r->rank][0]);
    for (int s = 0; s < ROWS && r->rank == 0; s++) {
      teamCheck(r, out[s * H + H - 1] == (float)(s / N * 10 + s % N), "%s: row %d", p->what, s);
    }
  }
  teamOk(r, ncclEpHandleDestroy(h));
  teamOk(r, ncclEpGroupDestroy(group));
  closeWindows(r, &w, other);
  ncclCommDestroy(other);
}

TEST(only_windows_of_the_group_and_all_inside) {
  const char *error = teamThreads(R, everyPlace, NULL);
  CHECK(!*error, "%s", error);
}

TEST_MAIN()
