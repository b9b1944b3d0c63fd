/* From the C API's configuration to the pure rules of plan/preflight.h. */
#ifndef TREFOIL_API_PREFLIGHT_CALL_H
#define TREFOIL_API_PREFLIGHT_CALL_H

#include "api/object.h"

void epLimitsOf(const ncclEpGroupConfig_t *config, ep_group_limits_t *out);

#endif
