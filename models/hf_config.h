/* The config.json that Hugging Face keeps beside a model's weights, as a source of MoE shapes. */
#ifndef TREFOIL_MODELS_HF_CONFIG_H
#define TREFOIL_MODELS_HF_CONFIG_H

#include <jansson.h>

#include "trefoil/models.h"

/* Whether the object is such a file, and not one of our presets. */
int epIsHfConfig(const json_t *root);
/* The shape, named after the file's folder (or the file, if it is not called config.json); the
 * sentence of a failure names the file and the keys. Out-parameter untouched on failure. */
trefoil_result_t epHfMoe(const json_t *root, const char *file, trefoil_moe_t *moe);

#endif
