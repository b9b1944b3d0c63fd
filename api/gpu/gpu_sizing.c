/* The GPU column of the sizing table: what a group and a handle ask for. */
#include <string.h>

#include "api/gpu/gpu_sizing.h"
#include "plan/error.h"

_Static_assert(EP_LL_GPU_MAX_RANKS == EP_LL_MAX_RANKS && EP_HT_MAX_RANKS == EP_LL_MAX_RANKS &&
                   EP_HT_MAX_TOPK == EP_LL_MAX_TOPK && EP_HT_MAX_TOKENS == EP_LL_MAX_TOKENS,
               "plan/sizing.h");
_Static_assert(EP_LL_GPU_MAX_TOPK == EP_LL_MAX_TOPK, "plan/sizing.h");
_Static_assert(EP_LL_GPU_MAX_TOKENS == EP_LL_MAX_TOKENS, "plan/sizing.h");

ep_ll_config_t epGpuConfig(const ep_sizing_config_t *config) {
  const trefoil_shape_t *s = &config->shape;
  return (ep_ll_config_t){
      .numRanks = s->numRanks,
      .numExperts = s->numExperts,
      .maxTopk = s->topk,
      .maxTokens = s->maxTokens,
      .maxTokenBytes = (config->maxTokenBytes + 15) / 16 * 16,
      .partial = 1, /* room for weights always: so little that it need not depend on a variable */
      .anyRanks = config->anyRanks,
  };
}

ep_ht_config_t epGpuHtConfig(const ep_sizing_config_t *config) {
  const trefoil_shape_t *s = &config->shape;
  int most =
      s->numRanks > EP_GPU_HT_PULLING_RANKS ? EP_GPU_HT_PULLING_SMS : EP_GPU_HT_STAGING_SMS_PAIR;
  int few = config->maxSms > 0 && config->maxSms <= most;
  return (ep_ht_config_t){.numRanks = s->numRanks,
                          .numExperts = s->numExperts,
                          .maxTopk = s->topk,
                          .maxTokens = s->maxTokens,
                          .maxTokenBytes = config->maxTokenBytes,
                          .windows = config->zeroCopyOn,
                          .inputs = few && !config->zeroCopyOn && s->numRanks > 1 &&
                                    s->ranksPerNode == s->numRanks};
}

static void addFixed(ep_sizing_t *t, int ht) {
  epSizingAdd(t, EP_BUFFER_CONTROL,
              (ep_buffer_t){"control", "fixed", EP_MEMORY_DEVICE, 0, EP_GPU_CONTROL_BYTES(ht), 0});
  epSizingAdd(t, EP_BUFFER_GROUP_OBJECT,
              (ep_buffer_t){"group object", "fixed", EP_MEMORY_HOST, 0, EP_GROUP_OBJECT_BYTES, 0});
  epSizingAdd(t, EP_BUFFER_RECORD,
              (ep_buffer_t){"record", "a page", EP_MEMORY_HOST, 0, EP_GPU_RECORD_BYTES, 0});
  epSizingAdd(
      t, EP_BUFFER_HANDLE_OBJECT,
      (ep_buffer_t){"handle object", "fixed", EP_MEMORY_HOST, 1, EP_GPU_HANDLE_OBJECT_BYTES, 0});
}

/* Several NVLink domains. */
static trefoil_result_t sizeFar(const ep_sizing_config_t *config, ep_sizing_t *t) {
  const trefoil_shape_t *s = &config->shape;
  ep_ll_config_t ll = epGpuConfig(config);
  ep_ll_relay_layout_t at;
  EP_TRY(epLlRelayLayout(&ll, s->ranksPerNode, 1, &at)); /* rails need no more than the mesh */
  EP_TRY(epLlRelayLayout(&ll, s->ranksPerNode, 0, &at));
  epSizingAdd(t, EP_BUFFER_MESSAGES,
              (ep_buffer_t){"messages",
                            "4 * far ranks * N (1 + min(K, L)) rows, weights, and words",
                            EP_MEMORY_SHARED, 0, 128 + at.bytes, 0});
  epSizingAdd(t, EP_BUFFER_MIRRORS,
              (ep_buffer_t){"mirrors", "2 * (1 + far ranks) * N rows, and words", EP_MEMORY_DEVICE,
                            0, at.mirrorBytes, 0});
  epSizingAdd(t, EP_BUFFER_RELAY,
              (ep_buffer_t){"relay", "fixed", EP_MEMORY_DEVICE, 0, EP_GPU_RELAY_BYTES, 0});
  return TREFOIL_OK;
}

static trefoil_result_t sizeLl(const ep_sizing_config_t *config, size_t scratch, ep_sizing_t *t) {
  ep_ll_config_t ll = epGpuConfig(config);
  ep_ll_layout_t at;
  EP_TRY(epLlLayout(&ll, &at));
  epSizingAdd(t, EP_BUFFER_EXCHANGE,
              (ep_buffer_t){"exchange", "2 * (R N + N K) * packets of a row, and words",
                            EP_MEMORY_SHARED, 0, at.bytes, 0});
  epSizingAdd(
      t, EP_BUFFER_SCRATCH,
      (ep_buffer_t){"scratch", "0, or slot tables of 132 blocks", EP_MEMORY_DEVICE, 0, scratch, 0});
  epSizingAdd(t, EP_BUFFER_HANDLE_MEM,
              (ep_buffer_t){"handle memory", "64 + 12 R N K", EP_MEMORY_DEVICE, 1,
                            (epLlHandleBytes(&ll, ll.maxTopk) + 15) / 16 * 16, 0});
  if (config->shape.ranksPerNode == config->shape.numRanks) return TREFOIL_OK;
  return sizeFar(config, t);
}

/* The same in high throughput. */
static trefoil_result_t sizeRings(const ep_sizing_config_t *config, ep_sizing_t *t) {
  const trefoil_shape_t *s = &config->shape;
  ep_ht_config_t ht = epGpuHtConfig(config);
  ep_ht_far_layout_t at;
  EP_TRY(epHtFarLayout(&ht, s->ranksPerNode, 0, &at));
  epSizingAdd(t, EP_BUFFER_MESSAGES,
              (ep_buffer_t){"rings", "4 * other nodes * slots, 2 * nodes * N ids", EP_MEMORY_SHARED,
                            0, 128 + at.bytes, 0});
  epSizingAdd(t, EP_BUFFER_MIRRORS,
              (ep_buffer_t){"words of rings", "32 * other nodes * slots", EP_MEMORY_DEVICE, 0,
                            at.wordBytes, 0});
  epSizingAdd(t, EP_BUFFER_RELAY,
              (ep_buffer_t){"poster", "fixed", EP_MEMORY_DEVICE, 0, EP_GPU_RELAY_BYTES, 0});
  return TREFOIL_OK;
}

static trefoil_result_t sizeHt(const ep_sizing_config_t *config, ep_sizing_t *t) {
  ep_ht_config_t ht = epGpuHtConfig(config);
  ep_ht_layout_t at;
  EP_TRY(epHtLayout(&ht, &at));
  int perNode = config->shape.ranksPerNode, isFar = perNode < config->shape.numRanks;
  size_t scratch = isFar ? epHtFarScratchBytes(&ht, perNode) : epHtScratchBytes(&ht);
  size_t handle =
      isFar ? epHtFarHandleBytes(&ht, perNode, ht.maxTopk) : epHtHandleBytes(&ht, ht.maxTopk);
  epSizingAdd(
      t, EP_BUFFER_EXCHANGE,
      (ep_buffer_t){"exchange",
                    "2 R * FIFOs, 2 R N * ids, R N * (weights, slots, 4 chunks), 0 or N rows",
                    EP_MEMORY_SHARED, 0, at.bytes, 0});
  epSizingAdd(
      t, EP_BUFFER_SCRATCH,
      (ep_buffer_t){"scratch", "14336 + 4 (L + R) R N / 256", EP_MEMORY_DEVICE, 0, scratch, 0});
  epSizingAdd(t, EP_BUFFER_HANDLE_MEM,
              (ep_buffer_t){"handle memory", "N (8 min(R, K) + 4 K) + 4 R N (K + 2) + 12 L",
                            EP_MEMORY_DEVICE, 1, EP_GPU_HT_HANDLE_EXTRA + handle, 0});
  return isFar ? sizeRings(config, t) : TREFOIL_OK;
}

trefoil_result_t epGpuTable(const ep_sizing_config_t *config, size_t llScratch, ep_sizing_t *out) {
  EP_TRY(trefoilShapeCheck(&config->shape));
  int ht = config->mode == TREFOIL_HT_FLAT || config->mode == TREFOIL_HT_EXPERT_MAJOR;
  ep_sizing_t t;
  memset(&t, 0, sizeof t);
  t.config = *config;
  EP_TRY(ht ? sizeHt(config, &t) : sizeLl(config, llScratch, &t));
  addFixed(&t, ht);
  EP_TRY(epSizingCheck(&t));
  *out = t;
  return TREFOIL_OK;
}
