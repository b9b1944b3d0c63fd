/* The presets that are built in: name and JSON text, ended by a NULL name; and how the text of a
 * preset or a file is found. */
#ifndef TREFOIL_MODELS_PRESET_H
#define TREFOIL_MODELS_PRESET_H

#include <stddef.h>

#include "trefoil/base.h"

typedef struct ep_preset {
  const char *name, *text;
} ep_preset_t;

extern const ep_preset_t epClusters[], epMoe[], epCosts[];

/* The i-th name, NULL outside. */
const char *epPresetName(const ep_preset_t *presets, int i);

typedef struct ep_text {
  const char *chars;
  size_t numBytes;
  char *owned; /* to be freed; NULL for a preset's text */
} ep_text_t;

/* The text behind a preset's name, or of the file at a path (it has a '/' or ends in ".json"). what:
 * the kind of preset, for sentences. */
trefoil_result_t epPresetRead(const char *what, const ep_preset_t *presets, const char *nameOrPath,
                              ep_text_t *text);

#endif
