/* One mapping of a communicator's shared memory per process, shared by the ranks that live here. */
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "comm_internal.h"

typedef struct shm_map {
  struct shm_map *next;
  ep_comm_shm_t *shm;
  size_t bytes;
  ino_t inode;
  int refs;
} shm_map_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static shm_map_t *maps;

ncclResult_t epCommShmJoin(const ep_process_t *owner, uint64_t key, int numRanks,
                           ep_comm_shm_t **out, const char *func) {
  int fd;
  struct stat info;
  size_t bytes = epCommShmBytes(numRanks);
  EP_NCCL_TRY(epServerAskShm(owner, key, numRanks, &fd, func));
  if (fstat(fd, &info)) info.st_ino = 0;
  pthread_mutex_lock(&lock);
  shm_map_t *map = maps;
  while (map && map->inode != info.st_ino) map = map->next;
  if (!map && (map = calloc(1, sizeof *map))) {
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED) {
      free(map);
      map = NULL;
    } else {
      map->shm = base;
      map->bytes = bytes;
      map->inode = info.st_ino;
      map->shm->numRanks = numRanks; /* every process writes the same two values */
      map->shm->key = key;
      map->next = maps;
      maps = map;
    }
  }
  if (map) {
    map->refs++;
    *out = map->shm;
  }
  pthread_mutex_unlock(&lock);
  close(fd);
  EP_NCCL_CHECK(map, ncclSystemError,
                "%s: the shared memory of %d ranks (%zu bytes) cannot be mapped", func, numRanks,
                bytes);
  return ncclSuccess;
}

void epCommShmLeave(ep_comm_shm_t *shm) {
  pthread_mutex_lock(&lock);
  shm_map_t **at = &maps;
  while (*at && (*at)->shm != shm) at = &(*at)->next;
  shm_map_t *map = *at;
  if (map && --map->refs == 0) {
    *at = map->next;
    munmap(map->shm, map->bytes);
    free(map);
  }
  pthread_mutex_unlock(&lock);
}

void epCommShmForked(void) {
  pthread_mutex_init(&lock, NULL);
  maps = NULL;
}
