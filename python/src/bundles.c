/* The structs of tensors that every call reads, as types whose fields lie in the object. */
#include "module.h"

#include <stddef.h>
#include <structmember.h>

#define NUM_FIELDS(type) ((sizeof(type) - sizeof(PyObject)) / sizeof(PyObject *))

static PyObject **fieldsOf(PyObject *self) {
  return (PyObject **)(self + 1);
}

static int visitFields(PyObject *self, size_t count, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  for (size_t i = 0; i < count; i++) Py_VISIT(fieldsOf(self)[i]);
  return 0;
}

static int clearFields(PyObject *self, size_t count) {
  for (size_t i = 0; i < count; i++) Py_CLEAR(fieldsOf(self)[i]);
  return 0;
}

static void endBundle(PyObject *self, size_t count) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clearFields(self, count);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

#define FIELD(type, name)                                                                          \
  { #name, T_OBJECT_EX, offsetof(type, name), 0, NULL }
#define END                                                                                        \
  { NULL, 0, 0, 0, NULL }
static PyMemberDef layoutInfo[] = {
    FIELD(ep_layout_info_t, expert_counters),    FIELD(ep_layout_info_t, src_rank_counters),
    FIELD(ep_layout_info_t, expert_offsets),     FIELD(ep_layout_info_t, recv_total_counter),
    FIELD(ep_layout_info_t, recv_topk_idx_kind), END};
static PyMemberDef dispatchInputs[] = {FIELD(ep_dispatch_inputs_t, tokens),
                                       FIELD(ep_dispatch_inputs_t, topk_weights),
                                       FIELD(ep_dispatch_inputs_t, scales), END};
static PyMemberDef dispatchOutputs[] = {
    FIELD(ep_dispatch_outputs_t, tokens), FIELD(ep_dispatch_outputs_t, topk_weights),
    FIELD(ep_dispatch_outputs_t, scales), FIELD(ep_dispatch_outputs_t, topk_idx), END};
static PyMemberDef combineInputs[] = {FIELD(ep_combine_inputs_t, tokens),
                                      FIELD(ep_combine_inputs_t, topk_weights),
                                      FIELD(ep_combine_inputs_t, scales), END};
static PyMemberDef combineOutputs[] = {FIELD(ep_combine_outputs_t, tokens),
                                       FIELD(ep_combine_outputs_t, topk_weights), END};

#define BUNDLE(members, name, type)                                                                \
  static int members##Visit(PyObject *self, visitproc visit, void *arg) {                          \
    return visitFields(self, NUM_FIELDS(type), visit, arg);                                        \
  }                                                                                                \
  static int members##Clear(PyObject *self) {                                                      \
    return clearFields(self, NUM_FIELDS(type));                                                    \
  }                                                                                                \
  static void members##End(PyObject *self) {                                                       \
    endBundle(self, NUM_FIELDS(type));                                                             \
  }                                                                                                \
  static PyType_Slot members##Slots[] = {{Py_tp_members, members},                                 \
                                         {Py_tp_traverse, members##Visit},                         \
                                         {Py_tp_clear, members##Clear},                            \
                                         {Py_tp_dealloc, members##End},                            \
                                         {0, NULL}};                                               \
  static PyType_Spec members##Spec = {                                                             \
      "trefoil._c." name, sizeof(type), 0,                                                         \
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, members##Slots};
BUNDLE(layoutInfo, "LayoutInfo", ep_layout_info_t)
BUNDLE(dispatchInputs, "DispatchInputs", ep_dispatch_inputs_t)
BUNDLE(dispatchOutputs, "DispatchOutputs", ep_dispatch_outputs_t)
BUNDLE(combineInputs, "CombineInputs", ep_combine_inputs_t)
BUNDLE(combineOutputs, "CombineOutputs", ep_combine_outputs_t)

static struct {
  const char *name;
  PyType_Spec *spec;
  PyMemberDef *members;
  PyObject *type;
} kinds[EP_NUM_BUNDLES] = {
    [EP_LAYOUT_INFO] = {"LayoutInfo", &layoutInfoSpec, layoutInfo, NULL},
    [EP_DISPATCH_INPUTS] = {"DispatchInputs", &dispatchInputsSpec, dispatchInputs, NULL},
    [EP_DISPATCH_OUTPUTS] = {"DispatchOutputs", &dispatchOutputsSpec, dispatchOutputs, NULL},
    [EP_COMBINE_INPUTS] = {"CombineInputs", &combineInputsSpec, combineInputs, NULL},
    [EP_COMBINE_OUTPUTS] = {"CombineOutputs", &combineOutputsSpec, combineOutputs, NULL},
};

const void *pyBundle(PyObject *object, ep_bundle_t bundle) {
  if (PyObject_TypeCheck(object, (PyTypeObject *)kinds[bundle].type)) return object;
  PyErr_Format(PyExc_TypeError, "expected a trefoil.ep.%s, not %R", kinds[bundle].name,
               Py_TYPE(object));
  return NULL;
}

/* __slots__ names the fields, so that an object can be copied and pickled. */
static int nameFields(PyObject *type, const PyMemberDef *members) {
  PyObject *names = PyList_New(0);
  int bad = !names;
  for (; !bad && members->name; members++) {
    PyObject *name = PyUnicode_FromString(members->name);
    bad = !name || PyList_Append(names, name);
    Py_XDECREF(name);
  }
  bad = bad || PyObject_SetAttrString(type, "__slots__", names);
  Py_XDECREF(names);
  return bad;
}

static int addBundle(PyObject *module, int i) {
  kinds[i].type = PyType_FromSpec(kinds[i].spec);
  if (!kinds[i].type || nameFields(kinds[i].type, kinds[i].members)) return -1;
  Py_INCREF(kinds[i].type);
  return PyModule_AddObject(module, kinds[i].name, kinds[i].type);
}

int pyBundlesInit(PyObject *module) {
  for (int i = 0; i < EP_NUM_BUNDLES; i++) {
    if (addBundle(module, i)) return -1;
  }
  return 0;
}
