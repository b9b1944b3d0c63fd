# The component NCCL: libnccl_ep.so.0, the C API on GPUs. Needs the component KERNELS and NCCL with its device API;
# no GPU to build.
trefoil_component(NCCL)
set(TREFOIL_NCCL_VERSION 2.30.7)
set(needs "the component KERNELS")
if(TREFOIL_KERNELS AND NOT TREFOIL_WITH_NCCL STREQUAL "OFF")
  find_package(NCCL ${TREFOIL_NCCL_VERSION} QUIET)
  set(needs "NCCL ${TREFOIL_NCCL_VERSION} or newer: pip install nvidia-nccl-cu13 or -DNCCL_ROOT=")
  if(NOT NCCL_FOUND AND NCCL_VERSION)
    string(CONCAT needs "NCCL ${TREFOIL_NCCL_VERSION} or newer, not ${NCCL_VERSION} in ${NCCL_INCLUDE_DIR}: "
      "pip install 'nvidia-nccl-cu13>=${TREFOIL_NCCL_VERSION}' or -DNCCL_ROOT=")
  endif()
endif()
trefoil_decide(NCCL "${NCCL_FOUND}" "${needs}")
