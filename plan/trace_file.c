/* Reading .npz traces and .npy arrays. A member is read as it decompresses, into memory that grows with
 * what really comes, so sizes that lie cost nothing; the arrays' own headers say the rest
 * (plan/npy.h), and plan/trace_import.c makes the trace. */
#include "plan/trace_import.h"

#include "plan/error.h"

#ifndef TREFOIL_HAVE_TRACE_FILES

static trefoil_result_t failWithout(void) {
  return epFail(TREFOIL_INVALID_USAGE,
                "this build reads no trace files: it was made without libzip or jansson");
}
trefoil_result_t epTraceLoadBytes(const trefoil_trace_t **trace, const uint8_t *bytes,
                                  size_t numBytes, const trefoil_trace_hints_t *hints) {
  (void)trace, (void)bytes, (void)numBytes, (void)hints;
  return failWithout();
}
trefoil_result_t trefoilTraceLoad(const trefoil_trace_t **trace, const char *path,
                                  const trefoil_trace_hints_t *hints) {
  (void)trace, (void)path, (void)hints;
  return failWithout();
}

#else

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>
#include <zip.h>

static const size_t maxMemberBytes = (size_t)16 << 30;

typedef struct bytes {
  uint8_t *data;
  size_t size;
} bytes_t;

typedef trefoil_result_t (*read_fn_t)(void *from, uint8_t *to, size_t room, size_t *got);

/* Reads to the end, doubling the memory as data comes. */
static trefoil_result_t readAll(const char *name, read_fn_t read, void *from, bytes_t *out) {
  size_t room = 1 << 16, size = 0, got;
  uint8_t *data = malloc(room);
  trefoil_result_t result = data ? TREFOIL_OK : TREFOIL_SYSTEM_ERROR;
  while (result == TREFOIL_OK) {
    result = read(from, data + size, room - size, &got);
    if (result != TREFOIL_OK || got == 0) break;
    size += got;
    if (size < room) continue;
    uint8_t *more = room < maxMemberBytes ? realloc(data, 2 * room) : NULL;
    if (more) data = more;
    result = more ? TREFOIL_OK : TREFOIL_SYSTEM_ERROR;
    room *= 2;
    if (!more) epFail(result, "%s: too large for the memory", name);
  }
  if (result != TREFOIL_OK) {
    free(data);
    return result;
  }
  *out = (bytes_t){data, size};
  return TREFOIL_OK;
}

typedef struct member {
  const char *file, *name;
  zip_file_t *stream;
} member_t;

static trefoil_result_t readMemberPart(void *from, uint8_t *to, size_t room, size_t *got) {
  member_t *m = from;
  zip_int64_t n = zip_fread(m->stream, to, room);
  EP_CHECK(n >= 0, TREFOIL_INVALID_ARGUMENT, "%s: member %s is damaged: %s", m->file, m->name,
           zip_file_strerror(m->stream));
  *got = (size_t)n;
  return TREFOIL_OK;
}

/* Leaves *out as it is where the member does not exist. */
static trefoil_result_t readMember(zip_t *zip, const char *file, const char *name, bytes_t *out) {
  zip_int64_t index = zip_name_locate(zip, name, 0);
  if (index < 0) return TREFOIL_OK;
  member_t m = {file, name, zip_fopen_index(zip, (zip_uint64_t)index, 0)};
  EP_CHECK(m.stream, TREFOIL_INVALID_ARGUMENT, "%s: member %s cannot be read: %s", file, name,
           zip_strerror(zip));
  trefoil_result_t result = readAll(name, readMemberPart, &m, out);
  zip_fclose(m.stream);
  return result;
}

/* A positive integer of the note, or 0 where it is not stated. */
static trefoil_result_t noteInt(const json_t *root, const char *file, const char *key,
                                int64_t *value) {
  const json_t *v = json_object_get(root, key);
  if (!v) return TREFOIL_OK;
  EP_CHECK(json_is_integer(v) && json_integer_value(v) > 0, TREFOIL_INVALID_ARGUMENT,
           "%s: trefoil.json: %s is not a positive integer", file, key);
  *value = json_integer_value(v);
  return TREFOIL_OK;
}

static trefoil_result_t readNote(const json_t *root, ep_trace_parts_t *p, char **note) {
  const char *format = json_string_value(json_object_get(root, "format"));
  EP_CHECK(format && !strcmp(format, "trefoil-trace"), TREFOIL_INVALID_ARGUMENT,
           "%s: trefoil.json does not say \"format\": \"trefoil-trace\"", p->name);
  EP_CHECK(json_integer_value(json_object_get(root, "version")) == 1, TREFOIL_INVALID_ARGUMENT,
           "%s: trefoil.json is not of version 1", p->name);
  EP_TRY(noteInt(root, p->name, "num_ranks", &p->numRanks));
  EP_TRY(noteInt(root, p->name, "ranks_per_node", &p->ranksPerNode));
  EP_TRY(noteInt(root, p->name, "num_experts", &p->numExperts));
  EP_TRY(noteInt(root, p->name, "topk", &p->topk));
  EP_TRY(noteInt(root, p->name, "max_tokens", &p->maxTokens));
  const json_t *provenance = json_object_get(root, "provenance");
  EP_CHECK(!provenance || json_is_object(provenance), TREFOIL_INVALID_ARGUMENT,
           "%s: trefoil.json: provenance is not an object", p->name);
  *note = provenance ? json_dumps(provenance, JSON_SORT_KEYS) : NULL;
  p->note = *note;
  return TREFOIL_OK;
}

static trefoil_result_t parseNote(const bytes_t *text, ep_trace_parts_t *p, char **note) {
  json_error_t error;
  json_t *root = json_loadb((const char *)text->data, text->size, JSON_REJECT_DUPLICATES, &error);
  EP_CHECK(root, TREFOIL_INVALID_ARGUMENT, "%s: trefoil.json, line %d: %s", p->name, error.line,
           error.text);
  trefoil_result_t result = readNote(root, p, note);
  json_decref(root);
  return result;
}

typedef struct members {
  bytes_t idx, offsets, weights, json;
  char *note;
} members_t;

static trefoil_result_t readMembers(zip_t *zip, const char *file, const char *array, members_t *m) {
  char name[128];
  int n = snprintf(name, sizeof name, "%s.npy", array);
  EP_CHECK(n < (int)sizeof name, TREFOIL_INVALID_ARGUMENT, "%s: the array's name is too long",
           file);
  EP_TRY(readMember(zip, file, name, &m->idx));
  EP_CHECK(m->idx.data, TREFOIL_INVALID_ARGUMENT, "%s: has no array %s", file, array);
  EP_TRY(readMember(zip, file, "offsets.npy", &m->offsets));
  EP_TRY(readMember(zip, file, "topk_weights.npy", &m->weights));
  return readMember(zip, file, "trefoil.json", &m->json);
}

static trefoil_result_t importMembers(const trefoil_trace_t **trace, members_t *m,
                                      ep_trace_parts_t *p, const trefoil_trace_hints_t *hints) {
  ep_npy_t idx, offsets, weights;
  EP_TRY(epNpyParse("topk_idx", m->idx.data, m->idx.size, &idx));
  p->idx = &idx;
  if (m->offsets.data) {
    EP_TRY(epNpyParse("offsets", m->offsets.data, m->offsets.size, &offsets));
    p->offsets = &offsets;
  }
  if (m->weights.data) {
    EP_TRY(epNpyParse("topk_weights", m->weights.data, m->weights.size, &weights));
    p->weights = &weights;
  }
  if (m->json.data) EP_TRY(parseNote(&m->json, p, &m->note));
  return epTraceImport(trace, p, hints);
}

static trefoil_result_t loadZip(const trefoil_trace_t **trace, zip_t *zip, const char *file,
                                const trefoil_trace_hints_t *hints) {
  const char *array = hints && hints->array ? hints->array : "topk_idx";
  members_t m = {0};
  ep_trace_parts_t parts = {.name = file};
  trefoil_result_t result = readMembers(zip, file, array, &m);
  if (result == TREFOIL_OK) result = importMembers(trace, &m, &parts, hints);
  free(m.idx.data);
  free(m.offsets.data);
  free(m.weights.data);
  free(m.json.data);
  free(m.note);
  return result;
}

static trefoil_result_t loadNpy(const trefoil_trace_t **trace, const bytes_t *bytes,
                                const char *file, const trefoil_trace_hints_t *hints) {
  ep_npy_t idx;
  EP_TRY(epNpyParse(file, bytes->data, bytes->size, &idx));
  ep_trace_parts_t parts = {.name = file, .idx = &idx};
  return epTraceImport(trace, &parts, hints);
}

static int isNpy(const uint8_t *bytes, size_t n) {
  return n >= 6 && !memcmp(bytes, "\x93NUMPY", 6);
}

trefoil_result_t epTraceLoadBytes(const trefoil_trace_t **trace, const uint8_t *bytes,
                                  size_t numBytes, const trefoil_trace_hints_t *hints) {
  if (isNpy(bytes, numBytes)) {
    return loadNpy(trace, &(bytes_t){(uint8_t *)bytes, numBytes}, "memory", hints);
  }
  zip_error_t error;
  zip_error_init(&error);
  zip_source_t *source = zip_source_buffer_create(bytes, numBytes, 0, &error);
  zip_t *zip = source ? zip_open_from_source(source, ZIP_RDONLY, &error) : NULL;
  if (!zip) {
    if (source) zip_source_free(source);
    epFail(TREFOIL_INVALID_ARGUMENT, "neither .npz nor .npy: %s", zip_error_strerror(&error));
    zip_error_fini(&error);
    return TREFOIL_INVALID_ARGUMENT;
  }
  trefoil_result_t result = loadZip(trace, zip, "memory", hints);
  zip_discard(zip);
  zip_error_fini(&error);
  return result;
}

static trefoil_result_t readFilePart(void *from, uint8_t *to, size_t room, size_t *got) {
  *got = fread(to, 1, room, from);
  EP_CHECK(!ferror((FILE *)from), TREFOIL_SYSTEM_ERROR, "reading fails: %s", strerror(errno));
  return TREFOIL_OK;
}

/* An .npy file is read here; for anything else *handled stays 0. */
static trefoil_result_t tryNpyFile(const trefoil_trace_t **trace, const char *path,
                                   const trefoil_trace_hints_t *hints, int *handled) {
  FILE *file = fopen(path, "rb");
  EP_CHECK(file, TREFOIL_SYSTEM_ERROR, "%s: cannot be opened: %s", path, strerror(errno));
  uint8_t head[6];
  trefoil_result_t result = TREFOIL_OK;
  *handled = isNpy(head, fread(head, 1, sizeof head, file));
  if (*handled) {
    bytes_t all = {0};
    rewind(file);
    result = readAll(path, readFilePart, file, &all);
    if (result == TREFOIL_OK) result = loadNpy(trace, &all, path, hints);
    free(all.data);
  }
  fclose(file);
  return result;
}

trefoil_result_t trefoilTraceLoad(const trefoil_trace_t **trace, const char *path,
                                  const trefoil_trace_hints_t *hints) {
  EP_CHECK(trace && path, TREFOIL_INVALID_ARGUMENT, "the %s is NULL",
           trace ? "path" : "trace's out-parameter");
  int handled = 0;
  trefoil_result_t result = tryNpyFile(trace, path, hints, &handled);
  if (result != TREFOIL_OK || handled) return result;
  int code;
  zip_t *zip = zip_open(path, ZIP_RDONLY, &code);
  if (!zip) {
    zip_error_t error;
    zip_error_init_with_code(&error, code);
    epFail(TREFOIL_INVALID_ARGUMENT, "%s: neither .npz nor .npy: %s", path,
           zip_error_strerror(&error));
    zip_error_fini(&error);
    return TREFOIL_INVALID_ARGUMENT;
  }
  result = loadZip(trace, zip, path, hints);
  zip_discard(zip);
  return result;
}

#endif
