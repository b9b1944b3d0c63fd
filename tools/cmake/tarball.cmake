# cmake -DBUILD=<build folder> -DNAME=<name> -DOUT=<folder> -P tarball.cmake: OUT/NAME.tar.gz, what `cmake --install`
# copies and the libraries that it needs, to be unpacked anywhere: all is found by $ORIGIN. Left to the system are the
# C library, the compiler's runtimes and the driver; NCCL, too, which comes with a framework or a wheel and must be one.
cmake_minimum_required(VERSION 3.25)
set(stage ${OUT}/${NAME})
file(REMOVE_RECURSE ${stage})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${stage} --strip
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)

file(GLOB_RECURSE libraries ${stage}/lib*/*.so.0)
file(GLOB programs ${stage}/bin/*)
list(GET libraries 0 first)
get_filename_component(folder ${first} DIRECTORY)
file(GET_RUNTIME_DEPENDENCIES EXECUTABLES ${programs} LIBRARIES ${libraries}
  RESOLVED_DEPENDENCIES_VAR needed UNRESOLVED_DEPENDENCIES_VAR missing
  PRE_EXCLUDE_REGEXES "^lib(c|m|dl|rt|pthread|util|resolv|stdc\\+\\+|gcc_s|nccl|cuda)\\.so" "^ld-linux"
  POST_EXCLUDE_REGEXES "^${stage}/")
if(missing)
  message(FATAL_ERROR "the tarball would lack ${missing}, which the loader does not find here")
endif()
set(paths)
foreach(library ${needed})
  file(COPY ${library} DESTINATION ${folder} FOLLOW_SYMLINK_CHAIN)
  file(REAL_PATH ${library} real)
  list(APPEND paths ${library} ${real} /usr${library})
endforeach()

# Their licences, where dpkg knows them.
find_program(DPKG dpkg)
if(DPKG AND paths)
  execute_process(COMMAND ${DPKG} -S ${paths} OUTPUT_VARIABLE owners ERROR_QUIET)
  string(REGEX MATCHALL "[^\n:]+:[^\n]+" owners "${owners}")
  list(TRANSFORM owners REPLACE ":.*" "")
  list(REMOVE_DUPLICATES owners)
  foreach(package ${owners})
    if(EXISTS /usr/share/doc/${package}/copyright)
      file(COPY /usr/share/doc/${package}/copyright DESTINATION ${stage}/share/doc/trefoil/licenses/${package})
    endif()
  endforeach()
endif()

execute_process(COMMAND ${CMAKE_COMMAND} -E tar czf ${NAME}.tar.gz ${NAME} WORKING_DIRECTORY ${OUT}
  COMMAND_ERROR_IS_FATAL ANY)
file(REMOVE_RECURSE ${stage})
message("${OUT}/${NAME}.tar.gz")
