/* The GPU library's preflight: what it takes, what it refuses and what would be legal, and how many bytes.
 * Needs the library, no GPU. */
#include "nccl_ep.h"
#include "test.h"

static ncclEpGroupConfig_t lowLatency(void) {
  ncclEpGroupConfig_t c = NCCL_EP_GROUP_CONFIG_INIT;
  c.num_experts = 256;
  c.max_dispatch_tokens_per_rank = 128;
  c.max_token_bytes = 7168 * 2;
  return c;
}

static ncclEpGroupConfig_t highThroughput(void) {
  ncclEpGroupConfig_t c = lowLatency();
  c.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  c.max_dispatch_tokens_per_rank = 4096;
  c.num_topk = 8;
  return c;
}

static ncclEpPreflight_t ask(const ncclEpGroupConfig_t *c, ncclEpLayout_t layout, int topk,
                             int ranks, int perNode) {
  ncclEpPreflight_t p = NCCL_EP_PREFLIGHT_INIT;
  ncclResult_t result = ncclEpPreflight(c, layout, NULL, topk, ranks, perNode, &p);
  CHECK(result == ncclSuccess, "%s", ncclEpGetLastError());
  return p;
}

TEST(goal_of_memory) {
  ncclEpGroupConfig_t c = lowLatency();
  for (int layout = 1; layout <= 2; layout++) {
    ncclEpPreflight_t p = ask(&c, (ncclEpLayout_t)layout, 8, 4, 4);
    size_t sum = p.group_device_bytes + p.group_shared_bytes + p.handle_device_bytes;
    CHECK(p.supported && sum <= (size_t)64 << 20, "layout %d: %zu bytes, %s", layout, sum,
          p.reason);
    CHECK(p.handle_shared_bytes == 0 && p.nccl_bytes < (size_t)2 << 20, "%zu, %zu",
          p.handle_shared_bytes, p.nccl_bytes);
  }
}

/* What moves between ranks is at least two buffers of what an operation can receive, and memory of high
 * throughput does not grow with the tokens as low latency's does. */
TEST(bytes_follow_the_shape) {
  ncclEpGroupConfig_t c = lowLatency(), h = highThroughput();
  size_t rows = 2u * (4u * 128u + 128u * 8u) * 7168u * 2u;
  ncclEpPreflight_t p = ask(&c, NCCL_EP_LAYOUT_EXPERT_MAJOR, 8, 4, 4);
  CHECK(p.group_shared_bytes > rows && p.group_shared_bytes < rows + rows / 20, "%zu, rows %zu",
        p.group_shared_bytes, rows);
  c.max_dispatch_tokens_per_rank = 256;
  ncclEpPreflight_t twice = ask(&c, NCCL_EP_LAYOUT_EXPERT_MAJOR, 8, 4, 4);
  CHECK(twice.group_shared_bytes > 19 * p.group_shared_bytes / 10, "%zu", twice.group_shared_bytes);
  ncclEpPreflight_t some = ask(&h, NCCL_EP_LAYOUT_FLAT, 8, 4, 4);
  h.max_dispatch_tokens_per_rank = 8192;
  ncclEpPreflight_t more = ask(&h, NCCL_EP_LAYOUT_FLAT, 8, 4, 4);
  CHECK(some.supported && some.group_shared_bytes < (size_t)300 << 20 &&
            more.group_shared_bytes < some.group_shared_bytes + ((size_t)8 << 20),
        "%zu, %zu, %s", some.group_shared_bytes, more.group_shared_bytes, some.reason);
  h.max_dispatch_tokens_per_rank = 4096;
  h.zero_copy = NCCL_EP_ZERO_COPY_ON;
  ncclEpPreflight_t windows = ask(&h, NCCL_EP_LAYOUT_FLAT, 8, 4, 4);
  CHECK(windows.supported && windows.group_shared_bytes < (size_t)126000000,
        "%zu with outputs in windows", windows.group_shared_bytes);
}

/* Across domains: in the window also messages, a buffer in and out by parity for each far rank; in device
 * memory mirrors: own rows, and a partial sum of each token of each far rank, by parity; and words. */
TEST(bytes_of_several_domains) {
  ncclEpGroupConfig_t c = lowLatency();
  ncclEpPreflight_t one = ask(&c, NCCL_EP_LAYOUT_EXPERT_MAJOR, 8, 16, 16);
  size_t rows = 128u * 7168u * 2u, far = 8, words = 400u << 10;
  ncclEpPreflight_t two = ask(&c, NCCL_EP_LAYOUT_EXPERT_MAJOR, 8, 16, 8);
  size_t messages = two.group_shared_bytes - one.group_shared_bytes;
  size_t mirrors = two.group_device_bytes - one.group_device_bytes;
  CHECK(two.supported, "%s", two.reason);
  CHECK(messages > 4 * far * (1 + 8) * rows && messages < 5 * far * (1 + 8) * rows, "%zu",
        messages);
  CHECK(mirrors > 2 * (1 + far) * rows && mirrors < 2 * (1 + far) * (rows + rows / 20) + words,
        "%zu for mirrors of rows of %zu", mirrors, rows);
  c.max_dispatch_tokens_per_rank = 65536;
  ncclEpPreflight_t large = ask(&c, NCCL_EP_LAYOUT_EXPERT_MAJOR, 8, 16, 8);
  CHECK(!large.supported && strstr(large.reason, "to a far rank: at most 1073741824"), "%s",
        large.reason);
}

/* In high throughput: in the window also rings for each other domain, at most 1 GiB of them, and ids. */
TEST(bytes_of_rings) {
  ncclEpGroupConfig_t c = highThroughput();
  ncclEpPreflight_t one = ask(&c, NCCL_EP_LAYOUT_FLAT, 8, 16, 16);
  ncclEpPreflight_t two = ask(&c, NCCL_EP_LAYOUT_FLAT, 8, 16, 8);
  size_t rings = two.group_shared_bytes - one.group_shared_bytes;
  size_t units = 4 * 4096u, unit = 14336;
  CHECK(two.supported, "%s", two.reason);
  CHECK(rings > units * unit && rings < (size_t)258 << 20, "%zu", rings);
  CHECK(two.group_device_bytes > one.group_device_bytes + 4 * units &&
            two.handle_device_bytes > one.handle_device_bytes + 4096u * 8 * 12,
        "%zu, %zu", two.group_device_bytes, two.handle_device_bytes);
  ncclEpPreflight_t four = ask(&c, NCCL_EP_LAYOUT_FLAT, 8, 16, 4);
  rings = four.group_shared_bytes - one.group_shared_bytes;
  CHECK(rings > 3 * units * unit && rings < ((size_t)1 << 30), "%zu", rings);
  ncclEpPreflight_t sixteen = ask(&c, NCCL_EP_LAYOUT_FLAT, 8, 16, 1);
  rings = sixteen.group_shared_bytes - one.group_shared_bytes;
  CHECK(sixteen.supported && rings > (size_t)512 << 20 && rings < (size_t)1034 << 20, "%zu", rings);
}

static void refused(const char *what, ncclEpPreflight_t p, const char *limit,
                    unsigned long long nearest) {
  CHECK(!p.supported && !strcmp(p.limit, limit) && p.nearest == nearest && p.reason[0],
        "%s: limit '%s', nearest %llu, '%s'", what, p.limit, p.nearest, p.reason);
}

TEST(rules_and_what_would_be_legal) {
  ncclEpGroupConfig_t c = lowLatency();
  CHECK(ask(&c, NCCL_EP_LAYOUT_EXPERT_MAJOR, 8, 16, 16).supported, "16 ranks of one domain");
  refused("ranks", ask(&c, NCCL_EP_LAYOUT_EXPERT_MAJOR, 8, 72, 72), "num_ranks", 64);
  refused("topk", ask(&c, NCCL_EP_LAYOUT_EXPERT_MAJOR, 65, 8, 8), "num_topk", 64);
  CHECK(ask(&c, NCCL_EP_LAYOUT_EXPERT_MAJOR, 64, 8, 8).supported, "top-64");
  c.num_experts = 8u * 65534u + 1;
  refused("experts", ask(&c, NCCL_EP_LAYOUT_RANK_MAJOR, 8, 8, 8), "num_experts", 8ull * 65534);
  c.num_experts = 524272;
  c.max_dispatch_tokens_per_rank = 1u << 20;
  refused("slots", ask(&c, NCCL_EP_LAYOUT_RANK_MAJOR, 8, 8, 8), "max_dispatch_tokens_per_rank",
          4096);
  c.max_dispatch_tokens_per_rank = 4096;
  CHECK(ask(&c, NCCL_EP_LAYOUT_RANK_MAJOR, 8, 8, 8).supported, "4096 tokens of 524272 experts");
  c = lowLatency();
  c.max_token_bytes = 1u << 26;
  refused("bytes", ask(&c, NCCL_EP_LAYOUT_RANK_MAJOR, 8, 8, 8), "max_token_bytes", (1u << 26) - 16);
  c = highThroughput();
  c.num_experts = 8 * 4096 + 1;
  refused("experts, HT", ask(&c, NCCL_EP_LAYOUT_FLAT, 8, 8, 8), "num_experts", 8 * 4096);
  c = highThroughput();
  c.max_dispatch_tokens_per_rank = (1u << 20) + 1;
  refused("tokens, HT", ask(&c, NCCL_EP_LAYOUT_FLAT, 8, 8, 8), "max_dispatch_tokens_per_rank",
          1u << 20);
  c.max_recv_tokens_per_rank = 300;
  refused("tokens over max_recv", ask(&c, NCCL_EP_LAYOUT_FLAT, 8, 8, 8),
          "max_dispatch_tokens_per_rank", 300);
  c.max_dispatch_tokens_per_rank = 300;
  CHECK(ask(&c, NCCL_EP_LAYOUT_FLAT, 8, 8, 8).supported, "the nearest value is refused");
  c = highThroughput();
  c.max_recv_tokens_per_rank = 1u << 31;
  refused("max_recv", ask(&c, NCCL_EP_LAYOUT_FLAT, 8, 8, 8), "max_recv_tokens_per_rank",
          INT32_MAX - 1);
}

/* 32 local experts, 8 * 4096 * 8 entries: zones of 2^26 slots would end past 2^31. */
TEST(padding_is_counted_in_31_bits) {
  ncclEpGroupConfig_t c = highThroughput();
  ncclEpHandleConfig_t h = NCCL_EP_HANDLE_CONFIG_INIT;
  ncclEpPreflight_t p = NCCL_EP_PREFLIGHT_INIT;
  h.dispatch_output_per_expert_alignment = 1u << 26;
  CHECK(!ncclEpPreflight(&c, NCCL_EP_LAYOUT_EXPERT_MAJOR, &h, 8, 8, 8, &p), "%s",
        ncclEpGetLastError());
  refused("alignment", p, "dispatch_output_per_expert_alignment", 1u << 25);
  h.dispatch_output_per_expert_alignment = 1u << 25;
  CHECK(!ncclEpPreflight(&c, NCCL_EP_LAYOUT_EXPERT_MAJOR, &h, 8, 8, 8, &p) && p.supported, "%s",
        p.reason);
}

TEST_MAIN()
