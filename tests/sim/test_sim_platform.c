/* A program that knows SimGrid and nothing of ours loads the platform that the library writes. */
#include <unistd.h>

#include "sim_world.h"

#ifndef TREFOIL_HAVE_SIMGRID

TEST(platform) {
  SKIP("no SimGrid in this build");
}

#else

#include <simgrid/actor.h>
#include <simgrid/engine.h>
#include <simgrid/host.h>

static int writePlatform(char *path) {
  world_t w;
  worldInit(&w, 8, 2, TREFOIL_HT_FLAT);
  w.cluster.nodesPerLeaf = 2;
  w.cluster.railLeaves = 1;
  w.cluster.leafOversubscription = 2;
  w.costs.numSms = 4;
  w.costs.op[0].sendRowNs = 300; /* 150 ns a row with the two SMs that send: less than NVLink */
  worldSend(&w, 0, 7, 10);
  trefoil_sim_t *sim = NULL;
  int fd = mkstemp(path);
  if (fd < 0 || close(fd)) return 0;
  int isWritten = trefoilSimCreate(&sim, &w.workload) == TREFOIL_OK &&
                  trefoilSimWritePlatform(sim, &w.run, TREFOIL_OP_DISPATCH, path) == TREFOIL_OK;
  CHECK(isWritten, "%s", trefoilLastError());
  trefoilSimDestroy(sim);
  return isWritten;
}

/* Seconds for 1 MB between two hosts, alone. */
static double timeOf(const char *from, const char *to) {
  double begin = simgrid_get_clock();
  sg_host_sendto(sg_host_by_name(from), sg_host_by_name(to), 1e6);
  return simgrid_get_clock() - begin;
}

static double nvlink, sameRail, otherRail, forwarded;
static void measure(int argc, char **argv) {
  (void)argc, (void)argv;
  nvlink = timeOf("g0", "g1");
  sameRail = timeOf("n0", "n2");
  otherRail = timeOf("n0", "n3");
  forwarded = timeOf("f2", "g3");
}

TEST(platform) {
  char path[] = "/tmp/trefoil-platform-XXXXXX.xml";
  path[strlen(path) - 4] = '\0'; /* mkstemp's six letters come last */
  REQUIRE(writePlatform(path), "no platform");
  char *arguments[] = {"any program", "--cfg=network/model:CM02", "--cfg=network/crosstraffic:0",
                       "--cfg=network/TCP-gamma:0", NULL};
  int count = 4;
  simgrid_init(&count, arguments);
  simgrid_load_platform(path);
  unlink(path);
  CHECK(sg_host_count() == 8 * 6, "%zu hosts", sg_host_count());
  sg_actor_create("measure", sg_host_by_name("g0"), measure, 0, NULL);
  simgrid_run();
  /* 10000 bytes take 150 ns of the sending SMs, 200 of the port; rail leaves join two nodes, so two
   * ports go up at the rate of one: a flow alone still has its port's rate. Forwarding takes 150. */
  CHECK(fabs(nvlink - 100 * 150e-9) < 1e-12, "%.9g", nvlink);
  CHECK(fabs(sameRail - 100 * 200e-9) < 1e-12, "%.9g", sameRail);
  CHECK(fabs(otherRail - 100 * 200e-9) < 1e-12, "%.9g", otherRail);
  CHECK(fabs(forwarded - 100 * 150e-9) < 1e-12, "%.9g", forwarded);
}

#endif

TEST(platform_that_cannot_be_written) {
  world_t w;
  worldInit(&w, 2, 2, TREFOIL_LL_EXPERT_MAJOR);
  trefoil_sim_t *sim = NULL;
  REQUIRE(trefoilSimCreate(&sim, &w.workload) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(trefoilSimWritePlatform(sim, &w.run, TREFOIL_OP_DISPATCH, "/nowhere/p.xml") ==
                TREFOIL_SYSTEM_ERROR &&
            strstr(trefoilLastError(), "cannot write /nowhere/p.xml: No such file"),
        "%s", trefoilLastError());
  trefoilSimDestroy(sim);
}

TEST_MAIN()
