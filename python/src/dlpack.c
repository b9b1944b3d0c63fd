/* DLPack: tensors of other packages, by capsule or by the table of functions of their type
 * (https://dmlc.github.io/dlpack/latest/python_spec.html). */
#include "module.h"

#define MAJOR 1 /* of the table's version; fields stay as they are within it */

/* DLPackExchangeAPI. */
typedef struct ep_exchange {
  uint32_t major, minor;
  const struct ep_exchange *older;
  void *allocate, *toManaged, *fromManaged;
  int (*read)(void *object, ep_dl_tensor_t *out); /* may be NULL */
  void *currentStream;
} ep_exchange_t;

static PyObject *exchangeName;

int pyDlpackInit(void) {
  exchangeName = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  return exchangeName ? 0 : -1;
}

static const ep_exchange_t *exchangeIn(PyObject *type) {
  PyObject *capsule = PyObject_GetAttr(type, exchangeName);
  const ep_exchange_t *e = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
  Py_XDECREF(capsule);
  PyErr_Clear();
  while (e && e->major != MAJOR) e = e->older;
  return e && e->read ? e : NULL;
}

/* Of the type of the last object, which lives as long. */
static const ep_exchange_t *exchangeOf(PyObject *type) {
  static PyObject *last;
  static const ep_exchange_t *found;
  if (type == last) return found;
  found = exchangeIn(type);
  Py_INCREF(type);
  Py_XDECREF(last);
  last = type;
  return found;
}

int pyExchange(PyObject *object, ep_dl_tensor_t *out) {
  const ep_exchange_t *e = exchangeOf((PyObject *)Py_TYPE(object));
  if (!e) return 0;
  if (!e->read(object, out)) return 1;
  PyErr_Clear(); /* another way says why, or does without */
  return 0;
}

#define TYPE(code, bits) ((code) << 8 | (bits))
int pyDlpackType(const ep_dl_tensor_t *t) {
  switch (t->lanes == 1 ? TYPE(t->code, t->bits) : -1) {
  case TYPE(0, 8):
    return ncclInt8;
  case TYPE(0, 32):
    return ncclInt32;
  case TYPE(0, 64):
    return ncclInt64;
  case TYPE(1, 8):
  case TYPE(6, 8): /* bool */
    return ncclUint8;
  case TYPE(1, 32):
    return ncclUint32;
  case TYPE(1, 64):
    return ncclUint64;
  case TYPE(2, 16):
    return ncclFloat16;
  case TYPE(2, 32):
    return ncclFloat32;
  case TYPE(2, 64):
    return ncclFloat64;
  case TYPE(4, 16):
    return ncclBfloat16;
  case TYPE(10, 8):
    return ncclFloat8e4m3;
  case TYPE(12, 8):
    return ncclFloat8e5m2;
  default:
    return -1;
  }
}

int pyIsContiguous(const ep_dl_tensor_t *t) {
  int64_t expected = 1;
  int isPlain = 1;
  for (int i = t->ndim - 1; i >= 0; i--) {
    if (t->shape[i] == 0) return 1;
    isPlain = isPlain && (!t->strides || t->shape[i] == 1 || t->strides[i] == expected);
    expected *= t->shape[i];
  }
  return isPlain;
}

static PyObject *sizesOf(const int64_t *values, int count) {
  if (!values) Py_RETURN_NONE;
  PyObject *tuple = PyTuple_New(count);
  for (int i = 0; tuple && i < count; i++) {
    PyTuple_SetItem(tuple, i, PyLong_FromLongLong(values[i]));
  }
  return tuple;
}

/* (data, device type, ncclDataType_t or -1, (code, bits, lanes), shape, strides or None, whether it is
 * C-contiguous). The capsule stays as it is: who keeps it keeps the memory. */
PyObject *pyReadDlpack(PyObject *module, PyObject *capsule) {
  (void)module;
  const ep_dl_tensor_t *t = PyCapsule_GetPointer(capsule, "dltensor");
  if (!t) return NULL;
  PyObject *data = PyLong_FromVoidPtr((char *)t->data + t->byteOffset);
  return Py_BuildValue("Nii(iii)NNN", data, t->deviceType, pyDlpackType(t), t->code, t->bits,
                       t->lanes, sizesOf(t->shape, t->ndim), sizesOf(t->strides, t->ndim),
                       PyBool_FromLong(pyIsContiguous(t)));
}
