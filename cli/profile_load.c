/* A profile from JSON: strict, so that a typing error in a key is an error. Every limit has a source, the
 * shapes to draw lie within the limits, and the numbers of "outside" do not. */
#include "cli/profile_load.h"

#include "models/preset.h"
#include "plan/error.h"
#include "validate/order_free.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

extern const ep_preset_t epProfiles[];

typedef struct reader {
  const char *file;
  json_t *root;
  ep_profile_t *p;
} reader_t;

static trefoil_result_t onlyKeys(const reader_t *r, json_t *object, const char *where,
                                 const char *keys) {
  const char *key;
  json_t *value;
  EP_CHECK(json_is_object(object), TREFOIL_INVALID_ARGUMENT, "%s: %s must be an object", r->file,
           where);
  json_object_foreach(object, key, value) {
    char word[64];
    snprintf(word, sizeof word, " %.60s ", key);
    EP_CHECK(strstr(keys, word), TREFOIL_INVALID_ARGUMENT, "%s: %s has no key %.60s, only%s",
             r->file, where, key, keys);
  }
  return TREFOIL_OK;
}

/* {"value": ..., "source": "..."} */
static trefoil_result_t takeSourced(const reader_t *r, json_t *parent, const char *key,
                                    json_t **value) {
  json_t *object = json_object_get(parent, key);
  EP_CHECK(object, TREFOIL_INVALID_ARGUMENT, "%s: %s is missing", r->file, key);
  EP_TRY(onlyKeys(r, object, key, " value source "));
  const char *source = json_string_value(json_object_get(object, "source"));
  *value = json_object_get(object, "value");
  EP_CHECK(*value && source && *source, TREFOIL_INVALID_ARGUMENT,
           "%s: %s must be {\"value\": ..., \"source\": \"...\"}", r->file, key);
  return TREFOIL_OK;
}

static int modeNumber(const char *word) {
  for (int m = 0; m < TREFOIL_NUM_MODES; m++)
    if (word && !strcmp(word, trefoilModeName((trefoil_mode_t)m))) return m;
  return -1;
}
static int featureNumber(const char *word) {
  for (int f = 0; f < EP_NUM_FEATURES; f++)
    if (word && !strcmp(word, epFeatureWord(f))) return f;
  return -1;
}

static trefoil_result_t takeModes(const reader_t *r) {
  json_t *list, *word;
  size_t i;
  EP_TRY(takeSourced(r, r->root, "modes", &list));
  json_array_foreach(list, i, word) {
    int m = modeNumber(json_string_value(word));
    EP_CHECK(m >= 0, TREFOIL_INVALID_ARGUMENT, "%s: modes: \"%.40s\" is not a mode", r->file,
             json_string_value(word) ? json_string_value(word) : "");
    r->p->modes |= 1u << m;
  }
  EP_CHECK(r->p->modes, TREFOIL_INVALID_ARGUMENT, "%s: modes: at least one", r->file);
  return TREFOIL_OK;
}

/* "all", or a list of words. */
static trefoil_result_t takeFeatures(const reader_t *r) {
  json_t *list, *word;
  size_t i;
  EP_TRY(takeSourced(r, r->root, "features", &list));
  if (json_is_string(list) && !strcmp(json_string_value(list), "all")) {
    r->p->features = EP_ALL_FEATURES;
    return TREFOIL_OK;
  }
  EP_CHECK(json_is_array(list), TREFOIL_INVALID_ARGUMENT,
           "%s: features must be \"all\" or a list of words", r->file);
  json_array_foreach(list, i, word) {
    int f = featureNumber(json_string_value(word));
    EP_CHECK(f >= 0, TREFOIL_INVALID_ARGUMENT, "%s: features: \"%.40s\" is not a feature", r->file,
             json_string_value(word) ? json_string_value(word) : "");
    r->p->features |= EP_BIT(f);
  }
  return TREFOIL_OK;
}

/* [{"mode", "feature", "source"}]: what a mode has not. */
static trefoil_result_t takeWithout(const reader_t *r) {
  json_t *list = json_object_get(r->root, "without"), *item;
  size_t i;
  json_array_foreach(list, i, item) {
    EP_TRY(onlyKeys(r, item, "without", " mode feature source "));
    int m = modeNumber(json_string_value(json_object_get(item, "mode")));
    int f = featureNumber(json_string_value(json_object_get(item, "feature")));
    EP_CHECK(m >= 0 && f >= 0 && json_is_string(json_object_get(item, "source")),
             TREFOIL_INVALID_ARGUMENT, "%s: without: a mode, a feature and a source each", r->file);
    r->p->without[m] |= EP_BIT(f);
  }
  return TREFOIL_OK;
}

static trefoil_result_t takeOpen(const reader_t *r) {
  json_t *list, *word;
  size_t i;
  EP_TRY(takeSourced(r, r->root, "open_order", &list));
  json_array_foreach(list, i, word) {
    const char *text = json_string_value(word);
    int isLow = text && !strcmp(text, "ll"), isHigh = text && !strcmp(text, "ht");
    EP_CHECK(isLow || isHigh, TREFOIL_INVALID_ARGUMENT, "%s: open_order: \"ll\", \"ht\", or none",
             r->file);
    r->p->open |= isLow ? EP_OPEN_LL_ROWS : EP_OPEN_HT_ROWS;
  }
  return TREFOIL_OK;
}

static trefoil_result_t takeRanks(const reader_t *r) {
  json_t *list, *number;
  size_t i;
  if (!json_object_get(r->root, "ranks")) return TREFOIL_OK;
  EP_TRY(takeSourced(r, r->root, "ranks", &list));
  json_array_foreach(list, i, number) {
    json_int_t n = json_integer_value(number);
    EP_CHECK(n >= 1 && n <= 16 && r->p->numRanks < EP_PROFILE_LIST, TREFOIL_INVALID_ARGUMENT,
             "%s: ranks: numbers from 1 to 16", r->file);
    r->p->ranks[r->p->numRanks++] = (int)n;
  }
  return TREFOIL_OK;
}

/* Whether a limit takes a number: a list, or a range with a divisor. 0 or 1; -1: no such limit. */
static int takes(json_t *limit, int64_t n) {
  json_t *value = json_object_get(limit, "value"), *item;
  size_t i;
  if (!value) return -1;
  json_array_foreach(value, i, item) if (json_integer_value(item) == n) return 1;
  if (json_is_array(value)) return 0;
  json_t *least = json_object_get(value, "least"), *most = json_object_get(value, "most");
  json_t *multiple = json_object_get(value, "multiple");
  if (least && n < json_integer_value(least)) return 0;
  if (most && n > json_integer_value(most)) return 0;
  if (multiple && (json_integer_value(multiple) < 1 || n % json_integer_value(multiple))) return 0;
  return !json_is_true(json_object_get(value, "power_of_two")) || (n & (n - 1)) == 0;
}

static const char *const numbers[] = {"hidden", "topk", "local_experts", "tokens"};

static trefoil_result_t takeNumbers(const reader_t *r, json_t *from, const char *where,
                                    ep_profile_shape_t *shape, int64_t of[4]) {
  EP_TRY(onlyKeys(r, from, where, " hidden topk local_experts tokens "));
  for (int i = 0; i < 4; i++) {
    of[i] = json_integer_value(json_object_get(from, numbers[i]));
    EP_CHECK(of[i] >= 0 && of[i] <= 1 << 20, TREFOIL_INVALID_ARGUMENT,
             "%s: %s: %s must be a number up to 1048576", r->file, where, numbers[i]);
  }
  *shape = (ep_profile_shape_t){of[0], of[3], (int)of[1], (int)of[2]};
  return TREFOIL_OK;
}

static trefoil_result_t takeShape(const reader_t *r, json_t *block, json_t *from, int ht) {
  int64_t of[4];
  ep_profile_t *p = r->p;
  EP_CHECK(p->numShapes[ht] < EP_PROFILE_LIST, TREFOIL_INVALID_ARGUMENT, "%s: shapes: at most %d",
           r->file, EP_PROFILE_LIST);
  EP_TRY(takeNumbers(r, from, "shapes", &p->shapes[ht][p->numShapes[ht]++], of));
  for (int i = 0; i < 4; i++)
    EP_CHECK(of[i] > 0 && takes(json_object_get(block, numbers[i]), of[i]) != 0,
             TREFOIL_INVALID_ARGUMENT, "%s: shapes: %s %lld is not within its limit", r->file,
             numbers[i], (long long)of[i]);
  return TREFOIL_OK;
}

/* What low latency, or high throughput, takes. */
static trefoil_result_t takeBlock(const reader_t *r, const char *name, int ht) {
  json_t *block = json_object_get(r->root, name), *shape, *value;
  size_t at;
  int64_t of[4];
  if (!block) return TREFOIL_OK;
  EP_TRY(onlyKeys(r, block, name, " hidden topk local_experts tokens shapes outside "));
  for (int i = 0; i < 4; i++) {
    EP_TRY(takeSourced(r, block, numbers[i], &value));
    EP_CHECK(json_is_array(value) || json_is_object(value), TREFOIL_INVALID_ARGUMENT,
             "%s: %s: a list, or least, most, multiple and power_of_two", r->file, numbers[i]);
    if (json_is_object(value))
      EP_TRY(onlyKeys(r, value, numbers[i], " least most multiple power_of_two "));
  }
  json_array_foreach(json_object_get(block, "shapes"), at, shape)
      EP_TRY(takeShape(r, block, shape, ht));
  EP_CHECK(r->p->numShapes[ht], TREFOIL_INVALID_ARGUMENT, "%s: %s: shapes to draw are missing",
           r->file, name);
  json_t *outside = json_object_get(block, "outside");
  if (!outside) return TREFOIL_OK;
  EP_TRY(takeNumbers(r, outside, "outside", &r->p->other[ht], of));
  for (int i = 0; i < 4; i++)
    EP_CHECK(!of[i] || takes(json_object_get(block, numbers[i]), of[i]) == 0,
             TREFOIL_INVALID_ARGUMENT, "%s: outside: %s %lld is within its limit", r->file,
             numbers[i], (long long)of[i]);
  return TREFOIL_OK;
}

static trefoil_result_t takeAll(const reader_t *r) {
  static const char keys[] = " name about libraries modes features without open_order ranks "
                             "low_latency high_throughput first_call_ms ";
  json_t *value = NULL;
  EP_TRY(onlyKeys(r, r->root, "the profile", keys));
  const char *name = json_string_value(json_object_get(r->root, "name"));
  EP_CHECK(name && *name && strlen(name) < EP_PROFILE_NAME, TREFOIL_INVALID_ARGUMENT,
           "%s: name must be a text of at most %d characters", r->file, EP_PROFILE_NAME - 1);
  EP_CHECK(json_is_string(json_object_get(r->root, "about")), TREFOIL_INVALID_ARGUMENT,
           "%s: about must be a text", r->file);
  strcpy(r->p->name, name);
  EP_TRY(takeModes(r));
  EP_TRY(takeFeatures(r));
  EP_TRY(takeWithout(r));
  EP_TRY(takeOpen(r));
  EP_TRY(takeRanks(r));
  EP_TRY(takeBlock(r, "low_latency", 0));
  EP_TRY(takeBlock(r, "high_throughput", 1));
  if (!json_object_get(r->root, "first_call_ms")) return TREFOIL_OK;
  EP_TRY(takeSourced(r, r->root, "first_call_ms", &value));
  json_int_t ms = json_integer_value(value);
  EP_CHECK(ms >= 1 && ms <= 3600000, TREFOIL_INVALID_ARGUMENT,
           "%s: first_call_ms must be 1 to 3600000", r->file);
  r->p->firstCallNs = (uint64_t)ms * 1000000u;
  return TREFOIL_OK;
}

static trefoil_result_t parse(const char *nameOrPath, ep_profile_t *found, json_t **root) {
  ep_text_t text;
  json_error_t error;
  EP_TRY(epPresetRead("profile", epProfiles, nameOrPath, &text));
  *root = json_loadb(text.chars, text.numBytes, JSON_REJECT_DUPLICATES, &error);
  free(text.owned);
  EP_CHECK(*root, TREFOIL_INVALID_ARGUMENT, "%s, line %d: %s", nameOrPath, error.line, error.text);
  reader_t r = {nameOrPath, *root, found};
  trefoil_result_t result = takeAll(&r);
  if (result == TREFOIL_OK) return result;
  json_decref(*root);
  *root = NULL;
  return result;
}

trefoil_result_t cliProfileLoad(ep_profile_t *profile, const char *nameOrPath) {
  ep_profile_t found = {.modes = 0};
  json_t *root;
  EP_TRY(parse(nameOrPath, &found, &root));
  json_decref(root);
  *profile = found;
  return TREFOIL_OK;
}

/* libraries: {"ours": true}, or {"versions": [100, 200]}: what ncclEpGetVersion says, patches apart. */
static int isOf(json_t *root, const ep_library_facts_t *facts) {
  json_t *libraries = json_object_get(root, "libraries"), *version;
  size_t i;
  if (facts->isOurs) return json_is_true(json_object_get(libraries, "ours"));
  json_array_foreach(json_object_get(libraries, "versions"), i,
                     version) if (json_integer_value(version) / 100 ==
                                  facts->version / 100) return 1;
  return 0;
}

trefoil_result_t cliProfileOf(ep_profile_t *profile, const ep_library_facts_t *facts) {
  char known[256] = "";
  for (int i = 0; epProfiles[i].name; i++) {
    ep_profile_t found = {.modes = 0};
    json_t *root;
    EP_TRY(parse(epProfiles[i].name, &found, &root));
    int fits = isOf(root, facts);
    json_decref(root);
    size_t used = strlen(known);
    snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", epProfiles[i].name);
    if (!fits) continue;
    *profile = found;
    return TREFOIL_OK;
  }
  return epFail(
      TREFOIL_INVALID_ARGUMENT,
      "no profile is of a library whose version is %d: say which with --profile (%s, or a "
      "file)",
      facts->version, known);
}

int cliProfileIsFree(const ep_profile_t *p) {
  return p->modes == 15 && p->features == EP_ALL_FEATURES && !p->open && !p->numRanks &&
         !p->numShapes[0] && !p->numShapes[1];
}
