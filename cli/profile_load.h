/* Profiles of libraries: JSON files into plain data (validate/profile.h). */
#ifndef TREFOIL_CLI_PROFILE_LOAD_H
#define TREFOIL_CLI_PROFILE_LOAD_H

#include "validate/library.h"
#include "validate/profile.h"

/* By name or path. TREFOIL_INVALID_ARGUMENT with a sentence: there is no such profile (those that exist are
 * named), or what is wrong with the file. */
trefoil_result_t cliProfileLoad(ep_profile_t *profile, const char *nameOrPath);
/* The profile of a library, by what it says of itself. */
trefoil_result_t cliProfileOf(ep_profile_t *profile, const ep_library_facts_t *facts);
/* 1: it takes everything in any shape, and nothing needs to be kept inside. */
int cliProfileIsFree(const ep_profile_t *profile);

#endif
