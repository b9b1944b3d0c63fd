/* Trefoil: what an operation costs beside its bytes over ports: SMs, messages, flags, launch. C99 and
 * C++.
 *
 * A cost record is fitted to measured times of one library's kernels on one platform, LL and HT
 * apart; the simulator (trefoil/sim.h) reads it. docs/sim.md has the equations. */
#ifndef TREFOIL_COSTS_H
#define TREFOIL_COSTS_H

#include "trefoil/models.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of one operation. SM times are of one SM; numSms of them work side by side. */
typedef struct trefoil_op_costs {
  double launchUs;           /* an operation without rows, start to end, without latency */
  double tokenNs;            /* SM time of each token before its rows: reading, quantising */
  double sendRowNs;          /* SM time of each row sent, besides its bytes */
  double sendGbPerSPerSm;    /* 10^9 bytes a second that one SM sends; 0 = SMs do not limit */
  double receiveRowNs;       /* SM time of each row received: finding it, its share of the sum */
  double receiveGbPerSPerSm; /* bytes that one SM copies or sums at the receiver; 0 = no limit */
  double forwardShare;       /* HT over nodes: share of the SMs that forward and sum for their node,
                                [0, 1); 0 = 0.5 */
  double signalNs;           /* time of a rank for the flag to each other rank, after its rows */
  double netSignalNs;        /* the same to a rank of another node; 0 = signalNs */
  double netStartUs;  /* what an operation takes once more if it has several nodes: filling buffers
                         and work requests of the network */
  double nodeRoundUs; /* what the operation waits for each doubling of the nodes: the rounds of
                                a barrier over the network */
  double sendShare; /* share of the SMs that send while the others receive, [0, 1); 0: shared by the
                         busiest work of either side if there is mostSendSms, else all do both */
  double mostSendSms; /* at most so many SMs send, the rest receive; 0 = no limit */
  double
      wholeSmsFrom; /* with sendShare or mostSendSms, (0, 1]: whole SMs send, one more from this part
                          of one on, and receive when they are done; 0 = parts of SMs, which only send */
  double slotNs;    /* SM time of each place of a row (expert-major: one for each expert of a token;
                         else one a rank): written by who receives a dispatch, read by who sends a
                         combine */
  double slotGbPerSPerSm; /* the same by bytes: what one SM writes or reads; 0 = no limit */
  double
      announceUs; /* from a rank's start until its word is on the way to all others, beside its rows.
                    Receivers begin when they have all announcements; 0 = with their rank */
  double restGbPerSPerSm; /* the part of the receivers' work that transfers do not hide, after the
                             last row: bytes that came (dispatch) or of the rank's own tokens
                             (combine), a second and SM; 0 = all is hidden */
  double missingUs; /* more of a rank with tokens, but fewer than another: it reads the words of the
                       tokens that it did not expect in a second round */
  double flowShare; /* of a port that both want, what flows of others get together, [0, 1): less if
                       the operation has more stores under way; 0 = 0.5 */
  double
      peersFlowShare; /* the same if a node has more than two ranks: rows meet flows of other ranks at
                            either end; 0 = flowShare */
  double rowHeadBytes; /* that the library puts before each row besides the plan's bytes: SMs that
                          send, forward and receive, and ports carry them */
  double batchSources; /* dispatch: rows with the same token number of so many ranks are received
                          together, as a batch; 0 = none are */
  double batchGbPerSPerSm; /* bytes of a row that one SM waits for and finds the places of, for each
                              batch, beside receiving its rows; 0 = no limit */
  double slotGbPerS; /* bytes of places that all SMs of a rank together write or read: its memory;
                        0 = no limit */
  double roundUs; /* combine: what each round of an SM's receivers takes after the last row, but for
                           the first */
  double roundBytes;    /* bytes of a rank's own tokens that they sum in a round; 0 = no rounds */
  double fewTokens;     /* a rank with fewer tokens has small blocks: */
  double fewRoundBytes; /* theirs in a round */
  double rankRoundUs;   /* wait for each doubling of the ranks: for the last of all their words */
  double flowWaitUs;    /* wait for the last word of each other rank that crosses a port of which a
                           flow of others takes all that it gets, from the start */
  /* HT, flat dispatch in one node, of tensors in no window, with at most pullSms SMs: each rank copies
   * its tokens to where the others read them, and reads what comes to it. */
  double pullSms;         /* 0 = never */
  double pullSmsOfTwo;    /* the same of at most two ranks; 0 = pullSms */
  double pullRowNs;       /* SM time of each row read, its own rank's too */
  double pullGbPerSPerSm; /* bytes of rows that one SM reads and stores; 0 = no limit */
  double pullPortShare;   /* of a port's rate what reading gets, [0, 1]; 0 = 1 */
  double stageGbPerS;     /* bytes of its tokens that a rank copies before; 0 = no limit */
} trefoil_op_costs_t;

/* All zero but numSms is legal: then only bytes over ports take time. */
typedef struct trefoil_costs {
  char name[TREFOIL_MODEL_NAME_BYTES];
  int numSms;             /* that work on an operation; >= 1 */
  double nvlinkGbPerS;    /* of one port, one way; 0 = the cluster's */
  double nicGbPerS;       /* the same of one network port */
  double nvlinkLatencyNs; /* one way, from the last byte sent to visible */
  double netLatencyNs;    /* the same; negative = the cluster's */
  double nvlinkRowNs;     /* NVLink port time of each row besides its bytes */
  double netMessageNs;    /* network port time of each message besides its bytes */
  double rowsPerMessage;  /* rows of a network message; 0 = 1 */
  int signalsPerExpert;   /* 1: a flag for each expert of the other rank, not one a rank */
  double nvlinkBackShare; /* what a byte takes of the port of the other direction besides its own:
                               flags, credits and acknowledgements; [0, 1) */
  int ownRowsStay;        /* 1: a rank's rows to itself are taken where they lie and pass no SM that
                               sends */
  double productShare;    /* what matrix products on the SMs that an operation leaves take of the
                          rates of its own, by memory and clocks, [0, 1); 0 = not known */
  trefoil_op_costs_t op[2]; /* by trefoil_op_t */
} trefoil_costs_t;

/* The costs that leave out everything but the ports, the cluster's latency and its fixed time: what
 * the closed form knows. */
TREFOIL_API trefoil_result_t trefoilCostsIdeal(trefoil_costs_t *costs,
                                               const trefoil_cluster_t *cluster,
                                               trefoil_mode_t mode);
/* The part of an operation's time that no row takes: launchUs, rankRoundUs * log2(ranks), with several
 * nodes netStartUs and nodeRoundUs * log2(nodes), and the flags of a rank to all others. Every engine
 * adds it to the time of the rows. */
TREFOIL_API double trefoilCostsFixedUs(const trefoil_costs_t *costs, trefoil_op_t op,
                                       const trefoil_shape_t *shape);
/* Numbers must be finite and, netLatencyNs apart, not negative; numSms >= 1; forwardShare, sendShare,
 * nvlinkBackShare, flowShare and productShare < 1, pullPortShare <= 1. */
TREFOIL_API trefoil_result_t trefoilCostsCheck(const trefoil_costs_t *costs);

#ifdef __cplusplus
}
#endif
#endif
