/* The module, the library in use, and its CUDA runtime: devices, host memory, streams. */
#include "module.h"

/* load(path or None) */
static PyObject *load(PyObject *module, PyObject *args) {
  (void)module;
  const char *path;
  if (!PyArg_ParseTuple(args, "z", &path)) return NULL;
  const char *why = pyLoad(path);
  if (why) return PyErr_Format(PyExc_OSError, "%s: %s", path, why);
  pyNextEpoch();
  Py_RETURN_NONE;
}

/* (path, version, whether the runtime is the host's) */
static PyObject *library(PyObject *module, PyObject *none) {
  (void)module;
  (void)none;
  int version = 0;
  pyLibrary->ncclEpGetVersion(&version);
  return Py_BuildValue("siN", pyLibraryPath(), version, PyBool_FromLong(pyLibrary->onHost));
}

static PyObject *setDevice(PyObject *module, PyObject *args) {
  (void)module;
  int device;
  if (!PyArg_ParseTuple(args, "i", &device)) return NULL;
  return pyDoneCuda(pyLibrary->cudaSetDevice(device));
}

static PyObject *numberFrom(cudaError_t (*ask)(int *)) {
  int number = 0;
  const cudaError_t code = ask(&number);
  return code == cudaSuccess ? PyLong_FromLong(number) : pyRaiseCuda(code);
}

static PyObject *getDevice(PyObject *module, PyObject *none) {
  (void)module;
  (void)none;
  return numberFrom(pyLibrary->cudaGetDevice);
}

static PyObject *deviceCount(PyObject *module, PyObject *none) {
  (void)module;
  (void)none;
  return numberFrom(pyLibrary->cudaGetDeviceCount);
}

/* pin(address, bytes): the library may use host memory. */
static PyObject *pin(PyObject *module, PyObject *args) {
  (void)module;
  unsigned long long address;
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(args, "Kn", &address, &bytes)) return NULL;
  return pyDoneCuda(pyLibrary->cudaHostRegister((void *)(uintptr_t)address, (size_t)bytes,
                                                cudaHostRegisterDefault));
}

/* settle(device): waits for the device's queued work. */
static PyObject *settle(PyObject *module, PyObject *args) {
  (void)module;
  int device, current = 0;
  if (!PyArg_ParseTuple(args, "i", &device)) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  pyLibrary->cudaGetDevice(&current);
  pyLibrary->cudaSetDevice(device);
  pyLibrary->cudaDeviceSynchronize();
  pyLibrary->cudaSetDevice(current);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

/* unpin(address): the end of pin. */
static PyObject *unpin(PyObject *module, PyObject *args) {
  (void)module;
  unsigned long long address;
  if (!PyArg_ParseTuple(args, "K", &address)) return NULL;
  return pyDoneCuda(pyLibrary->cudaHostUnregister((void *)(uintptr_t)address));
}

/* Whether the runtime knows the memory there. */
static PyObject *known(PyObject *module, PyObject *args) {
  (void)module;
  unsigned long long address;
  struct cudaPointerAttributes found;
  if (!PyArg_ParseTuple(args, "K", &address)) return NULL;
  const cudaError_t code =
      pyLibrary->cudaPointerGetAttributes(&found, (const void *)(uintptr_t)address);
  return PyBool_FromLong(code == cudaSuccess && found.type != cudaMemoryTypeUnregistered);
}

static PyObject *streamCreate(PyObject *module, PyObject *none) {
  (void)module;
  (void)none;
  cudaStream_t stream;
  const cudaError_t code = pyLibrary->cudaStreamCreate(&stream);
  return code == cudaSuccess ? PyLong_FromVoidPtr(stream) : pyRaiseCuda(code);
}

static PyObject *streamDestroy(PyObject *module, PyObject *object) {
  (void)module;
  cudaError_t code;
  cudaStream_t stream = pyValue(object, EP_STREAM);
  if (!stream) return NULL;
  ((ep_object_t *)object)->value = NULL;
  Py_BEGIN_ALLOW_THREADS;
  code = pyLibrary->cudaStreamDestroy(stream);
  Py_END_ALLOW_THREADS;
  return pyDoneCuda(code);
}

PyMethodDef pyRuntimeMethods[] = {{"load", load, METH_VARARGS, NULL},
                                  {"library", library, METH_NOARGS, NULL},
                                  {"set_device", setDevice, METH_VARARGS, NULL},
                                  {"get_device", getDevice, METH_NOARGS, NULL},
                                  {"device_count", deviceCount, METH_NOARGS, NULL},
                                  {"pin", pin, METH_VARARGS, NULL},
                                  {"settle", settle, METH_VARARGS, NULL},
                                  {"unpin", unpin, METH_VARARGS, NULL},
                                  {"known", known, METH_VARARGS, NULL},
                                  {"stream_create", streamCreate, METH_NOARGS, NULL},
                                  {"stream_destroy", streamDestroy, METH_O, NULL},
                                  {"stream_synchronize", pySynchronize, METH_O, NULL},
                                  {"read_dlpack", pyReadDlpack, METH_O, NULL},
                                  {"tensor_reader", pyTensorReader, METH_O, NULL},
                                  {"layout_info_kind", pyLayoutInfoKind, METH_O, NULL},
                                  {0}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                        "trefoil._c",
                                        "The C API of trefoil.ep; not for direct use.",
                                        -1,
                                        NULL,
                                        NULL,
                                        NULL,
                                        NULL,
                                        NULL};

static int fill(PyObject *module) {
  return pyErrorsInit(module) || pyObjectsInit(module) || pyTensorsInit(module) || pyDlpackInit() ||
         pyBundlesInit(module) || pyStructsInit() || PyModule_AddFunctions(module, pyCallMethods) ||
         PyModule_AddFunctions(module, pySetupMethods) ||
         PyModule_AddFunctions(module, pyRuntimeMethods);
}

PyMODINIT_FUNC PyInit__c(void);
PyMODINIT_FUNC PyInit__c(void) {
  PyObject *module = PyModule_Create(&definition);
  if (!module || !fill(module)) return module;
  Py_DECREF(module);
  return NULL;
}
