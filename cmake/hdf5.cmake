# Links libhdf5 as a static archive if there is one. Debian's shared libhdf5 depends on libcurl, OpenSSL, Kerberos and LDAP for
# its S3 driver, which fsdpckpt does not use. Relocating these 30 libraries takes three quarters of the start-up time of every
# command (5.4 ms instead of 1.4 ms for `fsdpckpt --version`). From the archive, only the needed code is linked.
include(CheckCSourceCompiles)

set(FSDPCKPT_STATIC_HDF5 AUTO CACHE STRING "Link libhdf5 statically: AUTO, ON or OFF")
set(FSDPCKPT_HDF5_IS_STATIC FALSE)

if(NOT FSDPCKPT_STATIC_HDF5 STREQUAL "OFF" AND NOT BUILD_SHARED_LIBS)
  find_library(FSDPCKPT_HDF5_ARCHIVE NAMES libhdf5_serial.a libhdf5.a HINTS ${HDF5_LIBRARY_DIRS})
  mark_as_advanced(FSDPCKPT_HDF5_ARCHIVE)
  # Some builds have the szip filter and need libsz. Trial linking shows which. libsz.a needs libaec.a.
  set(szip sz)
  if(FSDPCKPT_STATIC_LIBRARIES)
    find_library(FSDPCKPT_SZIP_ARCHIVE NAMES libsz.a HINTS ${HDF5_LIBRARY_DIRS})
    find_library(FSDPCKPT_AEC_ARCHIVE NAMES libaec.a HINTS ${HDF5_LIBRARY_DIRS})
    mark_as_advanced(FSDPCKPT_SZIP_ARCHIVE FSDPCKPT_AEC_ARCHIVE)
    if(FSDPCKPT_SZIP_ARCHIVE AND FSDPCKPT_AEC_ARCHIVE)
      set(szip "${FSDPCKPT_SZIP_ARCHIVE}" "${FSDPCKPT_AEC_ARCHIVE}")
    endif()
  endif()
  set(no_szip "")
  foreach(tried no_szip szip)
    set(filters ${${tried}})
    if(FSDPCKPT_HDF5_ARCHIVE AND NOT FSDPCKPT_HDF5_IS_STATIC)
      set(CMAKE_REQUIRED_INCLUDES ${HDF5_INCLUDE_DIRS})
      set(CMAKE_REQUIRED_LIBRARIES "${FSDPCKPT_HDF5_ARCHIVE};${filters};ZLIB::ZLIB;Threads::Threads;${CMAKE_DL_LIBS};m")
      check_c_source_compiles("#include <hdf5.h>
        int main(void) { return H5open() < 0 || H5Dopen2(0, \"\", 0) < 0; }" FSDPCKPT_HDF5_LINKS_${tried})
      if(FSDPCKPT_HDF5_LINKS_${tried})
        set(FSDPCKPT_HDF5_IS_STATIC TRUE)
        # A separate target makes CMake put zlib after the archive on the linker's line.
        add_library(fsdpckpt_hdf5_archive STATIC IMPORTED)
        set_target_properties(fsdpckpt_hdf5_archive PROPERTIES
          IMPORTED_LOCATION "${FSDPCKPT_HDF5_ARCHIVE}"
          INTERFACE_LINK_LIBRARIES "${filters};ZLIB::ZLIB;Threads::Threads;${CMAKE_DL_LIBS};m")
        set_target_properties(PkgConfig::HDF5 PROPERTIES INTERFACE_LINK_LIBRARIES fsdpckpt_hdf5_archive)
      endif()
      unset(CMAKE_REQUIRED_INCLUDES)
      unset(CMAKE_REQUIRED_LIBRARIES)
    endif()
  endforeach()
  if(FSDPCKPT_STATIC_HDF5 STREQUAL "ON" AND NOT FSDPCKPT_HDF5_IS_STATIC)
    message(FATAL_ERROR "FSDPCKPT_STATIC_HDF5=ON: no static libhdf5 that links was found")
  endif()
endif()
