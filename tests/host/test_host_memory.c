/* Device memory: attributes, guards, poison, reuse, no leak of descriptors or mappings. */
#include <dirent.h>
#include <stdint.h>

#include <cuda_runtime.h>
#include <nccl.h>

#include "test.h"
#include "trefoil_host.h"

#define OK(call) REQUIRE((call) == cudaSuccess, "%s: %s", #call, trefoilHostLastError())

static int countEntries(const char *path) {
  DIR *dir = opendir(path);
  int count = 0;
  while (dir && readdir(dir)) count++;
  if (dir) closedir(dir);
  return count;
}

TEST(pointers_know_what_they_are) {
  struct cudaPointerAttributes a;
  char *device, *pinned, *managed, own[64];
  OK(cudaSetDevice(3));
  OK(cudaMalloc((void **)&device, 1000));
  OK(cudaMallocHost((void **)&pinned, 1000));
  OK(cudaMallocManaged((void **)&managed, 1000, cudaMemAttachGlobal));
  OK(cudaSetDevice(0));
  OK(cudaPointerGetAttributes(&a, device + 999));
  CHECK(a.type == cudaMemoryTypeDevice && a.device == 3 && a.devicePointer == device + 999 &&
            !a.hostPointer,
        "device: type %d device %d", a.type, a.device);
  OK(cudaPointerGetAttributes(&a, device + 1000));
  CHECK(a.type == cudaMemoryTypeUnregistered, "one past the end: type %d", a.type);
  OK(cudaPointerGetAttributes(&a, pinned));
  CHECK(a.type == cudaMemoryTypeHost && a.hostPointer == pinned, "pinned: type %d", a.type);
  OK(cudaPointerGetAttributes(&a, managed));
  CHECK(a.type == cudaMemoryTypeManaged, "managed: type %d", a.type);
  OK(cudaPointerGetAttributes(&a, own));
  CHECK(a.type == cudaMemoryTypeUnregistered && a.hostPointer == own, "own: type %d", a.type);
  OK(cudaHostRegister(own, sizeof own, 0));
  CHECK(cudaHostRegister(own + 8, 8, 0) == cudaErrorHostMemoryAlreadyRegistered, "twice");
  OK(cudaPointerGetAttributes(&a, own + 63));
  CHECK(a.type == cudaMemoryTypeHost, "registered: type %d", a.type);
  OK(cudaHostUnregister(own));
  CHECK(cudaHostUnregister(own) == cudaErrorHostMemoryNotRegistered, "unregistered twice");
  CHECK(cudaFree(pinned) == cudaErrorInvalidValue, "pinned memory freed as device memory");
  CHECK(cudaFree(device + 8) == cudaErrorInvalidValue, "freed in the middle");
  OK(cudaFree(device));
  CHECK(cudaFree(device) == cudaErrorInvalidValue, "freed twice");
  OK(cudaFreeHost(pinned));
  OK(cudaFree(managed));
  OK(cudaFree(NULL));
}

TEST(fresh_memory_is_not_zero) {
  unsigned char *device;
  OK(cudaMalloc((void **)&device, 5000));
  CHECK(device[0] == 0xCB && device[4999] == 0xCB, "%02x %02x", device[0], device[4999]);
  OK(cudaFree(device));
}

#if !defined(__SANITIZE_ADDRESS__)
TEST(writing_past_the_end_is_found_on_free) {
  size_t sizes[] = {1, 511, 512, 4096, 70000, 5 << 20, 64 << 20};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    char *device;
    OK(cudaMalloc((void **)&device, sizes[i]));
    device[sizes[i]] = 1;
    CHECK(cudaFree(device) == cudaErrorIllegalAddress, "%zu bytes", sizes[i]);
    CHECK(strstr(trefoilHostLastError(), "past the end"), "%s", trefoilHostLastError());
  }
}
#endif

TEST(sizes_alignments_and_limits) {
  void *p = (void *)1;
  size_t before, after, total;
  OK(cudaMalloc(&p, 0));
  CHECK(!p, "no bytes: %p", p);
  for (size_t bytes = 1; bytes < 10000000; bytes = bytes * 3 + 1) {
    OK(cudaMalloc(&p, bytes));
    CHECK(((uintptr_t)p & 255) == 0, "%zu bytes at %p", bytes, p);
    memset(p, 1, bytes);
    OK(cudaFree(p));
    REQUIRE(ncclMemAlloc(&p, bytes) == ncclSuccess, "%s", trefoilHostLastError());
    CHECK(((uintptr_t)p & 4095) == 0, "window memory of %zu bytes at %p", bytes, p);
    REQUIRE(ncclMemFree(p) == ncclSuccess, "%s", trefoilHostLastError());
  }
  OK(cudaMemGetInfo(&before, &total));
  OK(cudaMalloc(&p, 1 << 20));
  OK(cudaMemGetInfo(&after, &total));
  CHECK(before - after == 1 << 20 && total == (size_t)80 << 30, "%zu %zu", before, after);
  OK(cudaFree(p));
  p = NULL;
  CHECK(cudaMalloc(&p, (size_t)81 << 30) == cudaErrorMemoryAllocation && !p, "81 GiB were given");
}

TEST(memory_freed_in_stream_order) {
  cudaStream_t s;
  char *device, host[100];
  OK(cudaStreamCreate(&s));
  for (int i = 0; i < 100; i++) {
    OK(cudaMallocAsync((void **)&device, 100, s));
    OK(cudaMemsetAsync(device, i, 100, s));
    OK(cudaMemcpyAsync(host, device, 100, cudaMemcpyDeviceToHost, s));
    OK(cudaFreeAsync(device, s));
    CHECK(host[99] == i, "round %d: %d", i, host[99]);
  }
  OK(cudaStreamSynchronize(s));
  CHECK(cudaFreeAsync(host, s) == cudaErrorInvalidValue, "host memory");
  OK(cudaStreamDestroy(s));
}

TEST(nothing_leaks) {
  int fds = 0;
  size_t used = 0, now, total;
  for (int round = 0; round < 3000; round++) {
    void *small, *large;
    cudaStream_t s;
    cudaEvent_t e;
    OK(cudaMalloc(&small, (size_t)(round % 97 + 1) * 100));
    OK(cudaMalloc(&large, (size_t)6 << 20));
    OK(cudaStreamCreate(&s));
    OK(cudaEventCreate(&e));
    OK(cudaMemsetAsync(small, 1, 100, s));
    OK(cudaEventRecord(e, s));
    if (round % 2) OK(cudaStreamSynchronize(s));
    OK(cudaStreamDestroy(s));
    OK(cudaEventDestroy(e));
    OK(cudaFree(small));
    OK(cudaFree(large));
    if (round == 100) {
      fds = countEntries("/proc/self/fd");
      OK(cudaMemGetInfo(&used, &total));
    }
  }
  OK(cudaMemGetInfo(&now, &total));
  CHECK(countEntries("/proc/self/fd") == fds, "%d descriptors, then %d", fds,
        countEntries("/proc/self/fd"));
  CHECK(now == used, "free %zu, then %zu", used, now);
  CHECK(countEntries("/proc/self/task") < 30, "%d threads", countEntries("/proc/self/task"));
}

TEST(devices) {
  int count, value, device = -1;
  struct cudaDeviceProp p;
  OK(cudaGetDeviceCount(&count));
  CHECK(count == 8, "%d devices", count);
  OK(cudaGetDeviceProperties(&p, 7));
  CHECK(p.major == 9 && p.multiProcessorCount == 132 && strstr(p.name, "host runtime"), "%s",
        p.name);
  OK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
  CHECK(value == 132, "%d", value);
  CHECK(cudaSetDevice(8) == cudaErrorInvalidDevice, "device 8 was taken");
  OK(cudaGetDevice(&device));
  CHECK(device == 0, "device %d", device);
  OK(cudaDeviceCanAccessPeer(&value, 0, 1));
  CHECK(value == 1, "no peer access");
  OK(cudaDeviceEnablePeerAccess(1, 0));
  CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessAlreadyEnabled, "twice");
  OK(cudaDeviceDisablePeerAccess(1));
}

TEST(devices_with_fewer_multiprocessors) {
  static const struct {
    const char *text;
    int sms;
  } wants[] = {{"3", 3}, {"132", 132}, {"0", 1}, {"500", 132}, {"many", 132}};
  for (size_t i = 0; i < sizeof wants / sizeof wants[0]; i++) {
    int value = -1;
    struct cudaDeviceProp p;
    setenv("TREFOIL_HOST_SMS", wants[i].text, 1);
    OK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 1));
    OK(cudaGetDeviceProperties(&p, 1));
    CHECK(value == wants[i].sms && p.multiProcessorCount == value, "%s: %d, %d", wants[i].text,
          value, p.multiProcessorCount);
  }
  unsetenv("TREFOIL_HOST_SMS");
}

TEST(what_is_missing_says_so_by_name) {
  dim3 one = {1, 1, 1};
  CHECK(cudaLaunchKernel(NULL, one, one, NULL, 0, NULL) == cudaErrorNotSupported, "no error");
  CHECK(strstr(trefoilHostLastError(), "cudaLaunchKernel"), "%s", trefoilHostLastError());
  CHECK(ncclCommRevoke(NULL, 0) == ncclInvalidUsage, "no error");
  CHECK(strstr(ncclGetLastError(NULL), "ncclCommRevoke"), "%s", ncclGetLastError(NULL));
}

TEST_MAIN()
