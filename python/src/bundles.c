/* The structs of tensors that every call reads, as types whose fields lie in the object. */
#include "module.h"

#include <stddef.h>
#include <structmember.h>

#define MOST_FIELDS      5
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

static int initBundle(PyObject *self, PyObject *args, PyObject *keywords, ep_bundle_t bundle);

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

#define BUNDLE(members, name, type, bundle)                                                        \
  static int members##Visit(PyObject *self, visitproc visit, void *arg) {                          \
    return visitFields(self, NUM_FIELDS(type), visit, arg);                                        \
  }                                                                                                \
  static int members##Clear(PyObject *self) {                                                      \
    return clearFields(self, NUM_FIELDS(type));                                                    \
  }                                                                                                \
  static void members##End(PyObject *self) {                                                       \
    endBundle(self, NUM_FIELDS(type));                                                             \
  }                                                                                                \
  static int members##Init(PyObject *self, PyObject *args, PyObject *keywords) {                   \
    return initBundle(self, args, keywords, bundle);                                               \
  }                                                                                                \
  static PyType_Slot members##Slots[] = {                                                          \
      {Py_tp_members, members},         {Py_tp_init, members##Init},                               \
      {Py_tp_traverse, members##Visit}, {Py_tp_clear, members##Clear},                             \
      {Py_tp_dealloc, members##End},    {0, NULL}};                                                \
  static PyType_Spec members##Spec = {                                                             \
      "trefoil._c." name, sizeof(type), 0,                                                         \
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, members##Slots};
BUNDLE(layoutInfo, "LayoutInfo", ep_layout_info_t, EP_LAYOUT_INFO)
BUNDLE(dispatchInputs, "DispatchInputs", ep_dispatch_inputs_t, EP_DISPATCH_INPUTS)
BUNDLE(dispatchOutputs, "DispatchOutputs", ep_dispatch_outputs_t, EP_DISPATCH_OUTPUTS)
BUNDLE(combineInputs, "CombineInputs", ep_combine_inputs_t, EP_COMBINE_INPUTS)
BUNDLE(combineOutputs, "CombineOutputs", ep_combine_outputs_t, EP_COMBINE_OUTPUTS)

static struct {
  const char *name;
  PyType_Spec *spec;
  PyMemberDef *members;
  PyObject *type, *names[MOST_FIELDS], *defaults[MOST_FIELDS]; /* NULL: None */
} kinds[EP_NUM_BUNDLES] = {
    [EP_LAYOUT_INFO] = {"LayoutInfo", &layoutInfoSpec, layoutInfo, NULL, {NULL}, {NULL}},
    [EP_DISPATCH_INPUTS] =
        {"DispatchInputs", &dispatchInputsSpec, dispatchInputs, NULL, {NULL}, {NULL}},
    [EP_DISPATCH_OUTPUTS] =
        {"DispatchOutputs", &dispatchOutputsSpec, dispatchOutputs, NULL, {NULL}, {NULL}},
    [EP_COMBINE_INPUTS] =
        {"CombineInputs", &combineInputsSpec, combineInputs, NULL, {NULL}, {NULL}},
    [EP_COMBINE_OUTPUTS] =
        {"CombineOutputs", &combineOutputsSpec, combineOutputs, NULL, {NULL}, {NULL}},
};

const void *pyBundle(PyObject *object, ep_bundle_t bundle) {
  if (PyObject_TypeCheck(object, (PyTypeObject *)kinds[bundle].type)) return object;
  PyErr_Format(PyExc_TypeError, "expected a trefoil.ep.%s, not %R", kinds[bundle].name,
               Py_TYPE(object));
  return NULL;
}

static void setField(PyObject **field, PyObject *value) {
  PyObject *before = *field;
  Py_INCREF(value);
  *field = value;
  Py_XDECREF(before);
}

/* The field of that name; -1: none. Names are one object, as a rule. */
static int fieldNamed(ep_bundle_t bundle, PyObject *name) {
  PyObject **names = kinds[bundle].names;
  for (int i = 0; i < MOST_FIELDS && names[i]; i++) {
    if (names[i] == name) return i;
  }
  for (int i = 0; i < MOST_FIELDS && names[i]; i++) {
    if (PyUnicode_Compare(names[i], name) == 0) return i;
  }
  return -1;
}

/* Fields by keyword; the others are as kinds says. */
static int initBundle(PyObject *self, PyObject *args, PyObject *keywords, ep_bundle_t bundle) {
  PyObject *name, *value;
  Py_ssize_t at = 0;
  if (PyTuple_Size(args)) {
    PyErr_Format(PyExc_TypeError, "%s() takes keyword arguments only", kinds[bundle].name);
    return -1;
  }
  for (int i = 0; i < MOST_FIELDS && kinds[bundle].names[i]; i++) {
    PyObject *otherwise = kinds[bundle].defaults[i];
    setField(&fieldsOf(self)[i], otherwise ? otherwise : Py_None);
  }
  while (keywords && PyDict_Next(keywords, &at, &name, &value)) {
    const int i = fieldNamed(bundle, name);
    if (i < 0) {
      PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument %R",
                   kinds[bundle].name, name);
      return -1;
    }
    setField(&fieldsOf(self)[i], value);
  }
  return 0;
}

/* layout_info_kind(object): the default of recv_topk_idx_kind. */
PyObject *pyLayoutInfoKind(PyObject *module, PyObject *kind) {
  (void)module;
  setField(&kinds[EP_LAYOUT_INFO].defaults[MOST_FIELDS - 1], kind);
  Py_RETURN_NONE;
}

/* __slots__ names the fields, so that an object can be copied and pickled. */
static int nameFields(int kind) {
  const PyMemberDef *members = kinds[kind].members;
  PyObject *names = PyList_New(0);
  int bad = !names;
  for (int i = 0; !bad && members[i].name; i++) {
    PyObject *name = kinds[kind].names[i] = PyUnicode_InternFromString(members[i].name);
    bad = !name || PyList_Append(names, name);
  }
  bad = bad || PyObject_SetAttrString(kinds[kind].type, "__slots__", names);
  Py_XDECREF(names);
  return bad;
}

static int addBundle(PyObject *module, int i) {
  kinds[i].type = PyType_FromSpec(kinds[i].spec);
  if (!kinds[i].type || nameFields(i)) return -1;
  Py_INCREF(kinds[i].type);
  return PyModule_AddObject(module, kinds[i].name, kinds[i].type);
}

int pyBundlesInit(PyObject *module) {
  for (int i = 0; i < EP_NUM_BUNDLES; i++) {
    if (addBundle(module, i)) return -1;
  }
  return 0;
}
