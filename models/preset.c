/* Clusters and model shapes from JSON: strict, so that a typing error in a key is an error. The text
 * comes from a built-in preset or a file; one table a kind says which key goes where. */
#include "models/preset.h"

#include <stddef.h>
#include <string.h>

#include "plan/error.h"
#include "trefoil/models.h"

const char *trefoilClusterName(int i) {
  return epPresetName(epClusters, i);
}
const char *trefoilMoeName(int i) {
  return epPresetName(epMoe, i);
}

#ifndef TREFOIL_HAVE_JSON

static trefoil_result_t failWithout(void) {
  return epFail(TREFOIL_INVALID_USAGE, "this build reads no presets: it was made without jansson");
}
trefoil_result_t trefoilClusterLoad(trefoil_cluster_t *cluster, const char *nameOrPath) {
  (void)cluster, (void)nameOrPath;
  return failWithout();
}
trefoil_result_t trefoilMoeLoad(trefoil_moe_t *moe, const char *nameOrPath) {
  (void)moe, (void)nameOrPath;
  return failWithout();
}
trefoil_result_t trefoilClusterParse(trefoil_cluster_t *cluster, const char *name, const char *text,
                                     size_t numBytes) {
  (void)cluster, (void)name, (void)text, (void)numBytes;
  return failWithout();
}
trefoil_result_t trefoilMoeParse(trefoil_moe_t *moe, const char *name, const char *text,
                                 size_t numBytes) {
  (void)moe, (void)name, (void)text, (void)numBytes;
  return failWithout();
}

#else

#include <stdio.h>
#include <stdlib.h>

#include <jansson.h>

#include "models/hf_config.h"

/* Where a key's value goes: an int or a double at an offset, in [low, high]. An optional one that is
 * not there stays 0. */
typedef struct field {
  const char *key;
  size_t offset;
  int isInt;
  double low, high;
  int isOptional;
} field_t;

/* A kind of file: numbers are plain, or objects {"value", "source"}. */
typedef struct kind {
  const char *what;
  const ep_preset_t *presets;
  int sourceEach;
  const field_t *fields;
  int numFields;
  size_t nameOffset;
} kind_t;

static const field_t clusterFields[] = {
    {"gpus_per_node", offsetof(trefoil_cluster_t, gpusPerNode), 1, 1, TREFOIL_MAX_RANKS, 0},
    {"max_gpus", offsetof(trefoil_cluster_t, maxGpus), 1, 1, TREFOIL_MAX_RANKS, 0},
    {"gpus_per_nic", offsetof(trefoil_cluster_t, gpusPerNic), 1, 1, TREFOIL_MAX_RANKS, 0},
    {"nvlink_gb_per_s", offsetof(trefoil_cluster_t, nvlinkGbPerS), 0, 1e-3, 1e9, 0},
    {"nic_gb_per_s", offsetof(trefoil_cluster_t, nicGbPerS), 0, 0, 1e9, 0},
    {"net_latency_us", offsetof(trefoil_cluster_t, netLatencyUs), 0, 0, 1e9, 0},
    {"ll_fixed_us", offsetof(trefoil_cluster_t, llFixedUs), 0, 0, 1e9, 0},
    {"ht_fixed_us", offsetof(trefoil_cluster_t, htFixedUs), 0, 0, 1e9, 0},
    {"nodes_per_leaf", offsetof(trefoil_cluster_t, nodesPerLeaf), 1, 1, TREFOIL_MAX_RANKS, 1},
    {"rail_leaves", offsetof(trefoil_cluster_t, railLeaves), 1, 0, 1, 1},
    {"leaf_oversubscription", offsetof(trefoil_cluster_t, leafOversubscription), 0, 1, 1e6, 1},
    {"gpu_memory_gb", offsetof(trefoil_cluster_t, gpuMemoryGb), 0, 1, 1e6, 1},
    {"nvlink_line_gb_per_s", offsetof(trefoil_cluster_t, nvlinkLineGbPerS), 0, 1e-3, 1e9, 1},
    {"gpu_hbm_gb_per_s", offsetof(trefoil_cluster_t, gpuHbmGbPerS), 0, 1, 1e9, 1},
    {"gpu_bf16_tflops", offsetof(trefoil_cluster_t, gpuBf16Tflops), 0, 1, 1e9, 1},
    {"gpu_fp8_tflops", offsetof(trefoil_cluster_t, gpuFp8Tflops), 0, 1, 1e9, 1},
    {"gpu_fp4_tflops", offsetof(trefoil_cluster_t, gpuFp4Tflops), 0, 1, 1e9, 1},
    {"gpus_per_host", offsetof(trefoil_cluster_t, gpusPerHost), 1, 1, TREFOIL_MAX_RANKS, 1},
    {"gpu_sms", offsetof(trefoil_cluster_t, gpuSms), 1, 1, 1 << 16, 1},
};
static const field_t moeFields[] = {
    {"hidden_elements", offsetof(trefoil_moe_t, hidden), 1, 1, 1 << 24, 0},
    {"num_experts", offsetof(trefoil_moe_t, numExperts), 1, 1, TREFOIL_MAX_EXPERTS, 0},
    {"topk", offsetof(trefoil_moe_t, topk), 1, 1, TREFOIL_MAX_TOPK, 0},
    {"num_moe_layers", offsetof(trefoil_moe_t, numMoeLayers), 1, 1, 1 << 20, 0},
    {"expert_hidden_elements", offsetof(trefoil_moe_t, expertHidden), 1, 1, 1 << 24, 0},
    {"num_shared_experts", offsetof(trefoil_moe_t, numShared), 1, 0, 1 << 20, 0},
    {"num_layers", offsetof(trefoil_moe_t, numLayers), 1, 1, 1 << 20, 1},
    {"dense_hidden_elements", offsetof(trefoil_moe_t, denseHidden), 1, 0, 1 << 24, 1},
    {"shared_hidden_elements", offsetof(trefoil_moe_t, sharedHidden), 1, 0, 1 << 24, 1},
    {"vocabulary", offsetof(trefoil_moe_t, vocab), 1, 1, 1 << 28, 1},
    {"tied_embeddings", offsetof(trefoil_moe_t, tiedEmbeddings), 1, 0, 1, 1},
    {"num_heads", offsetof(trefoil_moe_t, numHeads), 1, 1, 1 << 16, 1},
    {"num_kv_heads", offsetof(trefoil_moe_t, numKvHeads), 1, 1, 1 << 16, 1},
    {"head_elements", offsetof(trefoil_moe_t, headDim), 1, 1, 1 << 16, 1},
    {"q_lora_elements", offsetof(trefoil_moe_t, qLora), 1, 0, 1 << 20, 1},
    {"kv_lora_elements", offsetof(trefoil_moe_t, kvLora), 1, 1, 1 << 20, 1},
    {"nope_elements", offsetof(trefoil_moe_t, nopeDim), 1, 0, 1 << 16, 1},
    {"rope_elements", offsetof(trefoil_moe_t, ropeDim), 1, 0, 1 << 16, 1},
    {"v_elements", offsetof(trefoil_moe_t, vDim), 1, 1, 1 << 16, 1},
    {"window_tokens", offsetof(trefoil_moe_t, windowTokens), 1, 1, 1 << 30, 1},
    {"window_layers", offsetof(trefoil_moe_t, windowLayers), 1, 1, 1 << 20, 1},
    {"num_groups", offsetof(trefoil_moe_t, numGroups), 1, 1, TREFOIL_MAX_EXPERTS, 1},
    {"topk_groups", offsetof(trefoil_moe_t, topkGroups), 1, 1, TREFOIL_MAX_EXPERTS, 1},
    {"weight_bits", offsetof(trefoil_moe_t, weightBits), 1, 4, 16, 1},
};
enum {
  numClusterFields = sizeof clusterFields / sizeof *clusterFields,
  numMoeFields = sizeof moeFields / sizeof *moeFields
};
static const kind_t clusterKind = {
    "cluster", epClusters, 1, clusterFields, numClusterFields, offsetof(trefoil_cluster_t, name)};
static const kind_t moeKind = {"model",   epMoe,        0,
                               moeFields, numMoeFields, offsetof(trefoil_moe_t, name)};

static trefoil_result_t takeText(const json_t *root, const char *file, const char *key,
                                 const char **text) {
  const char *value = json_string_value(json_object_get(root, key));
  EP_CHECK(value && value[0], TREFOIL_INVALID_ARGUMENT, "%s: %s must be a text", file, key);
  if (text) *text = value;
  return TREFOIL_OK;
}

static trefoil_result_t takeNumber(const json_t *value, const char *file, const field_t *f,
                                   char *object) {
  EP_CHECK(f->isInt ? json_is_integer(value) : json_is_number(value), TREFOIL_INVALID_ARGUMENT,
           "%s: %s must be %s", file, f->key, f->isInt ? "an integer" : "a number");
  double number = json_number_value(value);
  EP_CHECK(number >= f->low && number <= f->high, TREFOIL_INVALID_ARGUMENT,
           "%s: %s is %g: must be in [%g, %g]", file, f->key, number, f->low, f->high);
  if (f->isInt) {
    int whole = (int)number;
    memcpy(object + f->offset, &whole, sizeof whole);
  } else {
    memcpy(object + f->offset, &number, sizeof number);
  }
  return TREFOIL_OK;
}

static trefoil_result_t takeField(const kind_t *kind, const json_t *root, const char *file,
                                  int fieldIdx, char *object) {
  const field_t *f = &kind->fields[fieldIdx];
  const json_t *value = json_object_get(root, f->key);
  if (!value && f->isOptional) return TREFOIL_OK;
  EP_CHECK(value, TREFOIL_INVALID_ARGUMENT, "%s: %s is missing", file, f->key);
  if (!kind->sourceEach) return takeNumber(value, file, f, object);
  const char *source = json_string_value(json_object_get(value, "source"));
  EP_CHECK(json_is_object(value) && json_object_size(value) == 2 && source && source[0],
           TREFOIL_INVALID_ARGUMENT, "%s: %s must be {\"value\": ..., \"source\": \"...\"}", file,
           f->key);
  return takeNumber(json_object_get(value, "value"), file, f, object);
}

static trefoil_result_t failUnknownKey(const kind_t *kind, const char *file, const char *key) {
  char known[640] = "name, about";
  if (!kind->sourceEach) strcat(known, ", source");
  for (int i = 0; i < kind->numFields; i++) {
    size_t used = strlen(known);
    snprintf(known + used, sizeof known - used, ", %s", kind->fields[i].key);
  }
  return epFail(TREFOIL_INVALID_ARGUMENT, "%s: the key %.60s is not known; known are %s", file, key,
                known);
}

static trefoil_result_t checkKeys(const kind_t *kind, json_t *root, const char *file) {
  const char *key;
  json_t *value;
  json_object_foreach(root, key, value) {
    int known = !strcmp(key, "name") || !strcmp(key, "about");
    known |= !kind->sourceEach && !strcmp(key, "source");
    for (int i = 0; i < kind->numFields; i++) known |= !strcmp(key, kind->fields[i].key);
    if (!known) return failUnknownKey(kind, file, key);
  }
  return TREFOIL_OK;
}

static trefoil_result_t takeAll(const kind_t *kind, json_t *root, const char *file, char *object) {
  const char *name = "";
  EP_CHECK(json_is_object(root), TREFOIL_INVALID_ARGUMENT, "%s: must be a JSON object", file);
  EP_TRY(checkKeys(kind, root, file));
  EP_TRY(takeText(root, file, "name", &name));
  EP_TRY(takeText(root, file, "about", NULL));
  if (!kind->sourceEach) EP_TRY(takeText(root, file, "source", NULL));
  EP_CHECK(strlen(name) < TREFOIL_MODEL_NAME_BYTES, TREFOIL_INVALID_ARGUMENT,
           "%s: the name is longer than %d characters", file, TREFOIL_MODEL_NAME_BYTES - 1);
  strcpy(object + kind->nameOffset, name);
  for (int i = 0; i < kind->numFields; i++) EP_TRY(takeField(kind, root, file, i, object));
  return TREFOIL_OK;
}

/* What a file says of the model outside its routed experts, it says whole. */
static trefoil_result_t checkRest(const char *file, const trefoil_moe_t *m) {
  int dense = m->numLayers - m->numMoeLayers;
  EP_CHECK(dense >= 0, TREFOIL_INVALID_ARGUMENT, "%s: num_layers is %d: %d of them have experts",
           file, m->numLayers, m->numMoeLayers);
  const struct {
    const char *key;
    int value, isNeeded;
  } needed[] = {{"vocabulary", m->vocab, 1},
                {"num_heads", m->numHeads, 1},
                {"num_kv_heads (or kv_lora_elements)", m->numKvHeads + m->kvLora, 1},
                {"head_elements", m->headDim, m->numKvHeads > 0},
                {"nope_elements or rope_elements", m->nopeDim + m->ropeDim, m->kvLora > 0},
                {"v_elements", m->vDim, m->kvLora > 0},
                {"dense_hidden_elements", m->denseHidden, dense > 0},
                {"shared_hidden_elements", m->sharedHidden, m->numShared > 0},
                {"window_tokens", m->windowTokens, m->windowLayers > 0}};
  for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
    EP_CHECK(!needed[i].isNeeded || needed[i].value, TREFOIL_INVALID_ARGUMENT,
             "%s: %s is missing: num_layers is there, so the whole model must be", file,
             needed[i].key);
  EP_CHECK(!m->numKvHeads || !m->kvLora, TREFOIL_INVALID_ARGUMENT,
           "%s: attention is GQA by num_kv_heads or MLA by kv_lora_elements, not both", file);
  EP_CHECK(m->windowLayers <= m->numLayers, TREFOIL_INVALID_ARGUMENT,
           "%s: window_layers is %d: there are %d layers", file, m->windowLayers, m->numLayers);
  return TREFOIL_OK;
}

static trefoil_result_t checkMoe(const char *file, trefoil_moe_t *m) {
  EP_CHECK(m->topk <= m->numExperts, TREFOIL_INVALID_ARGUMENT,
           "%s: topk is %d: a token goes to at most all %d experts", file, m->topk, m->numExperts);
  int bits = m->weightBits;
  EP_CHECK(bits == 0 || bits == 4 || bits == 8 || bits == 16, TREFOIL_INVALID_ARGUMENT,
           "%s: weight_bits is %d: must be 4, 8 or 16", file, bits);
  EP_CHECK(!m->numGroups || (m->numExperts % m->numGroups == 0 && m->topkGroups >= 1 &&
                             m->topkGroups <= m->numGroups &&
                             m->topk <= m->topkGroups * (m->numExperts / m->numGroups)),
           TREFOIL_INVALID_ARGUMENT,
           "%s: top-%d of %d experts cannot be of %d of %d groups (topk_groups, num_groups)", file,
           m->topk, m->numExperts, m->topkGroups, m->numGroups);
  if (m->numLayers) return checkRest(file, m);
  if (!m->missing[0]) strcpy(m->missing, "num_layers");
  return TREFOIL_OK;
}

/* Numbers that are possible alone, but not together. */
static trefoil_result_t checkTogether(const kind_t *kind, const char *file, char *object) {
  if (kind == &moeKind) return checkMoe(file, (trefoil_moe_t *)(void *)object);
  const trefoil_cluster_t *c = (const trefoil_cluster_t *)(const void *)object;
  EP_CHECK(c->gpusPerNic <= c->gpusPerNode, TREFOIL_INVALID_ARGUMENT,
           "%s: gpus_per_nic is %d: a network port serves at most the %d GPUs of its node", file,
           c->gpusPerNic, c->gpusPerNode);
  return TREFOIL_OK;
}

static trefoil_result_t parse(const kind_t *kind, const char *file, const char *text,
                              size_t numBytes, char *object) {
  json_error_t error;
  json_t *root = json_loadb(text, numBytes, JSON_REJECT_DUPLICATES, &error);
  EP_CHECK(root, TREFOIL_INVALID_ARGUMENT, "%s, line %d: %s", file, error.line, error.text);
  int isHf = kind == &moeKind && epIsHfConfig(root);
  trefoil_result_t result = isHf ? epHfMoe(root, file, (trefoil_moe_t *)(void *)object)
                                 : takeAll(kind, root, file, object);
  if (result == TREFOIL_OK) result = checkTogether(kind, file, object);
  json_decref(root);
  return result;
}

static trefoil_result_t load(const kind_t *kind, const char *nameOrPath, char *object) {
  ep_text_t text;
  EP_TRY(epPresetRead(kind->what, kind->presets, nameOrPath, &text));
  trefoil_result_t result = parse(kind, nameOrPath, text.chars, text.numBytes, object);
  free(text.owned);
  return result;
}

/* Each reads into an object of its own, so that a failure leaves the caller's as it was. */
trefoil_result_t trefoilClusterLoad(trefoil_cluster_t *cluster, const char *nameOrPath) {
  trefoil_cluster_t found = {.maxGpus = 0};
  EP_CHECK(cluster, TREFOIL_INVALID_ARGUMENT, "the cluster's out-parameter is NULL");
  EP_TRY(load(&clusterKind, nameOrPath, (char *)&found));
  *cluster = found;
  return TREFOIL_OK;
}

trefoil_result_t trefoilMoeLoad(trefoil_moe_t *moe, const char *nameOrPath) {
  trefoil_moe_t found = {.topk = 0};
  EP_CHECK(moe, TREFOIL_INVALID_ARGUMENT, "the model's out-parameter is NULL");
  EP_TRY(load(&moeKind, nameOrPath, (char *)&found));
  *moe = found;
  return TREFOIL_OK;
}

trefoil_result_t trefoilClusterParse(trefoil_cluster_t *cluster, const char *name, const char *text,
                                     size_t numBytes) {
  trefoil_cluster_t found = {.maxGpus = 0};
  EP_CHECK(cluster && name && text, TREFOIL_INVALID_ARGUMENT, "an argument is NULL");
  EP_TRY(parse(&clusterKind, name, text, numBytes, (char *)&found));
  *cluster = found;
  return TREFOIL_OK;
}

trefoil_result_t trefoilMoeParse(trefoil_moe_t *moe, const char *name, const char *text,
                                 size_t numBytes) {
  trefoil_moe_t found = {.topk = 0};
  EP_CHECK(moe && name && text, TREFOIL_INVALID_ARGUMENT, "an argument is NULL");
  EP_TRY(parse(&moeKind, name, text, numBytes, (char *)&found));
  *moe = found;
  return TREFOIL_OK;
}

#endif
