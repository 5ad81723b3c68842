# Builds the core in a directory of its own, so that a machine that cannot build it gets the package without: what was
# missing goes into multihead/_native_missing.py, which `multihead info` and `mh.explain` read. With
# MULTIHEAD_REQUIRE_NATIVE=1 in the environment it is an error instead.
set(core ${CMAKE_BINARY_DIR}/core)
set(missing ${CMAKE_BINARY_DIR}/_native_missing.py)
file(REMOVE ${missing} ${core}/missing.txt)

# What this configuration was told is told to that of the core.
set(given "")
get_cmake_property(names CACHE_VARIABLES)
foreach(name IN LISTS names)
  get_property(type CACHE ${name} PROPERTY TYPE)
  get_property(value CACHE ${name} PROPERTY VALUE)
  if(type STREQUAL "UNINITIALIZED")
    set(type STRING)
  endif()
  if(NOT type MATCHES "INTERNAL|STATIC" AND NOT name STREQUAL "MULTIHEAD_CORE")
    string(APPEND given "set(${name} [==[${value}]==] CACHE ${type} \"\" FORCE)\n")
  endif()
endforeach()
file(WRITE ${core}.cmake "${given}")

set(options -G ${CMAKE_GENERATOR})
if(CMAKE_GENERATOR_PLATFORM)
  list(APPEND options -A ${CMAKE_GENERATOR_PLATFORM})
endif()
if(CMAKE_GENERATOR_TOOLSET)
  list(APPEND options -T ${CMAKE_GENERATOR_TOOLSET})
endif()
set(ENV{LC_ALL} C)  # what the compiler says is kept, and read as UTF-8
execute_process(  # what FindPython keeps of an earlier run makes it overlook the headers: -U
  COMMAND ${CMAKE_COMMAND} -S ${CMAKE_SOURCE_DIR} -B ${core} -C ${core}.cmake ${options} -DMULTIHEAD_CORE=ON -U "_Python_*"
  RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said ECHO_OUTPUT_VARIABLE ECHO_ERROR_VARIABLE)
if(NOT failed)
  execute_process(
    COMMAND ${CMAKE_COMMAND} --build ${core} --config Release
    RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said ECHO_OUTPUT_VARIABLE ECHO_ERROR_VARIABLE)
endif()
if(NOT failed)
  install(SCRIPT ${core}/cmake_install.cmake)
  return()
endif()

if(EXISTS ${core}/missing.txt)
  file(READ ${core}/missing.txt reason)
else()
  set(compiler "the C++ compiler")
  if(EXISTS ${core}/compiler.txt)
    file(READ ${core}/compiler.txt compiler)
  endif()
  foreach(pattern "[^\n]*error: [^\n]*" "[^\n]*[Ee]rror[^\n]*")  # the first that a compiler reports; else any
    string(REGEX MATCH "${pattern}" line "${said}")
    if(line)
      break()
    endif()
  endforeach()
  set(reason "${compiler} cannot compile it (GCC 12 or newer can): ${line}")
endif()
if("$ENV{MULTIHEAD_REQUIRE_NATIVE}")
  message(FATAL_ERROR "multihead: MULTIHEAD_REQUIRE_NATIVE is set, and the native module was not built: ${reason}")
endif()
message(WARNING "multihead: the native module is left out: ${reason}")
file(REMOVE_RECURSE ${core})  # so that a compiler installed later is looked for
string(REGEX REPLACE "[\r\n\t]+" " " reason "${reason}")
string(REPLACE "\\" "\\\\" reason "${reason}")
string(REPLACE "\"" "\\\"" reason "${reason}")
file(WRITE ${missing} "reason = \"${reason}\"\n")
install(FILES ${missing} DESTINATION multihead)
