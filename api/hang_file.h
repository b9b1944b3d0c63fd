/* The file of a progress record (hang_record.h), for both libraries. */
#ifndef TREFOIL_API_HANG_FILE_H
#define TREFOIL_API_HANG_FILE_H

#include "api/hang_record.h"
#include "api/object.h"

#define EP_HANG_FILE_BYTES 4096 /* a page, so that it can be mapped to a device */

typedef struct ep_hang_file {
  ep_hang_record_t *record; /* NULL: none is kept */
  char path[600];
} ep_hang_file_t;

/* Opens this rank's file in NCCL_EP_HANG_DIR and fills the fields that do not change; commHash tells
 * communicators apart, id the groups of one, both alike on all ranks. Without the variable, or where no file
 * can be written, record is NULL: diagnosis never makes a program fail. Why stands in the last error then. */
void epHangFileOpen(ep_hang_file_t *file, const struct ncclEpGroup *group, uint64_t commHash,
                    uint64_t id);
/* keep: the group ended badly; else the file is removed. */
void epHangFileClose(ep_hang_file_t *file, int keep);

#endif
