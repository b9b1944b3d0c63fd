/* Calls that may wait for other ranks: Ctrl-C ends them. */
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "module.h"

#define SIGNAL_CHECK_NS 20000000 /* between looks for signals that came to another thread */

typedef struct {
  ep_job_t job;
  const ep_library_t *library;
  int device;
  ncclResult_t code;
  char sentence[2048];
  sem_t done;
  atomic_int users; /* the caller and the thread: the last one frees */
} ep_wait_t;

static const char *sentenceOf(const ep_wait_t *w) {
  return w->job.ofNccl ? w->library->ncclGetLastError(NULL) : w->library->ncclEpGetLastError();
}

static void runJob(ep_wait_t *w) {
  w->code = w->job.run(&w->job);
  if (w->code != ncclSuccess) snprintf(w->sentence, sizeof w->sentence, "%s", sentenceOf(w));
}

static void leave(ep_wait_t *w) {
  if (atomic_fetch_sub(&w->users, 1) > 1) return;
  sem_destroy(&w->done);
  free(w);
}

static void *jobThread(void *argument) {
  ep_wait_t *w = argument;
  w->library->cudaSetDevice(w->device);
  runJob(w);
  sem_post(&w->done);
  leave(w);
  return NULL;
}

/* The thread takes no signals: they are the main thread's. */
static int startThread(ep_wait_t *w) {
  sigset_t all, before;
  pthread_t thread;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int failed = pthread_create(&thread, NULL, jobThread, w);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!failed) pthread_detach(thread);
  return failed;
}

/* Whether it was posted within ns; a signal ends the wait early. */
static int waitFor(sem_t *done, long long ns) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  const long long end = until.tv_nsec + ns;
  until.tv_sec += end / 1000000000;
  until.tv_nsec = end % 1000000000;
  return sem_timedwait(done, &until) == 0;
}

/* 0: done; -1: a signal's handler raised, and the call was left behind: its communicator is not used again,
 * and what it reads of Python's stays for good. */
static int waitInMain(ep_wait_t *w) {
  for (;;) {
    int done;
    Py_BEGIN_ALLOW_THREADS;
    done = waitFor(&w->done, SIGNAL_CHECK_NS);
    Py_END_ALLOW_THREADS;
    if (done) return 0;
    if (!PyErr_CheckSignals()) continue;
    if (w->job.owner) ((ep_object_t *)w->job.owner)->value = NULL;
    return -1;
  }
}

static int runHere(ep_wait_t *w) {
  Py_BEGIN_ALLOW_THREADS;
  runJob(w);
  Py_END_ALLOW_THREADS;
  atomic_store(&w->users, 1);
  return 0;
}

static int isMainThread(void) {
  return getpid() == gettid();
}

static int runAndWait(ep_wait_t *w) {
  if (!isMainThread() || startThread(w)) return runHere(w);
  return waitInMain(w);
}

static ep_wait_t *makeWait(const ep_job_t *job) {
  ep_wait_t *w = calloc(1, sizeof *w);
  if (!w) return NULL;
  w->job = *job;
  w->library = pyLibrary;
  w->library->cudaGetDevice(&w->device);
  sem_init(&w->done, 0, 0);
  atomic_init(&w->users, 2);
  return w;
}

int pyWait(ep_job_t *job) {
  ep_wait_t *w = makeWait(job);
  if (!w) {
    pyRelease(&job->held);
    PyErr_NoMemory();
    return -1;
  }
  int bad = runAndWait(w);
  if (!bad) {
    job->result = w->job.result;
    pyRelease(&w->job.held);
    bad = w->code != ncclSuccess;
    if (bad) pyRaise(w->code, w->sentence);
  }
  leave(w);
  return bad ? -1 : 0;
}

/* ---- A stream --------------------------------------------------------------------------------- */

static void rest(int round) {
  const struct timespec nap = {0, round < 100 ? 20000 : 1000000};
  if (round >= 20) nanosleep(&nap, NULL);
}

/* In the main thread: asks, so that signals are acted on. The stream's work goes on if one raises. */
static int askStream(cudaStream_t stream) {
  cudaError_t code = cudaErrorNotReady;
  for (int round = 0; code == cudaErrorNotReady; round++) {
    Py_BEGIN_ALLOW_THREADS;
    code = pyLibrary->cudaStreamQuery(stream);
    if (code == cudaErrorNotReady) rest(round);
    Py_END_ALLOW_THREADS;
    if (PyErr_CheckSignals()) return -1;
  }
  return 0;
}

PyObject *pySynchronize(PyObject *module, PyObject *object) {
  (void)module;
  cudaStream_t stream;
  cudaError_t code;
  if (pyReadStream(object, &stream)) return NULL;
  if (isMainThread() && askStream(stream)) return NULL;
  Py_BEGIN_ALLOW_THREADS;
  code = pyLibrary->cudaStreamSynchronize(stream);
  Py_END_ALLOW_THREADS;
  return pyDoneCuda(code);
}
