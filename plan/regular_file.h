/* Files that a user names: regular ones alone, so that nothing is waited for (a FIFO without a writer) and
 * nothing is endless (a device). */
#ifndef TREFOIL_PLAN_REGULAR_FILE_H
#define TREFOIL_PLAN_REGULAR_FILE_H

#include "trefoil/base.h"

#include <stdint.h>
#include <stdio.h>

/* Opens it for reading; *size (may be NULL): its bytes. Fails with a sentence that begins with the path. */
trefoil_result_t epOpenRegular(const char *path, FILE **file, uint64_t *size);

#endif
