/* High throughput across NVLink domains: where things lie, besides ht_layout.c. Pure, no CUDA. */
#include "kernels/ht/ht_far_control.h"

#include "plan/error.h"

#include <string.h>

_Static_assert(sizeof(ep_ht_far_control_t) <= EP_HT_FAR_CONTROL_BYTES, "control memory");

/* All rings of a rank together take at most RINGS_BYTES, unless a ring has LEAST_SLOTS; with puts under way
 * CHUNK_BYTES are waited for (docs/kernels_ht.md). */
#define RINGS_BYTES ((size_t)1 << 30)
#define LEAST_SLOTS 64
#define CHUNK_BYTES ((size_t)2 << 20)

static size_t roundUp(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

static int ringSlotsOf(const ep_ht_config_t *c, const ep_ht_layout_t *near, size_t slotOfAll) {
  int64_t slots = LEAST_SLOTS, most = c->maxTokens * near->rowChunks;
  while (slots < (1 << 20) && slots < most && slotOfAll * (size_t)slots * 2 <= RINGS_BYTES) {
    slots *= 2;
  }
  return (int)slots;
}

static void layOutWords(ep_ht_far_layout_t *at) {
  size_t next = 0;
  for (int kind = 0; kind < 2; kind++) {
    at->words[kind] = next;
    next += roundUp(4 * (size_t)at->numFar * (size_t)at->ringSlots[kind] * 4, 512);
  }
  at->wordBytes = next;
}

trefoil_result_t epHtFarLayout(const ep_ht_config_t *c, int ranksPerDomain, int ringSlots,
                               ep_ht_far_layout_t *out) {
  ep_ht_layout_t near;
  EP_TRY(epHtLayout(c, &near));
  EP_CHECK(out && ranksPerDomain >= 1 && ranksPerDomain < c->numRanks &&
               c->numRanks % ranksPerDomain == 0,
           TREFOIL_INVALID_ARGUMENT, "%d ranks do not form several domains of %d", c->numRanks,
           ranksPerDomain);
  EP_CHECK(ringSlots >= 0 && (ringSlots & (ringSlots - 1)) == 0 && ringSlots <= (1 << 20),
           TREFOIL_INVALID_ARGUMENT, "rings of %d slots: must be a power of two", ringSlots);
  ep_ht_far_layout_t at = {.numRanks = c->numRanks,
                           .ranksPerDomain = ranksPerDomain,
                           .numFar = c->numRanks / ranksPerDomain - 1};
  size_t far = (size_t)at.numFar;
  at.voidAt = roundUp(near.fifoSlotBytes, 16) + 4 * (size_t)c->maxTopk;
  at.slotBytes = roundUp(at.voidAt + 4, 128);
  size_t next = 0;
  for (int kind = 0; kind < 2; kind++) {
    at.ringSlots[kind] = ringSlots ? ringSlots : ringSlotsOf(c, &near, 4 * far * at.slotBytes);
    int chunk = (int)(CHUNK_BYTES / at.slotBytes), most = at.ringSlots[kind] / 4;
    at.batchSlots[kind] = chunk < most ? chunk : most > 1 ? most : 1;
    for (int in = 0; in < 2; in++) {
      at.rings[kind][in] = next;
      next += roundUp(far * (size_t)at.ringSlots[kind] * at.slotBytes, 512);
    }
  }
  at.idsBytes = roundUp(16 + 8 * (size_t)c->maxTokens * (size_t)near.idVectors, 512);
  EP_CHECK(at.idsBytes < EP_NET_MOST_BYTES, TREFOIL_INVALID_ARGUMENT,
           "a message of %zu bytes to a far rank: at most %d", at.idsBytes, EP_NET_MOST_BYTES);
  at.ids[0] = next;
  at.ids[1] = next + 2 * at.idsBytes;
  at.bytes = at.ids[1] + 2 * far * at.idsBytes;
  layOutWords(&at);
  *out = at;
  return TREFOIL_OK;
}

size_t epHtFarHandleBytes(const ep_ht_config_t *c, int ranksPerDomain, int numTopk) {
  size_t N = (size_t)c->maxTokens, K = (size_t)numTopk, G = (size_t)ranksPerDomain;
  size_t far = (size_t)(c->numRanks / ranksPerDomain - 1), hops = G < K ? G : K;
  return epHtHandleBytes(c, numTopk) + roundUp(2 * 4 * EP_HT_MAX_RANKS, 256) +
         roundUp(far * N * hops * 8, 256) + roundUp(far * N * 4, 256) +
         roundUp(far * N * K * 4, 256);
}

size_t epHtFarScratchBytes(const ep_ht_config_t *c, int ranksPerDomain) {
  size_t tiles = (size_t)c->numRanks * (((size_t)c->maxTokens + 255) / 256);
  return epHtScratchBytes(c) +
         roundUp(2 * (size_t)(c->numRanks / ranksPerDomain - 1) * tiles * 4, 256);
}

void epHtFarRestart(void *control) {
  ep_ht_far_control_t *c = control;
  for (int kind = 0; kind < 2; kind++) {
    for (int i = 0; i < EP_HT_FAR_NODES; i++) {
      ep_ht_ring_count_t *ring = &c->rings[kind][i];
      *ring = (ep_ht_ring_count_t){.sentBefore = ring->sentBefore + ring->sent,
                                   .receivedBefore = ring->receivedBefore + ring->received};
    }
  }
}
