/* Progress records for `trefoil doctor --hang` (api/hang_record.h has the format). */
#ifndef TREFOIL_API_CPU_CPU_HANG_H
#define TREFOIL_API_CPU_CPU_HANG_H

#include "api/cpu/cpu.h"

void epHangOpen(ep_cpu_group_t *g);
void epHangClose(ep_cpu_group_t *g);
void epHangBegin(const ep_op_t *op);
void epHangWait(const ep_op_t *op, int peer, const char *what);
void epHangGo(const ep_op_t *op);
void epHangEnd(const ep_op_t *op);

#endif
