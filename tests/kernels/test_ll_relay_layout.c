/* Where the messages of low latency's relay lie: what a message and the mirrors must hold, that no two
 * buffers overlap, and which configurations are refused with which sentence. Needs no GPU. */
#include <stdint.h>
#include <string.h>

#include "kernels/ll/relay.h"
#include "kernels/ll/relay_control.h"
#include "plan/error.h"
#include "test.h"

enum { HIDDEN = 7168, LOCAL = 4 };

static ep_ll_config_t config(int ranks, int topk, int64_t tokens, size_t tokenBytes, int partial) {
  return (ep_ll_config_t){.numRanks = ranks,
                          .numExperts = LOCAL * ranks,
                          .maxTopk = topk,
                          .maxTokens = tokens,
                          .maxTokenBytes = tokenBytes,
                          .partial = partial};
}

/* Of each message from the formats in relay.cuh: a head, for dispatch the routing words of all tokens, then a
 * record of 128 bytes and the row's packets of 124 bytes a row. */
static size_t packets(size_t bytes) {
  return (bytes + 123) / 124 * 128;
}
static size_t up(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}
/* numTo: ranks that a dispatch's message is to. */
static void leastBytes(const ep_ll_config_t *c, int numTo, size_t *least) {
  size_t K = (size_t)c->maxTopk, N = (size_t)c->maxTokens;
  size_t words = (4 + K + 11) / 12 * 16;        /* of a token: 4 bytes and an id of one byte each */
  size_t returns = N * (K < LOCAL ? K : LOCAL); /* a token's row once an expert */
  least[EP_LL_MESSAGE_DISPATCH] = 128 + up((size_t)numTo * N * words, 128) +
                                  N * (128 + packets(c->maxTokenBytes + up(4 * K, 16)));
  least[EP_LL_MESSAGE_COMBINE] = 128 + returns * (128 + up(packets(c->maxTokenBytes), 512));
  least[EP_LL_MESSAGE_WEIGHTS] =
      c->partial ? 128 + N * up(16 + (K + 2) / 3 * 16, 128) : 0; /* 3 weights a word */
}

/* From mirror.cuh: words as in exchange memory, tokens' rows by parity, and by parity a partial sum of each
 * token of each far rank. */
static size_t mirrorsOf(const ep_ll_config_t *c, int far) {
  ep_ll_layout_t at;
  CHECK(epLlLayout(c, &at) == TREFOIL_OK, "%s", trefoilLastError());
  size_t N = (size_t)c->maxTokens, row = up(packets(c->maxTokenBytes), 512);
  return at.rows[0] + 2 * N * packets(c->maxTokenBytes + up(4 * (size_t)c->maxTopk, 16)) +
         (c->partial ? 2 * N * (size_t)far * row : 0);
}

/* The preflight knows no way: what it states for the mesh is enough. */
static void railsFit(const ep_ll_config_t *c, int perDomain) {
  ep_ll_relay_layout_t mesh, rails;
  REQUIRE(epLlRelayLayout(c, perDomain, 0, &mesh) == TREFOIL_OK, "%s", trefoilLastError());
  REQUIRE(epLlRelayLayout(c, perDomain, 1, &rails) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(rails.bytes <= mesh.bytes, "%d ranks in domains of %d: %zu bytes by rails, %zu by mesh",
        c->numRanks, perDomain, rails.bytes, mesh.bytes);
}

static void checkShape(const ep_ll_config_t *c, int perDomain, int rails) {
  char shape[160];
  snprintf(shape, sizeof shape, "%d ranks in domains of %d, top-%d, %lld tokens of %zu bytes%s%s",
           c->numRanks, perDomain, c->maxTopk, (long long)c->maxTokens, c->maxTokenBytes,
           c->partial ? ", partial sums" : "", rails ? ", rails" : "");
  ep_ll_relay_layout_t at;
  memset(&at, 0xA5, sizeof at);
  REQUIRE(epLlRelayLayout(c, perDomain, rails, &at) == TREFOIL_OK, "%s: %s", shape,
          trefoilLastError());
  CHECK(at.numRanks == c->numRanks && at.ranksPerDomain == perDomain && at.rails == rails,
        "%s: of %d ranks in %d", shape, at.numRanks, at.ranksPerDomain);
  size_t least[EP_LL_MESSAGES], used = 0, bytesOf[EP_LL_MESSAGES];
  leastBytes(c, rails ? perDomain : 1, least);
  for (int m = 0; m < EP_LL_MESSAGES; m++) {
    int isRails = rails && m == EP_LL_MESSAGE_DISPATCH, far = c->numRanks - perDomain;
    CHECK(at.numPeers[m] == (isRails ? c->numRanks / perDomain - 1 : far),
          "%s: %d at the other ends", shape, at.numPeers[m]);
    size_t spare = 256 * (size_t)(isRails ? perDomain : 1); /* words are rounded up for each rank */
    CHECK(at.message[m] >= least[m] && at.message[m] <= up(least[m] + spare, 512),
          "%s: message %d has %zu bytes, its content %zu", shape, m, at.message[m], least[m]);
    CHECK(at.message[m] % 512 == 0 && at.at[m] % 512 == 0, "%s: message %d: %zu bytes at %zu",
          shape, m, at.message[m], at.at[m]);
    /* out and in, two parities, each other end */
    size_t bytes = bytesOf[m] = 4 * (size_t)at.numPeers[m] * at.message[m];
    CHECK(at.at[m] <= at.bytes && bytes <= at.bytes - at.at[m], "%s: message %d ends past %zu",
          shape, m, at.bytes);
    for (int o = 0; o < m && bytes; o++) {
      size_t end = at.at[o] + bytesOf[o];
      CHECK(end <= at.at[m] || at.at[m] + bytes <= at.at[o], "%s: messages %d and %d overlap",
            shape, o, m);
    }
    used += bytes;
  }
  CHECK(used == at.bytes, "%s: %zu bytes are used of %zu", shape, used, at.bytes);
  size_t mirrors = mirrorsOf(c, c->numRanks - perDomain);
  CHECK(at.mirrorBytes == mirrors, "%s: mirrors of %zu bytes, not %zu", shape, at.mirrorBytes,
        mirrors);
}

TEST(buffers_hold_their_messages_and_do_not_overlap) {
  static const struct {
    int domains, perDomain;
  } groups[] = {{2, 1}, {2, 2}, {4, 2}, {4, 1}, {2, 4}, {32, 2}};
  static const size_t bytes[] = {2 * HIDDEN, HIDDEN + HIDDEN / 32, 16}; /* bf16; E4M3 with scales */
  static const int topks[] = {1, 8}, tokens[] = {1, 128};
  for (int i = 0; i < 6 * 3 * 2 * 2 * 2; i++) {
    int g = i / 24, b = i / 8 % 3, k = i / 4 % 2, n = i / 2 % 2;
    ep_ll_config_t c =
        config(groups[g].domains * groups[g].perDomain, topks[k], tokens[n], bytes[b], i % 2);
    for (int rails = 0; rails < 2; rails++) checkShape(&c, groups[g].perDomain, rails);
    railsFit(&c, groups[g].perDomain);
  }
}

/* Sizes by hand: 2 domains of one rank, top-1, one token of 7168 bf16. */
TEST(the_smallest_group_has_these_sizes) {
  ep_ll_config_t c = config(2, 1, 1, 2 * HIDDEN, 1);
  ep_ll_relay_layout_t at;
  REQUIRE(epLlRelayLayout(&c, 1, 0, &at) == TREFOIL_OK, "%s", trefoilLastError());
  /* A row of either is 116 packets, 14848 bytes. Dispatch: a head of 128, routing words of 256 (half of
   * the 512 that two sources have), a record of 128 and the row, 128 to spare. All rounded up to 512. */
  const size_t sizes[EP_LL_MESSAGES] = {15872, 15360, 512};
  size_t next = 0;
  for (int m = 0; m < EP_LL_MESSAGES; m++) {
    CHECK(at.message[m] == sizes[m], "message %d has %zu bytes", m, at.message[m]);
    CHECK(at.at[m] == next, "message %d lies at %zu, not %zu", m, at.at[m], next);
    next += 4 * at.message[m];
  }
  CHECK(at.bytes == next, "%zu bytes, not %zu", at.bytes, next);
  /* 2 * 512 for routing words, 2 * 512 for weights, behind 512 for others; a row of either, twice */
  CHECK(at.mirrorBytes == 512 + 1024 + 1024 + 4 * 14848, "mirrors of %zu bytes", at.mirrorBytes);
}

static void isRefused(const ep_ll_config_t *c, int perDomain, const char *sentence) {
  ep_ll_relay_layout_t at, before;
  memset(&at, 0xA5, sizeof at);
  before = at;
  CHECK(epLlRelayLayout(c, perDomain, 0, &at) == TREFOIL_INVALID_ARGUMENT, "taken, not: %s",
        sentence);
  CHECK(strstr(trefoilLastError(), sentence), "\"%s\", not \"%s\"", trefoilLastError(), sentence);
  CHECK(!memcmp(&at, &before, sizeof at), "refused, but written: %s", sentence);
}

TEST(domains_that_are_none_are_refused) {
  ep_ll_config_t four = config(4, 8, 128, 2 * HIDDEN, 0), one = config(1, 8, 128, 2 * HIDDEN, 0);
  isRefused(&four, 4, "4 ranks do not form several domains of 4");
  isRefused(&one, 1, "1 ranks do not form several domains of 1");
  isRefused(&four, 8, "4 ranks do not form several domains of 8");
  isRefused(&four, 3, "4 ranks do not form several domains of 3");
  isRefused(&four, 0, "4 ranks do not form several domains of 0");
  isRefused(&four, -2, "4 ranks do not form several domains of -2");
  CHECK(epLlRelayLayout(&four, 2, 0, NULL) == TREFOIL_INVALID_ARGUMENT, "out NULL is taken");
}

TEST(what_no_layout_takes_is_refused_first) {
  ep_ll_config_t odd = config(4, 8, 128, 2 * HIDDEN + 8, 0), none = config(4, 8, 0, 2 * HIDDEN, 0);
  isRefused(&odd, 2,
            "max_token_bytes is 14344, low latency on GPUs takes a multiple of 16 below 2^26");
  isRefused(&none, 3, "low latency on GPUs takes 1 to 1048576 tokens a rank, not 0");
  isRefused(NULL, 2, "config or out is NULL");
  ep_ll_config_t many = config(72, 8, 128, 2 * HIDDEN, 0);
  isRefused(&many, 8, "low latency on GPUs takes 1 to 64 ranks, not 72");
  many.anyRanks = 1;
  ep_ll_relay_layout_t at;
  CHECK(epLlRelayLayout(&many, 8, 0, &at) == TREFOIL_OK, "%s", trefoilLastError());
}

/* A message of 1 GiB would be split by the network. */
TEST(messages_that_are_too_large_are_refused) {
  int64_t most = 0, least = 1 << 20; /* tokens: taken, refused */
  ep_ll_relay_layout_t at;
  while (least - most > 1) {
    int64_t n = (most + least) / 2;
    ep_ll_config_t c = config(4, 8, n, 2 * HIDDEN, 0);
    *(epLlRelayLayout(&c, 2, 0, &at) == TREFOIL_OK ? &most : &least) = n;
  }
  ep_ll_config_t c = config(4, 8, most, 2 * HIDDEN, 0);
  REQUIRE(most > 0 && epLlRelayLayout(&c, 2, 0, &at) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(at.message[EP_LL_MESSAGE_COMBINE] < EP_NET_MOST_BYTES &&
            at.message[EP_LL_MESSAGE_COMBINE] + 65536 > EP_NET_MOST_BYTES,
        "%lld tokens: %zu bytes", (long long)most, at.message[EP_LL_MESSAGE_COMBINE]);
  c.maxTokens = least;
  char sentence[120];
  size_t bytes[EP_LL_MESSAGES];
  leastBytes(&c, 1, bytes);
  snprintf(sentence, sizeof sentence, "a message of %zu bytes to a far rank: at most 1073741824",
           up(bytes[EP_LL_MESSAGE_COMBINE], 512));
  isRefused(&c, 2, sentence);
  c = config(4, 1, 1024, ((size_t)1 << 26) - 16, 0); /* 64 GiB: sizes do not wrap */
  isRefused(&c, 2, "to a far rank: at most 1073741824");
}

/* 3 domains of 2: who is at the other ends of rank 3's messages, and back. */
TEST(peers_are_numbered) {
  static const int far[] = {0, 1, 4, 5}, rails[] = {1, 5};
  for (int i = 0; i < 4; i++) {
    CHECK(epLlFarRank(2, 3, i) == far[i] && epLlFarIndex(2, 3, far[i]) == i, "far rank %d", i);
  }
  for (int i = 0; i < 2; i++) {
    CHECK(epLlRailRank(2, 3, i) == rails[i] && epLlRailIndex(2, 3, rails[i]) == i, "rail %d", i);
  }
  /* What the ranks 0 to 5 dispatch to rank 3: its own rail are the odd ones. */
  static const int via[] = {2, -1, -1, -1, 2, -1};
  for (int i = 0; i < 6; i++)
    CHECK(epLlRailVia(2, 3, i) == via[i], "from %d through %d", i, epLlRailVia(2, 3, i));
}

TEST(control_memory_counts_from_the_first_operation) {
  char bytes[EP_LL_RELAY_CONTROL_BYTES + 64];
  memset(bytes, 0xA5, sizeof bytes);
  static _Alignas(16) char control[EP_LL_RELAY_CONTROL_BYTES];
  CHECK(sizeof(ep_ll_relay_control_t) <= EP_LL_RELAY_CONTROL_BYTES, "control memory is too small");
  epLlRelayControlInit(bytes, 0x123456789abcull);
  ep_ll_relay_control_t *c = (ep_ll_relay_control_t *)control;
  memcpy(control, bytes, sizeof control);
  CHECK(c->numbers[0] == 0x123456789abcull && c->numbers[1] == c->numbers[0], "%llu and %llu",
        c->numbers[0], c->numbers[1]);
  memset(c->numbers, 0, sizeof c->numbers);
  for (size_t i = 0; i < sizeof control; i++) REQUIRE(!control[i], "byte %zu is not zero", i);
  for (size_t i = sizeof control; i < sizeof bytes; i++)
    REQUIRE(bytes[i] == (char)0xA5, "byte %zu", i);
}

TEST_MAIN()
