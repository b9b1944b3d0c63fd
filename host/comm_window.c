/* Windows: memory of every rank that every rank can address. Registering is a control exchange: each rank
 * shows in which segment of which process its memory lies, then maps the others' segments. A segment of
 * another process is mapped once in this process and shared by all windows in it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "comm_internal.h"

typedef struct {
  ep_process_t process;
  uint64_t segment, offset, bytes;
  char *local; /* for ranks of the same process */
  int32_t flags;
} window_record_t;

_Static_assert(sizeof(window_record_t) <= EP_SHOWN_BYTES, "a window's record fits");

struct ep_peer_map {
  ep_peer_map_t *next;
  uint64_t uid, segment;
  char *base;
  size_t bytes;
  int refs;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ep_peer_map_t *peerMaps;
static ncclWindow_t freeWindows;

/* ---- Segments of other processes ---- */

static ep_peer_map_t *findMap(uint64_t uid, uint64_t segment) {
  ep_peer_map_t *map = peerMaps;
  while (map && (map->uid != uid || map->segment != segment)) map = map->next;
  if (map) map->refs++;
  return map;
}

static ncclResult_t mapSegment(const window_record_t *record, int device, ep_peer_map_t **out,
                               const char *func) {
  int fd;
  size_t bytes;
  pthread_mutex_lock(&lock);
  ep_peer_map_t *map = findMap(record->process.uid, record->segment);
  pthread_mutex_unlock(&lock);
  if (map) {
    *out = map;
    return ncclSuccess;
  }
  EP_NCCL_TRY(epServerAskSegment(&record->process, record->segment, &fd, &bytes, func));
  if (record->offset > bytes || record->bytes > bytes - record->offset) {
    close(fd);
    return epNcclFail(ncclInvalidUsage, "%s: the memory was freed while it was being registered",
                      func);
  }
  char *there = record->local - record->offset; /* if it can be, at the owner's address */
  void *base = mmap(there, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  close(fd);
  EP_NCCL_CHECK(base != MAP_FAILED, ncclSystemError,
                "%s: %zu bytes of another process cannot be mapped", func, bytes);
  ep_mem_t mem = {.base = base,
                  .bytes = bytes,
                  .kind = EP_MEM_PEER,
                  .device = device,
                  .segment = record->segment};
  pthread_mutex_lock(&lock);
  map = findMap(record->process.uid, record->segment); /* another thread may have been faster */
  if (map) {
    munmap(base, bytes);
  } else if ((map = calloc(1, sizeof *map)) && epMemAdd(&mem) == cudaSuccess) {
    *map = (ep_peer_map_t){peerMaps, record->process.uid, record->segment, base, bytes, 1};
    peerMaps = map;
  } else {
    free(map);
    map = NULL;
    munmap(base, bytes);
  }
  pthread_mutex_unlock(&lock);
  EP_NCCL_CHECK(map, ncclSystemError, "%s: out of memory", func);
  *out = map;
  return ncclSuccess;
}

static void unmapSegment(ep_peer_map_t *map) {
  pthread_mutex_lock(&lock);
  if (--map->refs == 0) {
    ep_peer_map_t **at = &peerMaps;
    while (*at != map) at = &(*at)->next;
    *at = map->next;
    epMemForget(map->base);
    munmap(map->base, map->bytes);
    free(map);
  }
  pthread_mutex_unlock(&lock);
}

/* ---- The object ---- */

static ncclWindow_t newWindow(ncclComm_t comm, void *user, size_t bytes, int flags) {
  pthread_mutex_lock(&lock);
  ncclWindow_t win = freeWindows;
  if (win) freeWindows = win->next;
  pthread_mutex_unlock(&lock);
  if (!win && !(win = calloc(1, sizeof *win))) return NULL;
  size_t count = (size_t)comm->numRanks;
  win->comm = comm;
  win->user = user;
  win->bytes = bytes;
  win->flags = flags;
  win->numRanks = comm->numRanks;
  win->bases = calloc(count, sizeof *win->bases);
  win->sizes = calloc(count, sizeof *win->sizes);
  win->maps = calloc(count, sizeof *win->maps);
  return win;
}

static void freeWindow(ncclWindow_t win) {
  atomic_store(&win->magic, EP_DEAD_MAGIC);
  for (int r = 0; win->maps && r < win->numRanks; r++)
    if (win->maps[r]) unmapSegment(win->maps[r]);
  free(win->bases);
  free(win->sizes);
  free(win->maps);
  win->bases = NULL;
  win->sizes = NULL;
  win->maps = NULL;
  pthread_mutex_lock(&lock);
  win->next = freeWindows;
  freeWindows = win;
  pthread_mutex_unlock(&lock);
}

/* Takes a window (NULL: the first) off its communicator's list; NULL: it is not there. */
static ncclWindow_t takeOff(ncclComm_t comm, ncclWindow_t win) {
  pthread_mutex_lock(&lock);
  ncclWindow_t *at = &comm->windows;
  while (win && *at && *at != win) at = &(*at)->next;
  ncclWindow_t found = *at;
  if (found) *at = found->next;
  pthread_mutex_unlock(&lock);
  return found;
}

void epWindowsFree(ncclComm_t comm) {
  for (ncclWindow_t win; (win = takeOff(comm, NULL));) freeWindow(win);
}

/* ---- Registering ---- */

static ncclResult_t showWindow(ep_job_t *job, void *data) {
  ncclWindow_t win = job->u.window.made;
  window_record_t record = {
      .process = job->comm->self, .bytes = win->bytes, .local = win->user, .flags = win->flags};
  ep_mem_t mem;
  if (job->round > 0) return ncclSuccess; /* only tells that mapping went well */
  EP_NCCL_CHECK(win->bytes > 0 && win->user, ncclInvalidArgument, "%s: no memory given", job->func);
  EP_NCCL_CHECK(
      epMemFind(win->user, &mem) && mem.kind != EP_MEM_REGISTERED && mem.kind != EP_MEM_PEER,
      ncclInvalidArgument, "%s: %p is not memory of ncclMemAlloc (or cudaMalloc) of this process",
      job->func, (void *)win->user);
  size_t at = (size_t)(win->user - mem.base);
  EP_NCCL_CHECK(win->bytes <= mem.bytes - at, ncclInvalidArgument,
                "%s: %zu bytes at offset %zu do not fit the allocation of %zu bytes", job->func,
                win->bytes, at, mem.bytes);
  EP_NCCL_CHECK(((uintptr_t)win->user & (NCCL_WIN_REQUIRED_ALIGNMENT - 1)) == 0,
                ncclInvalidArgument, "%s: %p is not aligned to %d bytes; ncclMemAlloc's memory is",
                job->func, (void *)win->user, NCCL_WIN_REQUIRED_ALIGNMENT);
  record.segment = mem.segment;
  record.offset = mem.segmentOffset + at;
  memcpy(data, &record, sizeof record);
  return ncclSuccess;
}

static ncclResult_t mapRank(ep_job_t *job, int r, const window_record_t *record,
                            const window_record_t *mine) {
  ncclWindow_t win = job->u.window.made;
  EP_NCCL_CHECK(record->flags == mine->flags, ncclInvalidArgument,
                "%s: the flags are 0x%x on rank %d and 0x%x on rank %d", job->func, mine->flags,
                job->comm->rank, record->flags, r);
  EP_NCCL_CHECK(!(mine->flags & NCCL_WIN_COLL_SYMMETRIC) || record->bytes == mine->bytes,
                ncclInvalidArgument,
                "%s: a symmetric window has %llu bytes on rank %d and %llu on "
                "rank %d",
                job->func, (unsigned long long)mine->bytes, job->comm->rank,
                (unsigned long long)record->bytes, r);
  win->sizes[r] = (size_t)record->bytes;
  win->bases[r] = record->local;
  if (epCommSameProcess(job->comm, r)) return ncclSuccess;
  ncclResult_t result =
      mapSegment(record, epCommEntry(job->comm, r)->device, &win->maps[r], job->func);
  if (result == ncclSuccess) {
    win->bases[r] = win->maps[r]->base + record->offset;
    return ncclSuccess;
  }
  char why[512];
  snprintf(why, sizeof why, "%s", epSentence());
  if (epCommPeerLeft(job->comm, r))
    return epNcclFail(ncclRemoteError, "%s: %s", job->func, epSentence());
  return epNcclFail(result, "%s (memory of rank %d)", why, r);
}

static ncclResult_t takeWindow(ep_job_t *job, const void *const *all, bool *more) {
  ncclWindow_t win = job->u.window.made;
  window_record_t record, mine;
  *more = job->round == 0;
  if (job->round > 0) return ncclSuccess;
  EP_NCCL_CHECK(win->bases && win->sizes && win->maps, ncclSystemError, "%s: out of memory",
                job->func);
  memcpy(&mine, all[job->comm->rank], sizeof mine);
  for (int r = 0; r < job->comm->numRanks; r++) {
    memcpy(&record, all[r], sizeof record);
    EP_NCCL_TRY(mapRank(job, r, &record, &mine));
  }
  return ncclSuccess;
}

static void finishWindow(ep_job_t *job, ncclResult_t result) {
  ncclWindow_t win = job->u.window.made;
  if (result != ncclSuccess) {
    freeWindow(win);
    return;
  }
  atomic_store(&win->magic, EP_WINDOW_MAGIC);
  pthread_mutex_lock(&lock);
  win->next = job->comm->windows;
  job->comm->windows = win;
  job->comm->freeWindows = epWindowsFree;
  pthread_mutex_unlock(&lock);
  *job->u.window.out = win;
}

static ncclResult_t registerWindow(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win,
                                   int winFlags) {
  const char *func = "ncclCommWindowRegister";
  EP_NCCL_TRY(epCommUsable(comm, func));
  EP_NCCL_CHECK(win, ncclInvalidArgument, "%s: win is NULL", func);
  EP_NCCL_CHECK(!epInHostFunc(), ncclInvalidUsage, "%s was called from a host function", func);
  ep_job_t *job = epJobNew(comm, func);
  if (!job) return ncclSystemError;
  job->u.window.out = win;
  job->u.window.made = newWindow(comm, buff, size, winFlags);
  if (!job->u.window.made) {
    free(job);
    return epNcclFail(ncclSystemError, "%s: out of memory", func);
  }
  job->show = showWindow;
  job->take = takeWindow;
  job->finish = finishWindow;
  return epJobSubmit(job);
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win,
                                    int winFlags) {
  return epGroupRemember(registerWindow(comm, buff, size, win, winFlags));
}

static ncclResult_t getWindow(ncclWindow_t win, const char *func) {
  EP_NCCL_CHECK(win && ((uintptr_t)win & 7) == 0 && atomic_load(&win->magic) == EP_WINDOW_MAGIC,
                ncclInvalidArgument, "%s: %p is not a live window", func, (void *)win);
  return ncclSuccess;
}

/* Local: other ranks keep their addresses until they deregister. */
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
  const char *func = "ncclCommWindowDeregister";
  EP_NCCL_TRY(epCommGet(comm, func));
  if (!win) return ncclSuccess;
  EP_NCCL_TRY(getWindow(win, func));
  EP_NCCL_CHECK(win->comm == comm, ncclInvalidArgument,
                "%s: the window belongs to another communicator", func);
  if (takeOff(comm, win)) freeWindow(win);
  return ncclSuccess;
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void **outUserPtr) {
  EP_NCCL_TRY(epCommGet(comm, "ncclWinGetUserPtr"));
  EP_NCCL_TRY(getWindow(win, "ncclWinGetUserPtr"));
  EP_NCCL_CHECK(outUserPtr, ncclInvalidArgument, "ncclWinGetUserPtr: outUserPtr is NULL");
  *outUserPtr = win->user;
  return ncclSuccess;
}

ncclResult_t trefoilHostWindowRange(ncclComm_t comm, ncclWindow_t window, void **base,
                                    size_t *bytes, int *flags) {
  const char *func = "trefoilHostWindowRange";
  EP_NCCL_TRY(epCommGet(comm, func));
  pthread_mutex_lock(&lock);
  ncclWindow_t win = comm->windows;
  while (win && win != window) win = win->next;
  if (win && base) *base = win->user;
  if (win && bytes) *bytes = win->bytes;
  if (win && flags) *flags = win->flags;
  pthread_mutex_unlock(&lock);
  EP_NCCL_CHECK(win, ncclInvalidArgument, "%s: %p is not a live window of the communicator", func,
                (void *)window);
  return ncclSuccess;
}

static ncclResult_t lookup(ncclWindow_t window, size_t offset, int rank, void **outPtr,
                           const char *func) {
  EP_NCCL_TRY(getWindow(window, func));
  EP_NCCL_CHECK(outPtr, ncclInvalidArgument, "%s: outPtr is NULL", func);
  EP_NCCL_CHECK(rank >= 0 && rank < window->numRanks, ncclInvalidArgument,
                "%s: rank %d is not in [0, %d)", func, rank, window->numRanks);
  EP_NCCL_CHECK(offset <= window->sizes[rank], ncclInvalidArgument,
                "%s: offset %zu is past the %zu bytes of rank %d", func, offset,
                window->sizes[rank], rank);
  *outPtr = window->bases[rank] + offset;
  return ncclSuccess;
}

ncclResult_t trefoilHostPeerPointer(ncclWindow_t window, size_t offset, int rank, void **outPtr) {
  return lookup(window, offset, rank, outPtr, "trefoilHostPeerPointer");
}

ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void **outPtr) {
  void *ptr;
  EP_NCCL_TRY(lookup(window, offset, peer, &ptr, "ncclGetPeerDevicePointer"));
  EP_NCCL_CHECK(outPtr, ncclInvalidArgument, "ncclGetPeerDevicePointer: outPtr is NULL");
  int lsaSize = window->comm->lsaSize;
  *outPtr = peer / lsaSize == window->comm->rank / lsaSize ? ptr : NULL;
  return ncclSuccess;
}

ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t window, size_t offset, int lsaRank,
                                     void **outPtr) {
  const char *func = "ncclGetLsaDevicePointer";
  EP_NCCL_TRY(getWindow(window, func));
  int lsaSize = window->comm->lsaSize;
  EP_NCCL_CHECK(lsaRank >= 0 && lsaRank < lsaSize, ncclInvalidArgument,
                "%s: lsaRank %d is not in [0, %d)", func, lsaRank, lsaSize);
  return lookup(window, offset, window->comm->rank / lsaSize * lsaSize + lsaRank, outPtr, func);
}

/* ---- Memory for windows; plain registration ---- */

ncclResult_t ncclMemAlloc(void **ptr, size_t size) {
  EP_NCCL_CHECK(ptr, ncclInvalidArgument, "ncclMemAlloc: ptr is NULL");
  EP_NCCL_CHECK(epCaptureForbids("ncclMemAlloc") == cudaSuccess, ncclUnhandledCudaError,
                "ncclMemAlloc is not allowed while a stream captures");
  if (size == 0) {
    *ptr = NULL;
    return ncclSuccess;
  }
  return epMemAlloc(ptr, size, NCCL_WIN_REQUIRED_ALIGNMENT, EP_MEM_DEVICE, 0) == cudaSuccess
             ? ncclSuccess
             : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void *ptr) {
  if (!ptr) return ncclSuccess;
  return cudaFree(ptr) == cudaSuccess ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle) {
  EP_NCCL_TRY(epCommGet(comm, "ncclCommRegister"));
  EP_NCCL_CHECK(buff && size && handle, ncclInvalidArgument,
                "ncclCommRegister: buff or handle is NULL, or size is 0");
  *handle = buff;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) {
  (void)handle;
  return epCommGet(comm, "ncclCommDeregister");
}

void epWindowsForked(void) {
  pthread_mutex_init(&lock, NULL);
  peerMaps = NULL;
  freeWindows = NULL;
}
