/* Fuzzes the progress records of `trefoil doctor --hang`: the input is cut into records, each a file.
 * Byte 0 says how many whole records are made passable (magic, version, sizes), so that most inputs
 * reach the judgement and not only the door. Whatever the bytes: a sentence and exit code 0 or 1. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "api/hang_record.h"
#include "cli/cli.h"
#include "cli/hang.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_FILES = 4 };

static void makePassable(ep_hang_record_t *r) {
  r->magic = EP_HANG_MAGIC;
  r->version = EP_HANG_VERSION;
  r->bytes = sizeof *r;
  if (r->numRanks < MAX_FILES) r->numRanks = MAX_FILES;
  r->rank &= MAX_FILES - 1;
  r->groupId &= 1;
  r->groupNo = 0;
  for (int k = 0; k < EP_HANG_KINDS; k++) {
    r->kinds[k].state %= 3;
    r->kinds[k].peer = r->kinds[k].peer % MAX_FILES;
    if (r->kinds[k].peer < -1) r->kinds[k].peer = -1;
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static int quiet;
  if (!quiet++ && !freopen("/dev/null", "w", stdout)) abort();
  if (size < 1) return 0;
  char paths[MAX_FILES][32];
  const char *files[MAX_FILES + 1] = {NULL};
  int fds[MAX_FILES], n = 0, numPassable = data[0] % (MAX_FILES + 1);
  const uint8_t *rest = data + 1, *end = data + size;
  while (n < MAX_FILES && (n == 0 || rest < end)) {
    ep_hang_record_t record;
    size_t left = (size_t)(end - rest), bytes = left < sizeof record ? left : sizeof record;
    memset(&record, 0, sizeof record);
    memcpy(&record, rest, bytes);
    if (n < numPassable) makePassable(&record);
    if (n < numPassable) bytes = sizeof record;
    rest += left < bytes ? left : bytes;
    fds[n] = memfd_create("record", MFD_CLOEXEC);
    if (fds[n] < 0 || write(fds[n], &record, bytes) != (ssize_t)bytes) abort();
    snprintf(paths[n], sizeof paths[n], "/proc/self/fd/%d", fds[n]);
    files[n] = paths[n];
    n++;
  }
  int code = cliHang(files, data[0] & 128);
  if (code != CLI_OK && code != CLI_FAILED) abort();
  for (int i = 0; i < n; i++) close(fds[i]);
  return 0;
}
