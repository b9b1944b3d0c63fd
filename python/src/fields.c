/* The C API's structs from trefoil.ep's: bundles of tensors (bundles.c), and configurations, which have the
 * fields as attributes. */
#include "module.h"

#define NAMES(X)                                                                                   \
  X(send_only)                                                                                     \
  X(round_scales)                                                                                  \
  X(pass_direction)                                                                                \
  X(quantization_recipe)                                                                           \
  X(algorithm)                                                                                     \
  X(num_experts)                                                                                   \
  X(max_dispatch_tokens_per_rank)                                                                  \
  X(max_recv_tokens_per_rank)                                                                      \
  X(max_token_bytes)                                                                               \
  X(rdma_buffer_size)                                                                              \
  X(num_qp_per_rank)                                                                               \
  X(num_channels)                                                                                  \
  X(max_num_sms)                                                                                   \
  X(alloc)                                                                                         \
  X(alloc_fn)                                                                                      \
  X(free_fn)                                                                                       \
  X(context)                                                                                       \
  X(enable_mask)                                                                                   \
  X(timeout_ns)                                                                                    \
  X(zero_copy)                                                                                     \
  X(overflow_policy)                                                                               \
  X(num_topk)                                                                                      \
  X(dispatch_output_per_expert_alignment)

#define NAME_ENUM(name) NAME_##name,
enum { NAMES(NAME_ENUM) NUM_NAMES };
#define NAME_TEXT(name) #name,
static const char *const texts[] = {NAMES(NAME_TEXT)};
static PyObject *names[NUM_NAMES];

int pyStructsInit(void) {
  for (int i = 0; i < NUM_NAMES; i++) {
    names[i] = PyUnicode_InternFromString(texts[i]);
    if (!names[i]) return -1;
  }
  return 0;
}

void pyRelease(ep_held_t *held) {
  while (held->count) Py_DECREF(held->objects[--held->count]);
}

PyObject *pyHold(ep_held_t *held, PyObject *object) {
  if (object) held->objects[held->count++] = object;
  return object;
}

/* NULL: the field was deleted, which is none. Held, since the field may change while the call runs. */
static int readField(ep_held_t *held, PyObject *object, int written, ncclEpTensor_t **out) {
  *out = NULL;
  if (!object || object == Py_None) return 0;
  Py_INCREF(object);
  return pyReadTensor(pyHold(held, object), written, out);
}
#define FIELD(bundle, name, written) (readField(held, (bundle)->name, written, &out->name))

/* An unsigned number, at most `most`. */
static int readIndex(PyObject *object, const char *name, unsigned long long most,
                     unsigned long long *out) {
  PyObject *number = PyNumber_Index(object);
  if (!number) return -1;
  *out = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  if (PyErr_Occurred()) return -1;
  if (*out <= most) return 0;
  PyErr_Format(PyExc_OverflowError, "%s: %llu, at most %llu", name, *out, most);
  return -1;
}

static int readNumber(PyObject *config, int name, unsigned long long most,
                      unsigned long long *out) {
  PyObject *object = PyObject_GetAttr(config, names[name]);
  if (!object) return -1;
  const int bad = readIndex(object, texts[name], most, out);
  Py_DECREF(object);
  return bad;
}
/* Into a field of four or eight bytes. */
#define NUMBER(bundle, name, to)                                                                   \
  (readNumber(bundle, NAME_##name, sizeof(to) == 4 ? 0xffffffffull : ~0ull, &number) ||            \
   ((to) = (__typeof__(to))number, 0))

static int readKind(PyObject *object, ncclEpLayoutInfo_t *out) {
  unsigned long long number = 0;
  if (object && readIndex(object, "recv_topk_idx_kind", 0xffffffffull, &number)) return -1;
  out->recv_topk_idx_kind = (__typeof__(out->recv_topk_idx_kind))number;
  return 0;
}

int pyReadLayoutInfo(ep_held_t *held, PyObject *object, ncclEpLayoutInfo_t *out) {
  const ep_layout_info_t *o = pyBundle(object, EP_LAYOUT_INFO);
  *out = NCCL_EP_LAYOUT_INFO_INIT;
  return !o || FIELD(o, expert_counters, 1) || FIELD(o, src_rank_counters, 1) ||
                 FIELD(o, expert_offsets, 1) || FIELD(o, recv_total_counter, 1) ||
                 readKind(o->recv_topk_idx_kind, out)
             ? -1
             : 0;
}

static int readDispatchInputs(ep_held_t *held, PyObject *object, ncclEpDispatchInputs_t *out) {
  const ep_dispatch_inputs_t *o = pyBundle(object, EP_DISPATCH_INPUTS);
  *out = NCCL_EP_DISPATCH_INPUTS_INIT;
  return !o || FIELD(o, tokens, 0) || FIELD(o, topk_weights, 0) || FIELD(o, scales, 0);
}

static int readDispatchOutputs(ep_held_t *held, PyObject *object, ncclEpDispatchOutputs_t *out) {
  const ep_dispatch_outputs_t *o = pyBundle(object, EP_DISPATCH_OUTPUTS);
  *out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  return !o || FIELD(o, tokens, 1) || FIELD(o, topk_weights, 1) || FIELD(o, scales, 1) ||
         FIELD(o, topk_idx, 1);
}

int pyReadDispatch(ep_held_t *held, PyObject *const *bundles, ncclEpDispatchInputs_t *inputs,
                   ncclEpDispatchOutputs_t *outputs) {
  return readDispatchInputs(held, bundles[0], inputs) ||
                 readDispatchOutputs(held, bundles[1], outputs)
             ? -1
             : 0;
}

static int readCombineInputs(ep_held_t *held, PyObject *object, ncclEpCombineInputs_t *out) {
  const ep_combine_inputs_t *o = pyBundle(object, EP_COMBINE_INPUTS);
  *out = NCCL_EP_COMBINE_INPUTS_INIT;
  return !o || FIELD(o, tokens, 0) || FIELD(o, topk_weights, 0) || FIELD(o, scales, 0);
}

static int readCombineOutputs(ep_held_t *held, PyObject *object, int backward,
                              ncclEpCombineOutputs_t *out) {
  const ep_combine_outputs_t *o = pyBundle(object, EP_COMBINE_OUTPUTS);
  *out = NCCL_EP_COMBINE_OUTPUTS_INIT;
  return !o || FIELD(o, tokens, 1) || FIELD(o, topk_weights, backward);
}

int pyReadCombine(ep_held_t *held, PyObject *const *bundles, int backward,
                  ncclEpCombineInputs_t *inputs, ncclEpCombineOutputs_t *outputs) {
  return readCombineInputs(held, bundles[0], inputs) ||
                 readCombineOutputs(held, bundles[1], backward, outputs)
             ? -1
             : 0;
}

int pyReadDispatchConfig(PyObject *o, ncclEpDispatchConfig_t *out) {
  unsigned long long number;
  *out = NCCL_EP_DISPATCH_CONFIG_INIT;
  return NUMBER(o, send_only, out->send_only) || NUMBER(o, round_scales, out->round_scales) ||
                 NUMBER(o, pass_direction, out->pass_direction) ||
                 NUMBER(o, quantization_recipe, out->quant_recipe)
             ? -1
             : 0;
}

int pyReadCombineConfig(PyObject *o, ncclEpCombineConfig_t *out) {
  unsigned long long number;
  *out = NCCL_EP_COMBINE_CONFIG_INIT;
  return NUMBER(o, send_only, out->send_only) || NUMBER(o, pass_direction, out->pass_direction) ||
                 NUMBER(o, quantization_recipe, out->quant_recipe)
             ? -1
             : 0;
}

static int readAlloc(PyObject *config, ncclEpAllocConfig_t *out) {
  unsigned long long number;
  uintptr_t functions[3];
  PyObject *o = PyObject_GetAttr(config, names[NAME_alloc]);
  if (!o) return -1;
  const int bad = NUMBER(o, alloc_fn, functions[0]) || NUMBER(o, free_fn, functions[1]) ||
                  NUMBER(o, context, functions[2]);
  Py_DECREF(o);
  if (bad) return -1;
  out->alloc_fn = (ncclEpAllocFn_t)functions[0];
  out->free_fn = (ncclEpFreeFn_t)functions[1];
  out->context = (void *)functions[2];
  return 0;
}

static int readLimits(PyObject *o, ncclEpGroupConfig_t *out) {
  unsigned long long number;
  return NUMBER(o, num_experts, out->num_experts) ||
         NUMBER(o, max_dispatch_tokens_per_rank, out->max_dispatch_tokens_per_rank) ||
         NUMBER(o, max_recv_tokens_per_rank, out->max_recv_tokens_per_rank) ||
         NUMBER(o, max_token_bytes, out->max_token_bytes) || NUMBER(o, num_topk, out->num_topk);
}

static int readHints(PyObject *o, ncclEpGroupConfig_t *out) {
  unsigned long long number;
  return NUMBER(o, rdma_buffer_size, out->rdma_buffer_size) ||
         NUMBER(o, num_qp_per_rank, out->num_qp_per_rank) ||
         NUMBER(o, num_channels, out->num_channels) || NUMBER(o, max_num_sms, out->max_num_sms);
}

int pyReadGroupConfig(PyObject *o, ncclEpGroupConfig_t *out) {
  unsigned long long number;
  *out = NCCL_EP_GROUP_CONFIG_INIT;
  return readLimits(o, out) || readHints(o, out) || readAlloc(o, &out->alloc) ||
                 NUMBER(o, algorithm, out->algorithm) || NUMBER(o, enable_mask, out->enable_mask) ||
                 NUMBER(o, timeout_ns, out->timeout_ns) || NUMBER(o, zero_copy, out->zero_copy) ||
                 NUMBER(o, overflow_policy, out->overflow_policy)
             ? -1
             : 0;
}

int pyReadHandleConfig(PyObject *o, ncclEpHandleConfig_t *out) {
  unsigned long long number = 0;
  *out = NCCL_EP_HANDLE_CONFIG_INIT;
  if (o == Py_None) return 0;
  return NUMBER(o, dispatch_output_per_expert_alignment, out->dispatch_output_per_expert_alignment)
             ? -1
             : 0;
}
