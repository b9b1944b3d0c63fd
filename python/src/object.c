#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "module.h"

PyObject *pyObjectType;
static unsigned epoch;
static PyObject *cudaStreamName, *torchStreamName;
static const char *const kindNames[] = {"communicator", "group", "handle", "stream"};

void pyNextEpoch(void) {
  epoch++;
}

static PyObject *newObject(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  int kind;
  PyObject *number;
  if (keywords && PyDict_Size(keywords)) return PyErr_Format(PyExc_TypeError, "no keywords here");
  if (!PyArg_ParseTuple(args, "iO!", &kind, &PyLong_Type, &number)) return NULL;
  void *value = PyLong_AsVoidPtr(number);
  if (PyErr_Occurred()) return NULL;
  allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  ep_object_t *o = (ep_object_t *)make(type, 0);
  if (!o) return NULL;
  o->value = value;
  o->kind = kind;
  o->epoch = epoch;
  return (PyObject *)o;
}

static PyObject *getPtr(PyObject *self, void *closure) {
  (void)closure;
  return PyLong_FromVoidPtr(((ep_object_t *)self)->value);
}

static PyObject *getLive(PyObject *self, void *closure) {
  (void)closure;
  const ep_object_t *o = (ep_object_t *)self;
  return PyBool_FromLong(o->epoch == epoch && o->value);
}

/* The object counts as destroyed from here on: its pointer, which somebody must destroy. */
static PyObject *forget(PyObject *self, PyObject *none) {
  (void)none;
  ep_object_t *o = (ep_object_t *)self;
  o->value = NULL;
  Py_RETURN_NONE;
}

static PyGetSetDef objectFields[] = {
    {"ptr", getPtr, NULL, "The library's pointer as an int; 0 once destroyed.", NULL},
    {"live", getLive, NULL, "Whether it can be used: not destroyed, and of this process.", NULL},
    {0}};
static PyMethodDef objectMethods[] = {{"_forget", forget, METH_NOARGS, NULL}, {0}};
static PyType_Slot objectSlots[] = {{Py_tp_new, newObject},
                                    {Py_tp_getset, objectFields},
                                    {Py_tp_methods, objectMethods},
                                    {0, NULL}};
static PyType_Spec objectSpec = {"trefoil._c.Object", sizeof(ep_object_t), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, objectSlots};

static void raiseGone(ep_kind_t kind) {
  char sentence[64];
  snprintf(sentence, sizeof sentence, "the %s was destroyed", kindNames[kind]);
  pyRaise(ncclInvalidUsage,
          kind == EP_COMM
              ? "the communicator was destroyed or aborted, or Ctrl-C ended a call that "
                "waited for its ranks; its groups are lost with it"
              : sentence);
}

void *pyValue(PyObject *object, ep_kind_t kind) {
  const ep_object_t *o = (ep_object_t *)object;
  if (!PyObject_TypeCheck(object, (PyTypeObject *)pyObjectType) || o->kind != (int)kind) {
    PyErr_Format(PyExc_TypeError, "expected a %s, not %R", kindNames[kind], Py_TYPE(object));
  } else if (o->epoch != epoch) {
    pyRaise(ncclInvalidUsage, "the object was made before a fork of this process, or by a library "
                              "that is no longer in use");
  } else if (!o->value) {
    raiseGone(kind);
  } else {
    return o->value;
  }
  return NULL;
}

/* The pointer that an object of cuda.core's protocol answers. */
static PyObject *askStream(PyObject *object) {
  PyObject *pair = PyObject_CallMethodObjArgs(object, cudaStreamName, NULL);
  PyObject *number = pair ? PySequence_GetItem(pair, 1) : NULL;
  Py_XDECREF(pair);
  return number;
}

/* An object with a pointer: torch's attribute, which is read without a call of Python's, or the protocol. */
static int readForeignStream(PyObject *object, cudaStream_t *out) {
  PyObject *number = PyObject_GetAttr(object, torchStreamName);
  if (!number && PyErr_ExceptionMatches(PyExc_AttributeError)) {
    PyErr_Clear();
    number = askStream(object);
  }
  if (!number) return -1;
  *out = (cudaStream_t)PyLong_AsVoidPtr(number);
  Py_DECREF(number);
  return PyErr_Occurred() ? -1 : 0;
}

int pyReadStream(PyObject *object, cudaStream_t *out) {
  *out = NULL;
  if (object == Py_None) return 0;
  if (PyObject_TypeCheck(object, (PyTypeObject *)pyObjectType)) {
    *out = (cudaStream_t)pyValue(object, EP_STREAM);
    return *out ? 0 : -1;
  }
  if (!PyLong_Check(object)) return readForeignStream(object, out);
  *out = (cudaStream_t)PyLong_AsVoidPtr(object);
  return PyErr_Occurred() ? -1 : 0;
}

PyObject *pyAddType(PyObject *module, const char *name, PyType_Spec *spec) {
  PyObject *type = PyType_FromSpec(spec);
  if (!type) return NULL;
  Py_INCREF(type);
  return PyModule_AddObject(module, name, type) ? NULL : type;
}

int pyObjectsInit(PyObject *module) {
  cudaStreamName = PyUnicode_InternFromString("__cuda_stream__");
  torchStreamName = PyUnicode_InternFromString("cuda_stream");
  pyObjectType = pyAddType(module, "Object", &objectSpec);
  pthread_atfork(NULL, NULL, pyNextEpoch);
  return cudaStreamName && torchStreamName && pyObjectType ? 0 : -1;
}
