/* Copies to and from device variables, registered as nvcc's code registers them. */
#include <cuda_runtime.h>

#include "host_kernel.h"
#include "test.h"
#include "trefoil_host.h"

#define OK(call)       REQUIRE((call) == cudaSuccess, "%s: %s", #call, trefoilHostLastError())
#define IS(call, code) CHECK((call) == (code), "%s: %s", #call, trefoilHostLastError())

static int counter, table[4], unread;
static int *managed;

static void **module(void) {
  static void **handle;
  if (handle) return handle;
  handle = __cudaRegisterFatBinary((void *)&handle);
  __cudaRegisterVar(handle, (char *)&counter, (char *)"counter", "counter", 0, 4, 0, 0);
  __cudaRegisterVar(handle, (char *)table, (char *)"table", "table", 0, 16, 1, 0);
  __cudaRegisterVar(handle, (char *)&unread, (char *)"unread", "unread", 0, 4, 0, 0);
  __cudaRegisterManagedVar(handle, (void **)&managed, (char *)"managed", "managed", 0, 4, 0, 0);
  __cudaRegisterFatBinaryEnd(handle);
  return handle;
}

TEST(symbols_are_written_and_read) {
  cudaStream_t s;
  void *address;
  size_t size = 0;
  int values[4] = {1, 2, 3, 4}, back[2] = {0, 0};
  REQUIRE(module(), "no module");
  OK(cudaStreamCreate(&s));
  OK(cudaGetSymbolSize(&size, table));
  CHECK(size == 16, "%zu", size);
  OK(cudaMemcpyToSymbol(table, values, 16, 0, cudaMemcpyHostToDevice));
  OK(cudaMemcpyToSymbolAsync(table, values, 4, 12, cudaMemcpyHostToDevice, s));
  OK(cudaStreamSynchronize(s));
  OK(cudaMemcpyFromSymbolAsync(back, table, 8, 8, cudaMemcpyDeviceToHost, s));
  CHECK(back[0] == 3 && back[1] == 1, "%d, %d", back[0], back[1]);
  OK(cudaGetSymbolAddress(&address, table));
  OK(cudaMemset(address, 0, 4));
  OK(cudaMemcpyFromSymbol(back, table, 4, 0, cudaMemcpyDefault));
  CHECK(back[0] == 0, "%d", back[0]);
  IS(cudaMemcpyToSymbol(table, values, 8, 12, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  IS(cudaMemcpyToSymbol(table, values, 8, 0, cudaMemcpyDeviceToHost),
     cudaErrorInvalidMemcpyDirection);
  IS(cudaMemcpyFromSymbol(back, values, 4, 0, cudaMemcpyDeviceToHost), cudaErrorInvalidSymbol);
  OK(cudaStreamDestroy(s));
}

static void *prepare(const void *func, const trefoil_host_launch_t *launch) {
  (void)launch;
  return (void *)func;
}
static void nothing(void *launch) {
  (void)launch;
}

TEST(a_value_that_nobody_knows_is_not_read) {
  static const trefoil_host_launcher_t launcher = {prepare, nothing, nothing};
  int back = 9;
  REQUIRE(module(), "no module");
  IS(cudaMemcpyFromSymbol(&back, &unread, 4, 0, cudaMemcpyDeviceToHost), cudaErrorNotSupported);
  CHECK(strstr(trefoilHostLastError(), "variable unread was not written"), "%s",
        trefoilHostLastError());
  CHECK(back == 9, "%d", back);
  trefoilHostSetLauncher(&launcher); /* its kernels may have written it */
  OK(cudaMemcpyFromSymbol(&back, &unread, 4, 0, cudaMemcpyDeviceToHost));
  CHECK(back == 0, "%d", back);
  trefoilHostSetLauncher(NULL);
}

TEST(a_managed_variable_is_its_memory) {
  void *address = NULL;
  size_t size = 0;
  int value = 5, back = 0;
  REQUIRE(module() && managed, "no module");
  OK(cudaGetSymbolAddress(&address, managed));
  OK(cudaGetSymbolSize(&size, managed));
  CHECK(address == (void *)managed && size == 4, "%zu", size);
  OK(cudaMemcpyToSymbol(managed, &value, 4, 0, cudaMemcpyHostToDevice));
  OK(cudaMemcpyFromSymbol(&back, managed, 4, 0, cudaMemcpyDeviceToHost));
  CHECK(back == 5 && *managed == 5, "%d", back);
}

TEST_MAIN()
