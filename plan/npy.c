/* The header of an .npy file is a Python dictionary in text, with the keys descr, fortran_order and
 * shape in any order. The parser takes just that grammar, from bytes that may be anything:
 *
 *   "\x93NUMPY" major minor, length (2 bytes for 1.0, 4 after), then length bytes of
 *   { 'descr': '<i4', 'fortran_order': False, 'shape': (3, 4), }
 *
 * Nothing is read past the given bytes, and no product of sizes is formed before it is known to fit. */
#include "plan/npy.h"

#include <stdio.h>
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

static trefoil_result_t setData(const char *name, const uint8_t *data, size_t dataBytes,
                                ep_npy_t *npy) {
  int64_t items = 1, most = (int64_t)dataBytes / npy->itemBytes;
  int empty = 0;
  for (int d = 0; d < npy->numDims; d++) empty |= npy->dims[d] == 0;
  for (int d = 0; d < npy->numDims && !empty; d++) {
    EP_CHECK(npy->dims[d] <= most / items, TREFOIL_INVALID_ARGUMENT,
             "%s: the shape asks for more than the %zu bytes of data that are there", name,
             dataBytes);
    items *= npy->dims[d];
  }
  npy->numItems = empty ? 0 : items;
  EP_CHECK((size_t)npy->numItems * (size_t)npy->itemBytes == dataBytes, TREFOIL_INVALID_ARGUMENT,
           "%s: %zu bytes of data, but the shape asks for %zu", name, dataBytes,
           (size_t)npy->numItems * (size_t)npy->itemBytes);
  npy->data = data;
  return TREFOIL_OK;
}

trefoil_result_t epNpyParse(const char *name, const uint8_t *bytes, size_t numBytes,
                            ep_npy_t *npy) {
  EP_CHECK(numBytes >= 10 && !memcmp(bytes, "\x93NUMPY", 6), TREFOIL_INVALID_ARGUMENT,
           "%s: not an .npy array", name);
  int major = bytes[6];
  EP_CHECK(major >= 1 && major <= 3, TREFOIL_INVALID_ARGUMENT, "%s: .npy version %d is not known",
           name, major);
  size_t start = major == 1 ? 10 : 12, length = (size_t)bytes[8] | (size_t)bytes[9] << 8;
  if (major > 1 && numBytes >= start) length |= (size_t)bytes[10] << 16 | (size_t)bytes[11] << 24;
  EP_CHECK(numBytes >= start && length <= numBytes - start, TREFOIL_INVALID_ARGUMENT,
           "%s: the .npy header is cut off", name);
  ep_npy_t found = {0};
  cursor_t c = {name, (const char *)bytes + start, (const char *)bytes + start + length};
  EP_TRY(takeDictionary(&c, &found));
  EP_CHECK(found.kind != 'f' || found.itemBytes >= 2, TREFOIL_INVALID_ARGUMENT,
           "%s: floats of %d bytes are not known", name, found.itemBytes);
  EP_TRY(setData(name, bytes + start + length, numBytes - start - length, &found));
  *npy = found;
  return TREFOIL_OK;
}

/* Item i as its bits, sign-extended for 'i'. */
static int64_t itemAt(const ep_npy_t *npy, int64_t i) {
  const uint8_t *p = npy->data + i * npy->itemBytes;
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

trefoil_result_t epNpyInts(const char *name, const ep_npy_t *npy, int64_t *out) {
  EP_TRY(checkInts(name, npy));
  for (int64_t i = 0; i < npy->numItems; i++) {
    out[i] = itemAt(npy, i);
    EP_CHECK(npy->kind == 'i' || out[i] >= 0, TREFOIL_INVALID_ARGUMENT,
             "%s: item %lld does not fit into int64", name, (long long)i);
  }
  return TREFOIL_OK;
}

trefoil_result_t epNpyInts32(const char *name, const ep_npy_t *npy, int32_t *out) {
  EP_TRY(checkInts(name, npy));
  for (int64_t i = 0; i < npy->numItems; i++) {
    int64_t value = itemAt(npy, i);
    EP_CHECK(value >= INT32_MIN && value <= INT32_MAX, TREFOIL_INVALID_ARGUMENT,
             "%s: item %lld does not fit into int32", name, (long long)i);
    out[i] = (int32_t)value;
  }
  return TREFOIL_OK;
}

trefoil_result_t epNpyFloats(const char *name, const ep_npy_t *npy, float *out) {
  EP_CHECK(npy->kind == 'f' && npy->itemBytes >= 4, TREFOIL_INVALID_ARGUMENT,
           "%s: float32 or float64 is wanted here", name);
  for (int64_t i = 0; i < npy->numItems; i++) {
    const uint8_t *p = npy->data + i * npy->itemBytes;
    if (npy->itemBytes == 4) {
      memcpy(&out[i], p, sizeof out[i]);
    } else {
      double wide;
      memcpy(&wide, p, sizeof wide);
      out[i] = (float)wide;
    }
  }
  return TREFOIL_OK;
}

void epNpyHeader(char *header, const char *dtype, int64_t rows, int64_t cols) {
  memset(header, ' ', EP_NPY_HEADER_BYTES);
  memcpy(header, "\x93NUMPY\x01\x00\x76\x00", 10); /* 128 = 10 + 0x76 */
  char text[EP_NPY_HEADER_BYTES - 10];
  int n = snprintf(text, sizeof text,
                   "{'descr': '%s', 'fortran_order': False, 'shape': (%lld, %lld), }", dtype,
                   (long long)rows, (long long)cols);
  memcpy(header + 10, text, (size_t)n);
  header[EP_NPY_HEADER_BYTES - 1] = '\n';
}
