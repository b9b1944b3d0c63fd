/* MoE shapes from the config.json of Hugging Face. Every family has its own names for the same six
 * numbers; one list a number says which names are tried, in this order. Models that also see keep
 * the language model's numbers in an object of their own ("text_config").
 *
 *   experts   n_routed_experts: DeepSeek, Kimi, GLM, dots. num_experts: Qwen, Hunyuan, OLMoE.
 *             num_local_experts: Mixtral, gpt-oss, Llama 4, MiniMax, Granite, Phi. moe_num_experts:
 *             ERNIE, DBRX (whose keys are its own, in objects of attention and experts)
 *   layers    all from first_k_dense_replace on (DeepSeek, Kimi, GLM); every decoder_sparse_step-th
 *             except mlp_only_layers (Qwen); every interleave_moe_layer_step-th, or those in
 *             moe_layers (Llama 4); moe_layer_start_index to moe_layer_end_index (ERNIE)
 *   shared    n_shared_experts; Llama 4 has one that its file does not mention
 *
 * The rest of the model: attention by kv_lora_rank and its parts (MLA) or num_key_value_heads (GQA),
 * windows by layer_types, dense layers by intermediate_size (Llama 4: intermediate_size_mlp).
 *
 * What a file does not say is not guessed, nor what the keys mean in a model_type that is not known:
 * `missing` then names the key, and the rest stays 0. */
#ifdef TREFOIL_HAVE_JSON

#include "models/hf_config.h"

#include <stdio.h>
#include <string.h>

#include "plan/error.h"

enum { maxNames = 4, maxLayers = 4096 };

typedef const char *names_t[maxNames];
static const names_t hiddenNames = {"hidden_size"};
static const names_t expertsNames = {"n_routed_experts", "num_experts", "num_local_experts",
                                     "moe_num_experts"};
static const names_t topkNames = {"num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk"};
static const names_t widthNames = {"moe_intermediate_size", "intermediate_size"};
static const names_t sharedNames = {"n_shared_experts", "num_shared_experts", "num_shared_expert",
                                    "moe_num_shared_experts"};

int epIsHfConfig(const json_t *root) {
  return json_is_object(root) && !json_object_get(root, "hidden_elements") &&
         (json_object_get(root, "model_type") || json_object_get(root, "architectures"));
}

/* The first of the names that is there and not null. */
static const json_t *find(const json_t *config, const names_t names, const char **name) {
  for (int i = 0; i < maxNames && names[i]; i++) {
    const json_t *value = json_object_get(config, names[i]);
    if (!value || json_is_null(value)) continue;
    *name = names[i];
    return value;
  }
  return NULL;
}

/* What a list says of every layer, if it is the same; else the list. */
static const json_t *ofEveryLayer(const json_t *value) {
  const json_t *first = json_array_get(value, 0);
  for (size_t i = 1; i < json_array_size(value); i++)
    if (!json_equal(json_array_get(value, i), first)) return value;
  return first ? first : value;
}

/* An integer in [low, high] under one of the names, or `missing` if that is >= 0. */
typedef struct range {
  json_int_t low, high, missing;
} range_t;

static trefoil_result_t take(const json_t *config, const char *file, const names_t names,
                             range_t range, int *value) {
  const char *name = names[0];
  const json_t *found = find(config, names, &name);
  if (!found && range.missing >= 0) {
    *value = (int)range.missing;
    return TREFOIL_OK;
  }
  EP_CHECK(found, TREFOIL_INVALID_ARGUMENT, "%s: %s is missing", file, name);
  found = ofEveryLayer(found);
  EP_CHECK(json_is_integer(found), TREFOIL_INVALID_ARGUMENT, "%s: %s must be an integer", file,
           name);
  json_int_t number = json_integer_value(found);
  EP_CHECK(number >= range.low && number <= range.high, TREFOIL_INVALID_ARGUMENT,
           "%s: %s is %lld: must be in [%lld, %lld]", file, name, (long long)number,
           (long long)range.low, (long long)range.high);
  *value = (int)number;
  return TREFOIL_OK;
}

/* Marks the layers that the list names; what is no layer is passed over. */
static void mark(const json_t *list, int layers, char *marks) {
  for (size_t i = 0; i < json_array_size(list); i++) {
    json_int_t layer = json_integer_value(json_array_get(list, i));
    if (layer >= 0 && layer < layers) marks[layer] = 1;
  }
}

/* Layers with experts: those of moe_layers; else those from the first to the last one that the
 * steps hit and mlp_only_layers does not name. */
static trefoil_result_t countMoeLayers(const json_t *config, const char *file, int *count) {
  int layers, dense, last, sparseStep, interleave, freq, found = 0;
  EP_TRY(take(config, file, (names_t){"num_hidden_layers"}, (range_t){1, maxLayers, -1}, &layers));
  const range_t step = {1, maxLayers, 1}, end = {-1, layers - 1, layers - 1};
  const names_t first = {"first_k_dense_replace", "moe_layer_num_skipped", "moe_layer_start_index"};
  EP_TRY(take(config, file, first, (range_t){0, layers, 0}, &dense));
  EP_TRY(take(config, file, (names_t){"moe_layer_end_index"}, end, &last));
  if (last < 0) last = layers - 1;
  const names_t sparse = {"decoder_sparse_step", "moe_layer_interval"};
  EP_TRY(take(config, file, sparse, step, &sparseStep));
  EP_TRY(take(config, file, (names_t){"interleave_moe_layer_step"}, step, &interleave));
  EP_TRY(take(config, file, (names_t){"moe_layer_freq"}, step, &freq));
  char named[maxLayers] = {0}, only[maxLayers] = {0};
  const json_t *list = json_object_get(config, "moe_layers");
  mark(list, layers, named);
  mark(json_object_get(config, "mlp_only_layers"), layers, only);
  for (int i = 0; i < layers; i++) {
    int hit = (i + 1) % sparseStep == 0 && (i + 1) % interleave == 0 && i % freq == 0;
    hit = hit && i >= dense && i <= last && !only[i];
    found += json_array_size(list) > 0 ? named[i] : hit;
  }
  EP_CHECK(found >= 1, TREFOIL_INVALID_ARGUMENT,
           "%s: of %d layers none has experts by first_k_dense_replace, decoder_sparse_step, "
           "interleave_moe_layer_step, moe_layer_freq, moe_layers and mlp_only_layers",
           file, layers);
  *count = found;
  return TREFOIL_OK;
}

/* .../deepseek-v3/config.json is called deepseek-v3, .../mine.json is called mine. */
static void nameAfter(const char *file, char name[TREFOIL_MODEL_NAME_BYTES]) {
  const char *slash = strrchr(file, '/');
  const char *start = slash ? slash + 1 : file, *end = start + strlen(start);
  if (!strcmp(start, "config.json") && slash && slash > file) {
    end = slash;
    for (start = slash; start > file && start[-1] != '/';) start--;
  } else if (end - start > 5 && !strcmp(end - 5, ".json")) {
    end -= 5;
  }
  size_t length = (size_t)(end - start);
  if (length >= TREFOIL_MODEL_NAME_BYTES) length = TREFOIL_MODEL_NAME_BYTES - 1;
  memcpy(name, start, length);
  name[length] = 0;
  if (!length || !strcmp(name, ".") || !strcmp(name, "..")) strcpy(name, "config");
}

static int isLlama4(const json_t *config) {
  const char *type = json_string_value(json_object_get(config, "model_type"));
  return type && !strncmp(type, "llama4", 6);
}

/* ---- The rest of the model ---- */

static int isThere(const json_t *config, const char *key) {
  const json_t *value = json_object_get(config, key);
  return value && !json_is_null(value) && !json_is_false(value);
}

static int isStopped(trefoil_moe_t *m, const char *key) {
  snprintf(m->missing, sizeof m->missing, "%s", key);
  return 1;
}

/* Of no family that is known: the same keys may mean other layers. */
static int isOfOtherFamily(const json_t *config, trefoil_moe_t *m) {
  static const char *const known[] = {
      "deepseek_v2", "deepseek_v3",  "kimi_k2",        "glm4_moe",   "qwen2_moe",
      "qwen3_moe",   "mixtral",      "gpt_oss",        "llama4",     "llama4_text",
      "minimax_m2",  "minimax",      "dots1",          "granitemoe", "granitemoeshared",
      "olmoe",       "ernie4_5_moe", "hunyuan_v1_moe", "phimoe",     "dbrx"};
  const char *type = json_string_value(json_object_get(config, "model_type"));
  if (!type) return isStopped(m, "model_type");
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (!strcmp(type, known[i])) return 0;
  snprintf(m->missing, sizeof m->missing, "model_type %.30s is not known", type);
  return 1;
}

/* Attention that keeps something other than keys and values of tokens: the key that says so. */
static int hasOtherAttention(const json_t *config, trefoil_moe_t *m) {
  static const char *const other[] = {"linear_attn_config",
                                      "linear_num_value_heads",
                                      "index_topk",
                                      "mamba_d_state",
                                      "ssm_cfg",
                                      "mamba_num_heads",
                                      "use_cla"};
  for (size_t i = 0; i < sizeof other / sizeof *other; i++)
    if (isThere(config, other[i])) return isStopped(m, other[i]);
  const json_t *types = json_object_get(config, "attn_type_list");
  for (size_t i = 0; i < json_array_size(types); i++)
    if (json_integer_value(json_array_get(types, i)) != 1) return isStopped(m, "attn_type_list");
  return 0;
}

/* Layers that see a window only; Llama 4's file leaves out that every fourth sees all. */
static trefoil_result_t takeWindow(const json_t *config, const char *file, trefoil_moe_t *m) {
  const json_t *types = json_object_get(config, "layer_types");
  const names_t names = {"sliding_window", "attention_chunk_size"};
  const char *name;
  int isUsed =
      isThere(config, "use_sliding_window") || !json_object_get(config, "use_sliding_window");
  if (!find(config, names, &name) || !isUsed) return TREFOIL_OK;
  EP_TRY(take(config, file, names, (range_t){1, 1 << 30, -1}, &m->windowTokens));
  m->windowLayers = isLlama4(config) ? m->numLayers - m->numLayers / 4 : m->numLayers;
  if (json_array_size(types)) m->windowLayers = 0;
  for (size_t i = 0; i < json_array_size(types); i++) {
    const char *type = json_string_value(json_array_get(types, i));
    m->windowLayers += type && (strstr(type, "sliding") || strstr(type, "chunked"));
  }
  if (!m->windowLayers) m->windowTokens = 0;
  return TREFOIL_OK;
}

/* Layers of layer_types that are neither full nor windowed. */
static int hasOtherLayers(const json_t *config, trefoil_moe_t *m) {
  const json_t *types = json_object_get(config, "layer_types");
  for (size_t i = 0; i < json_array_size(types); i++) {
    const char *type = json_string_value(json_array_get(types, i));
    if (!type || (!strstr(type, "full") && !strstr(type, "sliding") && !strstr(type, "chunked")))
      return isStopped(m, "layer_types");
  }
  return 0;
}

static trefoil_result_t takeAttention(const json_t *config, const char *file, trefoil_moe_t *m) {
  const range_t size = {1, 1 << 16, -1}, optional = {1, 1 << 20, 0};
  EP_TRY(take(config, file, (names_t){"num_attention_heads"}, size, &m->numHeads));
  EP_TRY(take(config, file, (names_t){"kv_lora_rank"}, optional, &m->kvLora));
  if (m->kvLora) {
    EP_TRY(take(config, file, (names_t){"q_lora_rank"}, optional, &m->qLora));
    EP_TRY(take(config, file, (names_t){"qk_nope_head_dim"}, size, &m->nopeDim));
    EP_TRY(take(config, file, (names_t){"qk_rope_head_dim"}, size, &m->ropeDim));
    return take(config, file, (names_t){"v_head_dim"}, size, &m->vDim);
  }
  range_t heads = {1, m->numHeads, m->numHeads};
  EP_TRY(take(config, file, (names_t){"num_key_value_heads"}, heads, &m->numKvHeads));
  int most = m->hidden / m->numHeads > 0 ? m->hidden / m->numHeads : 1;
  return take(config, file, (names_t){"head_dim"}, (range_t){1, 1 << 16, most}, &m->headDim);
}

/* Bits of the experts' weights, as quantization_config says; without one, 16. */
static int weightBits(const json_t *root, const json_t *config) {
  const json_t *how = json_object_get(root, "quantization_config");
  if (!json_is_object(how)) how = json_object_get(config, "quantization_config");
  if (!json_is_object(how)) return 16;
  const char *method = json_string_value(json_object_get(how, "quant_method"));
  if (method && !strcmp(method, "fp8")) return 8;
  return method && !strcmp(method, "mxfp4") ? 4 : 0;
}

static trefoil_result_t takeGroups(const json_t *config, const char *file, trefoil_moe_t *m) {
  const range_t groups = {1, m->numExperts, 0};
  int count, most;
  EP_TRY(take(config, file, (names_t){"n_group", "num_expert_group"}, groups, &count));
  EP_TRY(take(config, file, (names_t){"topk_group"}, groups, &most));
  if (count < 2 || !most || most >= count) return TREFOIL_OK;
  m->numGroups = count;
  m->topkGroups = most;
  return TREFOIL_OK;
}

/* The width of all shared experts, and of layers without experts. */
static trefoil_result_t takeWidths(const json_t *config, const char *file, trefoil_moe_t *m) {
  const range_t width = {0, 1 << 24, m->numShared * m->expertHidden};
  const names_t shared = {"shared_expert_intermediate_size", "shared_intermediate_size"};
  EP_TRY(take(config, file, shared, width, &m->sharedHidden));
  if (m->numMoeLayers == m->numLayers) return TREFOIL_OK;
  const names_t names = {"intermediate_size_mlp", "intermediate_size"};
  return take(config, file, names, (range_t){1, 1 << 24, -1}, &m->denseHidden);
}

/* numLayers stays 0, and `missing` names the key, where the file does not say all of it. */
static trefoil_result_t takeRest(const json_t *config, const char *file, trefoil_moe_t *found) {
  EP_TRY(takeGroups(config, file, found));
  trefoil_moe_t m = *found;
  static const char *const needed[] = {"num_attention_heads", "vocab_size"};
  for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
    if (!isThere(config, needed[i]) && isStopped(found, needed[i])) return TREFOIL_OK;
  if (isOfOtherFamily(config, found)) return TREFOIL_OK;
  if (hasOtherAttention(config, found) || hasOtherLayers(config, found)) return TREFOIL_OK;
  EP_TRY(take(config, file, (names_t){"num_hidden_layers"}, (range_t){1, maxLayers, -1},
              &m.numLayers));
  EP_TRY(take(config, file, (names_t){"vocab_size"}, (range_t){1, 1 << 28, -1}, &m.vocab));
  m.tiedEmbeddings = json_is_true(json_object_get(config, "tie_word_embeddings"));
  EP_TRY(takeAttention(config, file, &m));
  EP_TRY(takeWindow(config, file, &m));
  EP_TRY(takeWidths(config, file, &m));
  *found = m;
  return TREFOIL_OK;
}

/* DBRX under the others' names; NULL: of another family, or no memory. */
static json_t *renamed(const json_t *root) {
  static const struct {
    const char *object, *key, *name;
  } names[] = {{NULL, "model_type", "model_type"},
               {NULL, "d_model", "hidden_size"},
               {NULL, "n_layers", "num_hidden_layers"},
               {NULL, "n_heads", "num_attention_heads"},
               {NULL, "vocab_size", "vocab_size"},
               {NULL, "tie_word_embeddings", "tie_word_embeddings"},
               {NULL, "quantization_config", "quantization_config"},
               {"attn_config", "kv_n_heads", "num_key_value_heads"},
               {"ffn_config", "ffn_hidden_size", "moe_intermediate_size"},
               {"ffn_config", "moe_num_experts", "moe_num_experts"},
               {"ffn_config", "moe_top_k", "moe_topk"}};
  const char *type = json_string_value(json_object_get(root, "model_type"));
  json_t *made = type && !strcmp(type, "dbrx") ? json_object() : NULL;
  for (size_t i = 0; made && i < sizeof names / sizeof *names; i++) {
    const json_t *in = names[i].object ? json_object_get(root, names[i].object) : root;
    json_t *value = json_object_get(in, names[i].key);
    if (value) json_object_set(made, names[i].name, value);
  }
  return made;
}

static trefoil_result_t readMoe(const json_t *root, const char *file, trefoil_moe_t *moe) {
  const json_t *text = json_object_get(root, "text_config");
  const json_t *config = json_is_object(text) ? text : root;
  const char *name;
  EP_CHECK(find(config, expertsNames, &name), TREFOIL_INVALID_ARGUMENT,
           "%s: is not of an MoE model: none of n_routed_experts, num_experts, num_local_experts, "
           "moe_num_experts is there",
           file);
  trefoil_moe_t found = {.topk = 0};
  range_t width = {1, 1 << 24, -1};
  EP_TRY(take(config, file, hiddenNames, width, &found.hidden));
  EP_TRY(
      take(config, file, expertsNames, (range_t){1, TREFOIL_MAX_EXPERTS, -1}, &found.numExperts));
  range_t most = {1, found.numExperts < TREFOIL_MAX_TOPK ? found.numExperts : TREFOIL_MAX_TOPK, -1};
  EP_TRY(take(config, file, topkNames, most, &found.topk));
  EP_TRY(take(config, file, widthNames, width, &found.expertHidden));
  EP_TRY(countMoeLayers(config, file, &found.numMoeLayers));
  range_t shared = {0, 1 << 20, isLlama4(config) ? 1 : 0};
  EP_TRY(take(config, file, sharedNames, shared, &found.numShared));
  found.weightBits = weightBits(root, config);
  EP_TRY(takeRest(config, file, &found));
  nameAfter(file, found.name);
  *moe = found;
  return TREFOIL_OK;
}

trefoil_result_t epHfMoe(const json_t *root, const char *file, trefoil_moe_t *moe) {
  json_t *made = renamed(root);
  trefoil_result_t result = readMoe(made ? made : root, file, moe);
  json_decref(made);
  return result;
}

#else
/* ISO C has no empty files. */
extern const int epNoHfConfig;
const int epNoHfConfig = 0;
#endif
