#include "fault_calls.h"

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <search.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);
void __libc_free(void *ptr);

/* ---- The libraries under test ---- */

enum { MAX_RANGES = 8 };
static struct range {
  uintptr_t from, to, base;
  const char *name;
} ranges[MAX_RANGES];
static int numRanges;

static int recordObject(struct dl_phdr_info *info, size_t bytes, void *arg) {
  static const char *const names[] = {"libtrefoil_host", "libnccl_ep_cpu"};
  (void)bytes, (void)arg;
  for (int n = 0; n < 2; n++) {
    if (!strstr(info->dlpi_name, names[n])) continue;
    for (int i = 0; i < info->dlpi_phnum && numRanges < MAX_RANGES; i++) {
      const ElfW(Phdr) *p = &info->dlpi_phdr[i];
      uintptr_t from = info->dlpi_addr + p->p_vaddr;
      if (p->p_type == PT_LOAD && (p->p_flags & PF_X))
        ranges[numRanges++] = (struct range){from, from + p->p_memsz, info->dlpi_addr, names[n]};
    }
  }
  return 0;
}

static const struct range *rangeOf(const void *address) {
  for (int i = 0; i < numRanges; i++)
    if ((uintptr_t)address >= ranges[i].from && (uintptr_t)address < ranges[i].to)
      return &ranges[i];
  return NULL;
}

__attribute__((constructor)) static void prepare(void) {
  void *frames[2];
  backtrace(frames, 2); /* loads its library now */
  dl_iterate_phdr(recordObject, NULL);
}

/* ---- Places ---- */

static fault_places_t *recorded;
static uint64_t target;
static _Atomic int active, hit;
static _Atomic int recordLock;
static _Thread_local int busy;

void faultStart(fault_places_t *places, uint64_t hash) {
  recorded = places;
  target = hash;
  hit = 0;
  active = 1;
}

int faultStop(void) {
  active = 0;
  return hit;
}

void faultPause(int paused) {
  busy = paused;
}

/* Of the callers within the libraries, up to eight. */
static uint64_t hashOfCallers(const char *what) {
  void *frames[24];
  int n = backtrace(frames, 24), used = 0;
  uint64_t hash = 14695981039346656037ull;
  for (const char *c = what; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211ull;
  for (int i = 0; i < n && used < 8; i++) {
    const struct range *r = rangeOf(frames[i]);
    if (!r) continue;
    used++;
    hash = (hash ^ ((uintptr_t)frames[i] - r->base)) * 1099511628211ull;
    hash = (hash ^ (uint64_t)(unsigned char)r->name[3]) * 1099511628211ull;
  }
  return hash ? hash : 1;
}

static void record(uint64_t hash, const char *what, const void *caller) {
  const struct range *r = rangeOf(caller);
  while (atomic_exchange(&recordLock, 1)) continue;
  int n = recorded->count, i = 0;
  while (i < n && recorded->places[i].hash != hash) i++;
  if (i == n && n < FAULT_MAX_PLACES) {
    fault_place_t *p = &recorded->places[n];
    p->hash = hash;
    snprintf(p->what, sizeof p->what, "%s", what);
    snprintf(p->from, sizeof p->from, "%s+0x%lx", r->name,
             (unsigned long)((uintptr_t)caller - r->base));
    recorded->count = n + 1;
  } else if (i == n) {
    recorded->lost++;
  }
  atomic_store(&recordLock, 0);
}

/* Whether this call is the one that fails. */
static int fails(const char *what, const void *caller) {
  if (!active || busy || !rangeOf(caller)) return 0;
  busy = 1;
  int saved = errno;
  uint64_t hash = hashOfCallers(what);
  if (recorded) record(hash, what, caller);
  int now = hash == target && !atomic_exchange(&hit, 1);
  errno = saved;
  busy = 0;
  return now;
}

#define CALLER      __builtin_return_address(0)
#define FAILS(what) fails(what, CALLER)
#define FAIL_WITH(e, value)                                                                        \
  do {                                                                                             \
    errno = (e);                                                                                   \
    return value;                                                                                  \
  } while (0)

/* ---- Blocks that live ---- */

enum { TABLE = 1 << 16 };
static struct block {
  void *ptr; /* NULL: never used; TOMB: freed */
  const void *caller;
} blocks[TABLE];
#define TOMB ((void *)1)
static _Atomic int tableLock;
static _Atomic long live;

static void *keep(void *ptr, const void *caller) {
  if (!ptr || !rangeOf(caller)) return ptr;
  while (atomic_exchange(&tableLock, 1)) continue;
  size_t i = ((uintptr_t)ptr >> 4) * 0x9e3779b97f4a7c15ull >> 48;
  while (blocks[i].ptr && blocks[i].ptr != TOMB) i = (i + 1) % TABLE;
  blocks[i] = (struct block){ptr, caller};
  live++;
  atomic_store(&tableLock, 0);
  return ptr;
}

static void forget(void *ptr) {
  if (!ptr) return;
  while (atomic_exchange(&tableLock, 1)) continue;
  size_t i = ((uintptr_t)ptr >> 4) * 0x9e3779b97f4a7c15ull >> 48;
  for (int n = 0; n < TABLE && blocks[i].ptr; n++, i = (i + 1) % TABLE) {
    if (blocks[i].ptr != ptr) continue;
    blocks[i].ptr = TOMB;
    live--;
    break;
  }
  atomic_store(&tableLock, 0);
}

long faultLiveBlocks(void) {
  return live;
}

void faultDescribeLive(char *text, unsigned long bytes) {
  size_t n = 0;
  text[0] = 0;
  for (int i = 0; i < TABLE && n + 40 < bytes; i++) {
    if (!blocks[i].ptr || blocks[i].ptr == TOMB) continue;
    const struct range *r = rangeOf(blocks[i].caller);
    n += (size_t)snprintf(text + n, bytes - n, " %s+0x%lx", r->name + 3,
                          (unsigned long)((uintptr_t)blocks[i].caller - r->base));
  }
}

/* ---- Memory ---- */

void *malloc(size_t bytes) {
  if (FAILS("malloc")) FAIL_WITH(ENOMEM, NULL);
  return keep(__libc_malloc(bytes), CALLER);
}

void *calloc(size_t count, size_t bytes) {
  if (FAILS("calloc")) FAIL_WITH(ENOMEM, NULL);
  return keep(__libc_calloc(count, bytes), CALLER);
}

void *realloc(void *old, size_t bytes) {
  if (FAILS("realloc")) FAIL_WITH(ENOMEM, NULL);
  void *fresh = __libc_realloc(old, bytes);
  if (fresh) forget(old);
  return keep(fresh, CALLER);
}

void *aligned_alloc(size_t align, size_t bytes) {
  if (FAILS("aligned_alloc")) FAIL_WITH(ENOMEM, NULL);
  return keep(__libc_memalign(align, bytes), CALLER);
}

int posix_memalign(void **out, size_t align, size_t bytes) {
  if (FAILS("posix_memalign")) return ENOMEM;
  void *ptr = keep(__libc_memalign(align, bytes), CALLER);
  if (!ptr) return ENOMEM;
  *out = ptr;
  return 0;
}

void free(void *ptr) {
  forget(ptr);
  __libc_free(ptr);
}

/* ---- The system ---- */

/* libc's function of the name. */
#define REAL(name)                                                                                 \
  static __typeof__(name) *real;                                                                   \
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name)

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (FAILS("mmap")) FAIL_WITH(ENOMEM, MAP_FAILED);
  return (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}

int memfd_create(const char *name, unsigned flags) {
  if (FAILS("memfd_create")) FAIL_WITH(EMFILE, -1);
  return (int)syscall(SYS_memfd_create, name, flags);
}

int ftruncate(int fd, off_t bytes) {
  if (FAILS("ftruncate")) FAIL_WITH(ENOSPC, -1);
  return (int)syscall(SYS_ftruncate, fd, bytes);
}

int posix_fallocate(int fd, off_t from, off_t bytes) {
  REAL(posix_fallocate);
  return FAILS("posix_fallocate") ? ENOSPC : real(fd, from, bytes);
}

int open(const char *path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  unsigned mode = flags & O_CREAT ? va_arg(args, unsigned) : 0;
  va_end(args);
  if (FAILS("open")) FAIL_WITH(EMFILE, -1);
  return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

FILE *fopen(const char *path, const char *mode) {
  REAL(fopen);
  if (FAILS("fopen")) FAIL_WITH(EMFILE, NULL);
  return real(path, mode);
}

int stat(const char *path, struct stat *info) {
  REAL(stat);
  if (FAILS("stat")) FAIL_WITH(EACCES, -1);
  return real(path, info);
}

int fstat(int fd, struct stat *info) {
  REAL(fstat);
  if (FAILS("fstat")) FAIL_WITH(EIO, -1);
  return real(fd, info);
}

int fcntl(int fd, int command, ...) {
  va_list args;
  va_start(args, command);
  long arg = va_arg(args, long);
  va_end(args);
  if (FAILS("fcntl")) FAIL_WITH(EMFILE, -1);
  return (int)syscall(SYS_fcntl, fd, command, arg);
}

int socket(int domain, int type, int protocol) {
  if (FAILS("socket")) FAIL_WITH(EMFILE, -1);
  return (int)syscall(SYS_socket, domain, type, protocol);
}

int bind(int fd, const struct sockaddr *name, socklen_t bytes) {
  if (FAILS("bind")) FAIL_WITH(EADDRINUSE, -1);
  return (int)syscall(SYS_bind, fd, name, bytes);
}

int listen(int fd, int backlog) {
  if (FAILS("listen")) FAIL_WITH(EOPNOTSUPP, -1);
  return (int)syscall(SYS_listen, fd, backlog);
}

int accept4(int fd, struct sockaddr *name, socklen_t *bytes, int flags) {
  REAL(accept4);
  if (FAILS("accept4")) FAIL_WITH(EMFILE, -1);
  return real(fd, name, bytes, flags);
}

int connect(int fd, const struct sockaddr *name, socklen_t bytes) {
  REAL(connect);
  if (FAILS("connect")) FAIL_WITH(ENOMEM, -1);
  return real(fd, name, bytes);
}

int getsockopt(int fd, int level, int option, void *value, socklen_t *bytes) {
  if (FAILS("getsockopt")) FAIL_WITH(ENOPROTOOPT, -1);
  return (int)syscall(SYS_getsockopt, fd, level, option, value, bytes);
}

int setsockopt(int fd, int level, int option, const void *value, socklen_t bytes) {
  if (FAILS("setsockopt")) FAIL_WITH(ENOPROTOOPT, -1);
  return (int)syscall(SYS_setsockopt, fd, level, option, value, bytes);
}

ssize_t send(int fd, const void *data, size_t bytes, int flags) {
  REAL(send);
  if (FAILS("send")) FAIL_WITH(ENOBUFS, -1);
  return real(fd, data, bytes, flags);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
  REAL(sendmsg);
  if (FAILS("sendmsg")) FAIL_WITH(ENOBUFS, -1);
  return real(fd, message, flags);
}

ssize_t recv(int fd, void *data, size_t bytes, int flags) {
  REAL(recv);
  if (FAILS("recv")) FAIL_WITH(ECONNRESET, -1);
  return real(fd, data, bytes, flags);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
  REAL(recvmsg);
  if (FAILS("recvmsg")) FAIL_WITH(ECONNRESET, -1);
  return real(fd, message, flags);
}

ssize_t getrandom(void *out, size_t bytes, unsigned flags) {
  if (FAILS("getrandom")) FAIL_WITH(ENOSYS, -1);
  return syscall(SYS_getrandom, out, bytes, flags);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*body)(void *),
                   void *arg) {
  REAL(pthread_create);
  return FAILS("pthread_create") ? EAGAIN : real(thread, attr, body, arg);
}

/* tsearch of libc, which allocates for the libraries. */
void *tsearch(const void *key, void **root, int (*compare)(const void *, const void *)) {
  REAL(tsearch);
  return FAILS("tsearch") ? NULL : real(key, root, compare);
}
