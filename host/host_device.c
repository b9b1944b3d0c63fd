/* The devices: as many as TREFOIL_HOST_DEVICES says (1 to 64, default 8), all alike, with the figures of
 * an H100 where a program may size something by them (but TREFOIL_HOST_SMS multiprocessors, 1 to 132), and a
 * name that says what they are. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host_internal.h"

static _Thread_local int currentDevice;
static _Thread_local unsigned deviceFlags;

/* 0: the variable is not a number from 1 to 64, and there are no devices. */
int epNumDevices(void) {
  const char *text = getenv("TREFOIL_HOST_DEVICES");
  int64_t count = text && *text ? epEnvInt("TREFOIL_HOST_DEVICES", 0) : 8;
  return count < 1 || count > 64 ? 0 : (int)count;
}

static int numSms(void) {
  int64_t count = epEnvInt("TREFOIL_HOST_SMS", 132);
  return count < 1 ? 1 : count > 132 ? 132 : (int)count;
}

int epCurrentDevice(void) {
  return currentDevice;
}

static cudaError_t checkDevices(const char *func) {
  EP_CUDA_CHECK(epNumDevices() > 0, cudaErrorNoDevice,
                "%s: TREFOIL_HOST_DEVICES=%s: expected a whole number from 1 to 64", func,
                getenv("TREFOIL_HOST_DEVICES"));
  return cudaSuccess;
}

static cudaError_t checkDevice(int device, const char *func) {
  EP_CUDA_TRY(checkDevices(func));
  EP_CUDA_CHECK(device >= 0 && device < epNumDevices(), cudaErrorInvalidDevice,
                "%s: device %d is not in [0, %d); TREFOIL_HOST_DEVICES sets the number", func,
                device, epNumDevices());
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
  EP_CUDA_CHECK(count, cudaErrorInvalidValue, "cudaGetDeviceCount: count is NULL");
  *count = 0;
  EP_CUDA_TRY(checkDevices("cudaGetDeviceCount"));
  *count = epNumDevices();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  EP_CUDA_TRY(checkDevice(device, "cudaSetDevice"));
  currentDevice = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  EP_CUDA_CHECK(device, cudaErrorInvalidValue, "cudaGetDevice: device is NULL");
  *device = currentDevice;
  return cudaSuccess;
}

cudaError_t cudaInitDevice(int device, unsigned int flags, unsigned int initFlags) {
  (void)flags, (void)initFlags;
  return checkDevice(device, "cudaInitDevice");
}

cudaError_t cudaSetDeviceFlags(unsigned int flags) {
  deviceFlags = flags;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceFlags(unsigned int *flags) {
  EP_CUDA_CHECK(flags, cudaErrorInvalidValue, "cudaGetDeviceFlags: flags is NULL");
  *flags = deviceFlags;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device) {
  EP_CUDA_CHECK(value, cudaErrorInvalidValue, "cudaDeviceGetAttribute: value is NULL");
  EP_CUDA_TRY(checkDevice(device, "cudaDeviceGetAttribute"));
  switch (attr) {
  case cudaDevAttrMaxThreadsPerBlock:
  case cudaDevAttrMaxBlockDimX:
  case cudaDevAttrMaxBlockDimY:
    *value = 1024;
    break;
  case cudaDevAttrMaxBlockDimZ:
    *value = 64;
    break;
  case cudaDevAttrMaxGridDimX:
    *value = 0x7fffffff;
    break;
  case cudaDevAttrMaxGridDimY:
  case cudaDevAttrMaxGridDimZ:
    *value = 65535;
    break;
  case cudaDevAttrMaxSharedMemoryPerBlock:
    *value = 49152;
    break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin:
    *value = 232448;
    break;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
    *value = 233472;
    break;
  case cudaDevAttrReservedSharedMemoryPerBlock:
    *value = 1024;
    break;
  case cudaDevAttrTotalConstantMemory:
    *value = 65536;
    break;
  case cudaDevAttrWarpSize:
    *value = 32;
    break;
  case cudaDevAttrMaxPitch:
    *value = 0x7fffffff;
    break;
  case cudaDevAttrMaxRegistersPerBlock:
  case cudaDevAttrMaxRegistersPerMultiprocessor:
    *value = 65536;
    break;
  case cudaDevAttrClockRate:
    *value = 1980000;
    break;
  case cudaDevAttrMemoryClockRate:
    *value = 2619000;
    break;
  case cudaDevAttrGlobalMemoryBusWidth:
    *value = 5120;
    break;
  case cudaDevAttrL2CacheSize:
    *value = 52428800;
    break;
  case cudaDevAttrTextureAlignment:
    *value = 512;
    break;
  case cudaDevAttrMultiProcessorCount:
    *value = numSms();
    break;
  case cudaDevAttrMaxThreadsPerMultiProcessor:
    *value = 2048;
    break;
  case cudaDevAttrMaxBlocksPerMultiprocessor:
    *value = 32;
    break;
  case cudaDevAttrAsyncEngineCount:
    *value = 3;
    break;
  case cudaDevAttrComputeCapabilityMajor:
    *value = 9;
    break;
  case cudaDevAttrPciDeviceId:
    *value = device;
    break;
  case cudaDevAttrGpuOverlap:
  case cudaDevAttrCanMapHostMemory:
  case cudaDevAttrConcurrentKernels:
  case cudaDevAttrUnifiedAddressing:
  case cudaDevAttrStreamPrioritiesSupported:
  case cudaDevAttrManagedMemory:
  case cudaDevAttrConcurrentManagedAccess:
  case cudaDevAttrCanUseHostPointerForRegisteredMem:
  case cudaDevAttrHostRegisterSupported:
  case cudaDevAttrMemoryPoolsSupported:
  case cudaDevAttrCooperativeLaunch:
  case cudaDevAttrClusterLaunch:
  case cudaDevAttrHostNativeAtomicSupported:
    *value = 1;
    break;
  case cudaDevAttrNumaId:
  case cudaDevAttrHostNumaId:
    *value = -1;
    break;
  default:
    EP_CUDA_CHECK((int)attr >= 1 && attr < cudaDevAttrMax, cudaErrorInvalidValue,
                  "cudaDeviceGetAttribute: %d is not an attribute", (int)attr);
    *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device) {
  EP_CUDA_CHECK(prop, cudaErrorInvalidValue, "cudaGetDeviceProperties: prop is NULL");
  EP_CUDA_TRY(checkDevice(device, "cudaGetDeviceProperties"));
  struct cudaDeviceProp p;
  memset(&p, 0, sizeof p);
  snprintf(p.name, sizeof p.name, "Trefoil host runtime device %d (CPU)", device);
  memcpy(p.uuid.bytes, "trefoil-host", 12);
  p.uuid.bytes[15] = (char)device;
  p.totalGlobalMem = EP_DEVICE_BYTES;
  p.sharedMemPerBlock = 49152;
  p.sharedMemPerBlockOptin = 232448;
  p.sharedMemPerMultiprocessor = 233472;
  p.reservedSharedMemPerBlock = 1024;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.warpSize = 32;
  p.memPitch = 0x7fffffff;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 0x7fffffff;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.totalConstMem = 65536;
  p.major = 9;
  p.textureAlignment = 512;
  p.multiProcessorCount = numSms();
  p.maxThreadsPerMultiProcessor = 2048;
  p.maxBlocksPerMultiProcessor = 32;
  p.memoryBusWidth = 5120;
  p.l2CacheSize = 52428800;
  p.asyncEngineCount = 3;
  p.pciDeviceID = device;
  p.canMapHostMemory = p.concurrentKernels = p.unifiedAddressing = p.managedMemory = 1;
  p.streamPrioritiesSupported = p.concurrentManagedAccess = p.cooperativeLaunch = 1;
  p.canUseHostPointerForRegisteredMem = p.hostRegisterSupported = p.memoryPoolsSupported = 1;
  p.hostNativeAtomicSupported = p.clusterLaunch = 1;
  p.deviceNumaId = p.hostNumaId = -1;
  *prop = p;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *pciBusId, int len, int device) {
  EP_CUDA_CHECK(pciBusId && len >= 13, cudaErrorInvalidValue,
                "cudaDeviceGetPCIBusId: the buffer must hold 13 bytes");
  EP_CUDA_TRY(checkDevice(device, "cudaDeviceGetPCIBusId"));
  snprintf(pciBusId, (size_t)len, "0000:00:%02X.0", device & 255);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *pciBusId) {
  unsigned domain, bus, slot, func;
  EP_CUDA_CHECK(device && pciBusId, cudaErrorInvalidValue,
                "cudaDeviceGetByPCIBusId: device or pciBusId is NULL");
  EP_CUDA_CHECK(sscanf(pciBusId, "%x:%x:%x.%x", &domain, &bus, &slot, &func) == 4 && !domain &&
                    !bus && !func && slot < (unsigned)epNumDevices(),
                cudaErrorInvalidDevice, "cudaDeviceGetByPCIBusId: no device at %s", pciBusId);
  *device = (int)slot;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *canAccessPeer, int device, int peerDevice) {
  EP_CUDA_CHECK(canAccessPeer, cudaErrorInvalidValue,
                "cudaDeviceCanAccessPeer: canAccessPeer is NULL");
  EP_CUDA_TRY(checkDevice(device, "cudaDeviceCanAccessPeer"));
  EP_CUDA_TRY(checkDevice(peerDevice, "cudaDeviceCanAccessPeer"));
  *canAccessPeer = device != peerDevice;
  return cudaSuccess;
}

/* Every device reads every other's memory anyway; only the bookkeeping of CUDA's errors is kept. */
static _Atomic uint64_t peerEnabled[64];

cudaError_t cudaDeviceEnablePeerAccess(int peerDevice, unsigned int flags) {
  EP_CUDA_TRY(checkDevice(peerDevice, "cudaDeviceEnablePeerAccess"));
  EP_CUDA_CHECK(!flags, cudaErrorInvalidValue, "cudaDeviceEnablePeerAccess: flags must be 0");
  EP_CUDA_CHECK(peerDevice != currentDevice, cudaErrorInvalidDevice,
                "cudaDeviceEnablePeerAccess: device %d is the current device", peerDevice);
  uint64_t bit = 1ull << peerDevice;
  EP_CUDA_CHECK(!(atomic_fetch_or(&peerEnabled[currentDevice], bit) & bit),
                cudaErrorPeerAccessAlreadyEnabled, "peer access from device %d to %d is enabled",
                currentDevice, peerDevice);
  return cudaSuccess;
}

cudaError_t cudaDeviceDisablePeerAccess(int peerDevice) {
  EP_CUDA_TRY(checkDevice(peerDevice, "cudaDeviceDisablePeerAccess"));
  uint64_t bit = 1ull << peerDevice;
  EP_CUDA_CHECK(atomic_fetch_and(&peerEnabled[currentDevice], ~bit) & bit,
                cudaErrorPeerAccessNotEnabled, "peer access from device %d to %d is not enabled",
                currentDevice, peerDevice);
  return cudaSuccess;
}

static _Atomic size_t limits[7] = {1024, 8 << 20, 8 << 20, 2, 2048, 64, 0};

cudaError_t cudaDeviceSetLimit(enum cudaLimit limit, size_t value) {
  EP_CUDA_CHECK((unsigned)limit < 7, cudaErrorUnsupportedLimit,
                "cudaDeviceSetLimit: there is no limit %d", (int)limit);
  atomic_store(&limits[limit], value);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetLimit(size_t *pValue, enum cudaLimit limit) {
  EP_CUDA_CHECK(pValue && (unsigned)limit < 7, cudaErrorUnsupportedLimit,
                "cudaDeviceGetLimit: pValue is NULL, or there is no limit %d", (int)limit);
  *pValue = atomic_load(&limits[limit]);
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *driverVersion) {
  EP_CUDA_CHECK(driverVersion, cudaErrorInvalidValue,
                "cudaDriverGetVersion: driverVersion is NULL");
  *driverVersion = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *runtimeVersion) {
  EP_CUDA_CHECK(runtimeVersion, cudaErrorInvalidValue,
                "cudaRuntimeGetVersion: runtimeVersion is NULL");
  *runtimeVersion = CUDART_VERSION;
  return cudaSuccess;
}
