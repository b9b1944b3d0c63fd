/* Small files of this user's own, which processes map: progress records and the rendezvous of ranks. */
#ifndef TREFOIL_API_OWN_FILE_H
#define TREFOIL_API_OWN_FILE_H

#include <stddef.h>

/* Makes a file that is not there yet, for this user alone, with all of its space reserved: a process that
 * maps it cannot meet a full file system (SIGBUS). The descriptor, or -1 and errno, and then there is no
 * file. */
int epOwnFileNew(const char *path, size_t bytes);
/* Opens one that is there: a regular file of this user's, no link, accessible to no other user. -1 and
 * errno; EPERM: it is something else. */
int epOwnFileOpen(const char *path);

#endif
