/* Tensors. What lies on a GPU, C-contiguous, in an object whose type has DLPack's table of functions (torch's
 * has) is read here, without a call of Python's; anything else by trefoil.ep.tensor's reader. */
#include "module.h"

#include <stddef.h>
#include <structmember.h>

#define DL_CUDA 2

PyObject *pyTensorType;
static PyObject *reader, *dataPtrName;

/* ---- Made ------------------------------------------------------------------------------------- */

static int readShape(PyObject *shape, ep_tensor_object_t *t) {
  const Py_ssize_t count = PyTuple_Size(shape);
  if (count > EP_MAX_DIMS) {
    PyErr_Format(PyExc_ValueError, "a tensor of %zd dimensions: at most %d", count, EP_MAX_DIMS);
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    t->sizes[i] = PyLong_AsSize_t(PyTuple_GetItem(shape, i));
  }
  t->tensor.ndim = (unsigned)count;
  return PyErr_Occurred() ? -1 : 0;
}

static void *addressIn(PyObject *storage) {
  PyObject *number = PyObject_CallMethodObjArgs(storage, dataPtrName, NULL);
  void *address = number ? PyLong_AsVoidPtr(number) : NULL;
  Py_XDECREF(number);
  return address;
}

static PyObject *kept(PyObject *object) {
  Py_INCREF(object);
  return object;
}

/* From what the reader returns: (data, type, shape, window, its offset, whether it is read-only, buffer, pin,
 * storage or None). */
static int fillFrom(PyObject *read, ep_tensor_object_t *t) {
  PyObject *data, *shape, *window, *buffer, *pin, *storage;
  unsigned long long offset;
  int datatype, readOnly;
  if (!PyArg_ParseTuple(read, "O!iO!O!KpOOO", &PyLong_Type, &data, &datatype, &PyTuple_Type, &shape,
                        &PyLong_Type, &window, &offset, &readOnly, &buffer, &pin, &storage)) {
    return -1;
  }
  t->tensor.data = PyLong_AsVoidPtr(data);
  t->tensor.datatype = (ncclDataType_t)datatype;
  t->tensor.win_hdl = (ncclWindow_t)PyLong_AsVoidPtr(window);
  t->tensor.win_offset = offset;
  t->readOnly = readOnly;
  t->buffer = kept(buffer);
  t->pin = kept(pin);
  if (PyErr_Occurred() || readShape(shape, t)) return -1;
  if (storage == Py_None) return 0;
  t->storageData = addressIn(storage);
  t->storage = kept(storage);
  return PyErr_Occurred() ? -1 : 0;
}

/* The one argument, where there is no other. */
static PyObject *onlyArgument(PyObject *args, PyObject *keywords) {
  const int alone = PyTuple_Size(args) == 1 && !(keywords && PyDict_Size(keywords));
  return alone ? PyTuple_GetItem(args, 0) : NULL;
}

/* Whether the object is a plain tensor on a GPU. */
static int fillAtOnce(PyObject *object, ep_tensor_object_t *t) {
  ep_dl_tensor_t d;
  if (pyLibrary->onHost || !object || !pyExchange(object, &d)) return 0;
  const int datatype = pyDlpackType(&d);
  if (d.deviceType != DL_CUDA || datatype < 0 || d.ndim > EP_MAX_DIMS || !pyIsContiguous(&d))
    return 0;
  t->tensor.data = (char *)d.data + d.byteOffset;
  t->tensor.datatype = (ncclDataType_t)datatype;
  t->tensor.ndim = (unsigned)d.ndim;
  for (int i = 0; i < d.ndim; i++) t->sizes[i] = (size_t)d.shape[i];
  t->buffer = kept(object);
  return 1;
}

static PyObject *newTensor(PyTypeObject *type, PyObject *args, PyObject *keywords) {
  allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  ep_tensor_object_t *t = (ep_tensor_object_t *)make(type, 0);
  if (!t) return NULL;
  t->tensor = NCCL_EP_TENSOR_INIT;
  t->tensor.sizes = t->sizes;
  if (fillAtOnce(onlyArgument(args, keywords), t)) return (PyObject *)t;
  PyObject *read = reader ? PyObject_Call(reader, args, keywords) : NULL;
  const int bad = !read || fillFrom(read, t);
  Py_XDECREF(read);
  if (!bad) return (PyObject *)t;
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "trefoil.ep is not imported");
  Py_DECREF(t);
  return NULL;
}

/* tensor_reader(function): called with the arguments of Tensor. */
PyObject *pyTensorReader(PyObject *module, PyObject *function) {
  (void)module;
  Py_XDECREF(reader);
  reader = kept(function);
  Py_RETURN_NONE;
}

/* ---- Used ------------------------------------------------------------------------------------- */

/* Refuses a tensor whose storage holds other memory by now; -1 with an exception. */
static int stays(const ep_tensor_object_t *t) {
  if (!t->storage) return 0;
  const void *now = addressIn(t->storage);
  if (!PyErr_Occurred() && now != t->storageData) {
    pyRaise(ncclInvalidArgument,
            "the storage of the tensor was resized since its ep.Tensor was made; "
            "make that again");
  }
  return PyErr_Occurred() ? -1 : 0;
}

int pyReadTensor(PyObject *object, int written, ncclEpTensor_t **out) {
  *out = NULL;
  if (object == Py_None) return 0;
  if (!PyObject_TypeCheck(object, (PyTypeObject *)pyTensorType)) {
    PyErr_Format(PyExc_TypeError, "expected a trefoil.ep.Tensor or None, not %R", Py_TYPE(object));
    return -1;
  }
  ep_tensor_object_t *t = (ep_tensor_object_t *)object;
  if (written && t->readOnly) {
    pyRaise(ncclInvalidArgument, "the tensor is an output, and its array is read-only");
    return -1;
  }
  *out = &t->tensor;
  return stays(t);
}

/* ---- The type --------------------------------------------------------------------------------- */

static int visit(PyObject *self, visitproc visit, void *arg) {
  ep_tensor_object_t *t = (ep_tensor_object_t *)self;
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(t->buffer);
  Py_VISIT(t->pin);
  Py_VISIT(t->storage);
  return 0;
}

static int clear(PyObject *self) {
  ep_tensor_object_t *t = (ep_tensor_object_t *)self;
  Py_CLEAR(t->storage);
  Py_CLEAR(t->pin);
  Py_CLEAR(t->buffer);
  return 0;
}

static void freeTensor(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

static PyObject *tensorPtr(PyObject *self, void *closure) {
  (void)closure;
  return PyLong_FromVoidPtr(&((ep_tensor_object_t *)self)->tensor);
}

static PyObject *tensorData(PyObject *self, void *closure) {
  (void)closure;
  return PyLong_FromVoidPtr(((ep_tensor_object_t *)self)->tensor.data);
}

static PyObject *tensorNumDims(PyObject *self, void *closure) {
  (void)closure;
  return PyLong_FromLong((long)((ep_tensor_object_t *)self)->tensor.ndim);
}

static PyObject *tensorDatatype(PyObject *self, void *closure) {
  (void)closure;
  return PyLong_FromLong(((ep_tensor_object_t *)self)->tensor.datatype);
}

static PyObject *tensorSizes(PyObject *self, void *closure) {
  const ep_tensor_object_t *t = (ep_tensor_object_t *)self;
  (void)closure;
  PyObject *sizes = PyTuple_New(t->tensor.ndim);
  for (unsigned i = 0; sizes && i < t->tensor.ndim; i++) {
    PyTuple_SetItem(sizes, i, PyLong_FromSize_t(t->sizes[i]));
  }
  return sizes;
}

static PyMemberDef tensorMembers[] = {
    {"buffer", T_OBJECT, offsetof(ep_tensor_object_t, buffer), READONLY, "What it was made of."},
    {"_pin", T_OBJECT, offsetof(ep_tensor_object_t, pin), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};
static PyGetSetDef tensorFields[] = {
    {"ptr", tensorPtr, NULL, "Address of the ncclEpTensor_t.", NULL},
    {"data", tensorData, NULL, "Address of the elements.", NULL},
    {"ndim", tensorNumDims, NULL, "Number of dimensions.", NULL},
    {"datatype", tensorDatatype, NULL, "The elements' ncclDataType_t.", NULL},
    {"sizes", tensorSizes, NULL, "Elements in each dimension, the slowest first.", NULL},
    {0}};
static PyType_Slot tensorSlots[] = {{Py_tp_new, newTensor},
                                    {Py_tp_dealloc, freeTensor},
                                    {Py_tp_traverse, visit},
                                    {Py_tp_clear, clear},
                                    {Py_tp_members, tensorMembers},
                                    {Py_tp_getset, tensorFields},
                                    {0, NULL}};
static PyType_Spec tensorSpec = {"trefoil._c.Tensor", sizeof(ep_tensor_object_t), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                                 tensorSlots};

int pyTensorsInit(PyObject *module) {
  dataPtrName = PyUnicode_InternFromString("data_ptr");
  pyTensorType = pyAddType(module, "Tensor", &tensorSpec);
  return dataPtrName && pyTensorType ? 0 : -1;
}
