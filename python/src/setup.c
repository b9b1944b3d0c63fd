/* What is made once: communicators, groups, handles; and what may wait for other ranks. */
#include <string.h>

#include "module.h"

/* The communicator behind an object, NULL for None; -1 with an exception. */
static int readOwner(PyObject *object, ep_job_t *job) {
  if (object == Py_None) return 0;
  job->comm = pyValue(object, EP_COMM);
  job->owner = pyHold(&job->held, object);
  Py_INCREF(object);
  return job->comm ? 0 : -1;
}

static int failed(ep_job_t *job) {
  pyRelease(&job->held);
  return 1;
}

static PyObject *numberOf(ep_job_t *job) {
  return pyWait(job) ? NULL : PyLong_FromVoidPtr(job->result);
}

static PyObject *noneOf(ep_job_t *job) {
  if (pyWait(job)) return NULL;
  Py_RETURN_NONE;
}

static PyObject *uniqueId(PyObject *module, PyObject *none) {
  (void)module;
  (void)none;
  ncclUniqueId id;
  const ncclResult_t code = pyLibrary->ncclGetUniqueId(&id);
  if (code != ncclSuccess) return pyRaise(code, pyLibrary->ncclGetLastError(NULL));
  return PyBytes_FromStringAndSize(id.internal, sizeof id.internal);
}

static ncclResult_t runCommInit(ep_job_t *job) {
  return pyLibrary->ncclCommInitRank((ncclComm_t *)&job->result, job->ranks, job->id, job->rank);
}

/* comm_init(ranks, rank, id) -> int */
static PyObject *commInit(PyObject *module, PyObject *args) {
  (void)module;
  ep_job_t job = {.run = runCommInit, .ofNccl = 1};
  const char *id;
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(args, "iiy#", &job.ranks, &job.rank, &id, &bytes)) return NULL;
  if (bytes != sizeof job.id) {
    return PyErr_Format(PyExc_ValueError, "unique_id: %zd bytes, expected %zu", bytes,
                        sizeof job.id);
  }
  memcpy(&job.id, id, sizeof job.id);
  return numberOf(&job);
}

static ncclResult_t runCommDestroy(ep_job_t *job) {
  return pyLibrary->ncclCommDestroy(job->result);
}

static PyObject *commDestroy(PyObject *module, PyObject *object) {
  (void)module;
  ep_job_t job = {.run = runCommDestroy, .ofNccl = 1, .result = pyValue(object, EP_COMM)};
  if (!job.result) return NULL;
  ((ep_object_t *)object)->value = NULL;
  return noneOf(&job);
}

static PyObject *commAbort(PyObject *module, PyObject *object) {
  (void)module;
  ncclResult_t code;
  ncclComm_t comm = pyValue(object, EP_COMM);
  if (!comm) return NULL;
  ((ep_object_t *)object)->value = NULL;
  Py_BEGIN_ALLOW_THREADS;
  code = pyLibrary->ncclCommAbort(comm);
  Py_END_ALLOW_THREADS;
  if (code != ncclSuccess) return pyRaise(code, pyLibrary->ncclGetLastError(NULL));
  Py_RETURN_NONE;
}

static PyObject *commCount(PyObject *module, PyObject *object) {
  (void)module;
  int count = 0;
  ncclComm_t comm = pyValue(object, EP_COMM);
  if (!comm) return NULL;
  const ncclResult_t code = pyLibrary->ncclCommCount(comm, &count);
  if (code != ncclSuccess) return pyRaise(code, pyLibrary->ncclGetLastError(NULL));
  return PyLong_FromLong(count);
}

static ncclResult_t runCreateGroup(ep_job_t *job) {
  return pyLibrary->ncclEpCreateGroup((ncclEpGroup_t *)&job->result, job->comm, &job->groupConfig);
}

/* group_create(comm, config) -> int */
static PyObject *groupCreate(PyObject *module, PyObject *args) {
  (void)module;
  ep_job_t job = {.run = runCreateGroup};
  PyObject *comm, *config;
  if (!PyArg_ParseTuple(args, "OO", &comm, &config)) return NULL;
  if (pyReadGroupConfig(config, &job.groupConfig)) return NULL;
  if (readOwner(comm, &job) && failed(&job)) return NULL;
  return numberOf(&job);
}

static ncclResult_t runGroupDestroy(ep_job_t *job) {
  return pyLibrary->ncclEpGroupDestroy(job->group);
}

/* group_destroy(group, comm or None) */
static PyObject *groupDestroy(PyObject *module, PyObject *args) {
  (void)module;
  ep_job_t job = {.run = runGroupDestroy};
  PyObject *group, *comm;
  if (!PyArg_ParseTuple(args, "OO", &group, &comm)) return NULL;
  job.group = pyValue(group, EP_GROUP);
  if (!job.group || (readOwner(comm, &job) && failed(&job))) return NULL;
  return noneOf(&job);
}

static ncclResult_t runMaskClean(ep_job_t *job) {
  return pyLibrary->ncclEpMaskClean(job->group, job->stream);
}

/* mask_clean(group, comm or None, stream) */
static PyObject *maskClean(PyObject *module, PyObject *args) {
  (void)module;
  ep_job_t job = {.run = runMaskClean};
  PyObject *group, *comm, *stream;
  if (!PyArg_ParseTuple(args, "OOO", &group, &comm, &stream)) return NULL;
  job.group = pyValue(group, EP_GROUP);
  if (!job.group || pyReadStream(stream, &job.stream)) return NULL;
  if (readOwner(comm, &job) && failed(&job)) return NULL;
  return noneOf(&job);
}

/* handle_mem_size(group, layout, config, topk) -> int */
static PyObject *handleMemSize(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *object, *about;
  ncclEpHandleConfig_t config;
  size_t bytes = 0;
  int layout, topk;
  if (!PyArg_ParseTuple(args, "OiOi", &object, &layout, &about, &topk)) return NULL;
  ncclEpGroup_t group = pyValue(object, EP_GROUP);
  if (!group || pyReadHandleConfig(about, &config)) return NULL;
  const ncclResult_t code =
      pyLibrary->ncclEpHandleMemSize(group, (ncclEpLayout_t)layout, &config, &bytes, topk);
  return code == ncclSuccess ? PyLong_FromSize_t(bytes) : pyDone(code);
}

static ncclResult_t runInitHandle(ep_job_t *job) {
  return pyLibrary->ncclEpInitHandle((ncclEpHandle_t *)&job->result, job->group, job->layout,
                                     &job->handleConfig, job->topk, job->tensor);
}

/* The tensor is read while the call runs: its object stays. */
static int readJobTensor(PyObject *object, ep_job_t *job) {
  Py_INCREF(object);
  return pyReadTensor(pyHold(&job->held, object), 0, &job->tensor);
}

/* init_handle(group, comm or None, layout, config, topk, handle_mem or None) -> int */
static PyObject *initHandle(PyObject *module, PyObject *args) {
  (void)module;
  ep_job_t job = {.run = runInitHandle};
  PyObject *group, *comm, *config, *memory;
  int layout;
  if (!PyArg_ParseTuple(args, "OOiOiO", &group, &comm, &layout, &config, &job.topk, &memory)) {
    return NULL;
  }
  job.group = pyValue(group, EP_GROUP);
  job.layout = (ncclEpLayout_t)layout;
  if (!job.group || pyReadHandleConfig(config, &job.handleConfig)) return NULL;
  if ((readOwner(comm, &job) || readJobTensor(memory, &job)) && failed(&job)) return NULL;
  return numberOf(&job);
}

static ncclResult_t runCreateHandle(ep_job_t *job) {
  return pyLibrary->ncclEpCreateHandle((ncclEpHandle_t *)&job->result, job->group, job->layout,
                                       job->tensor, job->hasInfo ? &job->info : NULL,
                                       &job->handleConfig, job->stream);
}

static int readJobInfo(PyObject *object, ep_job_t *job) {
  job->hasInfo = object != Py_None;
  return job->hasInfo ? pyReadLayoutInfo(&job->held, object, &job->info) : 0;
}

/* create_handle(group, comm or None, layout, topk_idx, layout_info, config, stream) -> int */
static PyObject *createHandle(PyObject *module, PyObject *args) {
  (void)module;
  ep_job_t job = {.run = runCreateHandle};
  PyObject *group, *comm, *idx, *info, *config, *stream;
  int layout;
  if (!PyArg_ParseTuple(args, "OOiOOOO", &group, &comm, &layout, &idx, &info, &config, &stream)) {
    return NULL;
  }
  job.group = pyValue(group, EP_GROUP);
  job.layout = (ncclEpLayout_t)layout;
  if (!job.group || pyReadHandleConfig(config, &job.handleConfig)) return NULL;
  if (pyReadStream(stream, &job.stream)) return NULL;
  const int bad = readOwner(comm, &job) || readJobTensor(idx, &job) || readJobInfo(info, &job);
  if (bad && failed(&job)) return NULL;
  return numberOf(&job);
}

static ncclResult_t runHandleDestroy(ep_job_t *job) {
  return pyLibrary->ncclEpHandleDestroy(job->handle);
}

/* handle_destroy(handle, comm or None) */
static PyObject *handleDestroy(PyObject *module, PyObject *args) {
  (void)module;
  ep_job_t job = {.run = runHandleDestroy};
  PyObject *handle, *comm;
  if (!PyArg_ParseTuple(args, "OO", &handle, &comm)) return NULL;
  job.handle = pyValue(handle, EP_HANDLE);
  if (!job.handle || (readOwner(comm, &job) && failed(&job))) return NULL;
  return noneOf(&job);
}

static PyObject *answerOf(const ncclEpPreflight_t *p) {
  return Py_BuildValue("NssKnnnnnnn", PyBool_FromLong(p->supported), p->reason, p->limit,
                       p->nearest, p->group_device_bytes, p->group_shared_bytes,
                       p->group_host_bytes, p->handle_device_bytes, p->handle_shared_bytes,
                       p->handle_host_bytes, p->nccl_bytes);
}

/* preflight(config, layout, handle_config, topk, ranks, ranks_per_node) -> tuple of the fields */
static PyObject *preflight(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *about, *aboutHandle;
  ncclEpGroupConfig_t config;
  ncclEpHandleConfig_t handleConfig;
  ncclEpPreflight_t answer = NCCL_EP_PREFLIGHT_INIT;
  int layout, topk, ranks, perNode;
  if (!PyArg_ParseTuple(args, "OiOiii", &about, &layout, &aboutHandle, &topk, &ranks, &perNode)) {
    return NULL;
  }
  if (pyReadGroupConfig(about, &config) || pyReadHandleConfig(aboutHandle, &handleConfig)) {
    return NULL;
  }
  const ncclResult_t code = pyLibrary->ncclEpPreflight(
      &config, (ncclEpLayout_t)layout, &handleConfig, topk, ranks, perNode, &answer);
  return code == ncclSuccess ? answerOf(&answer) : pyDone(code);
}

PyMethodDef pySetupMethods[] = {{"unique_id", uniqueId, METH_NOARGS, NULL},
                                {"comm_init", commInit, METH_VARARGS, NULL},
                                {"comm_destroy", commDestroy, METH_O, NULL},
                                {"comm_abort", commAbort, METH_O, NULL},
                                {"comm_count", commCount, METH_O, NULL},
                                {"group_create", groupCreate, METH_VARARGS, NULL},
                                {"group_destroy", groupDestroy, METH_VARARGS, NULL},
                                {"mask_clean", maskClean, METH_VARARGS, NULL},
                                {"handle_mem_size", handleMemSize, METH_VARARGS, NULL},
                                {"init_handle", initHandle, METH_VARARGS, NULL},
                                {"create_handle", createHandle, METH_VARARGS, NULL},
                                {"handle_destroy", handleDestroy, METH_VARARGS, NULL},
                                {"preflight", preflight, METH_VARARGS, NULL},
                                {0}};
