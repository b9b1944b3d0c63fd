/* What differs from the cluster as it should be: options of simulate that become changes of a run. */
#ifndef TREFOIL_CLI_WHAT_IF_H
#define TREFOIL_CLI_WHAT_IF_H

#include <jansson.h>

#include "trefoil/sim.h"

#define WHAT_IF_KINDS TREFOIL_NUM_CHANGES
enum { maxChanges = 64, maxFlows = 64 };

typedef struct what_if {
  char *given[WHAT_IF_KINDS]; /* the options' texts, by trefoil_change_kind_t */
  double oversubscription, skewUs, zipf;
  trefoil_change_t changes[maxChanges];
  int numChanges;
  char *background; /* the option's text, of which the next three are made */
  trefoil_flow_t flows[maxFlows];
  int numFlows, hasProducts;
} what_if_t;

#define WHAT_IF_OPTIONS(w)                                                                         \
  {"rail-fail",                                                                                    \
   0,                                                                                              \
   POPT_ARG_STRING,                                                                                \
   &(w)->given[TREFOIL_CHANGE_RAIL_FAIL],                                                          \
   0,                                                                                              \
   "these rails are down on every node, the others carry their traffic",                           \
   "I,..."},                                                                                       \
      {"slow-rail",                                                                                \
       0,                                                                                          \
       POPT_ARG_STRING,                                                                            \
       &(w)->given[TREFOIL_CHANGE_RAIL_RATE],                                                      \
       0,                                                                                          \
       "rail I on every node at F times its rate (default 0.5)",                                   \
       "I[:F],..."},                                                                               \
      {"nic-fail",                                                                                 \
       0,                                                                                          \
       POPT_ARG_STRING,                                                                            \
       &(w)->given[TREFOIL_CHANGE_NIC_FAIL],                                                       \
       0,                                                                                          \
       "network port I (node * ports of a node + port) is down",                                   \
       "I,..."},                                                                                   \
      {"slow-nic",                                                                                 \
       0,                                                                                          \
       POPT_ARG_STRING,                                                                            \
       &(w)->given[TREFOIL_CHANGE_NIC_RATE],                                                       \
       0,                                                                                          \
       "network port I at F times its rate (default 0.5)",                                         \
       "I[:F],..."},                                                                               \
      {"slow-nvlink",                                                                              \
       0,                                                                                          \
       POPT_ARG_STRING,                                                                            \
       &(w)->given[TREFOIL_CHANGE_NVLINK_RATE],                                                    \
       0,                                                                                          \
       "NVLink of rank I at F times its rate (default 0.5)",                                       \
       "I[:F],..."},                                                                               \
      {"straggler",                                                                                \
       0,                                                                                          \
       POPT_ARG_STRING,                                                                            \
       &(w)->given[TREFOIL_CHANGE_SM_RATE],                                                        \
       0,                                                                                          \
       "SMs of rank I at F times their rate (default 0.5)",                                        \
       "I[:F],..."},                                                                               \
      {"late",                                                                                     \
       0,                                                                                          \
       POPT_ARG_STRING,                                                                            \
       &(w)->given[TREFOIL_CHANGE_START_US],                                                       \
       0,                                                                                          \
       "rank I starts US microseconds late (default 10)",                                          \
       "I[:US],..."},                                                                              \
      {"skew-us",                                                                                  \
       0,                                                                                          \
       POPT_ARG_DOUBLE,                                                                            \
       &(w)->skewUs,                                                                               \
       CLI_NOT_NEGATIVE,                                                                           \
       "each rank starts at a random time within X microseconds",                                  \
       "X"},                                                                                       \
      {"oversubscribe",                                                                            \
       0,                                                                                          \
       POPT_ARG_DOUBLE,                                                                            \
       &(w)->oversubscription,                                                                     \
       CLI_POSITIVE,                                                                               \
       "leaf switches have X times less to the spines than to the nodes",                          \
       "X"},                                                                                       \
      {"background",                                                                               \
       0,                                                                                          \
       POPT_ARG_STRING,                                                                            \
       &(w)->background,                                                                           \
       0,                                                                                          \
       "others copy from rank I to J, GBS GB/s (default and 0: what they get) from START to END "  \
       "us; products: matrix products on the SMs left",                                            \
       "I-J[:GBS[:START[:END]]],..."},                                                             \
  {                                                                                                \
    "zipf", 0, POPT_ARG_DOUBLE, &(w)->zipf, CLI_NOT_NEGATIVE,                                      \
        "experts popular by Zipf's law with exponent S (default 0: uniform)", "S"                  \
  }

/* Reads the options' texts into changes. -1, or an exit code: indices must be there in an EP group
 * of this shape on this cluster. */
int whatIfParse(const char *verb, what_if_t *w, const trefoil_cluster_t *cluster,
                const trefoil_shape_t *shape);
/* Whether anything is asked that only a simulation knows (routing by Zipf's law apart). */
int whatIfNeedsEngine(const what_if_t *w);
/* {"rail_fail": "0", "skew_us": 5, ...}: what was given. */
json_t *whatIfJson(const what_if_t *w);

#endif
