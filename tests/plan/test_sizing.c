/* The sizing table by hand. A buffer that is too small would only be noticed by operations that meet
 * in it. */
#include "plan/sizing.h"

#include "test.h"

/* 8 ranks on 2 nodes, 100 tokens of up to 1000 bytes (stride 1008), top-3, 4 experts a rank. */
static ep_sizing_t tableOf(trefoil_mode_t mode) {
  ep_sizing_config_t c = {EP_BACKEND_CPU, mode, {8, 4, 32, 3, 100}, 1000, 0, 0, 0};
  ep_sizing_t t = {.rowStride = 0};
  CHECK(epSizing(&c, &t) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(t.rowStride == 1008, "stride %zu", t.rowStride);
  return t;
}

static size_t up256(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

typedef struct wanted {
  ep_buffer_id_t id;
  size_t bytes[4]; /* by mode; shared ones rounded up to 256 below */
} wanted_t;

/* 4 N K = 1200, of which each slot begins at a multiple of 64: 1216. */
static const wanted_t wanted[] = {
    {EP_BUFFER_ROUTING, {3 * 1216, 3 * 1216, 1216, 1216}},
    {EP_BUFFER_DISPATCH_HEAD, {2 * 128, 2 * 128, 128, 128}},
    {EP_BUFFER_DISPATCH_ROWS, {2 * 100800, 2 * 100800, 100800, 100800}},
    {EP_BUFFER_DISPATCH_WEIGHTS, {0, 2 * 1216, 1216, 1216}},
    {EP_BUFFER_FORWARD_ROWS, {0, 0, 100800, 100800}},
    {EP_BUFFER_COMBINE_WEIGHTS, {2 * 1216, 0, 0, 0}},
    /* LL: 8 rings of 2 slots of 64 + 100 p * (8 + 1008), tags and rows rounded to 64; HT: 9 rings of
     * chunks of 64 tokens, with weights of 12 bytes */
    {EP_BUFFER_COMBINE_RINGS,
     {8 * 2 * (64 + 2432 + 302400), 8 * 2 * (64 + 832 + 100800), 9 * 2 * (64 + 512 + 768 + 64512),
      9 * 2 * (64 + 512 + 768 + 64512)}},
};

TEST(shared_buffers_by_hand) {
  for (int mode = 0; mode < 4; mode++) {
    ep_sizing_t t = tableOf((trefoil_mode_t)mode);
    size_t offset = t.buffers[EP_BUFFER_CONTROL].bytes; /* asserted where its arrays are named */
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
      const ep_buffer_t *b = &t.buffers[wanted[i].id];
      CHECK(b->bytes == up256(wanted[i].bytes[mode]), "mode %d, %s: %zu bytes, by hand %zu", mode,
            b->name, b->bytes, up256(wanted[i].bytes[mode]));
      CHECK(b->memory == EP_MEMORY_SHARED && b->offset == offset, "mode %d, %s: at %zu, not %zu",
            mode, b->name, b->offset, offset);
      offset += b->bytes;
    }
    CHECK(t.totals[0][EP_MEMORY_SHARED] == offset, "mode %d: %zu in all", mode, offset);
  }
}

/* One node forwards nothing; three forward for two others. */
TEST(areas_of_nodes) {
  for (int nodes = 1; nodes <= 4; nodes++) {
    ep_sizing_config_t c = {
        EP_BACKEND_CPU, TREFOIL_HT_FLAT, {12, 12 / nodes, 12, 2, 50}, 64, 0, 0, 0};
    ep_sizing_t t = {.rowStride = 0};
    REQUIRE(epSizing(&c, &t) == TREFOIL_OK, "%s", trefoilLastError());
    CHECK(t.buffers[EP_BUFFER_FORWARD_ROWS].bytes == up256((size_t)(nodes - 1) * 50 * 64),
          "%d nodes: %zu bytes", nodes, t.buffers[EP_BUFFER_FORWARD_ROWS].bytes);
    CHECK(t.numRings == 12 + nodes - 1, "%d nodes: %d rings", nodes, t.numRings);
  }
}

TEST_MAIN()
