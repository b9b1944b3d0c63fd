/* The text of a preset or of a file. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/preset.h"
#include "plan/error.h"
#include "plan/regular_file.h"

const char *epPresetName(const ep_preset_t *presets, int i) {
  int n = 0;
  while (presets[n].name) n++;
  return i >= 0 && i < n ? presets[i].name : NULL;
}

static trefoil_result_t readFile(const char *path, ep_text_t *text) {
  enum { MAX_BYTES = 1 << 20 };
  FILE *file = NULL;
  EP_TRY(epOpenRegular(path, &file, NULL));
  char *chars = malloc(MAX_BYTES);
  size_t size = chars ? fread(chars, 1, MAX_BYTES, file) : 0;
  int failed = ferror(file);
  fclose(file);
  if (chars && !failed && size < MAX_BYTES) {
    *text = (ep_text_t){chars, size, chars};
    return TREFOIL_OK;
  }
  trefoil_result_t result;
  if (size == MAX_BYTES) {
    result = epFail(TREFOIL_INVALID_ARGUMENT, "%s: larger than 1 MiB", path);
  } else {
    result = epFail(TREFOIL_SYSTEM_ERROR, "%s: %s", path, chars ? "cannot be read" : "no memory");
  }
  free(chars);
  return result;
}

static trefoil_result_t failUnknown(const char *what, const ep_preset_t *presets,
                                    const char *name) {
  char known[360] = "";
  for (int i = 0; presets[i].name; i++) {
    size_t used = strlen(known);
    snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", presets[i].name);
  }
  return epFail(TREFOIL_INVALID_ARGUMENT, "no %s is called %.40s; known are %s, or a path", what,
                name, known);
}

trefoil_result_t epPresetRead(const char *what, const ep_preset_t *presets, const char *nameOrPath,
                              ep_text_t *text) {
  EP_CHECK(nameOrPath, TREFOIL_INVALID_ARGUMENT, "the %s's name is NULL", what);
  size_t length = strlen(nameOrPath);
  int isPath = strchr(nameOrPath, '/') || (length > 5 && !strcmp(nameOrPath + length - 5, ".json"));
  if (isPath) return readFile(nameOrPath, text);
  for (int i = 0; presets[i].name; i++) {
    if (strcmp(presets[i].name, nameOrPath)) continue;
    *text = (ep_text_t){presets[i].text, strlen(presets[i].text), NULL};
    return TREFOIL_OK;
  }
  return failUnknown(what, presets, nameOrPath);
}
