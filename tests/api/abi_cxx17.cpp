// nccl_ep.h as C++17.
#include "abi_asserts.h"

extern "C" int abiCxx17(void);
extern "C" int abiCxx17(void) {
  return initialisersAreRight();
}
