/* trefoil._c: the C API for Python, on Python's limited API 3.10. No torch, no NumPy. */
#ifndef TREFOIL_PYTHON_MODULE_H
#define TREFOIL_PYTHON_MODULE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "loader.h"

/* ---- Objects: what the library made, by its pointer ------------------------------------------- */

typedef enum { EP_COMM, EP_GROUP, EP_HANDLE, EP_STREAM } ep_kind_t;

/* value NULL: destroyed. epoch: of the library and the process that made it. */
typedef struct {
  PyObject_HEAD void *value;
  unsigned epoch;
  int kind;
} ep_object_t;

extern PyObject *pyObjectType, *pyTensorType;
int pyObjectsInit(PyObject *module);
int pyTensorsInit(PyObject *module);
/* The new type, which the module has, too; NULL with an exception. */
PyObject *pyAddType(PyObject *module, const char *name, PyType_Spec *spec);
/* The pointer behind a live object of that kind, else NULL with an exception. */
void *pyValue(PyObject *object, ep_kind_t kind);
/* What was made before a fork or an pyLoad is refused from now on. */
void pyNextEpoch(void);
int pyReadStream(PyObject *object, cudaStream_t *out);

/* ---- Tensors and structs ---------------------------------------------------------------------- */

#define EP_MAX_DIMS 8
typedef struct {
  PyObject_HEAD ncclEpTensor_t tensor;
  size_t sizes[EP_MAX_DIMS];
  int readOnly;
  PyObject *buffer, *pin; /* what it was made of, and what keeps its memory known; or NULL */
  PyObject *storage;      /* of torch, which may move what it holds; else NULL */
  void *storageData;      /* where it was */
} ep_tensor_object_t;
PyObject *pyTensorReader(PyObject *module, PyObject *function);

/* What every call reads: trefoil.ep's dataclasses of these names have their fields here, where reading one is
 * no look-up. A field is NULL when it was deleted. */
typedef struct {
  PyObject_HEAD PyObject *expert_counters, *src_rank_counters, *expert_offsets;
  PyObject *recv_total_counter, *recv_topk_idx_kind;
} ep_layout_info_t;
typedef struct {
  PyObject_HEAD PyObject *tokens, *topk_weights, *scales;
} ep_dispatch_inputs_t;
typedef struct {
  PyObject_HEAD PyObject *tokens, *topk_weights, *scales, *topk_idx;
} ep_dispatch_outputs_t;
typedef struct {
  PyObject_HEAD PyObject *tokens, *topk_weights, *scales;
} ep_combine_inputs_t;
typedef struct {
  PyObject_HEAD PyObject *tokens, *topk_weights;
} ep_combine_outputs_t;

typedef enum {
  EP_LAYOUT_INFO,
  EP_DISPATCH_INPUTS,
  EP_DISPATCH_OUTPUTS,
  EP_COMBINE_INPUTS,
  EP_COMBINE_OUTPUTS,
  EP_NUM_BUNDLES
} ep_bundle_t;
int pyBundlesInit(PyObject *module);
PyObject *pyLayoutInfoKind(PyObject *module, PyObject *kind);
/* The object if it is such a bundle, else NULL with an exception. */
const void *pyBundle(PyObject *object, ep_bundle_t bundle);

/* References that a call needs until it has returned. */
typedef struct {
  PyObject *objects[16];
  int count;
} ep_held_t;
void pyRelease(ep_held_t *held);
PyObject *pyHold(ep_held_t *held, PyObject *object); /* takes the reference; NULL stays NULL */

int pyStructsInit(void);
/* Each fills a struct from its bundle, or an object with its fields as attributes; -1 with an exception. */
int pyReadTensor(PyObject *object, int written, ncclEpTensor_t **out);
int pyReadLayoutInfo(ep_held_t *held, PyObject *object, ncclEpLayoutInfo_t *out);
int pyReadDispatch(ep_held_t *held, PyObject *const *bundles, ncclEpDispatchInputs_t *inputs,
                   ncclEpDispatchOutputs_t *outputs);
int pyReadCombine(ep_held_t *held, PyObject *const *bundles, int backward,
                  ncclEpCombineInputs_t *inputs, ncclEpCombineOutputs_t *outputs);
int pyReadDispatchConfig(PyObject *object, ncclEpDispatchConfig_t *out);
int pyReadCombineConfig(PyObject *object, ncclEpCombineConfig_t *out);
int pyReadGroupConfig(PyObject *object, ncclEpGroupConfig_t *out);
int pyReadHandleConfig(PyObject *object, ncclEpHandleConfig_t *out);

/* ---- DLPack ----------------------------------------------------------------------------------- */

/* DLTensor, with which DLManagedTensor begins. */
typedef struct {
  void *data;
  int32_t deviceType, deviceId;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byteOffset;
} ep_dl_tensor_t;
int pyDlpackInit(void);
/* Whether `out` is filled from the object, whose memory it shows as long as nothing else is called. No
 * exception is left. */
int pyExchange(PyObject *object, ep_dl_tensor_t *out);
int pyDlpackType(const ep_dl_tensor_t *t); /* an ncclDataType_t, -1: none */
int pyIsContiguous(const ep_dl_tensor_t *t);
PyObject *pyReadDlpack(PyObject *module, PyObject *capsule);

/* ---- Errors: NULL, with the exception of the code and the library's sentence ------------------- */

int pyErrorsInit(PyObject *module);
PyObject *pyRaise(ncclResult_t code, const char *sentence);
PyObject *pyRaiseCuda(cudaError_t code);
PyObject *pyDone(ncclResult_t code);    /* of an ncclEp call: None, or the exception */
PyObject *pyDoneCuda(cudaError_t code); /* of a cuda call */

/* ---- Waits: calls that may wait for other ranks ------------------------------------------------ */

/* The call runs on a thread of its own, so that the main thread can act on signals. If a signal's handler
 * raises, the call is left behind, and its communicator (if it has one) counts as destroyed. */
typedef struct ep_job ep_job_t;
struct ep_job {
  ncclResult_t (*run)(ep_job_t *job);
  ncclComm_t comm;
  ncclEpGroup_t group;
  ncclEpHandle_t handle;
  cudaStream_t stream;
  ncclUniqueId id;
  ncclEpGroupConfig_t groupConfig;
  ncclEpHandleConfig_t handleConfig;
  ncclEpLayoutInfo_t info;
  ncclEpTensor_t *tensor;
  int hasInfo, ofNccl; /* ofNccl: the sentence is NCCL's */
  int ranks, rank, topk;
  ncclEpLayout_t layout;
  ep_held_t held;
  PyObject *owner; /* of comm: loses it if the call is interrupted */
  void *result;
};
/* 0, or -1 with an exception. Releases what the job holds. */
int pyWait(ep_job_t *job);
PyObject *pySynchronize(PyObject *module, PyObject *stream);

extern PyMethodDef pyCallMethods[], pySetupMethods[], pyRuntimeMethods[];

#endif
