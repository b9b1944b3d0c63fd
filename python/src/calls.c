/* Calls of each step. They queue work and return; the interpreter runs on meanwhile. */
#include "module.h"

static int wrongCount(const char *name, Py_ssize_t count, Py_ssize_t wanted) {
  if (count == wanted) return 0;
  PyErr_Format(PyExc_TypeError, "%s: %zd arguments, expected %zd", name, count, wanted);
  return 1;
}

static const ncclEpLayoutInfo_t *infoOrNull(ep_held_t *held, PyObject *object,
                                            ncclEpLayoutInfo_t *info, int *bad) {
  if (object == Py_None) return NULL;
  *bad = pyReadLayoutInfo(held, object, info);
  return info;
}

/* update(handle, topk_idx, layout_info, stream) */
static PyObject *update(PyObject *module, PyObject *const *a, Py_ssize_t count) {
  (void)module;
  ep_held_t held = {.count = 0};
  ncclEpTensor_t *idx;
  ncclEpLayoutInfo_t info;
  cudaStream_t stream;
  int bad = 0;
  if (wrongCount("update", count, 4)) return NULL;
  ncclEpHandle_t handle = pyValue(a[0], EP_HANDLE);
  if (!handle || pyReadTensor(a[1], 0, &idx) || pyReadStream(a[3], &stream)) return NULL;
  const ncclEpLayoutInfo_t *counters = infoOrNull(&held, a[2], &info, &bad);
  ncclResult_t code = ncclSuccess;
  if (!bad) {
    Py_BEGIN_ALLOW_THREADS;
    code = pyLibrary->ncclEpUpdateHandle(handle, idx, counters, stream);
    Py_END_ALLOW_THREADS;
  }
  pyRelease(&held);
  return bad ? NULL : pyDone(code);
}

/* What is passed to the library, of a dispatch or a combine. */
typedef struct {
  ep_held_t held;
  ncclEpHandle_t handle;
  ncclEpLayoutInfo_t info;
  const ncclEpLayoutInfo_t *counters;
  cudaStream_t stream;
} ep_call_t;

/* dispatch(handle, inputs, outputs, layout_info, config, stream) */
static PyObject *dispatch(PyObject *module, PyObject *const *a, Py_ssize_t count) {
  (void)module;
  ep_call_t call = {.held = {.count = 0}};
  ncclEpDispatchInputs_t inputs;
  ncclEpDispatchOutputs_t outputs;
  ncclEpDispatchConfig_t config;
  int bad = 0;
  if (wrongCount("dispatch", count, 6)) return NULL;
  call.handle = pyValue(a[0], EP_HANDLE);
  if (!call.handle || pyReadStream(a[5], &call.stream)) return NULL;
  if (a[4] != Py_None && pyReadDispatchConfig(a[4], &config)) return NULL;
  call.counters = infoOrNull(&call.held, a[3], &call.info, &bad);
  bad = bad || pyReadDispatch(&call.held, a + 1, &inputs, &outputs);
  ncclResult_t code = ncclSuccess;
  if (!bad) {
    Py_BEGIN_ALLOW_THREADS;
    code = pyLibrary->ncclEpDispatch(call.handle, &inputs, &outputs, call.counters,
                                     a[4] == Py_None ? NULL : &config, call.stream);
    Py_END_ALLOW_THREADS;
  }
  pyRelease(&call.held);
  return bad ? NULL : pyDone(code);
}

/* combine(handle, inputs, outputs, config, stream) */
static PyObject *combine(PyObject *module, PyObject *const *a, Py_ssize_t count) {
  (void)module;
  ep_call_t call = {.held = {.count = 0}};
  ncclEpCombineInputs_t inputs;
  ncclEpCombineOutputs_t outputs;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  if (wrongCount("combine", count, 5)) return NULL;
  call.handle = pyValue(a[0], EP_HANDLE);
  if (!call.handle || pyReadStream(a[4], &call.stream)) return NULL;
  if (a[3] != Py_None && pyReadCombineConfig(a[3], &config)) return NULL;
  const int backward = config.pass_direction == NCCL_EP_BWD_PASS;
  const int bad = pyReadCombine(&call.held, a + 1, backward, &inputs, &outputs);
  ncclResult_t code = ncclSuccess;
  if (!bad) {
    Py_BEGIN_ALLOW_THREADS;
    code = pyLibrary->ncclEpCombine(call.handle, &inputs, &outputs,
                                    a[3] == Py_None ? NULL : &config, call.stream);
    Py_END_ALLOW_THREADS;
  }
  pyRelease(&call.held);
  return bad ? NULL : pyDone(code);
}

/* complete(handle, stream) */
static PyObject *complete(PyObject *module, PyObject *const *a, Py_ssize_t count) {
  (void)module;
  cudaStream_t stream;
  ncclResult_t code;
  if (wrongCount("complete", count, 2)) return NULL;
  ncclEpHandle_t handle = pyValue(a[0], EP_HANDLE);
  if (!handle || pyReadStream(a[1], &stream)) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  code = pyLibrary->ncclEpComplete(handle, NULL, stream);
  Py_END_ALLOW_THREADS;
  return pyDone(code);
}

/* mask_query(group, tensor, stream): the caller has seen that the tensor is int32 [R]. */
static PyObject *maskQuery(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *object, *mask, *where;
  ncclEpTensor_t *tensor;
  cudaStream_t stream;
  ncclResult_t code;
  if (!PyArg_ParseTuple(args, "OO!O", &object, pyTensorType, &mask, &where)) return NULL;
  ncclEpGroup_t group = pyValue(object, EP_GROUP);
  if (!group || pyReadTensor(mask, 1, &tensor) || pyReadStream(where, &stream)) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  code = pyLibrary->ncclEpMaskQuery(group, tensor->data, stream);
  Py_END_ALLOW_THREADS;
  return pyDone(code);
}

/* mask_update(group, bytes of int32 [R], stream) */
static PyObject *maskUpdate(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *object, *where;
  const char *mask;
  Py_ssize_t bytes;
  cudaStream_t stream;
  ncclResult_t code;
  if (!PyArg_ParseTuple(args, "Oy#O", &object, &mask, &bytes, &where)) return NULL;
  ncclEpGroup_t group = pyValue(object, EP_GROUP);
  if (!group || pyReadStream(where, &stream)) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  code = pyLibrary->ncclEpMaskUpdate(group, (const int *)mask, stream);
  Py_END_ALLOW_THREADS;
  return pyDone(code);
}

static PyObject *asyncError(PyObject *module, PyObject *object) {
  (void)module;
  int error = 0;
  ncclEpGroup_t group = pyValue(object, EP_GROUP);
  if (!group) return NULL;
  const ncclResult_t code = pyLibrary->ncclEpGetAsyncError(group, &error);
  return code == ncclSuccess ? PyBool_FromLong(error) : pyDone(code);
}

static PyObject *errorClear(PyObject *module, PyObject *object) {
  (void)module;
  ncclEpGroup_t group = pyValue(object, EP_GROUP);
  return group ? pyDone(pyLibrary->ncclEpErrorClear(group)) : NULL;
}

#define FAST(name)                                                                                 \
  { #name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL }
PyMethodDef pyCallMethods[] = {FAST(update),
                               FAST(dispatch),
                               FAST(combine),
                               FAST(complete),
                               {"mask_query", maskQuery, METH_VARARGS, NULL},
                               {"mask_update", maskUpdate, METH_VARARGS, NULL},
                               {"async_error", asyncError, METH_O, NULL},
                               {"error_clear", errorClear, METH_O, NULL},
                               {0}};
