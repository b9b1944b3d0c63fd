# Finds NCCL: a system install, a prefix (-DNCCL_ROOT=..., or NCCL_ROOT or NCCL_HOME in the environment), or the
# wheel nvidia-nccl-cu13 (nvidia-nccl-cu12 too) of the Python that is found.
#
# Result: NCCL_FOUND, NCCL_VERSION, NCCL_INCLUDE_DIR, NCCL_LIBRARY, and the target NCCL::nccl. A library that is only
# called libnccl.so.2, as in the wheel, is found too. With find_package(NCCL 2.30.7) an older one is not found, and
# NCCL_VERSION says what was there.
set(NCCL_HINTS ${NCCL_ROOT} $ENV{NCCL_ROOT} $ENV{NCCL_HOME})
if(NOT NCCL_HINTS)
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(Python3_FOUND)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c "import nvidia.nccl as n; print(list(n.__path__)[0])"
      OUTPUT_VARIABLE NCCL_WHEEL ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
endif()
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${NCCL_HINTS} ${NCCL_WHEEL} PATH_SUFFIXES include)
# The library that belongs to the headers, though another may lie where libraries are looked for first.
get_filename_component(NCCL_PREFIX "${NCCL_INCLUDE_DIR}" DIRECTORY)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 NAMES_PER_DIR HINTS ${NCCL_PREFIX} PATH_SUFFIXES lib lib64
  NO_DEFAULT_PATH)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 NAMES_PER_DIR HINTS ${NCCL_HINTS} ${NCCL_WHEEL}
  PATH_SUFFIXES lib lib64)

if(NCCL_INCLUDE_DIR)
  file(STRINGS ${NCCL_INCLUDE_DIR}/nccl.h NCCL_LINES REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" NCCL_VERSION "${NCCL_LINES}")
  list(JOIN NCCL_VERSION "." NCCL_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR VERSION_VAR NCCL_VERSION)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)

if(NCCL_FOUND AND NOT TARGET NCCL::nccl)
  add_library(NCCL::nccl UNKNOWN IMPORTED)
  set_target_properties(NCCL::nccl PROPERTIES IMPORTED_LOCATION ${NCCL_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${NCCL_INCLUDE_DIR})
endif()
