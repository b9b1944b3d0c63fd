/* Reading .npz traces and .npy arrays. The headers of all arrays and the metadata come first; when they fit
 * together the data is read in chunks as it decompresses (plan/npy.h), straight into the trace that
 * plan/trace_import.c makes. */
#include "plan/trace_import.h"

#include "plan/error.h"
#include "plan/regular_file.h"

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
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>
#include <zip.h>

/* A member of an archive, open for reading. */
typedef struct member {
  const char *file, *name;
  zip_file_t *stream; /* NULL: there is no such member */
  uint64_t size;      /* as the archive states it */
} member_t;

static trefoil_result_t readMemberPart(void *from, uint8_t *to, size_t room, size_t *got) {
  member_t *m = from;
  zip_int64_t n = zip_fread(m->stream, to, room);
  EP_CHECK(n >= 0, TREFOIL_INVALID_ARGUMENT, "%s: member %s is damaged: %s", m->file, m->name,
           zip_file_strerror(m->stream));
  *got = (size_t)n;
  return TREFOIL_OK;
}

/* Leaves the stream NULL where the member does not exist; one that is there twice is refused. */
static trefoil_result_t openMember(zip_t *zip, member_t *m) {
  zip_int64_t found = -1, entries = zip_get_num_entries(zip, 0);
  for (zip_int64_t i = 0; i < entries; i++) {
    const char *name = zip_get_name(zip, (zip_uint64_t)i, 0);
    if (!name || strcmp(name, m->name)) continue;
    EP_CHECK(found < 0, TREFOIL_INVALID_ARGUMENT, "%s: has member %s twice", m->file, m->name);
    found = i;
  }
  if (found < 0) return TREFOIL_OK;
  zip_stat_t stat;
  int known = zip_stat_index(zip, (zip_uint64_t)found, 0, &stat) == 0 && stat.valid & ZIP_STAT_SIZE;
  m->stream = known ? zip_fopen_index(zip, (zip_uint64_t)found, 0) : NULL;
  EP_CHECK(m->stream, TREFOIL_INVALID_ARGUMENT, "%s: member %s cannot be read: %s", m->file,
           m->name, zip_strerror(zip));
  m->size = stat.size;
  return TREFOIL_OK;
}

/* A positive integer of the metadata, or 0 where it is not stated. */
static trefoil_result_t readInt(const json_t *root, const char *file, const char *key,
                                int64_t *value) {
  const json_t *v = json_object_get(root, key);
  if (!v) return TREFOIL_OK;
  EP_CHECK(json_is_integer(v) && json_integer_value(v) > 0, TREFOIL_INVALID_ARGUMENT,
           "%s: trefoil.json: %s is not a positive integer", file, key);
  *value = json_integer_value(v);
  return TREFOIL_OK;
}

/* A typing error in a key would leave its value unread. */
static trefoil_result_t checkKeys(const json_t *root, const char *file) {
  static const char *const known[] = {"format",         "version",     "num_ranks",
                                      "ranks_per_node", "num_experts", "topk",
                                      "max_tokens",     "steps",       "provenance"};
  const char *key;
  json_t *value;
  json_object_foreach((json_t *)root, key, value) {
    int isKnown = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) isKnown |= !strcmp(key, known[i]);
    EP_CHECK(isKnown, TREFOIL_INVALID_ARGUMENT,
             "%s: trefoil.json: the key %.60s is not known; known are format, version, num_ranks, "
             "ranks_per_node, num_experts, topk, max_tokens, steps and provenance",
             file, key);
  }
  return TREFOIL_OK;
}

static trefoil_result_t readMetadata(const json_t *root, ep_trace_parts_t *p, char **out) {
  EP_CHECK(json_is_object(root), TREFOIL_INVALID_ARGUMENT, "%s: trefoil.json is not an object",
           p->name);
  const char *format = json_string_value(json_object_get(root, "format"));
  EP_CHECK(format && !strcmp(format, "trefoil-trace"), TREFOIL_INVALID_ARGUMENT,
           "%s: trefoil.json does not say \"format\": \"trefoil-trace\"", p->name);
  EP_CHECK(json_integer_value(json_object_get(root, "version")) == 1, TREFOIL_INVALID_ARGUMENT,
           "%s: trefoil.json is not of version 1", p->name);
  EP_TRY(checkKeys(root, p->name));
  EP_TRY(readInt(root, p->name, "num_ranks", &p->numRanks));
  EP_TRY(readInt(root, p->name, "ranks_per_node", &p->ranksPerNode));
  EP_TRY(readInt(root, p->name, "num_experts", &p->numExperts));
  EP_TRY(readInt(root, p->name, "topk", &p->topk));
  EP_TRY(readInt(root, p->name, "max_tokens", &p->maxTokens));
  EP_TRY(readInt(root, p->name, "steps", &p->numSteps));
  const json_t *provenance = json_object_get(root, "provenance");
  EP_CHECK(!provenance || json_is_object(provenance), TREFOIL_INVALID_ARGUMENT,
           "%s: trefoil.json: provenance is not an object", p->name);
  *out = provenance ? json_dumps(provenance, JSON_SORT_KEYS) : NULL;
  p->provenance = *out;
  return TREFOIL_OK;
}

static trefoil_result_t parseMetadata(member_t *m, ep_trace_parts_t *p, char **out) {
  enum { MAX_BYTES = 1 << 20 };
  EP_CHECK(m->size <= MAX_BYTES, TREFOIL_INVALID_ARGUMENT,
           "%s: trefoil.json has %llu bytes: must be at most 1 MiB", p->name,
           (unsigned long long)m->size);
  char *text = malloc(MAX_BYTES + 1);
  EP_CHECK(text, TREFOIL_SYSTEM_ERROR, "%s: out of memory for trefoil.json", p->name);
  size_t size = 0, got = 1;
  trefoil_result_t result = TREFOIL_OK;
  for (; result == TREFOIL_OK && got > 0 && size <= MAX_BYTES; size += got) {
    result = readMemberPart(m, (uint8_t *)text + size, MAX_BYTES + 1 - size, &got);
    if (result != TREFOIL_OK) got = 0;
  }
  if (result == TREFOIL_OK && size > MAX_BYTES) {
    result = epFail(TREFOIL_INVALID_ARGUMENT, "%s: trefoil.json must be at most 1 MiB", p->name);
  }
  json_error_t error;
  json_t *root =
      result == TREFOIL_OK ? json_loadb(text, size, JSON_REJECT_DUPLICATES, &error) : NULL;
  free(text);
  EP_TRY(result);
  EP_CHECK(root, TREFOIL_INVALID_ARGUMENT, "%s: trefoil.json, line %d: %s", p->name, error.line,
           error.text);
  result = readMetadata(root, p, out);
  json_decref(root);
  return result;
}

typedef struct members {
  member_t idx, offsets, weights, json;
  char idxName[128];
  char *provenance;
} members_t;

/* "has no array X; its arrays are A, B" */
static trefoil_result_t failMissing(zip_t *zip, const char *file, const char *array) {
  char known[300] = "";
  for (zip_int64_t i = 0, n = zip_get_num_entries(zip, 0); i < n; i++) {
    const char *name = zip_get_name(zip, (zip_uint64_t)i, 0);
    size_t length = name ? strlen(name) : 0, used = strlen(known);
    if (length < 5 || strcmp(name + length - 4, ".npy") || used + length > sizeof known) continue;
    snprintf(known + used, sizeof known - used, "%s%.*s", used ? ", " : "", (int)length - 4, name);
  }
  return epFail(TREFOIL_INVALID_ARGUMENT, "%s: has no array %.100s; its arrays are %s", file, array,
                *known ? known : "none");
}

static trefoil_result_t openMembers(zip_t *zip, const char *file, const char *array, members_t *m) {
  int n = snprintf(m->idxName, sizeof m->idxName, "%s.npy", array);
  EP_CHECK(n < (int)sizeof m->idxName, TREFOIL_INVALID_ARGUMENT, "%s: the array's name is too long",
           file);
  m->idx = (member_t){.file = file, .name = m->idxName};
  m->offsets = (member_t){.file = file, .name = "offsets.npy"};
  m->weights = (member_t){.file = file, .name = "topk_weights.npy"};
  m->json = (member_t){.file = file, .name = "trefoil.json"};
  EP_TRY(openMember(zip, &m->idx));
  if (!m->idx.stream) return failMissing(zip, file, array);
  EP_TRY(openMember(zip, &m->offsets));
  EP_TRY(openMember(zip, &m->weights));
  return openMember(zip, &m->json);
}

/* Headers and the metadata first: no data is read before they fit together. */
static trefoil_result_t openArray(const char *name, member_t *m, ep_npy_t *npy,
                                  const ep_npy_t **part) {
  if (!m->stream) return TREFOIL_OK;
  EP_TRY(epNpyOpen(name, (ep_stream_t){readMemberPart, m}, m->size, npy));
  *part = npy;
  return TREFOIL_OK;
}

static trefoil_result_t importMembers(const trefoil_trace_t **trace, members_t *m,
                                      ep_trace_parts_t *p, const trefoil_trace_hints_t *hints) {
  ep_npy_t idx, offsets, weights;
  trefoil_result_t result = openArray("topk_idx", &m->idx, &idx, &p->idx);
  if (result == TREFOIL_OK) result = openArray("offsets", &m->offsets, &offsets, &p->offsets);
  if (result == TREFOIL_OK) result = openArray("topk_weights", &m->weights, &weights, &p->weights);
  if (result != TREFOIL_OK) {
    char why[400];
    snprintf(why, sizeof why, "%s", trefoilLastError());
    return strncmp(why, p->name, strlen(p->name)) ? epFail(result, "%s: %s", p->name, why) : result;
  }
  if (m->json.stream) EP_TRY(parseMetadata(&m->json, p, &m->provenance));
  return epTraceImport(trace, p, hints);
}

static void closeMember(member_t *m) {
  if (m->stream) zip_fclose(m->stream);
}

static trefoil_result_t loadZip(const trefoil_trace_t **trace, zip_t *zip, const char *file,
                                const trefoil_trace_hints_t *hints) {
  const char *array = hints && hints->array ? hints->array : "topk_idx";
  members_t m = {.provenance = NULL};
  ep_trace_parts_t parts = {.name = file};
  trefoil_result_t result = openMembers(zip, file, array, &m);
  if (result == TREFOIL_OK) result = importMembers(trace, &m, &parts, hints);
  closeMember(&m.idx);
  closeMember(&m.offsets);
  closeMember(&m.weights);
  closeMember(&m.json);
  free(m.provenance);
  return result;
}

static trefoil_result_t loadNpy(const trefoil_trace_t **trace, const ep_npy_t *idx,
                                const char *file, const trefoil_trace_hints_t *hints) {
  ep_trace_parts_t parts = {.name = file, .idx = idx};
  return epTraceImport(trace, &parts, hints);
}

static int isNpy(const uint8_t *bytes, size_t n) {
  return n >= 6 && !memcmp(bytes, "\x93NUMPY", 6);
}

trefoil_result_t epTraceLoadBytes(const trefoil_trace_t **trace, const uint8_t *bytes,
                                  size_t numBytes, const trefoil_trace_hints_t *hints) {
  if (isNpy(bytes, numBytes)) {
    ep_npy_t idx;
    EP_TRY(epNpyParse("memory", bytes, numBytes, &idx));
    return loadNpy(trace, &idx, "memory", hints);
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
  FILE *file = NULL;
  uint64_t size = 0;
  EP_TRY(epOpenRegular(path, &file, &size));
  uint8_t head[6];
  trefoil_result_t result = TREFOIL_OK;
  *handled = isNpy(head, fread(head, 1, sizeof head, file));
  if (*handled) {
    ep_npy_t idx;
    fseek(file, 0, SEEK_SET);
    result = epNpyOpen(path, (ep_stream_t){readFilePart, file}, size, &idx);
    if (result == TREFOIL_OK) result = loadNpy(trace, &idx, path, hints);
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
