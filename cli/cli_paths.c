/* Where the libraries are: relative to the program, in the build tree as in an installation. */
#include "cli/cli.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

const char *cliFindLibrary(const char *name, char *path, size_t pathBytes) {
  static const char *const folders[] = {
      // NOLINTNEXTLINE(bugprone-suspicious-missing-comma): it is one folder
      "", "/../api", "/../host", "/..", "/../lib", "/../" TREFOIL_LIBDIR, "/../lib64"};
  char self[4096];
  ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
  if (n > 0) {
    self[n] = 0;
    char *slash = strrchr(self, '/');
    if (slash) *slash = 0;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
      int len = snprintf(path, pathBytes, "%s%s/%s", self, folders[i], name);
      if (len > 0 && (size_t)len < pathBytes && access(path, R_OK) == 0) return path;
    }
  }
  snprintf(path, pathBytes, "%s", name);
  return path;
}
