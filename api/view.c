/* Tensors: what every tensor must be, and what its place asks of it. The struct and its sizes are
 * read during the call only. */
#include <stdio.h>
#include <string.h>

#include "api/object.h"

static trefoil_result_t checkHead(const ncclEpTensor_t *t, const char *name) {
  EP_CHECK(t, TREFOIL_INVALID_ARGUMENT, "%s is NULL", name);
  EP_CHECK(t->magic == NCCL_EP_TENSOR_MAGIC, TREFOIL_INVALID_ARGUMENT,
           "%s: magic is 0x%X; must be 0x%X (NCCL_EP_TENSOR_INIT)", name, t->magic,
           NCCL_EP_TENSOR_MAGIC);
  EP_CHECK(t->size >= NCCL_EP_TENSOR_V1_SIZE, TREFOIL_INVALID_ARGUMENT,
           "%s: size is %u; must be at least %zu (NCCL_EP_TENSOR_INIT)", name, t->size,
           (size_t)NCCL_EP_TENSOR_V1_SIZE);
  EP_CHECK(t->sizes, TREFOIL_INVALID_ARGUMENT, "%s: sizes is NULL", name);
  return TREFOIL_OK;
}

static void nameDtypes(unsigned dtypes, char *text, size_t bytes) {
  size_t used = 0;
  text[0] = 0;
  for (unsigned d = 0; d < 13; d++) {
    if (!(dtypes >> d & 1)) continue;
    int n = snprintf(text + used, bytes - used, "%s%s", used ? ", " : "",
                     trefoilDtypeName((trefoil_dtype_t)d));
    used += (size_t)n;
    if (used >= bytes) return;
  }
}

static trefoil_result_t checkDtype(const ncclEpTensor_t *t, const ep_tensor_rule_t *rule) {
  unsigned d = (unsigned)t->datatype;
  if (d < 13 && (rule->dtypes >> d & 1)) return TREFOIL_OK;
  char legal[120];
  nameDtypes(rule->dtypes, legal, sizeof legal);
  return epFail(TREFOIL_INVALID_ARGUMENT, "%s: datatype is %s (%u); must be %s", rule->name,
                trefoilDtypeName((trefoil_dtype_t)d), d, legal);
}

static trefoil_result_t checkSizes(const ncclEpTensor_t *t, const ep_tensor_rule_t *rule) {
  EP_CHECK(t->ndim == rule->ndim, TREFOIL_INVALID_ARGUMENT, "%s: ndim is %u; must be %u",
           rule->name, t->ndim, rule->ndim);
  for (unsigned i = 0; i < t->ndim; i++) {
    size_t want = rule->sizes[i], got = t->sizes[i];
    if (want == EP_ANY) continue;
    int larger = rule->atLeast && i == 0;
    EP_CHECK(larger ? got >= want : got == want, TREFOIL_INVALID_ARGUMENT,
             "%s: sizes[%u] is %zu; must be %s%zu", rule->name, i, got, larger ? "at least " : "",
             want);
  }
  return TREFOIL_OK;
}

/* The whole tensor lies in the window, and data, if given, is the place that win_offset names: the
 * offset is what peers go by. */
static trefoil_result_t findInWindow(ncclEpGroup_t group, const ncclEpTensor_t *t, const char *name,
                                     size_t bytes, void **data) {
  ep_window_t w;
  trefoil_result_t result = epBackend.findWindow(group, t->win_hdl, &w);
  if (result != TREFOIL_OK) {
    return epFail(result, "%s: win_hdl %p is not a live window of the group's communicator", name,
                  (void *)t->win_hdl);
  }
  EP_CHECK(w.symmetric, TREFOIL_INVALID_ARGUMENT,
           "%s: win_hdl was registered without NCCL_WIN_COLL_SYMMETRIC", name);
  EP_CHECK(t->win_offset <= w.bytes && bytes <= w.bytes - t->win_offset, TREFOIL_INVALID_ARGUMENT,
           "%s: %zu bytes at win_offset %llu do not lie in the window's %zu bytes", name, bytes,
           (unsigned long long)t->win_offset, w.bytes);
  char *at = w.base + t->win_offset;
  EP_CHECK(!t->data || t->data == at, TREFOIL_INVALID_ARGUMENT,
           "%s: data is %p; the window at win_offset %llu is %p; must be equal, or data NULL", name,
           t->data, (unsigned long long)t->win_offset, (void *)at);
  *data = at;
  return TREFOIL_OK;
}

static trefoil_result_t findData(ncclEpGroup_t group, const ncclEpTensor_t *t, const char *name,
                                 size_t alignment, size_t bytes, void **out) {
  size_t below = alignment - 1; /* a power of two */
  void *data = t->data;
  if (t->win_hdl) EP_TRY(findInWindow(group, t, name, bytes, &data));
  EP_CHECK(data || !bytes, TREFOIL_INVALID_ARGUMENT,
           "%s: data is NULL and there is no window; only a tensor with a zero dimension may be so",
           name);
  *out = data;
  if (!bytes) return TREFOIL_OK;
  EP_CHECK(((uintptr_t)data & below) == 0, TREFOIL_INVALID_ARGUMENT,
           "%s: data is %p; must be a multiple of %zu bytes", name, data, alignment);
  EP_CHECK(!t->win_hdl || (t->win_offset & below) == 0, TREFOIL_INVALID_ARGUMENT,
           "%s: win_offset is %llu; must be a multiple of %zu bytes", name,
           (unsigned long long)t->win_offset, alignment);
  return TREFOIL_OK;
}

/* Fields are stored one by one: a struct made here and copied would wait for its own stores, and this
 * is a good part of a call's time. */
trefoil_result_t epViewTensor(ep_ranges_t *call, const ncclEpTensor_t *t,
                              const ep_tensor_rule_t *rule, ep_view_t *view) {
  EP_TRY(checkHead(t, rule->name));
  EP_TRY(checkDtype(t, rule));
  EP_TRY(checkSizes(t, rule));
  unsigned last = t->ndim - 1;
  size_t rows = 1, width = t->sizes[last], bytes = trefoilDtypeBytes((trefoil_dtype_t)t->datatype),
         all = 1;
  int overflow = 0;
  for (unsigned i = 0; i <= last; i++) {
    size_t n = t->sizes[i];
    if (n) overflow |= __builtin_mul_overflow(all, n, &all);
    if (i < last) rows *= n;
  }
  overflow |= __builtin_mul_overflow(all, bytes, &all) || all > (size_t)1 << 62;
  EP_CHECK(!overflow, TREFOIL_INVALID_ARGUMENT, "%s: sizes exceed 2^62 bytes", rule->name);
  void *data = NULL;
  size_t alignment = rule->alignment ? rule->alignment : bytes;
  all = rows && width ? all : 0;
  EP_TRY(findData(call->group, t, rule->name, alignment, all, &data));
  if (call->group->checkTensors) EP_TRY(epRangeCheck(call, rule->name, data, all, rule->written));
  view->data = data;
  view->ndim = t->ndim;
  view->dtype = t->datatype;
  view->windowed = t->win_hdl != NULL;
  for (unsigned i = 0; i < 4; i++) view->sizes[i] = i <= last ? t->sizes[i] : 0;
  view->rows = (int64_t)rows;
  view->rowBytes = width * bytes;
  return TREFOIL_OK;
}

trefoil_result_t epCheckAbsent(const ncclEpTensor_t *tensor, const char *name, const char *why) {
  EP_CHECK(!tensor, TREFOIL_INVALID_ARGUMENT, "%s must be NULL: %s", name, why);
  return TREFOIL_OK;
}

trefoil_result_t epViewCounter(ep_ranges_t *call, const ncclEpTensor_t *tensor, const char *name,
                               size_t least, unsigned dtypes, ep_counter_t *out) {
  memset(out, 0, sizeof *out);
  if (!tensor) return TREFOIL_OK;
  ep_tensor_rule_t rule = {
      .name = name, .ndim = 1, .sizes = {least}, .atLeast = 1, .written = 1, .dtypes = dtypes};
  ep_view_t v;
  EP_TRY(epViewTensor(call, tensor, &rule, &v));
  *out = (ep_counter_t){v.data, v.dtype == ncclInt64};
  return TREFOIL_OK;
}
