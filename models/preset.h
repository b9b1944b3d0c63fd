/* The presets that are built in: name and JSON text, ended by a NULL name. */
#ifndef TREFOIL_MODELS_PRESET_H
#define TREFOIL_MODELS_PRESET_H

typedef struct ep_preset {
  const char *name, *text;
} ep_preset_t;

extern const ep_preset_t epClusters[], epMoe[], epCosts[];

#endif
