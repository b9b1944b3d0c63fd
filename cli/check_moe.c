/* Model shapes by name, for the verbs that run a real shape. */
#include "cli/check_verb.h"
#include "trefoil/models.h"

int cliMoeShape(const char *verb, const char *name, ep_real_options_t *o) {
  trefoil_moe_t moe;
  if (trefoilMoeLoad(&moe, name) != TREFOIL_OK) return cliUsage(verb, "%s", trefoilLastError());
  o->hidden = moe.hidden;
  o->shape.numExperts = moe.numExperts;
  o->shape.topk = moe.topk;
  return 0;
}
