/* What simulate and plan are asked about: a cluster, a model's layer, a mode, and the routing.
 *
 * A verb puts a scenario_args_t into its option table (SCENARIO_OPTIONS), checks and loads it with
 * the functions below, which say in one sentence what is wrong and what would be right. */
#ifndef TREFOIL_CLI_SCENARIO_H
#define TREFOIL_CLI_SCENARIO_H

#include "trefoil/models.h"
#include "trefoil/trace.h"

typedef struct scenario_args {
  char *cluster, *moe, *mode, *dispatchDtype, *combine, *variant, *trace, *placement;
  int ep, physicalExperts, grouped;
  long long tokens, seed;     /* tokens 0: the mode's default */
  long long maskedSelections; /* of each rank, in generated routing */
} scenario_args_t;

#define SCENARIO_DEFAULTS                                                                          \
  {                                                                                                \
    .cluster = "dgx-h100", .moe = "deepseek-v3", .mode = "ll", .dispatchDtype = "bf16",            \
    .combine = "exact", .variant = "ours", .placement = "auto", .seed = 1                          \
  }

#define SCENARIO_OPTIONS(a)                                                                        \
  {"cluster", 0, POPT_ARG_STRING, &(a)->cluster, 0, "preset or file (default dgx-h100)", "NAME"},  \
      {"moe", 0, POPT_ARG_STRING, &(a)->moe, 0, "preset or file (default deepseek-v3)", "NAME"},   \
      {"mode",                                                                                     \
       0,                                                                                          \
       POPT_ARG_STRING,                                                                            \
       &(a)->mode,                                                                                 \
       0,                                                                                          \
       "ll (default), ht, or with the layout: ll-expert-major (ll), ll-rank-major, ht-flat (ht), " \
       "ht-expert-major",                                                                          \
       "MODE"},                                                                                    \
      {"tokens",                                                                                   \
       0,                                                                                          \
       POPT_ARG_LONGLONG,                                                                          \
       &(a)->tokens,                                                                               \
       CLI_POSITIVE,                                                                               \
       "tokens a GPU (default: 128 in ll, 4096 in ht)",                                            \
       "N"},                                                                                       \
      {"ep",         0,                                                                            \
       POPT_ARG_INT, &(a)->ep,                                                                     \
       CLI_POSITIVE, "GPUs of an EP group (default: as many as can be)",                           \
       "N"},                                                                                       \
      {"physical-experts",                                                                         \
       0,                                                                                          \
       POPT_ARG_INT,                                                                               \
       &(a)->physicalExperts,                                                                      \
       CLI_POSITIVE,                                                                               \
       "with redundant copies (default: the model's experts)",                                     \
       "E"},                                                                                       \
      {"placement",                                                                                \
       0,                                                                                          \
       POPT_ARG_STRING,                                                                            \
       &(a)->placement,                                                                            \
       0,                                                                                          \
       "of experts and their copies: in-turn, global or hierarchical (EPLB's policies), or auto "  \
       "(default)",                                                                                \
       "HOW"},                                                                                     \
      {"grouped",                                                                                  \
       0,                                                                                          \
       POPT_ARG_NONE,                                                                              \
       &(a)->grouped,                                                                              \
       0,                                                                                          \
       "route as the model does: a token's experts of so many groups (default: of any)",           \
       NULL},                                                                                      \
      {"dispatch-dtype",                                                                           \
       0,                                                                                          \
       POPT_ARG_STRING,                                                                            \
       &(a)->dispatchDtype,                                                                        \
       0,                                                                                          \
       "bf16 (default), fp8 with a scale per 128, or fp4 with one per 16",                         \
       "T"},                                                                                       \
      {"combine",                                                                                  \
       0,                                                                                          \
       POPT_ARG_STRING,                                                                            \
       &(a)->combine,                                                                              \
       0,                                                                                          \
       "ll: exact (default), one row a (token, expert), or partial, one a (token, rank)",          \
       "HOW"},                                                                                     \
      {"variant",                                                                                  \
       0,                                                                                          \
       POPT_ARG_STRING,                                                                            \
       &(a)->variant,                                                                              \
       0,                                                                                          \
       "rows of dispatch: ours (default), one a (token, rank); per-expert; rails, in ll one a "    \
       "(token, node) between nodes",                                                              \
       "V"},                                                                                       \
      {"trace", 0, POPT_ARG_STRING, &(a)->trace, 0, "routing of a file, on its ranks", "FILE"}, {  \
    "seed", 0, POPT_ARG_LONGLONG, &(a)->seed, CLI_NOT_NEGATIVE,                                    \
        "of the generated routing (default 1)", "S"                                                \
  }

/* The cluster, the model, and how rows are sent; spec.cluster points into the struct. */
typedef struct scenario {
  trefoil_cluster_t cluster;
  trefoil_moe_t moe;
  trefoil_predict_spec_t spec;
  int isLl;
} scenario_t;

/* Checks the words and loads the presets; sets the default of tokens. -1, or an exit code. */
int scenarioLoad(const char *verb, scenario_args_t *args, scenario_t *s);

/* EP groups of numGpus GPUs: the size into *ep. -1, or an exit code: what is impossible and what
 * would do. */
int scenarioEpSize(const char *verb, const scenario_args_t *args, const scenario_t *s, int numGpus,
                   int *ep);

/* A line of text where an EP group leaves GPUs of its nodes idle: its NVLink domains. */
void scenarioPrintUneven(const scenario_t *s, int ep);

/* ---- One step of routing (scenario_routing.c) ---- */

typedef struct scenario_routing {
  const trefoil_trace_t *trace; /* owns what routing points to */
  trefoil_routing_t routing;    /* ranksPerNode as the cluster has it */
  int64_t maxReceived;          /* rows that the busiest rank receives, one a (token, rank) */
  const char *placement;        /* of experts: in-turn, global, hierarchical */
} scenario_routing_t;

/* Seeded routing of an EP group, experts popular by Zipf's law with this exponent (0: uniform);
 * args->maskedSelections of each rank's selections are -1. */
int scenarioGenerate(const char *verb, const scenario_args_t *args, const scenario_t *s, int ep,
                     double zipf, scenario_routing_t *r);
/* The file args->trace, its experts copied to --physical-experts and placed; says where it does not
 * fit the model or the cluster. */
int scenarioOpenTrace(const char *verb, const scenario_args_t *args, const scenario_t *s,
                      const trefoil_trace_t **trace, const char **placement);
/* A step of it. */
int scenarioReadTrace(const char *verb, const scenario_args_t *args, const scenario_t *s, int step,
                      scenario_routing_t *r);
void scenarioReleaseRouting(scenario_routing_t *r);

#endif
