/* Writing .npz traces, so that equal traces give equal files: fixed dates, one compression level.
 * libzip writes beside the file and renames at the end. */
#include "trefoil/trace.h"

#include "plan/error.h"

#ifndef TREFOIL_HAVE_TRACE_FILES

trefoil_result_t trefoilTraceSave(const trefoil_trace_t *trace, const char *path) {
  (void)trace, (void)path;
  return epFail(TREFOIL_INVALID_USAGE,
                "this build writes no trace files: it was made without libzip or jansson");
}

#else

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <jansson.h>
#include <zip.h>

#include "plan/npy.h"

/* Hands memory (malloc'ed) to the archive as a member, with a fixed date: equal traces are equal
 * files. */
static trefoil_result_t addMember(zip_t *zip, const char *name, void *data, size_t size) {
  zip_source_t *source = data ? zip_source_buffer(zip, data, size, 1) : NULL;
  if (!source) free(data);
  zip_int64_t index = source ? zip_file_add(zip, name, source, ZIP_FL_OVERWRITE) : -1;
  if (source && index < 0) zip_source_free(source);
  EP_CHECK(index >= 0, TREFOIL_SYSTEM_ERROR, "member %s cannot be written: %s", name,
           data ? zip_strerror(zip) : "out of memory");
  zip_set_file_compression(zip, (zip_uint64_t)index, ZIP_CM_DEFLATE, 1);
  zip_file_set_dostime(zip, (zip_uint64_t)index, 0, 0x21, 0); /* 1980-01-01 */
  return TREFOIL_OK;
}

static trefoil_result_t addArray(zip_t *zip, const char *name, const ep_npy_t *a) {
  size_t bytes = (size_t)a->numItems * (size_t)a->itemBytes;
  char dtype[4] = {'<', a->kind, (char)('0' + a->itemBytes), 0};
  char *data = malloc(EP_NPY_HEADER_BYTES + bytes);
  EP_CHECK(data, TREFOIL_SYSTEM_ERROR, "out of memory: %zu bytes for %s", bytes, name);
  epNpyHeader(data, dtype, a->dims[0], a->dims[1]);
  if (bytes) memcpy(data + EP_NPY_HEADER_BYTES, a->data, bytes);
  return addMember(zip, name, data, EP_NPY_HEADER_BYTES + bytes);
}

static trefoil_result_t addIds(zip_t *zip, const trefoil_trace_t *t) {
  ep_npy_t a = {'i',  4,           2, {t->numTokens, t->shape.topk}, t->numTokens * t->shape.topk,
                NULL, {NULL, NULL}};
  a.data = (const uint8_t *)t->topkIdx;
  if (t->shape.numExperts > INT16_MAX + 1) return addArray(zip, "topk_idx.npy", &a);
  int16_t *narrow = malloc((size_t)a.numItems * sizeof *narrow + 1);
  EP_CHECK(narrow, TREFOIL_SYSTEM_ERROR, "out of memory for %lld ids", (long long)a.numItems);
  for (int64_t i = 0; i < a.numItems; i++) narrow[i] = (int16_t)t->topkIdx[i];
  a.data = (const uint8_t *)narrow;
  a.itemBytes = 2;
  trefoil_result_t result = addArray(zip, "topk_idx.npy", &a);
  free(narrow);
  return result;
}

static trefoil_result_t addMetadata(zip_t *zip, const trefoil_trace_t *t) {
  json_error_t error;
  json_t *provenance = json_loads(t->provenance, JSON_REJECT_DUPLICATES, &error);
  EP_CHECK(provenance, TREFOIL_INVALID_ARGUMENT, "the trace's provenance is no JSON object: %s",
           error.text);
  if (!json_is_object(provenance)) {
    json_decref(provenance);
    return epFail(TREFOIL_INVALID_ARGUMENT, "the trace's provenance is no JSON object");
  }
  json_t *root = json_pack(
      "{s:s, s:i, s:i, s:i, s:i, s:i, s:I, s:i, s:o}", "format", "trefoil-trace", "version", 1,
      "num_ranks", t->shape.numRanks, "ranks_per_node", t->shape.ranksPerNode, "num_experts",
      t->shape.numExperts, "topk", t->shape.topk, "max_tokens", (json_int_t)t->shape.maxTokens,
      "steps", t->numSteps, "provenance", provenance);
  char *text = root ? json_dumps(root, JSON_INDENT(2)) : NULL;
  json_decref(root);
  return addMember(zip, "trefoil.json", text, text ? strlen(text) : 0);
}

static trefoil_result_t addAll(zip_t *zip, const trefoil_trace_t *t) {
  EP_TRY(addIds(zip, t));
  int64_t columns = (int64_t)t->shape.numRanks + 1;
  ep_npy_t a = {'i', 8, 2, {t->numSteps, columns}, t->numSteps * columns, NULL, {NULL, NULL}};
  a.data = (const uint8_t *)t->offsets;
  EP_TRY(addArray(zip, "offsets.npy", &a));
  if (t->topkWeights) {
    a = (ep_npy_t){
        'f', 4, 2, {t->numTokens, t->shape.topk}, t->numTokens * t->shape.topk, NULL, {NULL, NULL}};
    a.data = (const uint8_t *)t->topkWeights;
    EP_TRY(addArray(zip, "topk_weights.npy", &a));
  }
  return addMetadata(zip, t);
}

trefoil_result_t trefoilTraceSave(const trefoil_trace_t *trace, const char *path) {
  EP_CHECK(trace && path, TREFOIL_INVALID_ARGUMENT, "the %s is NULL", trace ? "path" : "trace");
  struct stat found;
  EP_CHECK(stat(path, &found) || S_ISREG(found.st_mode), TREFOIL_SYSTEM_ERROR,
           "%s: cannot be written: it is not a regular file", path);
  int code;
  zip_t *zip = zip_open(path, ZIP_CREATE | ZIP_TRUNCATE, &code);
  if (!zip) {
    zip_error_t error;
    zip_error_init_with_code(&error, code);
    epFail(TREFOIL_SYSTEM_ERROR, "%s: cannot be written: %s", path, zip_error_strerror(&error));
    zip_error_fini(&error);
    return TREFOIL_SYSTEM_ERROR;
  }
  trefoil_result_t result = addAll(zip, trace);
  if (result == TREFOIL_OK && zip_close(zip) == 0) return TREFOIL_OK;
  if (result == TREFOIL_OK) {
    result = epFail(TREFOIL_SYSTEM_ERROR, "%s: cannot be written: %s", path, zip_strerror(zip));
  }
  zip_discard(zip);
  return result;
}

#endif
