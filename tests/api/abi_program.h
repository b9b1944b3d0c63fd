/* A step of low-latency dispatch and combine on one rank, compiled against whatever version of the
 * interface was declared before this file; abi_v1.c and abi_v2.c declare theirs from scratch. */
#define FRAME(s) (s).size = sizeof(s), (s).magic = 0xC00FFFEEu

#define OK(call)                                                                                   \
  if ((call) != 0) return __LINE__

static int runProgram(ncclComm_t comm, cudaStream_t stream) {
  enum { T = 4, K = 2, E = 3, H = 8 };
  static struct {
    float x[T * H], out[E * T * H], back[T * H], w[T * K];
    int idx[T * K], counts[E];
  } memory;
  float *x = memory.x, *back = memory.back, *w = memory.w;
  int *idx = memory.idx, *counts = memory.counts;
  OK(cudaHostRegister(&memory, sizeof memory, 0));
  for (int i = 0; i < T * H; i++) x[i] = (float)i;
  for (int i = 0; i < T; i++) idx[2 * i] = i % E, idx[2 * i + 1] = (i + 1) % E;
  for (int i = 0; i < T * K; i++) w[i] = 0.5f;
  size_t sx[] = {T, H}, si[] = {T, K}, so[] = {E, T, H}, sc[] = {E};
  tensor_t tx = {sizeof tx, 0xCAFECAFEu, 2, 7, x, 0, 0, sx};
  tensor_t ti = {sizeof ti, 0xCAFECAFEu, 2, 2, idx, 0, 0, si};
  tensor_t to = {sizeof to, 0xCAFECAFEu, 3, 7, memory.out, 0, 0, so};
  tensor_t tc = {sizeof tc, 0xCAFECAFEu, 1, 2, counts, 0, 0, sc};
  tensor_t tb = {sizeof tb, 0xCAFECAFEu, 2, 7, back, 0, 0, sx};
  tensor_t tw = {sizeof tw, 0xCAFECAFEu, 2, 7, w, 0, 0, si};
  group_config_t g = {0};
  FRAME(g), g.version = VERSION, g.num_experts = E, g.max_dispatch_tokens_per_rank = T;
  g.max_token_bytes = H * 4;
  layout_info_t info = {0};
  FRAME(info), info.expert_counters = &tc;
  dispatch_inputs_t in = {0};
  FRAME(in), in.tokens = &tx;
  dispatch_outputs_t dout = {0};
  FRAME(dout), dout.tokens = &to;
  dispatch_config_t dc = {0};
  FRAME(dc);
  combine_inputs_t cin = {0};
  FRAME(cin), cin.tokens = &to;
  combine_outputs_t cout = {0};
  FRAME(cout), cout.tokens = &tb, cout.topk_weights = &tw;
  combine_config_t cc = {0};
  FRAME(cc);
  void *group, *handle;
  OK(ncclEpCreateGroup(&group, comm, &g));
  OK(ncclEpCreateHandle(&handle, group, 1, &ti, (void *)0, (void *)0, stream));
  OK(ncclEpDispatch(handle, &in, &dout, &info, &dc, stream));
  OK(ncclEpComplete(handle, (void *)0, stream));
  OK(ncclEpCombine(handle, &cin, &cout, &cc, stream));
  OK(cudaStreamSynchronize(stream));
  if (counts[0] != 3 || counts[1] != 3 || counts[2] != 2) return -1;
  for (int i = 0; i < T * H; i++) {
    if (back[i] != x[i]) return -2;
  }
  OK(ncclEpHandleDestroy(handle));
  OK(ncclEpGroupDestroy(group));
  OK(cudaHostUnregister(&memory));
  return 0;
}
