/* A small test harness: a program of named tests, each a function; CHECK records, REQUIRE also stops
 * the test. Prints one line a failure and a summary, exits 0, 1, or 77 (skipped, with the reason).
 *
 *   TEST(slots_ascend) { CHECK(a == b, "slot %d", slot); }
 *   TEST_MAIN()
 *
 * argv[1], if given, runs only the tests whose name contains it; --list lists them. */
#ifndef TREFOIL_TEST_H
#define TREFOIL_TEST_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct test_entry {
  const char *name;
  void (*run)(void);
  struct test_entry *next;
} test_entry_t;

static test_entry_t *testFirst, **testLast = &testFirst;
static int testFailures, testSkips;

#define TEST(name)                                                                                 \
  static void test_##name(void);                                                                   \
  __attribute__((constructor)) static void register_##name(void) {                                 \
    static test_entry_t entry = {#name, test_##name, NULL};                                        \
    *testLast = &entry;                                                                            \
    testLast = &entry.next;                                                                        \
  }                                                                                                \
  static void test_##name(void)

/* Each evaluates its condition once. */
#define CHECK(cond, ...)                                                                           \
  do {                                                                                             \
    int testHolds = (cond) ? 1 : 0;                                                                \
    TEST_REPORT(testHolds, #cond, __VA_ARGS__);                                                    \
  } while (0)
#define REQUIRE(cond, ...)                                                                         \
  do {                                                                                             \
    int testHolds = (cond) ? 1 : 0;                                                                \
    TEST_REPORT(testHolds, #cond, __VA_ARGS__);                                                    \
    if (!testHolds) return;                                                                        \
  } while (0)
#define TEST_REPORT(holds, text, ...)                                                              \
  do {                                                                                             \
    if (!(holds) && ++testFailures <= 50) {                                                        \
      fprintf(stderr, "%s:%d: CHECK(%s) failed: ", __FILE__, __LINE__, text);                      \
      fprintf(stderr, " " __VA_ARGS__);                                                            \
      fputc('\n', stderr);                                                                         \
    }                                                                                              \
  } while (0)
#define SKIP(...)                                                                                  \
  do {                                                                                             \
    printf("skipped: " __VA_ARGS__);                                                               \
    putchar('\n');                                                                                 \
    testSkips++;                                                                                   \
    return;                                                                                        \
  } while (0)

static int testRunAll(int argc, char **argv) {
  int ran = 0, failed = 0;
  for (test_entry_t *t = testFirst; t; t = t->next) {
    if (argc > 1 && !strcmp(argv[1], "--list")) {
      puts(t->name);
      continue;
    }
    if (argc > 1 && !strstr(t->name, argv[1])) continue;
    int before = testFailures;
    t->run();
    ran++;
    if (testFailures > before) {
      failed++;
      fprintf(stderr, "FAILED %s\n", t->name);
    }
  }
  if (argc > 1 && !strcmp(argv[1], "--list")) return 0;
  printf("%d tests, %d failed, %d skipped\n", ran, failed, testSkips);
  if (ran == 0) return 1;
  return failed ? 1 : testSkips == ran ? 77 : 0;
}

#define TEST_MAIN()                                                                                \
  int main(int argc, char **argv) {                                                                \
    return testRunAll(argc, argv);                                                                 \
  }

#endif
