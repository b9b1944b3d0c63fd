/* The set of live objects (api/registry.c): what was registered is there, nothing else is, whatever came and
 * went before; and while other threads ask. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "api/object.h"
#include "test.h"

enum { OBJECTS = 3000 };

static void *at(size_t i) {
  return (void *)(uintptr_t)(0x10000 + 16 * i);
}

static uint64_t next(uint64_t *state) {
  *state = *state * 6364136223846793005ull + 1442695040888963407ull;
  return *state >> 33;
}

TEST(kinds_and_neighbours_are_told_apart) {
  void *object = at(OBJECTS + 7);
  REQUIRE(epRegister(object, EP_OBJECT_HANDLE) == TREFOIL_OK, "%s", trefoilLastError());
  CHECK(epIsLive(object, EP_OBJECT_HANDLE), "not found");
  CHECK(!epIsLive(object, EP_OBJECT_GROUP), "taken for a group");
  CHECK(!epIsLive(object, EP_OBJECT_TENSOR), "taken for a tensor");
  for (int d = 1; d < 16; d++) {
    CHECK(!epIsLive((char *)object + d, EP_OBJECT_HANDLE), "%d bytes behind it", d);
    CHECK(!epIsLive((char *)object + d, EP_OBJECT_GROUP), "%d bytes behind it, a group", d);
  }
  CHECK(!epIsLive(at(OBJECTS + 8), EP_OBJECT_HANDLE), "the next one");
  CHECK(!epUnregister(object, EP_OBJECT_GROUP), "removed as a group");
  CHECK(epUnregister(object, EP_OBJECT_HANDLE), "not removed");
  CHECK(!epUnregister(object, EP_OBJECT_HANDLE), "removed twice");
  CHECK(!epIsLive(object, EP_OBJECT_HANDLE), "found after it was removed");
}

TEST(coming_and_going_in_any_order) {
  static unsigned char live[OBJECTS];
  uint64_t seed = 5;
  for (int step = 0; step < 200000; step++) {
    size_t i = next(&seed) % (step % 3 ? OBJECTS : 40);
    ep_object_kind_t kind = (ep_object_kind_t)(1 + i % 3);
    int is = epIsLive(at(i), kind);
    REQUIRE(is == live[i], "step %d: object %zu is %d, should be %d", step, i, is, live[i]);
    if (live[i]) {
      REQUIRE(epUnregister(at(i), kind), "step %d: object %zu was not there", step, i);
    } else {
      REQUIRE(epRegister(at(i), kind) == TREFOIL_OK, "%s", trefoilLastError());
    }
    live[i] = !live[i];
  }
  for (size_t i = 0; i < OBJECTS; i++) {
    CHECK(epUnregister(at(i), (ep_object_kind_t)(1 + i % 3)) == live[i], "object %zu", i);
  }
}

static atomic_int stop, missed, invented;

static void *ask(void *unused) {
  (void)unused;
  while (!atomic_load(&stop)) {
    for (size_t i = 0; i < 8; i++) {
      if (!epIsLive(at(OBJECTS + 100 + 2 * i), EP_OBJECT_GROUP)) atomic_fetch_add(&missed, 1);
      if (epIsLive(at(OBJECTS + 101 + 2 * i), EP_OBJECT_GROUP)) atomic_fetch_add(&invented, 1);
    }
  }
  return NULL;
}

TEST(others_ask_while_objects_come_and_go) {
  enum { THREADS = 3, ROUNDS = 200, MORE = 4000 };
  pthread_t threads[THREADS];
  for (size_t i = 0; i < 8; i++) {
    REQUIRE(epRegister(at(OBJECTS + 100 + 2 * i), EP_OBJECT_GROUP) == TREFOIL_OK, "%s",
            trefoilLastError());
  }
  atomic_store(&stop, 0);
  for (int t = 0; t < THREADS; t++) {
    REQUIRE(pthread_create(&threads[t], NULL, ask, NULL) == 0, "no thread");
  }
  int lost = 0;
  for (int round = 0; round < ROUNDS; round++) { /* the first one makes the table grow */
    for (size_t i = 0; i < MORE; i++) epRegister(at(2 * OBJECTS + i), EP_OBJECT_TENSOR);
    for (size_t i = 0; i < MORE; i++) {
      lost += !epUnregister(at(2 * OBJECTS + (i * 7 + 3) % MORE), EP_OBJECT_TENSOR);
    }
  }
  atomic_store(&stop, 1);
  for (int t = 0; t < THREADS; t++) pthread_join(threads[t], NULL);
  CHECK(lost == 0, "%d objects were not there any more", lost);
  CHECK(missed == 0, "a live object was not found %d times", (int)missed);
  CHECK(invented == 0, "an object that never was is found %d times", (int)invented);
}

TEST_MAIN()
