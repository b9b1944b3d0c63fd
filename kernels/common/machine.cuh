// Names for the few things of CUDA C++ that the emulator (tests/emulator) implements otherwise: memory of a
// block and the address of a kernel. Its file of this name, earlier on the include path, takes the place
// of this one; so with ptx.cuh and bulk.cuh.
#ifndef TREFOIL_KERNELS_COMMON_MACHINE_CUH
#define TREFOIL_KERNELS_COMMON_MACHINE_CUH

#define EP_SHARED(type, name)          __shared__ type name
#define EP_SHARED_ARRAY(type, name, n) __shared__ type name[n]
#define EP_DYNAMIC_SHARED(alignment, name)                                                         \
  extern __shared__ __align__(alignment)                                                           \
  char name[]
#define EP_KERNEL(...) ((const void *)(__VA_ARGS__))

#endif
