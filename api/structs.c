/* Versioned structs: what the caller's size covers is read, the rest is zero, more is ignored. */
#include <string.h>

#include "api/object.h"

trefoil_result_t epCopyStruct(void *out, const void *in, const ep_struct_type_t *type) {
  EP_CHECK(in, TREFOIL_INVALID_ARGUMENT, "%s is NULL", type->name);
  unsigned head[2]; /* size, magic */
  memcpy(head, in, sizeof head);
  EP_CHECK(head[1] == NCCL_EP_MAGIC, TREFOIL_INVALID_ARGUMENT,
           "%s.magic is 0x%X; must be 0x%X (use its _INIT macro)", type->name, head[1],
           NCCL_EP_MAGIC);
  EP_CHECK(head[0] >= type->v1Bytes, TREFOIL_INVALID_ARGUMENT,
           "%s.size is %u; must be at least %zu (use its _INIT macro)", type->name, head[0],
           type->v1Bytes);
  memset(out, 0, type->bytes);
  memcpy(out, in, head[0] < type->bytes ? head[0] : type->bytes);
  return TREFOIL_OK;
}
