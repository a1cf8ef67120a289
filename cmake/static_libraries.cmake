# With FSDPCKPT_STATIC_LIBRARIES, makes PkgConfig::<name> link the archive of the library where there is one.
function(fsdpckpt_prefer_archive name)
  if(NOT FSDPCKPT_STATIC_LIBRARIES OR NOT ${name}_FOUND)
    return()
  endif()
  string(REGEX REPLACE "^lib" "" library "${${name}_MODULE_NAME}") # the name of the module of jansson has no lib
  find_library(FSDPCKPT_${name}_ARCHIVE NAMES lib${library}.a HINTS ${${name}_LIBRARY_DIRS})
  mark_as_advanced(FSDPCKPT_${name}_ARCHIVE)
  if(FSDPCKPT_${name}_ARCHIVE)
    set_target_properties(PkgConfig::${name} PROPERTIES INTERFACE_LINK_LIBRARIES "${FSDPCKPT_${name}_ARCHIVE}")
  else()
    message(STATUS "lib${library}.a was not found: the shared library is linked")
  endif()
endfunction()
