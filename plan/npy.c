/* The header of an .npy file is a Python dictionary in text, with the keys descr, fortran_order and
 * shape in any order. The parser takes just that grammar, from bytes that may be anything:
 *
 *   "\x93NUMPY" major minor, length (2 bytes for 1.0, 4 after), then length bytes of
 *   { 'descr': '<i4', 'fortran_order': False, 'shape': (3, 4), }
 *
 * Nothing is read past the given bytes, no product of sizes is formed before it is known to fit, and the
 * data of a stream is read in chunks, after all that its header says is known to be possible. */
#include "plan/npy.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/error.h"

typedef struct cursor {
  const char *name;
  const char *at, *end;
} cursor_t;

static void skipSpace(cursor_t *c) {
  while (c->at < c->end && (*c->at == ' ' || *c->at == '\n' || *c->at == '\t')) c->at++;
}

/* Takes the text if it comes next. */
static int take(cursor_t *c, const char *text) {
  skipSpace(c);
  size_t n = strlen(text);
  if ((size_t)(c->end - c->at) < n || memcmp(c->at, text, n)) return 0;
  c->at += n;
  return 1;
}

static trefoil_result_t malformed(const cursor_t *c, const char *what) {
  return epFail(TREFOIL_INVALID_ARGUMENT, "%s: not an .npy header: %s", c->name, what);
}

static trefoil_result_t takeString(cursor_t *c, char *out, size_t room) {
  skipSpace(c);
  char quote = c->at < c->end ? *c->at : 0;
  if (quote != '\'' && quote != '"') return malformed(c, "a quoted string is missing");
  const char *first = ++c->at;
  while (c->at < c->end && *c->at != quote) c->at++;
  if (c->at == c->end || (size_t)(c->at - first) >= room) {
    return malformed(c, "a string does not end or is too long");
  }
  memcpy(out, first, (size_t)(c->at - first));
  out[c->at - first] = 0;
  c->at++;
  return TREFOIL_OK;
}

static trefoil_result_t takeNumber(cursor_t *c, int64_t *out) {
  skipSpace(c);
  int64_t value = 0;
  int digits = 0;
  for (; c->at < c->end && *c->at >= '0' && *c->at <= '9'; c->at++, digits++) {
    if (value > (INT64_MAX - 9) / 10) return malformed(c, "a dimension is too large");
    value = 10 * value + (*c->at - '0');
  }
  if (digits == 0) return malformed(c, "a dimension is not a number");
  (void)take(c, "L"); /* written by Python 2 */
  *out = value;
  return TREFOIL_OK;
}

static trefoil_result_t takeShape(cursor_t *c, ep_npy_t *npy) {
  if (!take(c, "(")) return malformed(c, "the shape is not a tuple");
  npy->numDims = 0;
  while (!take(c, ")")) {
    if (npy->numDims == EP_NPY_MAX_DIMS) return malformed(c, "more than 4 dimensions");
    EP_TRY(takeNumber(c, &npy->dims[npy->numDims++]));
    if (take(c, ",")) continue;
    if (!take(c, ")")) return malformed(c, "the shape does not end");
    break;
  }
  if (npy->numDims == 0) return malformed(c, "a single number has no dimensions");
  return TREFOIL_OK;
}

static trefoil_result_t takeDtype(cursor_t *c, ep_npy_t *npy) {
  char dtype[16];
  if (!take(c, "'") && !take(c, "\"")) { /* structured dtypes are lists */
    return malformed(c, "the dtype is not a plain one");
  }
  c->at--;
  EP_TRY(takeString(c, dtype, sizeof dtype));
  int isKnown = strlen(dtype) == 3 && strchr("iuf", dtype[1]) && strchr("1248", dtype[2]) &&
                (dtype[0] == '<' || dtype[0] == '|' || dtype[0] == '=');
  EP_CHECK(
      isKnown, TREFOIL_INVALID_ARGUMENT,
      "%s: dtype '%s' is not taken: integers of 1, 2, 4 or 8 bytes or floats, little-endian, are",
      c->name, dtype);
  npy->kind = dtype[1];
  npy->itemBytes = dtype[2] - '0';
  return TREFOIL_OK;
}

static trefoil_result_t takeEntry(cursor_t *c, ep_npy_t *npy, int *seen) {
  char key[32];
  EP_TRY(takeString(c, key, sizeof key));
  if (!take(c, ":")) return malformed(c, "a colon is missing");
  int which = !strcmp(key, "descr") ? 1 : !strcmp(key, "fortran_order") ? 2 : 4;
  if (which == 4 && strcmp(key, "shape")) return malformed(c, "it has an unknown key");
  if (*seen & which) return malformed(c, "a key comes twice");
  *seen |= which;
  if (which == 1) return takeDtype(c, npy);
  if (which == 4) return takeShape(c, npy);
  EP_CHECK(!take(c, "True"), TREFOIL_INVALID_ARGUMENT,
           "%s: the array is in Fortran order: save numpy.ascontiguousarray of it", c->name);
  return take(c, "False") ? TREFOIL_OK : malformed(c, "fortran_order is not a truth value");
}

static trefoil_result_t takeDictionary(cursor_t *c, ep_npy_t *npy) {
  int seen = 0;
  if (!take(c, "{")) return malformed(c, "it does not start with a brace");
  while (!take(c, "}")) {
    EP_TRY(takeEntry(c, npy, &seen));
    if (take(c, ",")) continue;
    if (!take(c, "}")) return malformed(c, "a comma or brace is missing");
    break;
  }
  skipSpace(c);
  if (c->at != c->end) return malformed(c, "text follows it");
  return seen == 7 ? TREFOIL_OK : malformed(c, "descr, fortran_order or shape is missing");
}

/* The number of items, if they take just the bytes that are said to be there. */
static trefoil_result_t setItems(const char *name, uint64_t dataBytes, ep_npy_t *npy) {
  int64_t items = 1, most = (int64_t)(dataBytes / (unsigned)npy->itemBytes);
  int empty = 0;
  for (int d = 0; d < npy->numDims; d++) empty |= npy->dims[d] == 0;
  for (int d = 0; d < npy->numDims && !empty; d++) {
    EP_CHECK(npy->dims[d] <= most / items, TREFOIL_INVALID_ARGUMENT,
             "%s: the shape asks for more than the %llu bytes of data that are there", name,
             (unsigned long long)dataBytes);
    items *= npy->dims[d];
  }
  npy->numItems = empty ? 0 : items;
  uint64_t asked = (uint64_t)npy->numItems * (unsigned)npy->itemBytes;
  EP_CHECK(asked == dataBytes, TREFOIL_INVALID_ARGUMENT,
           "%s: %llu bytes of data, but the shape asks for %llu", name,
           (unsigned long long)dataBytes, (unsigned long long)asked);
  return TREFOIL_OK;
}

static trefoil_result_t parseHeader(const char *name, const uint8_t *text, size_t length,
                                    ep_npy_t *npy) {
  cursor_t c = {name, (const char *)text, (const char *)text + length};
  EP_TRY(takeDictionary(&c, npy));
  EP_CHECK(npy->kind != 'f' || npy->itemBytes >= 2, TREFOIL_INVALID_ARGUMENT,
           "%s: floats of %d bytes are not known", name, npy->itemBytes);
  return TREFOIL_OK;
}

/* What comes before the dictionary: where it starts, and its length. */
static trefoil_result_t parsePreamble(const char *name, const uint8_t *bytes, size_t numBytes,
                                      size_t *start, size_t *length) {
  EP_CHECK(numBytes >= 10 && !memcmp(bytes, "\x93NUMPY", 6), TREFOIL_INVALID_ARGUMENT,
           "%s: not an .npy array", name);
  int major = bytes[6];
  EP_CHECK(major >= 1 && major <= 3, TREFOIL_INVALID_ARGUMENT, "%s: .npy version %d is not known",
           name, major);
  *start = major == 1 ? 10 : 12;
  *length = (size_t)bytes[8] | (size_t)bytes[9] << 8;
  EP_CHECK(numBytes >= *start, TREFOIL_INVALID_ARGUMENT, "%s: the .npy header is cut off", name);
  if (major > 1) *length |= (size_t)bytes[10] << 16 | (size_t)bytes[11] << 24;
  return TREFOIL_OK;
}

trefoil_result_t epNpyParse(const char *name, const uint8_t *bytes, size_t numBytes,
                            ep_npy_t *npy) {
  size_t start, length;
  EP_TRY(parsePreamble(name, bytes, numBytes, &start, &length));
  EP_CHECK(length <= numBytes - start, TREFOIL_INVALID_ARGUMENT, "%s: the .npy header is cut off",
           name);
  ep_npy_t found = {0};
  EP_TRY(parseHeader(name, bytes + start, length, &found));
  EP_TRY(setItems(name, numBytes - start - length, &found));
  found.data = bytes + start + length;
  *npy = found;
  return TREFOIL_OK;
}

/* Reads until room is full or the stream ends. */
static trefoil_result_t readFull(const ep_stream_t *s, uint8_t *to, size_t room, size_t *size) {
  size_t got = 1;
  for (*size = 0; *size < room && got > 0; *size += got) {
    EP_TRY(s->read(s->from, to + *size, room - *size, &got));
  }
  return TREFOIL_OK;
}

trefoil_result_t epNpyOpen(const char *name, ep_stream_t stream, uint64_t size, ep_npy_t *npy) {
  enum { MAX_HEADER = 1 << 16 };
  uint8_t head[12] = {0};
  size_t got, start, length, rest;
  EP_TRY(readFull(&stream, head, 10, &got));
  if (got == 10 && head[6] > 1) {
    EP_TRY(readFull(&stream, head + 10, 2, &rest));
    got += rest;
  }
  EP_TRY(parsePreamble(name, head, got, &start, &length));
  EP_CHECK(length < MAX_HEADER, TREFOIL_INVALID_ARGUMENT, "%s: the .npy header has %zu bytes", name,
           length);
  uint8_t *text = malloc(length + 1);
  EP_CHECK(text, TREFOIL_SYSTEM_ERROR, "%s: out of memory for the .npy header", name);
  ep_npy_t found = {.stream = stream};
  trefoil_result_t result = readFull(&stream, text, length, &got);
  if (result == TREFOIL_OK && (got < length || size < start + length)) {
    result = epFail(TREFOIL_INVALID_ARGUMENT, "%s: the .npy header is cut off", name);
  }
  if (result == TREFOIL_OK) result = parseHeader(name, text, length, &found);
  free(text);
  EP_TRY(result);
  EP_TRY(setItems(name, size - start - length, &found));
  *npy = found;
  return TREFOIL_OK;
}

/* ---- The data, in chunks ---- */

typedef struct chunk {
  const uint8_t *data;
  int64_t first, numItems;
} chunk_t;

typedef struct reader {
  const char *name;
  const ep_npy_t *npy;
  uint8_t bytes[1 << 16];
} reader_t;

/* The next chunk after p; numItems 0 when there is none. */
static trefoil_result_t nextChunk(reader_t *r, chunk_t *p) {
  const ep_npy_t *npy = r->npy;
  p->first += p->numItems;
  int64_t left = npy->numItems - p->first, most = (int64_t)sizeof r->bytes / npy->itemBytes;
  p->numItems = left < most ? left : most;
  if (npy->data) {
    p->data = npy->data + p->first * npy->itemBytes;
    return TREFOIL_OK;
  }
  p->data = r->bytes;
  size_t wanted = (size_t)p->numItems * (size_t)npy->itemBytes, got;
  EP_TRY(readFull(&npy->stream, r->bytes, wanted ? wanted : 1, &got));
  EP_CHECK(got == wanted, TREFOIL_INVALID_ARGUMENT, "%s: %s", r->name,
           got < wanted ? "the data is cut off" : "data follows that the shape does not ask for");
  return TREFOIL_OK;
}

/* Calls take for every chunk. */
static trefoil_result_t
eachChunk(const char *name, const ep_npy_t *npy,
          trefoil_result_t (*take)(const reader_t *, const chunk_t *, void *), void *out) {
  reader_t *r = malloc(sizeof *r);
  EP_CHECK(r, TREFOIL_SYSTEM_ERROR, "%s: out of memory", name);
  r->name = name;
  r->npy = npy;
  chunk_t chunk = {0};
  trefoil_result_t result;
  do {
    result = nextChunk(r, &chunk);
    if (result == TREFOIL_OK && chunk.numItems > 0) result = take(r, &chunk, out);
  } while (result == TREFOIL_OK && chunk.numItems > 0);
  free(r);
  return result;
}

/* Item i of a chunk as its bits, sign-extended for 'i'. */
static int64_t itemAt(const ep_npy_t *npy, const chunk_t *chunk, int64_t i) {
  const uint8_t *p = chunk->data + i * npy->itemBytes;
  uint64_t bits = 0;
  for (int b = 0; b < npy->itemBytes; b++) bits |= (uint64_t)p[b] << 8 * b;
  int unused = 64 - 8 * npy->itemBytes;
  if (npy->kind != 'i') return (int64_t)bits;
  return (int64_t)(bits << unused) >> unused;
}

static trefoil_result_t checkInts(const char *name, const ep_npy_t *npy) {
  EP_CHECK(npy->kind != 'f', TREFOIL_INVALID_ARGUMENT,
           "%s: holds floats, but integers are wanted here", name);
  return TREFOIL_OK;
}

static trefoil_result_t takeInts(const reader_t *r, const chunk_t *p, void *to) {
  int64_t *out = (int64_t *)to + p->first;
  for (int64_t i = 0; i < p->numItems; i++) {
    out[i] = itemAt(r->npy, p, i);
    EP_CHECK(r->npy->kind == 'i' || out[i] >= 0, TREFOIL_INVALID_ARGUMENT,
             "%s: item %lld does not fit into int64", r->name, (long long)(p->first + i));
  }
  return TREFOIL_OK;
}

trefoil_result_t epNpyInts(const char *name, const ep_npy_t *npy, int64_t *out) {
  EP_TRY(checkInts(name, npy));
  return eachChunk(name, npy, takeInts, out);
}

static trefoil_result_t takeInts32(const reader_t *r, const chunk_t *p, void *to) {
  int32_t *out = (int32_t *)to + p->first;
  for (int64_t i = 0; i < p->numItems; i++) {
    int64_t value = itemAt(r->npy, p, i);
    EP_CHECK(value >= INT32_MIN && value <= INT32_MAX, TREFOIL_INVALID_ARGUMENT,
             "%s: item %lld does not fit into int32", r->name, (long long)(p->first + i));
    out[i] = (int32_t)value;
  }
  return TREFOIL_OK;
}

trefoil_result_t epNpyInts32(const char *name, const ep_npy_t *npy, int32_t *out) {
  EP_TRY(checkInts(name, npy));
  return eachChunk(name, npy, takeInts32, out);
}

static trefoil_result_t takeFloats(const reader_t *r, const chunk_t *chunk, void *to) {
  float *out = (float *)to + chunk->first;
  for (int64_t i = 0; i < chunk->numItems; i++) {
    const uint8_t *p = chunk->data + i * r->npy->itemBytes;
    double wide;
    if (r->npy->itemBytes == 4) {
      memcpy(&out[i], p, sizeof out[i]);
    } else {
      memcpy(&wide, p, sizeof wide);
      out[i] = fabs(wide) <= FLT_MAX ? (float)wide : INFINITY;
    }
    EP_CHECK(isfinite(out[i]), TREFOIL_INVALID_ARGUMENT,
             "%s: item %lld is NaN, infinite or too large for float32", r->name,
             (long long)(chunk->first + i));
  }
  return TREFOIL_OK;
}

trefoil_result_t epNpyFloats(const char *name, const ep_npy_t *npy, float *out) {
  EP_CHECK(npy->kind == 'f' && npy->itemBytes >= 4, TREFOIL_INVALID_ARGUMENT,
           "%s: float32 or float64 is wanted here", name);
  return eachChunk(name, npy, takeFloats, out);
}

void epNpyHeader(char *header, const char *dtype, int64_t rows, int64_t cols) {
  memset(header, ' ', EP_NPY_HEADER_BYTES);
  // NOLINTNEXTLINE(bugprone-not-null-terminated-result): a header, no string; 128 = 10 + 0x76
  memcpy(header, "\x93NUMPY\x01\x00\x76\x00", 10);
  char text[EP_NPY_HEADER_BYTES - 10];
  int n = snprintf(text, sizeof text,
                   "{'descr': '%s', 'fortran_order': False, 'shape': (%lld, %lld), }", dtype,
                   (long long)rows, (long long)cols);
  memcpy(header + 10, text, (size_t)n);
  header[EP_NPY_HEADER_BYTES - 1] = '\n';
}
