# Components that need something a machine may lack. AUTO builds what is possible and says in the closing summary
# what was left out and which package brings it; ON makes that an error (every component in the preset ci).
#
# Each need is tested by a program that compiles and links as the component's own do: headers without their library,
# or a library without its headers, are no component.
include(CheckCSourceCompiles)
include(CheckCXXSourceCompiles)
find_package(PkgConfig)
find_package(Threads REQUIRED)
set_property(GLOBAL PROPERTY TREFOIL_LEFT_OUT "")
set_property(GLOBAL PROPERTY TREFOIL_IN "")

function(trefoil_left_out component needs)
  if(TREFOIL_WITH_${component} STREQUAL "ON")
    message(FATAL_ERROR "TREFOIL_WITH_${component} is ON but ${needs} was not found")
  endif()
  set_property(GLOBAL APPEND PROPERTY TREFOIL_LEFT_OUT "${component} (needs ${needs})")
endfunction()

# trefoil_component(name): declares TREFOIL_WITH_<name> and sets TREFOIL_<name> to OFF until it is found.
macro(trefoil_component name)
  set(TREFOIL_WITH_${name} AUTO CACHE STRING "AUTO, ON or OFF")
  set_property(CACHE TREFOIL_WITH_${name} PROPERTY STRINGS AUTO ON OFF)
  set(TREFOIL_${name} OFF)
endmacro()

# trefoil_decide(name works needs): TREFOIL_<name>, from what was asked for and what works.
function(trefoil_decide name works needs)
  if(TREFOIL_WITH_${name} STREQUAL "OFF")
    set_property(GLOBAL APPEND PROPERTY TREFOIL_LEFT_OUT "${name} (TREFOIL_WITH_${name} is OFF)")
  elseif(works)
    set_property(GLOBAL APPEND PROPERTY TREFOIL_IN ${name})
    set(TREFOIL_${name} ON PARENT_SCOPE)
  else()
    trefoil_left_out(${name} "${needs}")
  endif()
endfunction()

# trefoil_links(result language libraries source): whether that compiles and links.
macro(trefoil_links result language libraries source)
  set(CMAKE_REQUIRED_LIBRARIES ${libraries})
  set(CMAKE_REQUIRED_QUIET ON)
  if("${language}" STREQUAL "C")
    check_c_source_compiles("${source}" ${result})
  else()
    check_cxx_source_compiles("${source}" ${result})
  endif()
  if(NOT ${result})
    unset(${result} CACHE) # asked again, once what it needs was installed
  endif()
  unset(CMAKE_REQUIRED_LIBRARIES)
  unset(CMAKE_REQUIRED_QUIET)
endmacro()

# trefoil_module(variable module source): a library found by pkg-config; <variable>_WORKS, PkgConfig::<variable>.
macro(trefoil_module variable module source)
  if(PKG_CONFIG_FOUND)
    pkg_check_modules(${variable} QUIET IMPORTED_TARGET ${module})
    if(${variable}_FOUND)
      trefoil_links(${variable}_WORKS C PkgConfig::${variable} "${source}")
    endif()
  endif()
endmacro()

foreach(component CLI JSON TRACE_FILES SIMGRID PYTHON EMULATOR MPI_TESTS PROTOCOL_TESTS PYTHON_TESTS)
  trefoil_component(${component})
endforeach()

# JSON (cluster presets, model shapes, machine-readable output): jansson.
trefoil_module(JANSSON jansson "#include <jansson.h>
int main(void) { json_t *v = json_object(); json_decref(v); return 0; }")
trefoil_decide(JSON "${JANSSON_WORKS}" "libjansson-dev")
if(TREFOIL_JSON)
  set(TREFOIL_JANSSON_LIBS PkgConfig::JANSSON)
endif()

# Trace files (.npz): libzip.
trefoil_module(LIBZIP libzip "#include <zip.h>
int main(void) { return zip_source_buffer_create(0, 0, 0, 0) != 0; }")
trefoil_decide(TRACE_FILES "${LIBZIP_WORKS}" "libzip-dev")
if(TREFOIL_TRACE_FILES)
  set(TREFOIL_LIBZIP_LIBS PkgConfig::LIBZIP)
endif()

# The simulator's engine for flows: SimGrid. Without it the simulator has its port queues.
trefoil_module(SIMGRID simgrid "#include <simgrid/engine.h>
int main(void) { return (int)simgrid_get_clock(); }")
trefoil_decide(SIMGRID "${SIMGRID_WORKS}" "libsimgrid-dev")
if(TREFOIL_SIMGRID)
  set(TREFOIL_SIMGRID_LIBS PkgConfig::SIMGRID)
endif()

# The command `trefoil`: popt for arguments, plus JSON.
trefoil_module(POPT popt "#include <popt.h>
int main(void) { return poptFreeContext(0) != 0; }")
if(POPT_WORKS AND TREFOIL_JSON)
  set(cli_works ON)
endif()
trefoil_decide(CLI "${cli_works}" "libpopt-dev and libjansson-dev")
if(TREFOIL_CLI)
  set(TREFOIL_POPT_LIBS PkgConfig::POPT)
endif()

# The module trefoil._c of the Python package. An interpreter does not bring a sanitizer's runtime.
if(TREFOIL_SANITIZE AND TREFOIL_WITH_PYTHON STREQUAL "AUTO")
  set(TREFOIL_WITH_PYTHON OFF)
endif()
if(NOT TREFOIL_WITH_PYTHON STREQUAL "OFF")
  find_package(Python3 3.10 QUIET COMPONENTS Interpreter Development.Module)
endif()
trefoil_decide(PYTHON "${Python3_Development.Module_FOUND}" "python3-dev")

if(BUILD_TESTING)
  include(TrefoilTestComponents)
endif()

function(trefoil_summary)
  get_property(in GLOBAL PROPERTY TREFOIL_IN)
  get_property(left GLOBAL PROPERTY TREFOIL_LEFT_OUT)
  list(JOIN in ", " in)
  message(STATUS "Trefoil: built with: ${in}")
  if(left)
    list(JOIN left "; " left)
    message(STATUS "Trefoil: left out: ${left}")
  else()
    message(STATUS "Trefoil: nothing is left out")
  endif()
endfunction()
