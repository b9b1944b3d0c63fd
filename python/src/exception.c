#include <stdio.h>

#include "module.h"

static PyObject *base;
static struct {
  ncclResult_t code;
  const char *name, *doc;
  PyObject **python; /* a second base */
  PyObject *type;
} kinds[] = {
    {ncclInvalidArgument, "trefoil.ep.InvalidArgumentError", "An argument breaks its rule.",
     &PyExc_ValueError, NULL},
    {ncclInvalidUsage, "trefoil.ep.InvalidUsageError", "The call is not possible now.", NULL, NULL},
    {ncclRemoteError, "trefoil.ep.RemoteError", "Another rank failed, is gone or late.", NULL,
     NULL},
    {ncclSystemError, "trefoil.ep.SystemFailureError", "The system refused memory or another need.",
     &PyExc_OSError, NULL},
};
enum { NUM_KINDS = sizeof kinds / sizeof *kinds };

static int addType(PyObject *module, const char *name, PyObject *type) {
  if (!type) return -1;
  Py_INCREF(type);
  return PyModule_AddObject(module, name, type);
}

static PyObject *makeKind(int i) {
  PyObject *bases =
      kinds[i].python ? PyTuple_Pack(2, base, *kinds[i].python) : PyTuple_Pack(1, base);
  if (!bases) return NULL;
  kinds[i].type = PyErr_NewExceptionWithDoc(kinds[i].name, kinds[i].doc, bases, NULL);
  Py_DECREF(bases);
  return kinds[i].type;
}

int pyErrorsInit(PyObject *module) {
  base = PyErr_NewExceptionWithDoc(
      "trefoil.ep.Error",
      "A refusal or failure; the text is the library's sentence, code its result.",
      PyExc_RuntimeError, NULL);
  if (addType(module, "Error", base)) return -1;
  for (int i = 0; i < NUM_KINDS; i++) {
    const char *name = kinds[i].name + sizeof "trefoil.ep." - 1;
    if (addType(module, name, makeKind(i))) return -1;
  }
  return 0;
}

static PyObject *typeOf(ncclResult_t code) {
  for (int i = 0; i < NUM_KINDS; i++) {
    if (kinds[i].code == code) return kinds[i].type;
  }
  return base;
}

static void setCode(PyObject *error, int code) {
  PyObject *value = PyLong_FromLong(code);
  if (!value || PyObject_SetAttrString(error, "code", value)) PyErr_Clear();
  Py_XDECREF(value);
}

PyObject *pyRaise(ncclResult_t code, const char *sentence) {
  PyObject *error = PyObject_CallFunction(typeOf(code), "s", sentence);
  if (!error) return NULL;
  setCode(error, code);
  PyErr_SetObject((PyObject *)Py_TYPE(error), error);
  Py_DECREF(error);
  return NULL;
}

PyObject *pyRaiseCuda(cudaError_t code) {
  const int memory = code == cudaErrorMemoryAllocation;
  const int value = code == cudaErrorInvalidValue || code == cudaErrorInvalidDevice;
  return pyRaise(memory  ? ncclSystemError
                 : value ? ncclInvalidArgument
                         : ncclUnhandledCudaError,
                 pyLibrary->cudaGetErrorString(code));
}

PyObject *pyDone(ncclResult_t code) {
  if (code != ncclSuccess) return pyRaise(code, pyLibrary->ncclEpGetLastError());
  Py_RETURN_NONE;
}

PyObject *pyDoneCuda(cudaError_t code) {
  if (code != cudaSuccess) return pyRaiseCuda(code);
  Py_RETURN_NONE;
}
