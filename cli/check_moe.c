#include "cli/check_verb.h"
int cliMoeShape(const char *verb, const char *name, ep_real_options_t *o) {
  (void)o;
  return cliUsage(verb, "--moe %s: this build knows no models", name);
}
