# One place for flags: arithmetic must never be contracted or flushed, warnings are errors in CI.
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_EXTENSIONS ON)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
string(REPLACE "-O3" "-O2" CMAKE_C_FLAGS_RELEASE "${CMAKE_C_FLAGS_RELEASE}")
option(TREFOIL_WERROR "Warnings are errors" OFF)
set(TREFOIL_SANITIZE "" CACHE STRING "address,undefined or thread")

add_library(trefoil_flags INTERFACE)
target_compile_options(trefoil_flags INTERFACE
  -ffp-contract=off -fno-fast-math -fvisibility=hidden -Wall -Wextra
  $<$<COMPILE_LANGUAGE:C>:-Wstrict-prototypes -Wmissing-prototypes>)
target_include_directories(trefoil_flags INTERFACE ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/include)
target_compile_definitions(trefoil_flags INTERFACE _GNU_SOURCE)
if(TREFOIL_WERROR)
  target_compile_options(trefoil_flags INTERFACE -Werror)
endif()
if(TREFOIL_SANITIZE)
  target_compile_options(trefoil_flags INTERFACE -fsanitize=${TREFOIL_SANITIZE}
    -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  target_link_options(trefoil_flags INTERFACE -fsanitize=${TREFOIL_SANITIZE})
endif()

# trefoil_objects(name SOURCES ... [LIBS ...]): the code of one folder, position-independent.
function(trefoil_objects name)
  cmake_parse_arguments(A "" "" "SOURCES;LIBS" ${ARGN})
  add_library(${name} OBJECT ${A_SOURCES})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(${name} PRIVATE trefoil_flags ${A_LIBS})
endfunction()

# trefoil_library(name OBJECTS ... VERSION_SCRIPT file [LIBS ...]): lib<name>.so.0 and lib<name>.a.
function(trefoil_library name)
  cmake_parse_arguments(A "" "VERSION_SCRIPT" "OBJECTS;LIBS" ${ARGN})
  set(objects)
  foreach(o ${A_OBJECTS})
    list(APPEND objects $<TARGET_OBJECTS:${o}>)
  endforeach()
  add_library(${name} SHARED ${objects})
  set_target_properties(${name} PROPERTIES SOVERSION 0 VERSION 0 LINK_DEPENDS ${A_VERSION_SCRIPT})
  target_link_options(${name} PRIVATE -Wl,--version-script=${A_VERSION_SCRIPT} -Wl,-z,defs)
  target_link_libraries(${name} PRIVATE trefoil_flags ${A_LIBS} Threads::Threads)
  target_include_directories(${name} INTERFACE
    $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  add_library(${name}_static STATIC ${objects})
  set_target_properties(${name}_static PROPERTIES OUTPUT_NAME ${name})
  target_link_libraries(${name}_static PUBLIC ${A_LIBS} Threads::Threads)
  target_include_directories(${name}_static INTERFACE
    $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
endfunction()

# trefoil_test(name SOURCES ... [OBJECTS ...] [LIBS ...] [LABELS ...] [ARGS ...] [TIMEOUT s]):
# a test program; exit code 77 means skipped. Default label: cpu.
function(trefoil_test name)
  cmake_parse_arguments(A "" "TIMEOUT" "SOURCES;OBJECTS;LIBS;LABELS;ARGS;ENVIRONMENT" ${ARGN})
  set(objects)
  foreach(o ${A_OBJECTS})
    list(APPEND objects $<TARGET_OBJECTS:${o}>)
  endforeach()
  add_executable(test_${name} ${A_SOURCES} ${objects})
  target_link_libraries(test_${name} PRIVATE trefoil_flags ${A_LIBS} Threads::Threads m)
  target_include_directories(test_${name} PRIVATE ${CMAKE_SOURCE_DIR}/tests)
  add_test(NAME ${name} COMMAND test_${name} ${A_ARGS})
  if(NOT A_LABELS)
    set(A_LABELS cpu)
  endif()
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 300) # on two cores, with a sanitizer, beside another test
  endif()
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT ${A_TIMEOUT}
    LABELS "${A_LABELS}" ENVIRONMENT "${A_ENVIRONMENT}")
endfunction()
