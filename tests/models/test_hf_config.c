/* MoE shapes from Hugging Face's config.json: what each family writes, shortened to the keys that
 * matter and some that must be passed over, and what a reader must refuse. */
#include "trefoil/models.h"

#include "test.h"

#include <stddef.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct {
  const char *preset, *text;
} families[] = {
    {"deepseek-v3",
     "{\"architectures\": [\"DeepseekV3ForCausalLM\"], \"model_type\": \"deepseek_v3\", "
     "\"hidden_size\": 7168, \"intermediate_size\": 18432, \"moe_intermediate_size\": 2048, "
     "\"first_k_dense_replace\": 3, \"moe_layer_freq\": 1, \"n_routed_experts\": 256, "
     "\"n_shared_experts\": 1, \"num_experts_per_tok\": 8, \"num_hidden_layers\": 61, "
     "\"n_group\": 8, \"topk_group\": 4, \"tie_word_embeddings\": false"
     ", \"num_attention_heads\": 128, \"num_key_value_heads\": 128, \"vocab_size\": 129280, "
     "\"kv_lora_rank\": 512, \"q_lora_rank\": 1536, \"qk_nope_head_dim\": 128, "
     "\"qk_rope_head_dim\": 64, \"v_head_dim\": 128, \"quantization_config\": {\"quant_method\": "
     "\"fp8\"}}"},
    {"kimi-k2",
     "{\"model_type\": \"kimi_k2\", \"hidden_size\": 7168, \"intermediate_size\": 18432, "
     "\"moe_intermediate_size\": 2048, \"first_k_dense_replace\": 1, \"moe_layer_freq\": 1, "
     "\"n_routed_experts\": 384, \"n_shared_experts\": 1, \"num_experts_per_tok\": 8, "
     "\"num_hidden_layers\": 61, \"n_group\": 1, \"topk_group\": 1, \"num_attention_heads\": 64, "
     "\"vocab_size\": 163840, \"kv_lora_rank\": 512, \"q_lora_rank\": 1536, \"qk_nope_head_dim\": "
     "128, \"qk_rope_head_dim\": 64, \"v_head_dim\": 128, \"quantization_config\": "
     "{\"quant_method\": \"fp8\"}}"},
    {"glm-4.5",
     "{\"model_type\": \"glm4_moe\", \"hidden_size\": 5120, \"intermediate_size\": 12288, "
     "\"moe_intermediate_size\": 1536, \"first_k_dense_replace\": 3, "
     "\"n_routed_experts\": 160, \"n_shared_experts\": 1, \"num_experts_per_tok\": 8, "
     "\"num_hidden_layers\": 92, \"num_attention_heads\": 96, \"num_key_value_heads\": 8, "
     "\"head_dim\": 128, \"vocab_size\": 151552}"},
    {"qwen3-235b-a22b",
     "{\"model_type\": \"qwen3_moe\", \"hidden_size\": 4096, \"intermediate_size\": 12288, "
     "\"moe_intermediate_size\": 1536, \"decoder_sparse_step\": 1, \"mlp_only_layers\": [], "
     "\"num_experts\": 128, \"num_experts_per_tok\": 8, \"num_hidden_layers\": 94, "
     "\"num_attention_heads\": 64, \"num_key_value_heads\": 4, \"head_dim\": 128, \"vocab_size\": "
     "151936, \"use_sliding_window\": false, \"sliding_window\": 4096}"},
    {"mixtral-8x7b",
     "{\"model_type\": \"mixtral\", \"hidden_size\": 4096, \"intermediate_size\": "
     "14336, \"num_local_experts\": 8, \"num_experts_per_tok\": 2, "
     "\"num_hidden_layers\": 32, \"sliding_window\": null, \"num_attention_heads\": 32, "
     "\"num_key_value_heads\": 8, \"vocab_size\": 32000}"},
    {"gpt-oss-120b",
     "{\"model_type\": \"gpt_oss\", \"hidden_size\": 2880, \"intermediate_size\": "
     "2880, \"num_local_experts\": 128, \"experts_per_token\": 4, "
     "\"num_experts_per_tok\": 4, \"num_hidden_layers\": 36, \"num_attention_heads\": 64, "
     "\"num_key_value_heads\": 8, \"head_dim\": 64, \"vocab_size\": 201088, \"sliding_window\": "
     "128, \"layer_types\": [\"sliding_attention\", \"full_attention\", \"sliding_attention\", "
     "\"full_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\", "
     "\"full_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\", "
     "\"full_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\", "
     "\"full_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\", "
     "\"full_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\", "
     "\"full_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\", "
     "\"full_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\", "
     "\"full_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\", "
     "\"full_attention\"], \"quantization_config\": {\"quant_method\": \"mxfp4\"}}"},
    {"minimax-m2",
     "{\"model_type\": \"minimax_m2\", \"hidden_size\": 3072, \"intermediate_size\": "
     "1536, \"num_local_experts\": 256, \"num_experts_per_tok\": 8, "
     "\"num_hidden_layers\": 62, \"shared_intermediate_size\": 0, \"num_attention_heads\": 48, "
     "\"num_key_value_heads\": 8, \"head_dim\": 128, \"vocab_size\": 200064, \"attn_type_list\": "
     "[1, 1, 1], \"quantization_config\": {\"quant_method\": \"fp8\"}}"},
    {"llama4-maverick",
     "{\"model_type\": \"llama4\", \"text_config\": {\"model_type\": \"llama4_text\", "
     "\"hidden_size\": 5120, \"intermediate_size\": 8192, \"intermediate_size_mlp\": 16384, "
     "\"interleave_moe_layer_step\": 2, \"moe_layers\": null, \"num_local_experts\": 128, "
     "\"num_experts_per_tok\": 1, \"num_hidden_layers\": 48, \"num_attention_heads\": 40, "
     "\"num_key_value_heads\": 8, \"head_dim\": 128, \"vocab_size\": 202048, "
     "\"attention_chunk_size\": 8192}, \"vision_config\": "
     "{\"hidden_size\": 1408, \"num_hidden_layers\": 34}}"},
};

static trefoil_result_t parse(trefoil_moe_t *m, const char *text) {
  return trefoilMoeParse(m, "models/some-model/config.json", text, strlen(text));
}

TEST(each_family_equals_its_preset) {
  trefoil_moe_t preset, m;
  if (trefoilMoeLoad(&preset, "deepseek-v3") == TREFOIL_INVALID_USAGE) {
    SKIP("built without jansson");
  }
  for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
    const char *name = families[i].preset;
    REQUIRE(trefoilMoeLoad(&preset, name) == TREFOIL_OK, "%s", trefoilLastError());
    REQUIRE(parse(&m, families[i].text) == TREFOIL_OK, "%s: %s", name, trefoilLastError());
    CHECK(m.hidden == preset.hidden && m.expertHidden == preset.expertHidden, "%s: %d, %d", name,
          m.hidden, m.expertHidden);
    CHECK(m.numExperts == preset.numExperts && m.topk == preset.topk, "%s: top-%d of %d", name,
          m.topk, m.numExperts);
    CHECK(m.numMoeLayers == preset.numMoeLayers && m.numShared == preset.numShared,
          "%s: %d layers, %d shared", name, m.numMoeLayers, m.numShared);
    CHECK(!strcmp(m.name, "some-model"), "%s is called %s", name, m.name);
    size_t rest = offsetof(trefoil_moe_t, numLayers), end = offsetof(trefoil_moe_t, missing);
    CHECK(m.numLayers > 0 && !memcmp((char *)&m + rest, (char *)&preset + rest, end - rest),
          "%s: the rest of the model differs from the preset's (%d layers, %d heads, %d bits)",
          name, m.numLayers, m.numHeads, m.weightBits);
  }
}

static long long elements(const trefoil_moe_t *m, long long experts) {
  long long h = m->hidden, dense = m->numLayers - m->numMoeLayers;
  long long attention = h * (2 * m->numHeads + 2 * m->numKvHeads) * m->headDim * m->numLayers;
  long long widths = m->numMoeLayers * (experts * m->expertHidden + m->sharedHidden);
  long long router = m->numMoeLayers * h * m->numExperts;
  return attention + 3 * h * (widths + dense * m->denseHidden) + router +
         h * m->vocab * (m->tiedEmbeddings ? 1 : 2);
}

/* Families without a preset, by the parameters that their publishers state, in tenths of billions. */
TEST(other_families_have_their_parameters) {
  trefoil_moe_t m;
  if (trefoilMoeLoad(&m, "deepseek-v3") == TREFOIL_INVALID_USAGE) SKIP("built without jansson");
  static const struct {
    const char *text;
    int total;
  } cases[] = {
      {"{\"model_type\": \"ernie4_5_moe\", \"hidden_size\": 8192, \"intermediate_size\": 28672, "
       "\"num_hidden_layers\": 54, \"num_attention_heads\": 64, \"num_key_value_heads\": 8, "
       "\"moe_num_experts\": 64, \"moe_k\": 8, \"moe_intermediate_size\": 3584, "
       "\"moe_layer_start_index\": 3, \"moe_layer_end_index\": 53, \"moe_layer_interval\": 1, "
       "\"moe_num_shared_experts\": 0, \"vocab_size\": 103424}",
       2995},
      {"{\"model_type\": \"ernie4_5_moe\", \"hidden_size\": 2560, \"intermediate_size\": 12288, "
       "\"num_hidden_layers\": 28, \"num_attention_heads\": 20, \"num_key_value_heads\": 4, "
       "\"moe_num_experts\": 64, \"moe_k\": 6, \"moe_intermediate_size\": 1536, "
       "\"moe_layer_start_index\": 1, \"moe_layer_end_index\": -1, \"moe_layer_interval\": 1, "
       "\"moe_num_shared_experts\": 2, \"vocab_size\": 103424, \"tie_word_embeddings\": true}",
       218},
      {"{\"model_type\": \"hunyuan_v1_moe\", \"hidden_size\": 4096, \"intermediate_size\": 3072, "
       "\"num_hidden_layers\": 3, \"num_attention_heads\": 32, \"num_key_value_heads\": 8, "
       "\"head_dim\": 128, \"num_experts\": 64, \"moe_topk\": [8, 8, 8], "
       "\"moe_intermediate_size\": [3072, 3072, 3072], \"num_shared_expert\": [1, 1, 1], "
       "\"vocab_size\": 128167, \"tie_word_embeddings\": true}",
       80},
      {"{\"model_type\": \"dbrx\", \"d_model\": 6144, \"n_heads\": 48, \"n_layers\": 40, "
       "\"vocab_size\": 100352, \"attn_config\": {\"kv_n_heads\": 8}, \"ffn_config\": "
       "{\"ffn_hidden_size\": 10752, \"moe_num_experts\": 16, \"moe_top_k\": 4}}",
       1316},
      {"{\"model_type\": \"granitemoe\", \"hidden_size\": 1536, \"intermediate_size\": 512, "
       "\"num_hidden_layers\": 32, \"num_attention_heads\": 24, \"num_key_value_heads\": 8, "
       "\"num_local_experts\": 40, \"num_experts_per_tok\": 8, \"vocab_size\": 49155, "
       "\"tie_word_embeddings\": true}",
       33},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    REQUIRE(parse(&m, cases[i].text) == TREFOIL_OK, "%s", trefoilLastError());
    long long tenths = (elements(&m, m.numExperts) + 50000000) / 100000000;
    CHECK(m.numLayers && tenths == cases[i].total, "case %zu: %lld, %s", i, tenths, m.missing);
  }
}

#define SMALL(more)                                                                                \
  "{\"model_type\": \"qwen3_moe\", \"hidden_size\": 64, \"intermediate_size\": 32, "               \
  "\"num_experts\": 8, "                                                                           \
  "\"num_experts_per_tok\": 2, \"num_hidden_layers\": 10" more "}"

/* 10 layers. step 3 hits layers 2, 5, 8 (counted from 0), of which 5 is named dense; a list of three
 * layers, one of them past the last; the first 4 dense and then every second: 4, 6, 8. */
TEST(layers_with_experts) {
  trefoil_moe_t m;
  if (trefoilMoeLoad(&m, "deepseek-v3") == TREFOIL_INVALID_USAGE) SKIP("built without jansson");
  static const struct {
    const char *text;
    int layers;
  } cases[] = {
      {SMALL(""), 10},
      {SMALL(", \"decoder_sparse_step\": 3, \"mlp_only_layers\": [5, 6]"), 2},
      {SMALL(", \"moe_layers\": [1, 4, 10]"), 2},
      {SMALL(", \"first_k_dense_replace\": 4, \"moe_layer_freq\": 2"), 3},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    REQUIRE(parse(&m, cases[i].text) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(m.numMoeLayers == cases[i].layers, "case %zu: %d layers", i, m.numMoeLayers);
  }
}

#define WHOLE ", \"num_attention_heads\": 4, \"vocab_size\": 100"

/* A file that does not state its attention, or states one that keeps more than keys and values, says
 * which key is in the way; the routed experts are known all the same. */
TEST(what_is_not_known_is_named) {
  trefoil_moe_t m;
  if (trefoilMoeLoad(&m, "deepseek-v3") == TREFOIL_INVALID_USAGE) SKIP("built without jansson");
  static const struct {
    const char *text, *missing;
  } cases[] = {
      {SMALL(""), "num_attention_heads"},
      {SMALL(", \"num_attention_heads\": 4"), "vocab_size"},
      {SMALL(WHOLE ", \"index_topk\": 2048"), "index_topk"},
      {SMALL(WHOLE ", \"linear_attn_config\": {\"head_dim\": 4}"), "linear_attn_config"},
      {SMALL(WHOLE ", \"attn_type_list\": [1, 0]"), "attn_type_list"},
      {SMALL(WHOLE ", \"layer_types\": [\"full_attention\", \"mamba\"]"), "layer_types"},
      {"{\"model_type\": \"jamba\", \"hidden_size\": 64, \"intermediate_size\": 32, "
       "\"num_experts\": 8, "
       "\"num_experts_per_tok\": 2, \"num_hidden_layers\": 10" WHOLE "}",
       "model_type jamba is not known"},
      {SMALL(WHOLE), ""},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    REQUIRE(parse(&m, cases[i].text) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(!strcmp(m.missing, cases[i].missing), "case %zu: \"%s\"", i, m.missing);
    CHECK((m.numLayers == 10) == !cases[i].missing[0], "case %zu: %d layers", i, m.numLayers);
    CHECK(m.numExperts == 8, "case %zu", i);
  }
  CHECK(m.numHeads == 4 && m.numKvHeads == 4 && m.headDim == 16, "%d, %d, %d", m.numHeads,
        m.numKvHeads, m.headDim);
  CHECK(m.weightBits == 16 && !m.windowLayers && !m.numGroups, "%d bits", m.weightBits);
  REQUIRE(parse(&m, SMALL(WHOLE ", \"quantization_config\": {\"quant_method\": \"awq\"}")) ==
              TREFOIL_OK,
          "%s", trefoilLastError());
  CHECK(m.weightBits == 0, "a method that is not known: %d bits", m.weightBits);
}

static void expectRefused(const char *text, const char *sentence) {
  trefoil_moe_t m = {.topk = -7};
  CHECK(parse(&m, text) == TREFOIL_INVALID_ARGUMENT, "taken: %s", text);
  CHECK(strstr(trefoilLastError(), sentence), "\"%s\" lacks \"%s\"", trefoilLastError(), sentence);
  CHECK(m.topk == -7, "a failure wrote its out-parameter");
}

TEST(refused_with_a_sentence) {
  trefoil_moe_t m;
  if (trefoilMoeLoad(&m, "deepseek-v3") == TREFOIL_INVALID_USAGE) SKIP("built without jansson");
  expectRefused("{\"model_type\": \"llama\", \"hidden_size\": 4096}", "not of an MoE model");
  expectRefused("{\"model_type\": \"x\", \"num_experts\": 8}", "hidden_size is missing");
  expectRefused("{\"model_type\": \"x\", \"num_experts\": \"8\", \"hidden_size\": 4}",
                "num_experts must be an integer");
  expectRefused("{\"model_type\": \"x\", \"num_experts\": 8, \"hidden_size\": 4, "
                "\"num_experts_per_tok\": 9}",
                "num_experts_per_tok is 9: must be in [1, 8]");
  expectRefused(SMALL(", \"moe_layer_end_index\": 10"), "moe_layer_end_index is 10");
  expectRefused(SMALL(", \"n_shared_experts\": [1, 2]"), "n_shared_experts must be an integer");
  expectRefused(SMALL(", \"mlp_only_layers\": [0,1,2,3,4,5,6,7,8,9]"), "none has experts");
  expectRefused(SMALL(", \"first_k_dense_replace\": 11"), "first_k_dense_replace is 11");
  expectRefused(SMALL(WHOLE ", \"num_key_value_heads\": 5"), "num_key_value_heads is 5");
  expectRefused(SMALL(WHOLE ", \"kv_lora_rank\": 5"), "qk_nope_head_dim is missing");
  expectRefused(SMALL(", \"n_group\": 4, \"topk_group\": 0"), "topk_group is 0");
  expectRefused(SMALL(", \"n_group\": 3, \"topk_group\": 1"), "of 1 of 3 groups");
  expectRefused(SMALL(", \"hidden_size\": 3"), "line 1");
  expectRefused("{\"hidden_size\": 4}", "not known");
}

TEST(named_after_folder_or_file) {
  trefoil_moe_t m;
  if (trefoilMoeLoad(&m, "deepseek-v3") == TREFOIL_INVALID_USAGE) SKIP("built without jansson");
  char folder[] = "/tmp/trefoil_hf_XXXXXX", path[64];
  REQUIRE(mkdtemp(folder), "no temporary folder");
  static const char *const names[] = {"config.json", "mine.json"};
  for (int i = 0; i < 2; i++) {
    snprintf(path, sizeof path, "%s/%s", folder, names[i]);
    FILE *file = fopen(path, "w");
    REQUIRE(file && fputs(families[0].text, file) >= 0 && !fclose(file), "%s", path);
    REQUIRE(trefoilMoeLoad(&m, path) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(!strcmp(m.name, i ? "mine" : folder + 5), "%s is called %s", path, m.name);
    unlink(path);
  }
  rmdir(folder);
}

TEST_MAIN()
