// High throughput across NVLink domains over a Wire of kernels/net: kernels of its own besides those of one
// domain, which share their pipelines.
#ifndef TREFOIL_KERNELS_HT_FAR_CUH
#define TREFOIL_KERNELS_HT_FAR_CUH

#include "kernels/ht/ht_far_combine.cuh"
#include "kernels/ht/ht_far_dispatch.cuh"
#include "kernels/ht/ht_far_update.cuh"

extern "C" {
#include "plan/error.h"
}

#include <cmath>

template <class Network, bool EXPERT_MAJOR>
static __global__ void __launch_bounds__(HT_PIPE_THREADS, 1)
    farHtDispatchKernel(const __grid_constant__ HtDispatchArgs a,
                        const __grid_constant__ HtFarArgs f) {
  EP_DYNAMIC_SHARED(128, shared);
  runFarDispatch<Network, EXPERT_MAJOR>(a, f, shared);
}
template <class Network, Elem T, bool EXPERT_MAJOR>
static __global__ void __launch_bounds__(HT_PIPE_THREADS, 1)
    farHtCombineKernel(const __grid_constant__ HtCombineArgs a,
                       const __grid_constant__ HtFarArgs f) {
  EP_DYNAMIC_SHARED(128, shared);
  runFarCombine<Network, T, EXPERT_MAJOR>(a, f, shared);
}

template <class Network> struct HtFarKernels {
  static const void *dispatch(bool expertMajor) {
    return expertMajor ? EP_KERNEL(farHtDispatchKernel<Network, true>)
                       : EP_KERNEL(farHtDispatchKernel<Network, false>);
  }
  static const void *combine(trefoil_dtype_t dtype, bool expertMajor) {
    return kernelOfDtype(dtype, [expertMajor](auto elem) {
      constexpr Elem T = decltype(elem)::value;
      return expertMajor ? EP_KERNEL(farHtCombineKernel<Network, T, true>)
                         : EP_KERNEL(farHtCombineKernel<Network, T, false>);
    });
  }
  static const void *update() { return EP_KERNEL(updateKernel<FarDomains<Network>>); }

  // Loads all of them on the current device.
  static trefoil_result_t load() {
    EP_TRY(epHtLoadKernel(update()));
    for (int em = 0; em < 2; em++) {
      EP_TRY(epHtLoadKernel(dispatch(em)));
      for (const trefoil_dtype_t t : SUMMED) EP_TRY(epHtLoadKernel(combine(t, em)));
    }
    return TREFOIL_OK;
  }

  static HtFarArgs argsOf(const ep_ht_far_t &far) {
    HtFarArgs f = {};
    f.far = far;
    for (int kind = 0; kind < 2; kind++) {
      while (1 << f.slotBits[kind] < far.at.ringSlots[kind]) f.slotBits[kind]++;
    }
#ifdef TREFOIL_HT_FAR_STAMPS
    f.stamps = htStampsOf(far.port.rank);
#endif
    return f;
  }
  static trefoil_result_t start(const void *kernel, HtLaunch l, void *args, HtFarArgs &f,
                                void *stream) {
    void *params[] = {args, &f};
    if (l.shared < HT_POSTER_BYTES) l.shared = HT_POSTER_BYTES;
    return epHtStart(kernel, l, params, stream);
  }

  // Blocks of each role, by the rows that each stores or adds for a token, uniform routing.
  struct Load {
    double send, middle, receive;
  };
  static void split(HtFarArgs &f, const Load &load, int blocks) {
    const int n = blocks - 1; // the last one posts
    const double all = load.send + load.middle + load.receive;
    int send = (int)(n * load.send / all + 0.5), middle = (int)(n * load.middle / all + 0.5);
    if (send < 1) send = 1;
    if (middle < 1) middle = 1;
    if (send > n - 2) send = n - 2;
    if (middle > n - 1 - send) middle = n - 1 - send;
    f.split = send;
    f.endMiddle = send + middle;
  }
  static Load loadOf(const ep_ht_far_layout_t &at, int topk, bool combine, bool expertMajor) {
    const double near = at.ranksPerDomain * epHtShareOf(at.numRanks, topk),
                 far = at.numFar * epHtShareOf(at.numFar + 1, topk);
    const double passed =
        near * at.numFar; // rows that this rank forwards or adds up for other nodes
    // Expert-major, a rank has a row for each expert: combine's senders add them, receivers store them.
    const double rows = near + passed, slots = expertMajor ? topk : rows;
    const Load l = combine ? Load{rows + (expertMajor ? slots : 0), passed + far, near + far + 1}
                           : Load{1 + near + far, passed + far, rows + slots};
    return l;
  }

  static trefoil_result_t check(const ep_ht_group_t &g, const ep_ht_far_t &far, int numSms) {
    EP_CHECK(far.at.numRanks == g.numRanks && far.control && far.words && far.window,
             TREFOIL_INVALID_ARGUMENT, "the network's memory is missing, or of %d ranks, not %d",
             far.at.numRanks, g.numRanks);
    EP_CHECK(numSms >= EP_HT_FAR_LEAST_SMS, TREFOIL_INVALID_ARGUMENT,
             "numSms is %d, must be %d or more across NVLink domains", numSms, EP_HT_FAR_LEAST_SMS);
    return TREFOIL_OK;
  }
  static trefoil_result_t update(const ep_ht_update_t &op, const ep_ht_far_t &far, void *stream) {
    UpdateArgs a;
    HtLaunch l;
    HtFarArgs f = argsOf(far);
    EP_TRY(check(op.group, far, EP_HT_FAR_LEAST_SMS));
    EP_TRY(epHtPrepareUpdate(op, 2 * far.at.numFar, &a, &l));
    return start(update(), l, &a, f, stream);
  }
  static trefoil_result_t dispatch(const ep_ht_dispatch_t &op, const ep_ht_far_t &far,
                                   void *stream) {
    HtDispatchArgs a;
    HtLaunch l;
    HtFarArgs f = argsOf(far);
    EP_TRY(check(op.group, far, op.numSms));
    EP_CHECK(!op.window.is && !op.input.is, TREFOIL_INVALID_ARGUMENT,
             "no windows across NVLink domains");
    EP_TRY(epHtPrepareDispatch(op, &a, &l));
    split(f, loadOf(far.at, op.handle.numTopk, false, op.handle.expertMajor), l.blocks);
    f.middle = a.sender;
    return start(dispatch(op.handle.expertMajor), l, &a, f, stream);
  }
  static trefoil_result_t combine(const ep_ht_combine_t &op, const ep_ht_far_t &far, void *stream) {
    HtCombineArgs a;
    HtLaunch l;
    HtFarArgs f = argsOf(far);
    EP_TRY(check(op.group, far, op.numSms));
    EP_CHECK(!op.input.is, TREFOIL_INVALID_ARGUMENT, "no windows across NVLink domains");
    EP_TRY(epHtPrepareCombine(op, &a, &l));
    split(f, loadOf(far.at, op.handle.numTopk, true, op.handle.expertMajor), l.blocks);
    f.middle = a.receiver;
    return start(combine(op.dtype, op.handle.expertMajor), l, &a, f, stream);
  }
};

#endif
