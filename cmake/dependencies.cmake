# Finds the libraries that fsdpckpt is built with. The rows at the end are the one list of them. Missing libraries are reported
# together, with their Debian packages: needed ones as one error, optional ones as one message that says what is lost.

set(missing_needed "")   # names and reasons
set(missing_optional "") # lines of the message
set(packages_needed "")
set(packages_optional "")

# Records a missing library. It is needed if nothing is said to be lost without it, or if FSDPCKPT_WITH_<name> is ON.
# `package` may be empty, `reason` is for the error.
macro(fsdpckpt_missing name package lost reason)
  if("${lost}" STREQUAL "" OR "${FSDPCKPT_WITH_${name}}" STREQUAL "ON")
    list(APPEND missing_needed "${reason}")
    list(APPEND packages_needed ${package})
  else()
    list(APPEND missing_optional "FSDPCKPT_WITH_${name}: ${lost}")
    list(APPEND packages_optional ${package})
  endif()
endmacro()

# Looks for a library, unless FSDPCKPT_WITH_<name> is OFF. Sets <name>_FOUND and PkgConfig::<name>.
macro(fsdpckpt_pkg_config name module package lost)
  if(NOT "${FSDPCKPT_WITH_${name}}" STREQUAL "OFF")
    if(PKG_CONFIG_FOUND)
      pkg_check_modules(${name} IMPORTED_TARGET ${module})
    endif()
    if(NOT ${name}_FOUND)
      fsdpckpt_missing(${name} ${package} "${lost}" "${module}")
    endif()
  else()
    set(${name}_FOUND FALSE) # the cache may say that an earlier configuration found it
  endif()
endmacro()

# The same for a library that is linked if it is there: FSDPCKPT_OPTIONAL_LIBRARIES has those, each of which defines
# FSDPCKPT_HAVE_<name>.
set(FSDPCKPT_OPTIONAL_LIBRARIES "")
macro(fsdpckpt_optional name module package lost)
  fsdpckpt_pkg_config(${name} ${module} ${package} "${lost}")
  if(${name}_FOUND)
    list(APPEND FSDPCKPT_OPTIONAL_LIBRARIES ${name})
  endif()
endmacro()

# The same as fsdpckpt_pkg_config by CMake's own module; the arguments after the fixed ones are for find_package.
macro(fsdpckpt_find_package name found package lost)
  if(NOT "${FSDPCKPT_WITH_${name}}" STREQUAL "OFF")
    find_package(${ARGN} QUIET)
    if(NOT ${found})
      fsdpckpt_missing(${name} ${package} "${lost}" "${name}")
    endif()
  else()
    set(${found} FALSE)
  endif()
endmacro()

# Ends with one error if a library that is needed is missing.
function(fsdpckpt_require_libraries)
  if(missing_needed)
    list(JOIN missing_needed ", " names)
    set(text "Not found, but needed: ${names}.")
    if(packages_needed)
      list(JOIN packages_needed " " packages)
      string(APPEND text " On Debian and Ubuntu run\n  sudo apt-get install ${packages}\nthen configure again.")
    endif()
    message(FATAL_ERROR "${text}")
  endif()
endfunction()

# Says what is lost without the optional libraries that are missing.
function(fsdpckpt_report_optional)
  if(missing_optional)
    list(JOIN missing_optional "\n     " lines)
    set(text "Optional libraries were not found. The build lacks (the option set to OFF leaves its line out):\n     ${lines}")
    if(packages_optional)
      list(JOIN packages_optional " " packages)
      string(APPEND text "\n   To have them, configure again after\n     sudo apt-get install ${packages}")
    endif()
    message(STATUS "${text}")
  endif()
endfunction()

find_package(PkgConfig QUIET)
if(NOT PKG_CONFIG_FOUND)
  fsdpckpt_missing(PKG_CONFIG pkg-config "" pkg-config)
endif()
# Columns: name, module or variable that says found, Debian package, what is lost without it (nothing: it is needed).
fsdpckpt_find_package(Threads Threads_FOUND libc6-dev "" Threads)
fsdpckpt_find_package(ZLIB ZLIB_FOUND zlib1g-dev "" ZLIB)
fsdpckpt_pkg_config(HDF5 hdf5-serial libhdf5-dev "")
fsdpckpt_pkg_config(JANSSON jansson libjansson-dev "")
fsdpckpt_pkg_config(XXHASH libxxhash libxxhash-dev "")
if(FSDPCKPT_TESTS)
  fsdpckpt_pkg_config(CMOCKA cmocka libcmocka-dev "")
  fsdpckpt_find_package(python3 Python3_Interpreter_FOUND python3 "" Python3 COMPONENTS Interpreter)
endif()
fsdpckpt_optional(SECCOMP libseccomp libseccomp-dev
  "the sandbox of the process that reads HDF5 files, a filter of system calls (libseccomp-dev)")
fsdpckpt_optional(ISAL libisal libisal-dev "fast gzip; zlib does it, which is slower (libisal-dev)")
fsdpckpt_optional(ZSTD libzstd libzstd-dev "checkpoints that are compressed with Zstandard (libzstd-dev)")
if(FSDPCKPT_STATIC_LIBRARIES)
  find_library(BZIP2_LIBRARY_RELEASE NAMES libbz2.a) # FindBZip2 has no variable that asks for the archive
endif()
# Debian has no file of it for pkg-config.
fsdpckpt_find_package(BZIP2 BZIP2_FOUND libbz2-dev "HDF5 files that are compressed with bzip2 (libbz2-dev)" BZip2)
fsdpckpt_pkg_config(CURL libcurl libcurl4-openssl-dev "checkpoints on servers and in buckets (libcurl4-openssl-dev)")
if(CURL_FOUND)
  pkg_check_modules(OPENSSL QUIET IMPORTED_TARGET openssl) # without it, each connection takes longer to begin (libssl-dev)
endif()
fsdpckpt_find_package(MPI MPI_C_FOUND libopenmpi-dev "mpirun and srun with several ranks (libopenmpi-dev)"
  MPI COMPONENTS C)
# Python itself is not built for the fuzzers and ThreadSanitizer.
if(NOT FSDPCKPT_FUZZ AND NOT FSDPCKPT_SANITIZE MATCHES "thread")
  fsdpckpt_find_package(PYTHON Python3_Development.Module_FOUND python3-dev "the Python package (python3-dev)"
    Python3 COMPONENTS Interpreter Development.Module)
endif()
include(${CMAKE_CURRENT_LIST_DIR}/cuda.cmake)
fsdpckpt_require_libraries()
