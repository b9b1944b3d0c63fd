/* trefoil doctor --hang. */
#ifndef TREFOIL_CLI_HANG_H
#define TREFOIL_CLI_HANG_H

/* files: NULL-terminated paths of progress records; returns an exit code. */
int cliHang(const char *const *files, int json);

#endif
