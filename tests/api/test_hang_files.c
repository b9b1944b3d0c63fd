/* The files of NCCL_EP_HANG_DIR where the folder is full, or others have been there before: a group is made
 * in any case, the last error says why no record is kept, nobody else's file is touched, none is left. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "small_tmpfs.h"
#include "team.h"
#include "test.h"

static char folder[64], said[600];
static int files; /* in the folder, while the group lives */
static mode_t mode;

static int numFiles(void) {
  DIR *dir = opendir(folder);
  int n = 0;
  for (struct dirent *e; dir && (e = readdir(dir));) {
    struct stat info;
    if (!strstr(e->d_name, ".hang")) continue;
    n++;
    if (!fstatat(dirfd(dir), e->d_name, &info, AT_SYMLINK_NOFOLLOW)) mode = info.st_mode;
  }
  if (dir) closedir(dir);
  return n;
}

static void makeGroup(team_rank_t *r) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpGroup_t group = NULL;
  config.num_experts = 4;
  config.max_dispatch_tokens_per_rank = 4;
  config.max_token_bytes = 64;
  teamOk(r, ncclEpCreateGroup(&group, r->comm, &config));
  snprintf(said, sizeof said, "%s", ncclEpGetLastError());
  files = numFiles();
  teamOk(r, ncclEpGroupDestroy(group));
}

/* The name of this process's first file. */
static const char *firstFile(void) {
  static char path[256];
  char host[64] = "";
  gethostname(host, sizeof host - 1);
  snprintf(path, sizeof path, "%s/nccl_ep.%s.%d.0.0.hang", folder, host, (int)getpid());
  return path;
}

static void groupInFolder(void) {
  setenv("NCCL_EP_HANG_DIR", folder, 1);
  const char *error = teamThreads(1, makeGroup, NULL);
  CHECK(!*error, "%s", error);
}

/* Each in a process of its own: the number of files counts from 0, and a mount is not for the others. */
static void inProcess(void (*body)(void)) {
  snprintf(folder, sizeof folder, "/tmp/trefoil-hang-XXXXXX");
  REQUIRE(mkdtemp(folder), "%s", strerror(errno));
  fflush(NULL);
  pid_t pid = fork();
  if (pid == 0) {
    testFailures = 0;
    body();
    fflush(NULL);
    _exit(testFailures ? 1 : 0);
  }
  int status = -1;
  waitpid(pid, &status, 0);
  CHECK(status == 0, "status 0x%x (7: SIGBUS)", status);
  CHECK(numFiles() == 0, "a file is left");
  rmdir(folder);
}

static void alone(void) {
  groupInFolder();
  CHECK(files == 1 && (mode & 07777) == 0600, "%d files, mode %o", files, (unsigned)mode);
}

TEST(a_record_is_its_users_alone) {
  inProcess(alone);
}

static int small = -1; /* a full file system */

static void full(void) {
  REQUIRE(fillFolder(small), "%s", strerror(errno));
  snprintf(folder, sizeof folder, "/proc/self/fd/%d", small);
  groupInFolder();
  CHECK(files == 0 && strstr(said, "No space left") && strstr(said, folder), "%d files: %s", files,
        said);
  CHECK(numFiles() == 0, "a file is left");
}

TEST(a_full_folder_kills_nobody) {
  small = smallTmpfs("64k");
  if (small < 0) SKIP("no file system can be made here (needs root)");
  inProcess(full);
  close(small);
}

static void linked(void) {
  char target[128], text[8] = "";
  snprintf(target, sizeof target, "%s/precious", folder);
  int fd = open(target, O_RDWR | O_CREAT, 0600);
  REQUIRE(write(fd, "kept", 4) == 4 && !symlink(target, firstFile()), "%s", strerror(errno));
  groupInFolder();
  CHECK(strstr(said, "another user's file, or a link"), "%s", said);
  CHECK(pread(fd, text, 7, 0) == 4 && !strcmp(text, "kept"), "the file became '%s'", text);
  close(fd);
  unlink(target);
  unlink(firstFile());
}

TEST(links_are_not_followed) {
  inProcess(linked);
}

static void occupied(void) {
  struct stat info;
  int fd = open(firstFile(), O_RDWR | O_CREAT, 0666);
  REQUIRE(!ftruncate(fd, 4096) && !fchown(fd, 65534, 65534), "%s", strerror(errno));
  groupInFolder();
  CHECK(strstr(said, "another user's file, or a link"), "%s", said);
  CHECK(!fstat(fd, &info) && info.st_nlink == 1, "it was removed");
  close(fd);
  unlink(firstFile());
}

TEST(files_of_others_are_left_alone) {
  if (geteuid() != 0) SKIP("needs root, to make a file of another user");
  inProcess(occupied);
}

static void leftOver(void) {
  int fd = open(firstFile(), O_RDWR | O_CREAT, 0600);
  groupInFolder();
  CHECK(files == 1 && (mode & 07777) == 0600, "%d files: %s", files, said);
  close(fd);
}

TEST(an_own_left_file_gives_way) {
  inProcess(leftOver);
}

int main(int argc, char **argv) {
#if defined(__SANITIZE_THREAD__)
  printf("skipped: ThreadSanitizer does not follow threads made after a fork\n");
  return 77;
#endif
  return testRunAll(argc, argv);
}
