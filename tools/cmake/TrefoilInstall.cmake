# Install rules: headers, shared and static libraries, the command, a CMake package, pkg-config files.
#
# The CMake package is written by hand rather than exported: it then names only what a consumer
# needs, works from any prefix it is moved to, and does not ask for the build's own flags.
include(CMakePackageConfigHelpers)
set(cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/trefoil)
set(host_include ${CMAKE_INSTALL_INCLUDEDIR}/trefoil-host)

# Builds all that `cmake --install` copies, and nothing else.
add_custom_target(installable)

# trefoil_install_library(target rpath [elements for the build tree...]). What is built has its final run path: where
# CMake rewrites it at installation it reserves room with empty elements, and those are the current directory.
function(trefoil_install_library target rpath)
  if(NOT TARGET ${target})
    return()
  endif()
  add_dependencies(installable ${target})
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${rpath};${ARGN}" BUILD_WITH_INSTALL_RPATH ON)
  install(TARGETS ${target}
          RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  if(ARGN)
    list(JOIN rpath ":" new)
    list(JOIN ARGN ":" extra)
    install(CODE "file(RPATH_CHANGE FILE
      \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/lib${target}.so.0\"
      OLD_RPATH \"${new}:${extra}\" NEW_RPATH \"${new}\")")
  endif()
endfunction()

# Where libnccl_ep.so.0 in the build tree finds the NCCL that it was built with, if the loader does not know.
set(nccl_folder)
if(TREFOIL_NCCL)
  get_filename_component(nccl_folder ${NCCL_LIBRARY} DIRECTORY)
  if(nccl_folder IN_LIST CMAKE_C_IMPLICIT_LINK_DIRECTORIES)
    set(nccl_folder)
  elseif(nccl_folder MATCHES "^${CMAKE_SOURCE_DIR}/")
    file(RELATIVE_PATH nccl_folder ${CMAKE_BINARY_DIR}/api ${nccl_folder})
    set(nccl_folder "$ORIGIN/${nccl_folder}")
  endif()
endif()
trefoil_install_library(trefoil "$ORIGIN")
trefoil_install_library(trefoil_host "$ORIGIN")
trefoil_install_library(nccl_ep_cpu "$ORIGIN" "$ORIGIN/../host")
trefoil_install_library(nccl_ep "$ORIGIN" ${nccl_folder})
trefoil_install_library(nccl_rma_trefoil "$ORIGIN")
foreach(library trefoil nccl_ep nccl_ep_cpu trefoil_host)
  trefoil_install_library(${library}_static "")
endforeach()
file(RELATIVE_PATH up "/${CMAKE_INSTALL_BINDIR}" "/${CMAKE_INSTALL_LIBDIR}")
trefoil_install_library(trefoil_cli "$ORIGIN/${up}")
# An old-style run path also holds for what the libraries found by it need in turn (the tarball brings those).
foreach(target trefoil trefoil_cli)
  if(TARGET ${target})
    target_link_options(${target} PRIVATE -Wl,--disable-new-dtags)
  endif()
endforeach()

# What runs anywhere: the command, the libraries and what they need, in one file.
add_custom_target(tarball
  COMMAND ${CMAKE_COMMAND} -DBUILD=${CMAKE_BINARY_DIR} -DOUT=${CMAKE_BINARY_DIR}
    -DNAME=trefoil-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR}
    -P ${CMAKE_SOURCE_DIR}/tools/cmake/tarball.cmake
  VERBATIM)
add_dependencies(tarball installable)

install(DIRECTORY ${CMAKE_SOURCE_DIR}/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h")
# In a folder of their own, so that they never hide the real nccl.h and cuda_runtime.h.
install(DIRECTORY ${CMAKE_SOURCE_DIR}/host/include/ DESTINATION ${host_include}
        FILES_MATCHING PATTERN "*.h")
# In a wheel the package is not part of the prefix: the prefix is trefoil/_root in it.
option(TREFOIL_WHEEL "Install into a wheel's trefoil/_root (pyproject.toml)" OFF)
if(NOT TREFOIL_WHEEL)
  install(DIRECTORY ${CMAKE_SOURCE_DIR}/python/trefoil DESTINATION ${CMAKE_INSTALL_DATADIR}/trefoil/python
          PATTERN "__pycache__" EXCLUDE)
endif()
# Measurements, and the splits that `trefoil fit` knows by name; the cost records as files.
install(DIRECTORY ${CMAKE_SOURCE_DIR}/validate/data/ DESTINATION ${CMAKE_INSTALL_DATADIR}/trefoil/data
        FILES_MATCHING PATTERN "*.csv" PATTERN "*.json" PATTERN "README.md")
install(DIRECTORY ${CMAKE_SOURCE_DIR}/models/costs DESTINATION ${CMAKE_INSTALL_DATADIR}/trefoil
        FILES_MATCHING PATTERN "*.json")
install(FILES ${CMAKE_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# What a static link of libtrefoil.a needs besides.
set(TREFOIL_STATIC_LIBS "-lm -pthread")
set(TREFOIL_STATIC_REQUIRES "")
foreach(pair JSON:jansson TRACE_FILES:libzip SIMGRID:simgrid)
  string(REPLACE ":" ";" pair ${pair})
  list(GET pair 0 component)
  list(GET pair 1 module)
  if(TREFOIL_${component})
    string(APPEND TREFOIL_STATIC_REQUIRES " ${module}")
  endif()
endforeach()

configure_package_config_file(
  ${CMAKE_SOURCE_DIR}/tools/cmake/trefoilConfig.cmake.in ${CMAKE_BINARY_DIR}/trefoilConfig.cmake
  INSTALL_DESTINATION ${cmake_dir} PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR host_include)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/trefoilConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/trefoilConfig.cmake ${CMAKE_BINARY_DIR}/trefoilConfigVersion.cmake
        DESTINATION ${cmake_dir})

file(RELATIVE_PATH TREFOIL_PC_PREFIX "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
foreach(module trefoil nccl_ep nccl_ep_cpu trefoil_host)
  if(NOT TARGET ${module})
    continue()
  endif()
  configure_file(${CMAKE_SOURCE_DIR}/tools/cmake/${module}.pc.in ${CMAKE_BINARY_DIR}/${module}.pc @ONLY)
  install(FILES ${CMAKE_BINARY_DIR}/${module}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()
