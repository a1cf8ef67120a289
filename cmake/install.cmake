# Installation: the library with its headers, find_package(fsdpckpt) and pkg-config. The command installs itself (cli/).
include(CMakePackageConfigHelpers)

# Before 1.0 a minor version may change the ABI, as SameMinorVersion below says, so it is in the SONAME. scripts/abi compares.
set(soversion ${PROJECT_VERSION_MAJOR})
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(soversion 0.${PROJECT_VERSION_MINOR})
endif()
set(libraries fsdpckpt)
set(include_directories lib/include/fsdpckpt)
if(TARGET fsdpckpt-train)
  list(APPEND libraries fsdpckpt-train)
  list(APPEND include_directories train/include/fsdpckpt)
endif()
set_target_properties(${libraries} PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${soversion})
include(${CMAKE_CURRENT_LIST_DIR}/exports.cmake)
install(TARGETS ${libraries} EXPORT fsdpckpt
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${include_directories} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")

# The pkg-config modules that the library was built with. A program that links the static library needs them all, with or
# without pkg-config --static. A shared library records its own dependencies, and its users need not install their headers.
set(FSDPCKPT_MODULES "")
set(FSDPCKPT_LIBS "")
set(FSDPCKPT_IMPORTED "")
get_target_property(type fsdpckpt TYPE)
if(type STREQUAL "STATIC_LIBRARY")
  set(FSDPCKPT_MODULES "hdf5-serial jansson zlib")
  set(FSDPCKPT_LIBS " -pthread -lm")
  set(FSDPCKPT_IMPORTED HDF5:hdf5-serial JANSSON:jansson)
  foreach(name ${FSDPCKPT_OPTIONAL_LIBRARIES})
    string(APPEND FSDPCKPT_MODULES " ${${name}_MODULE_NAME}")
    list(APPEND FSDPCKPT_IMPORTED ${name}:${${name}_MODULE_NAME})
  endforeach()
  if(BZIP2_FOUND)
    string(APPEND FSDPCKPT_LIBS " -lbz2")
  endif()
endif()

set(package "${CMAKE_INSTALL_LIBDIR}/cmake/fsdpckpt")
install(EXPORT fsdpckpt NAMESPACE fsdpckpt:: FILE fsdpckptTargets.cmake DESTINATION ${package})
configure_package_config_file(cmake/fsdpckptConfig.cmake.in ${PROJECT_BINARY_DIR}/fsdpckptConfig.cmake
  INSTALL_DESTINATION ${package})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdpckptConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fsdpckptConfig.cmake ${PROJECT_BINARY_DIR}/fsdpckptConfigVersion.cmake
  DESTINATION ${package})

foreach(library ${libraries})
  configure_file(cmake/${library}.pc.in ${PROJECT_BINARY_DIR}/${library}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${library}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()
