/* Every function that docs/host_api.md calls "sentence" fails with a sentence that begins with its name and
 * has the page's reason. None of CUDA's or NCCL's headers is included: the functions are called without
 * arguments, as they look at none. */
#include <string.h>

#include "test.h"

extern const char *trefoilHostLastError(void);
extern int cudaGetLastError(void);

#define S(function, name, kind, why) int function(void);
#include "host_sentences.inc"
#undef S

enum { S_cuda = 801 /* cudaErrorNotSupported */, S_nccl = 5 /* ncclInvalidUsage */ };

TEST(each_fails_by_its_name) {
  int count = 0;
#define S(function, name, kind, why)                                                               \
  {                                                                                                \
    int code = function();                                                                         \
    CHECK(code == S_##kind, "%s returned %d", #function, code);                                    \
    CHECK(!strcmp(trefoilHostLastError(), name " is not implemented by the host runtime: " why),   \
          "%s said: %s", #function, trefoilHostLastError());                                       \
    if (S_##kind == S_cuda) CHECK(cudaGetLastError() == code, "%s: no last error", #function);     \
    count++;                                                                                       \
  }
#include "host_sentences.inc"
#undef S
  CHECK(count > 200, "only %d names", count);
}

TEST_MAIN()
