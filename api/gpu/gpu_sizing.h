/* The GPU column of the sizing table (plan/sizing.h). Pure: needs neither CUDA nor NCCL. */
#ifndef TREFOIL_API_GPU_GPU_SIZING_H
#define TREFOIL_API_GPU_GPU_SIZING_H

#include "kernels/ht/ht_far.h"
#include "kernels/ll/relay.h"
#include "plan/sizing.h"

#define EP_GPU_MAX_SMS             132 /* blocks of a launch: all SMs of an H100 or H200 */
#define EP_GPU_RECORD_BYTES        4096
#define EP_GPU_HANDLE_OBJECT_BYTES 6144

/* Up to how many SMs a dispatch reads rows in the peers' inputs (docs/kernels_ht.md has the times): rows in
 * windows, and rows that it copies to the group's memory first. Two ranks: expert-major always, copied up to
 * EP_GPU_HT_STAGING_SMS_PAIR; flat, where the output is in no window. More ranks: expert-major, copied
 * where the output is in a window up to EP_GPU_HT_STAGING_SMS_PUSHED; flat up to EP_GPU_HT_PULLING_SMS_FLAT,
 * where the output is in no window. Copies need max_num_sms. */
#define EP_GPU_HT_PULLING_RANKS      2
#define EP_GPU_HT_PULLING_SMS        24
#define EP_GPU_HT_PULLING_SMS_FLAT   16 /* more ranks than two */
#define EP_GPU_HT_STAGING_SMS_FLAT   20
#define EP_GPU_HT_STAGING_SMS_PAIR   48
#define EP_GPU_HT_STAGING_SMS_PUSHED 20

/* Control memory: the kernels' part (of the mode), mask, byte counters. */
#define EP_GPU_CONTROL_PART(ht)  ((ht) ? (size_t)EP_HT_CONTROL_BYTES : (size_t)EP_LL_CONTROL_BYTES)
#define EP_GPU_MASK_AT(ht)       EP_GPU_CONTROL_PART(ht)
#define EP_GPU_BYTES_AT(ht)      (EP_GPU_MASK_AT(ht) + 4 * EP_KERNEL_MAX_RANKS)
#define EP_GPU_CONTROL_BYTES(ht) (EP_GPU_BYTES_AT(ht) + 2 * 8 * EP_KERNEL_MAX_RANKS)

/* The relay's control memory, counts of puts, and a copy of the device communicator. */
#define EP_GPU_RELAY_POSTED_AT EP_LL_RELAY_CONTROL_BYTES
#define EP_GPU_RELAY_PUTS      ((1 + EP_NET_PURPOSES) * EP_KERNEL_MAX_RANKS) /* all, by purpose */
#define EP_GPU_RELAY_COMM_AT   (EP_GPU_RELAY_POSTED_AT + 8 * EP_GPU_RELAY_PUTS)
#define EP_GPU_RELAY_LATE_AT   (EP_GPU_RELAY_COMM_AT + 960) /* an int of epGpuFarDrain */
#define EP_GPU_RELAY_BYTES     (EP_GPU_RELAY_COMM_AT + 1024)

/* handle_mem in high throughput, from the next multiple of 256 on: what Update noted for other handles,
 * then the kernels' part. */
#define EP_GPU_HT_HEAD_BYTES   256
#define EP_GPU_HT_HANDLE_EXTRA (240 + EP_GPU_HT_HEAD_BYTES) /* handle_mem is 16-byte aligned */

/* The configuration as the kernels' layouts take it. */
ep_ll_config_t epGpuConfig(const ep_sizing_config_t *config);
ep_ht_config_t epGpuHtConfig(const ep_sizing_config_t *config);
/* llScratch: bytes of low latency's slot tables where they do not fit shared memory, which depends on the
 * launch (gpu_scratch.c); 0 for all but very large numbers of experts and tokens. */
trefoil_result_t epGpuTable(const ep_sizing_config_t *config, size_t llScratch, ep_sizing_t *out);

#endif
