/* Presets, port loads and the closed form. Loads are compared with sums over the traffic matrices,
 * and with numbers derived in comments. */
#include "trefoil/models.h"

#include "test.h"
#include "tests/plan/cases.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

static int hasJson(void) {
  trefoil_cluster_t c;
  return trefoilClusterLoad(&c, "dgx-h100") != TREFOIL_INVALID_USAGE;
}

/* The planner leaves out what does not fit, and a bound is over line rates: every preset says both. */
TEST(presets_state_memory_and_line_rates) {
  trefoil_cluster_t c;
  for (int i = 0; trefoilClusterName(i); i++) {
    REQUIRE(trefoilClusterLoad(&c, trefoilClusterName(i)) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(c.gpuMemoryGb >= 80, "%s: %g GB a GPU", c.name, c.gpuMemoryGb);
    CHECK(c.nvlinkLineGbPerS > c.nvlinkGbPerS, "%s: line rate %g", c.name, c.nvlinkLineGbPerS);
    trefoil_port_loads_t loads = {.maxBytes = {0, 9000, 4500, 100, 0}};
    double line = 9000 / (c.nvlinkLineGbPerS * 1e3), nic = 0.1 / c.nicGbPerS;
    CHECK(trefoilLineBoundUs(&c, &loads, 0) == line, "%s: NVLink alone", c.name);
    loads.maxBytes[TREFOIL_PORT_NIC_OUT] = 1000000;
    if (c.nicGbPerS > 0) CHECK(trefoilLineBoundUs(&c, &loads, 1) == 1e4 * nic, "%s", c.name);
  }
}

TEST(all_presets_load) {
  if (!hasJson()) SKIP("built without jansson");
  int clusters = 0, models = 0;
  for (; trefoilClusterName(clusters); clusters++) {
    trefoil_cluster_t c;
    const char *name = trefoilClusterName(clusters);
    REQUIRE(trefoilClusterLoad(&c, name) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(!strcmp(c.name, name), "%s calls itself %s", name, c.name);
    CHECK(c.maxGpus == c.gpusPerNode || c.nicGbPerS > 0, "%s has no network between nodes", name);
    CHECK(clusters == 0 || strcmp(trefoilClusterName(clusters - 1), name) < 0, "%s: order", name);
  }
  for (; trefoilMoeName(models); models++) {
    trefoil_moe_t m;
    const char *name = trefoilMoeName(models);
    REQUIRE(trefoilMoeLoad(&m, name) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(!strcmp(m.name, name) && m.topk <= m.numExperts, "%s calls itself %s", name, m.name);
  }
  CHECK(clusters == 13 && models == 10, "%d clusters, %d models", clusters, models);
  CHECK(!trefoilClusterName(-1) && !trefoilMoeName(1000), "names outside");
  trefoil_moe_t v3;
  REQUIRE(trefoilMoeLoad(&v3, "deepseek-v3") == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(v3.hidden == 7168 && v3.numExperts == 256 && v3.topk == 8 && v3.numMoeLayers == 58, "v3");
}

#define CLUSTER(gpus, nvlink)                                                                      \
  "{\"name\": \"x\", \"about\": \"y\", \"gpus_per_node\": {\"value\": " gpus                       \
  ", \"source\": \"s\"}, \"max_gpus\": {\"value\": 8, \"source\": \"s\"}, "                        \
  "\"nvlink_gb_per_s\": " nvlink                                                                   \
  ", \"gpus_per_nic\": {\"value\": 1, \"source\": \"s\"}, \"nic_gb_per_s\": {\"value\": 50, "      \
  "\"source\": \"s\"}, \"net_latency_us\": {\"value\": 2, \"source\": \"s\"}, \"ll_fixed_us\": "   \
  "{\"value\": 3, \"source\": \"s\"}, \"ht_fixed_us\": {\"value\": 11, \"source\": \"s\"}}"

#define MOE(topk)                                                                                  \
  "{\"name\": \"x\", \"about\": \"y\", \"source\": \"s\", \"hidden_elements\": 128, "              \
  "\"num_experts\": 8, "                                                                           \
  "\"topk\": " topk ", \"num_moe_layers\": 1, \"expert_hidden_elements\": 64, "                    \
  "\"num_shared_experts\": 0}"

static void expectCluster(const char *text, const char *sentence) {
  trefoil_cluster_t c = {.maxGpus = -7};
  trefoil_result_t result = trefoilClusterParse(&c, "f.json", text, strlen(text));
  if (!sentence) {
    CHECK(result == TREFOIL_OK && c.maxGpus == 8, "%s", trefoilLastError());
    return;
  }
  CHECK(result == TREFOIL_INVALID_ARGUMENT, "taken: %s", text);
  CHECK(strstr(trefoilLastError(), sentence), "\"%s\" lacks \"%s\"", trefoilLastError(), sentence);
  CHECK(c.maxGpus == -7, "a failure wrote its out-parameter");
}

/* A model with 4 layers of experts, and what `more` says of the rest. */
static void expectRest(const char *more, const char *sentence) {
  char text[600];
  int size = snprintf(text, sizeof text,
                      "{\"name\": \"x\", \"about\": \"y\", \"source\": \"z\", "
                      "\"hidden_elements\": 64, \"num_experts\": 8, \"topk\": 2, "
                      "\"num_moe_layers\": 4, \"expert_hidden_elements\": 16, "
                      "\"num_shared_experts\": 0%s}",
                      more);
  trefoil_moe_t m = {.topk = -7};
  trefoil_result_t result = trefoilMoeParse(&m, "f.json", text, (size_t)size);
  CHECK((result == TREFOIL_OK) == !sentence, "%s: %s", more, trefoilLastError());
  CHECK(!sentence || strstr(trefoilLastError(), sentence), "%s: %s", more, trefoilLastError());
  CHECK(sentence ? m.topk == -7 : m.topk == 2, "%s: top-%d", more, m.topk);
}

#define GQA                                                                                        \
  ", \"vocabulary\": 9, \"num_heads\": 4, \"num_kv_heads\": 2, \"head_elements\": 8, "             \
  "\"num_layers\": "

TEST(the_rest_of_a_model_is_whole) {
  if (!hasJson()) SKIP("built without jansson");
  expectRest("", NULL);
  expectRest(GQA "4", NULL);
  expectRest(GQA "3", "num_layers is 3: 4 of them have experts");
  expectRest(GQA "5", "dense_hidden_elements is missing");
  expectRest(", \"num_layers\": 4", "vocabulary is missing");
  expectRest(", \"num_layers\": 4, \"vocabulary\": 9, \"num_heads\": 4", "num_kv_heads (or");
  expectRest(", \"num_layers\": 4, \"vocabulary\": 9, \"num_heads\": 4, \"num_kv_heads\": 2",
             "head_elements is missing");
  expectRest(", \"num_layers\": 4, \"vocabulary\": 9, \"num_heads\": 4, \"kv_lora_elements\": 2",
             "nope_elements or rope_elements is missing");
  expectRest(GQA "4, \"kv_lora_elements\": 2, \"nope_elements\": 2, \"v_elements\": 2", "not both");
  expectRest(GQA "4, \"window_layers\": 5, \"window_tokens\": 8", "window_layers is 5");
  expectRest(GQA "4, \"window_layers\": 2", "window_tokens is missing");
  expectRest(", \"weight_bits\": 5", "weight_bits is 5");
  expectRest(", \"num_groups\": 8, \"topk_groups\": 1", "top-2 of 8 experts cannot be of 1 of 8");
  expectRest(", \"num_groups\": 3, \"topk_groups\": 2", "of 2 of 3 groups");
  expectRest(", \"num_groups\": 4, \"topk_groups\": 2", NULL);
}

TEST(malformed_presets) {
  if (!hasJson()) SKIP("built without jansson");
  expectCluster(CLUSTER("8", "{\"value\": 350, \"source\": \"s\"}"), NULL);
  expectCluster(CLUSTER("0", "{\"value\": 350, \"source\": \"s\"}"), "gpus_per_node is 0");
  expectCluster(CLUSTER("8.5", "{\"value\": 350, \"source\": \"s\"}"), "an integer");
  expectCluster(CLUSTER("8", "350"), "nvlink_gb_per_s must be {");
  expectCluster(CLUSTER("8", "{\"value\": 350}"), "source");
  expectCluster(CLUSTER("8", "{\"value\": 350, \"source\": \"\"}"), "source");
  expectCluster(CLUSTER("8", "{\"value\": -1, \"source\": \"s\"}"), "must be in");
  expectCluster(CLUSTER("8", "{\"value\": \"fast\", \"source\": \"s\"}"), "a number");
  expectCluster(CLUSTER("8", "{\"value\": 1, \"source\": \"s\"}, \"nvlnk\": 3"),
                "nvlnk is not known");
  expectCluster(CLUSTER("8", "{\"value\": 1, \"source\": \"s\"}, \"name\": \"z\""), "line 1");
  expectCluster("{\"name\": \"x\", \"about\": \"y\"}", "gpus_per_node is missing");
  expectCluster(CLUSTER("8", "{\"value\": 350, \"source\": \"s\"}") "x", "line 1");
  expectCluster("[1]", "object");
  expectCluster("{", "line 1");
  expectCluster("", "line");
  trefoil_moe_t m = {.topk = -7};
  CHECK(trefoilMoeLoad(&m, "gpt-2") == TREFOIL_INVALID_ARGUMENT, "gpt-2");
  CHECK(strstr(trefoilLastError(), "deepseek-v3"), "%s", trefoilLastError());
  static const char tooMany[] = MOE("9");
  CHECK(trefoilMoeParse(&m, "f.json", tooMany, sizeof tooMany - 1) == TREFOIL_INVALID_ARGUMENT,
        "9 of 8 experts");
  CHECK(strstr(trefoilLastError(), "at most all 8 experts"), "%s", trefoilLastError());
  static const char allOf[] = MOE("8");
  trefoil_moe_t all;
  CHECK(trefoilMoeParse(&all, "f.json", allOf, sizeof allOf - 1) == TREFOIL_OK && all.topk == 8,
        "%s", trefoilLastError());
  CHECK(!strcmp(all.missing, "num_layers"), "what is not stated is not named: %s", all.missing);
  CHECK(trefoilMoeLoad(&m, "/nonexistent/m.json") == TREFOIL_SYSTEM_ERROR, "no file");
  CHECK(trefoilMoeLoad(&m, NULL) == TREFOIL_INVALID_ARGUMENT && m.topk == -7, "NULL");
}

TEST(files_by_path) {
  if (!hasJson()) SKIP("built without jansson");
  char path[] = "/tmp/trefoil_cluster_XXXXXX";
  int fd = mkstemp(path);
  REQUIRE(fd >= 0, "no temporary file");
  static const char text[] = CLUSTER("4", "{\"value\": 123.5, \"source\": \"s\"}");
  CHECK(write(fd, text, sizeof text - 1) == (ssize_t)sizeof text - 1, "write");
  close(fd);
  trefoil_cluster_t c;
  CHECK(trefoilClusterLoad(&c, path) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(c.gpusPerNode == 4 && c.nvlinkGbPerS == 123.5 && c.llFixedUs == 3, "values");
  unlink(path);
}

/* 2 nodes of 2 ranks, one expert each, K = 2, HT, row of 10 bytes. Rank 0's two tokens go to experts
 * (1, 3) and (2, 3); rank 3's token goes to (3, 2).
 *   rank 0: DIRECT 0->1 one row. NET_OUT 0->2 two rows (rail 0); FORWARD 2->2 one, 2->3 two.
 *   rank 3: DIRECT 3->3 one, 3->2 one.
 * NVLink out: rank 0: 10, rank 2: 20, rank 3: 10; in: rank 1: 10, rank 2: 10, rank 3: 20.
 * Net: out of rank 0 and into rank 2: 20. */
TEST(loads_by_hand) {
  static const int32_t t0[] = {1, 3, 2, 3}, t3[] = {3, 2};
  const int32_t *const idx[] = {t0, NULL, NULL, t3};
  const int64_t numTokens[] = {2, 0, 0, 1};
  trefoil_routing_t r = {{4, 2, 4, 2, 8}, numTokens, idx};
  trefoil_plan_config_t config = {.mode = TREFOIL_HT_FLAT, .rowBytes = 10};
  trefoil_plan_t *plan = NULL;
  trefoil_port_loads_t l;
  REQUIRE(trefoilPlanCreate(&plan, &r, &config) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(trefoilPortLoads(plan, &r.shape, 1, &l) == TREFOIL_OK, "%s", trefoilLastError());
  static const uint64_t expected[] = {0, 20, 20, 20, 20};
  static const int busiest[] = {-1, 2, 3, 0, 2};
  for (int p = 0; p < TREFOIL_NUM_PORTS; p++) {
    CHECK(l.maxBytes[p] == expected[p] && l.busiest[p] == busiest[p], "%s: %llu bytes at %d",
          trefoilPortName((trefoil_port_t)p), (unsigned long long)l.maxBytes[p], l.busiest[p]);
  }
  CHECK(l.totalBytes[0] == 20 && l.totalBytes[1] == 40 && l.totalBytes[2] == 20, "tiers");
  trefoil_cluster_t c = {.name = "x", .nvlinkGbPerS = 0.01, .nicGbPerS = 0.002, .netLatencyUs = 5};
  c.htFixedUs = 11;
  c.llFixedUs = 3;
  trefoil_closed_form_t b;
  /* 20 bytes at 2 bytes a us: 10 us, the NVLink's 2 us are hidden; 11 + 5 + 10 */
  REQUIRE(trefoilClosedForm(&c, TREFOIL_HT_FLAT, &l, &b) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(fabs(b.us - 26) < 1e-9 && b.limit == TREFOIL_PORT_NIC_OUT && b.fixedUs == 16, "%g", b.us);
  c.nicGbPerS = 0.2; /* 0.1 us: NVLink's 20 bytes at 10 a us limit */
  REQUIRE(trefoilClosedForm(&c, TREFOIL_LL_RANK_MAJOR, &l, &b) == TREFOIL_OK, "%s",
          trefoilLastError());
  CHECK(fabs(b.us - 10) < 1e-9 && b.limit == TREFOIL_PORT_NVLINK_OUT, "%g", b.us);
  c.nicGbPerS = 0;
  CHECK(trefoilClosedForm(&c, TREFOIL_HT_FLAT, &l, &b) == TREFOIL_INVALID_ARGUMENT, "no network");
  CHECK(trefoilClosedForm(&c, (trefoil_mode_t)9, &l, &b) == TREFOIL_INVALID_ARGUMENT, "mode 9");
  CHECK(trefoilPortLoads(plan, &r.shape, 0, &l) == TREFOIL_INVALID_ARGUMENT, "0 GPUs a NIC");
  trefoilPlanDestroy(plan);
}

/* Every port's load is the sum of a row or column of the traffic matrix, by tier. */
TEST(loads_equal_traffic) {
  for (int i = 0; i < 200; i++) {
    uint64_t state = 300 + (uint64_t)i;
    random_case_t c;
    randomCase(&c, &state);
    const trefoil_shape_t *s = &c.routing.shape;
    int R = s->numRanks, G = s->ranksPerNode, perNic = 1 + (int)randomBelow(&state, 4);
    trefoil_plan_config_t config = {.mode = (trefoil_mode_t)randomBelow(&state, 4),
                                    .op = (trefoil_op_t)randomBelow(&state, 2),
                                    .rowBytes = 7};
    trefoil_plan_t *plan = NULL;
    trefoil_port_loads_t l;
    uint64_t *bytes = malloc((size_t)(R * R) * sizeof *bytes);
    REQUIRE(trefoilPlanCreate(&plan, &c.routing, &config) == TREFOIL_OK, "%s", trefoilLastError());
    REQUIRE(trefoilPlanTraffic(plan, -1, bytes) == TREFOIL_OK, "%s", trefoilLastError());
    REQUIRE(trefoilPortLoads(plan, s, perNic, &l) == TREFOIL_OK, "%s", trefoilLastError());
    uint64_t most[TREFOIL_NUM_PORTS] = {0};
    for (int a = 0; a < R; a++) {
      uint64_t port[TREFOIL_NUM_PORTS] = {0};
      for (int near = 0; near < R; near++) {
        /* a's NVLink; the network port that a is the first GPU of */
        int sameNic = near / G == a / G && near % G / perNic == a % G / perNic;
        for (int far = 0; far < R; far++) {
          uint64_t out = bytes[near * R + far], in = bytes[far * R + near];
          if (near == a && far != a && far / G == a / G) {
            port[TREFOIL_PORT_NVLINK_OUT] += out;
            port[TREFOIL_PORT_NVLINK_IN] += in;
          } else if (sameNic && a % G % perNic == 0 && far / G != near / G) {
            port[TREFOIL_PORT_NIC_OUT] += out;
            port[TREFOIL_PORT_NIC_IN] += in;
          }
        }
      }
      for (int p = 0; p < TREFOIL_NUM_PORTS; p++) most[p] = port[p] > most[p] ? port[p] : most[p];
    }
    CHECK(!memcmp(most, l.maxBytes, sizeof most), "case %d", i);
    trefoilPlanDestroy(plan);
    free(bytes);
    freeCase(&c);
  }
}

/* H200, LL dispatch of 128 tokens on 4 ranks, top-8 of 256, every token on all 4: 384 rows of 14336
 * bytes leave each rank, 5.505 MB at 350 GB/s = 15.73 us, and 3.4 us are fixed. */
TEST(h200_by_hand) {
  if (!hasJson()) SKIP("built without jansson");
  enum { B = 128 };
  static int32_t idx[4][B * 8];
  const int32_t *rows[4];
  int64_t numTokens[4];
  for (int r = 0; r < 4; r++) {
    rows[r] = idx[r];
    numTokens[r] = B;
    for (int i = 0; i < B * 8; i++) idx[r][i] = i % 8 * 32 + i / 8 % 32;
  }
  trefoil_routing_t routing = {{4, 4, 256, 8, B}, numTokens, rows};
  trefoil_plan_config_t config = {.mode = TREFOIL_LL_EXPERT_MAJOR, .rowBytes = 14336};
  trefoil_plan_t *plan = NULL;
  trefoil_port_loads_t l;
  trefoil_cluster_t c;
  trefoil_closed_form_t b;
  REQUIRE(trefoilPlanCreate(&plan, &routing, &config) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(trefoilPortLoads(plan, &routing.shape, 1, &l) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(trefoilClusterLoad(&c, "h200-x4") == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(trefoilClosedForm(&c, TREFOIL_LL_EXPERT_MAJOR, &l, &b) == TREFOIL_OK, "%s",
          trefoilLastError());
  CHECK(l.maxBytes[TREFOIL_PORT_NVLINK_OUT] == 384 * 14336, "bytes");
  CHECK(fabs(b.us - (3.4 + 384 * 14336 / 350e3)) < 1e-9, "%g us", b.us);
  trefoilPlanDestroy(plan);
}

TEST(ep_sizes) {
  CHECK(trefoilEpSize(1024, 256, 0) == 256 && trefoilEpSize(64, 256, 0) == 64, "V3");
  CHECK(trefoilEpSize(1024, 160, 0) == 128, "160 experts: the largest divisor of 1024 is 128");
  CHECK(trefoilEpSize(72, 256, 64) == 36 && trefoilEpSize(8, 3, 0) == 2, "divisors");
  CHECK(trefoilEpSize(7, 1, 0) == 1, "one expert");
  CHECK(trefoilEpSize(64, 8, 32) == 8, "more ranks wanted than experts");
  CHECK(trefoilRanksPerNode(256, 8) == 8 && trefoilRanksPerNode(4, 8) == 4, "nodes of 8");
  CHECK(trefoilRanksPerNode(6, 8) == 6 && trefoilRanksPerNode(16, 8) == 8, "even nodes");
  CHECK(trefoilRanksPerNode(12, 8) == 6, "two nodes of 6");
  CHECK(trefoilRanksPerNode(20, 8) == 4, "8, 8 and 4; 5 would take a fourth node");
  CHECK(trefoilRanksPerNode(9, 8) == 3, "6 and 3");
  CHECK(trefoilRanksPerNode(13, 8) == 1, "a prime number");
  CHECK(trefoilRanksPerNode(8, 0) == 1 && trefoilRanksPerNode(0, 8) == 1 &&
            trefoilRanksPerNode(-8, -1) == 1,
        "none");
  CHECK(trefoilRanksPerNode(1 << 20, INT_MAX) == 1 << 20, "huge nodes");
  CHECK(trefoilRanksPerNode(128, 72) == 64, "NVL72: two racks of 64");
  for (int ranks = 1; ranks <= 200; ranks++) {
    for (int most = 1; most <= 72; most += 1 + most / 9) {
      const int n = trefoilRanksPerNode(ranks, most), nodes = (ranks + most - 1) / most;
      CHECK(n >= 1 && n <= most && ranks % n == 0 && ranks <= nodes * (most / n * n),
            "%d ranks on nodes of %d: domains of %d", ranks, most, n);
    }
  }
}

TEST_MAIN()
