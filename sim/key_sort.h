/* A stable sort of ids by 64-bit keys. */
#ifndef TREFOIL_SIM_KEY_SORT_H
#define TREFOIL_SIM_KEY_SORT_H

#include <stddef.h>
#include <stdint.h>

typedef struct ep_keyed {
  uint64_t key;
  int32_t id;
} ep_keyed_t;

/* Ascending by key, equal keys in the order given. scratch: room for n. */
void epSortKeyed(ep_keyed_t *items, ep_keyed_t *scratch, size_t n);

#endif
