/* One mapping of a board per process, shared by the ranks that live here. */
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "comm_internal.h"

typedef struct board_map {
  struct board_map *next;
  ep_board_t *board;
  size_t bytes;
  ino_t inode;
  int refs;
} board_map_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static board_map_t *maps;

ncclResult_t epBoardJoin(const ep_process_t *owner, uint64_t key, int numRanks, ep_board_t **out,
                         const char *func) {
  int fd;
  struct stat info;
  size_t bytes = epBoardBytes(numRanks);
  EP_NCCL_TRY(epServerAskBoard(owner, key, numRanks, &fd, func));
  if (fstat(fd, &info)) info.st_ino = 0;
  pthread_mutex_lock(&lock);
  board_map_t *map = maps;
  while (map && map->inode != info.st_ino) map = map->next;
  if (!map && (map = calloc(1, sizeof *map))) {
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED) {
      free(map);
      map = NULL;
    } else {
      map->board = base;
      map->bytes = bytes;
      map->inode = info.st_ino;
      map->board->numRanks = numRanks; /* every process writes the same two values */
      map->board->key = key;
      map->next = maps;
      maps = map;
    }
  }
  if (map) {
    map->refs++;
    *out = map->board;
  }
  pthread_mutex_unlock(&lock);
  close(fd);
  EP_NCCL_CHECK(map, ncclSystemError, "%s: a board of %d ranks (%zu bytes) cannot be mapped", func,
                numRanks, bytes);
  return ncclSuccess;
}

void epBoardLeave(ep_board_t *board) {
  pthread_mutex_lock(&lock);
  board_map_t **at = &maps;
  while (*at && (*at)->board != board) at = &(*at)->next;
  board_map_t *map = *at;
  if (map && --map->refs == 0) {
    *at = map->next;
    munmap(map->board, map->bytes);
    free(map);
  }
  pthread_mutex_unlock(&lock);
}

void epBoardForked(void) {
  pthread_mutex_init(&lock, NULL);
  maps = NULL;
}
