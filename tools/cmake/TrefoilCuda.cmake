# The component KERNELS: nvcc, without needing a GPU. AUTO: left out, with a line in the closing summary, where
# there is no nvcc. SASS for sm_90, and PTX for what comes after it.
#
# nvcc is that of -DCMAKE_CUDA_COMPILER or CUDACXX, else the system's, else the one of NVIDIA's wheels in the Python
# that is found (tools/requirements-cuda.txt; tools/test installs them): enough to compile and link all kernels.
#
# CUDA's runtime comes from beside nvcc, as CUDA::cudart_static. It is not looked for with FindCUDAToolkit, which
# also wants cuBLAS's headers and more that the wheels do not bring, and stops in CMake 3.25 where they lack.
trefoil_component(KERNELS)
if(NOT TREFOIL_WITH_KERNELS STREQUAL "OFF")
  include(CheckLanguage)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90)
  endif()
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(TREFOIL_NVCC nvcc PATHS /usr/local/cuda/bin)
    if(NOT TREFOIL_NVCC)
      find_package(Python3 QUIET COMPONENTS Interpreter)
    endif()
    if(NOT TREFOIL_NVCC AND Python3_FOUND)
      execute_process(
        COMMAND ${Python3_EXECUTABLE} -c "import nvidia.cu13 as n; print(list(n.__path__)[0])"
        OUTPUT_VARIABLE TREFOIL_CUDA_WHEEL ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
      if(EXISTS "${TREFOIL_CUDA_WHEEL}/lib64/libcudart_static.a")
        set(TREFOIL_NVCC ${TREFOIL_CUDA_WHEEL}/bin/nvcc CACHE FILEPATH "nvcc" FORCE)
      endif()
    endif()
    if(TREFOIL_NVCC)
      set(CMAKE_CUDA_COMPILER ${TREFOIL_NVCC})
    endif()
  endif()
  check_language(CUDA)
  set(needs "nvcc of CUDA 13.0 or newer")
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_path(CUDA_RUNTIME_INCLUDE_DIR cuda_runtime.h PATHS ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES} NO_DEFAULT_PATH)
    foreach(kind cudart cudart_static)
      find_library(CUDA_${kind}_LIBRARY NAMES ${kind} lib${kind}.so.13 PATHS ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES}
        NO_DEFAULT_PATH)
    endforeach()
    mark_as_advanced(CUDA_RUNTIME_INCLUDE_DIR CUDA_cudart_LIBRARY CUDA_cudart_static_LIBRARY)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
      set(needs "nvcc of CUDA 13.0 or newer, not ${CMAKE_CUDA_COMPILER_VERSION}")
    elseif(NOT CUDA_RUNTIME_INCLUDE_DIR OR NOT CUDA_cudart_static_LIBRARY)
      set(needs "cuda_runtime.h and libcudart_static.a beside ${CMAKE_CUDA_COMPILER}")
    else()
      set(kernels_work ON)
      add_library(CUDA::cudart_static STATIC IMPORTED)
      set_target_properties(CUDA::cudart_static PROPERTIES IMPORTED_LOCATION ${CUDA_cudart_static_LIBRARY}
        INTERFACE_INCLUDE_DIRECTORIES ${CUDA_RUNTIME_INCLUDE_DIR}
        INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};rt")
    endif()
  endif()
endif()
trefoil_decide(KERNELS "${kernels_work}" "${needs}")
