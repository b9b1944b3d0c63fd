#include "net_settings.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 1000000000

int epNetFail(char *why, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(why, EP_NET_WHY, format, arguments);
  va_end(arguments);
  return -1;
}

/* A setting is a number, or a choice of two words, or RAIL:NUMBER and RANK:NUMBER. */
typedef struct {
  const char *name;
  size_t first, second; /* fields; second 0: none */
  int64_t low, high;    /* of the number (of the second, if there are two) */
  int64_t start;        /* of the field when nothing is said */
  int64_t unit;         /* what the number is multiplied with */
  const char *words[2];
} setting_t;

#define AT(field) offsetof(ep_net_settings_t, field)
static const setting_t SETTINGS[] = {
    {"TREFOIL_NET_CARRIER", AT(carrier), 0, 0, 1, EP_NET_COPY, 1, {"copy", "tcp"}},
    {"TREFOIL_NET_ON_DEAD", AT(onDead), 0, 0, 1, EP_NET_DEAD_ERROR, 1, {"error", "drop"}},
    {"TREFOIL_NET_TIMEOUT_MS", AT(limitNs), 0, 1, 86400000, 30000, 1000000, {0}},
    {"TREFOIL_NET_MBPS", AT(mbps), 0, 0, MOST, 0, 1, {0}},
    {"TREFOIL_NET_LATENCY_NS", AT(latencyNs), 0, 0, MOST, 0, 1, {0}},
    {"TREFOIL_NET_JITTER_NS", AT(jitterNs), 0, 0, MOST, 0, 1, {0}},
    {"TREFOIL_NET_REORDER_PPM", AT(reorder), 0, 0, 1000000, 0, 1, {0}},
    {"TREFOIL_NET_REORDER_NS", AT(reorderNs), 0, 0, MOST, 100000, 1, {0}},
    {"TREFOIL_NET_IN_FLIGHT", AT(inFlight), 0, 0, MOST, 0, 1, {0}},
    {"TREFOIL_NET_RAILS", AT(rails), 0, 1, EP_NET_MAX_RAILS, 1, 1, {0}},
    {"TREFOIL_NET_SLOW_RAIL", AT(slowRail), AT(slowFactor), 1, 1000, -1, 1, {0}},
    {"TREFOIL_NET_FAILING_RAIL", AT(failingRail), AT(failures), 0, 1000000, -1, 1, {0}},
    {"TREFOIL_NET_RETRY_NS", AT(retryNs), 0, 0, MOST, 1000000, 1, {0}},
    {"TREFOIL_NET_DEAD_RANK", AT(deadRank), AT(deadAfter), 0, MOST, -1, 1, {0}},
    {"TREFOIL_NET_SEED", AT(seed), 0, 0, MOST, 1, 1, {0}},
};

static int64_t *field(ep_net_settings_t *s, size_t at) {
  return (int64_t *)(void *)((char *)s + at);
}

/* Reads digits up to `end`; -1 if there are none, or too many. */
static int64_t number(const char *text, char end) {
  int64_t value = -1;
  for (; *text >= '0' && *text <= '9' && value <= MOST; text++)
    value = (value < 0 ? 0 : value) * 10 + (*text - '0');
  return *text == end ? value : -1;
}

static int readWord(const setting_t *a, const char *text, int64_t *value, char *why) {
  for (*value = 0; *value < 2; ++*value)
    if (!strcmp(text, a->words[*value])) return 0;
  return epNetFail(why, "%s is '%s'; must be %s or %s", a->name, text, a->words[0], a->words[1]);
}

static int readPair(const setting_t *a, const char *text, int64_t *first, int64_t *second,
                    char *why) {
  const char *colon = strchr(text, ':');
  *first = colon ? number(text, ':') : -1;
  *second = colon ? number(colon + 1, 0) : -1;
  if (*first >= 0 && *second >= a->low && *second <= a->high) return 0;
  return epNetFail(why, "%s is '%s'; must be NUMBER:VALUE, the value in [%lld, %lld]", a->name,
                   text, (long long)a->low, (long long)a->high);
}

static int readNumber(const setting_t *a, const char *text, int64_t *value, char *why) {
  *value = number(text, 0);
  if (*value >= a->low && *value <= a->high) {
    *value *= a->unit;
    return 0;
  }
  return epNetFail(why, "%s is '%s'; must be an integer in [%lld, %lld]", a->name, text,
                   (long long)a->low, (long long)a->high);
}

static int readSetting(const setting_t *a, const char *text, ep_net_settings_t *out, char *why) {
  int64_t *value = field(out, a->first);
  *value = a->start * a->unit;
  if (!text || !*text) return 0;
  if (a->words[0]) return readWord(a, text, value, why);
  if (a->second) return readPair(a, text, value, field(out, a->second), why);
  return readNumber(a, text, value, why);
}

int epNetSettings(char *(*get)(const char *), ep_net_settings_t *out, char *why) {
  memset(out, 0, sizeof *out);
  for (size_t i = 0; i < sizeof SETTINGS / sizeof *SETTINGS; i++)
    if (readSetting(&SETTINGS[i], get(SETTINGS[i].name), out, why)) return -1;
  const char *address = get("TREFOIL_NET_ADDRESS");
  snprintf(out->address, sizeof out->address, "%s", address ? address : "");
  if (out->slowRail >= out->rails || out->failingRail >= out->rails)
    return epNetFail(why,
                     "TREFOIL_NET_SLOW_RAIL or _FAILING_RAIL names a rail that is not in [0, %lld)",
                     (long long)out->rails);
  if (out->slowRail >= 0 && !out->mbps)
    return epNetFail(why, "TREFOIL_NET_SLOW_RAIL needs TREFOIL_NET_MBPS: without a bandwidth no "
                          "rail is slow");
  return 0;
}
