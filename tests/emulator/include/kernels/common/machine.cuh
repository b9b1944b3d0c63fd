// kernels/common/machine.cuh for the emulator.
#ifndef TREFOIL_TESTS_EMULATOR_MACHINE_CUH
#define TREFOIL_TESTS_EMULATOR_MACHINE_CUH

#include <cuda_runtime.h>

#define EP_SHARED(type, name)                                                                      \
  static const char name##Key = 0;                                                                 \
  type &name = *(type *)emulator::staticShared(&name##Key, sizeof(type))
#define EP_SHARED_ARRAY(type, name, n)                                                             \
  static const char name##Key = 0;                                                                 \
  type *const name = (type *)emulator::staticShared(&name##Key, sizeof(type) * (n))
#define EP_DYNAMIC_SHARED(alignment, name) char *const name = emulator::dynamicShared()
#define EP_KERNEL(...)                     emulator::addressOf(__VA_ARGS__)

#endif
