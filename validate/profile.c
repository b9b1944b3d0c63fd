/* Features by number, word and text; what a profile takes in a mode. */
#include "validate/profile.h"

static const struct feature {
  const char *word, *text;
  unsigned modes;
} features[] = {
#define EP_FEATURE_ROW(name, word, modes, text) {word, text, modes},
    EP_FEATURES(EP_FEATURE_ROW)
#undef EP_FEATURE_ROW
};

const char *epFeatureWord(int feature) {
  return feature >= 0 && feature < EP_NUM_FEATURES ? features[feature].word : NULL;
}
const char *epFeatureText(int feature) {
  return feature >= 0 && feature < EP_NUM_FEATURES ? features[feature].text : NULL;
}
unsigned epFeatureModes(int feature) {
  return feature >= 0 && feature < EP_NUM_FEATURES ? features[feature].modes : 0;
}

uint64_t epProfileFeatures(const ep_profile_t *p, trefoil_mode_t mode) {
  uint64_t set = 0;
  if (!(p->modes >> mode & 1)) return 0;
  for (int i = 0; i < EP_NUM_FEATURES; i++)
    if (features[i].modes >> mode & 1) set |= EP_BIT(i);
  return set & p->features & ~p->without[mode];
}
