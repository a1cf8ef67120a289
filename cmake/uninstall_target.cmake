# The target `uninstall`. Included before anything is installed, because an installation first records the directories that it
# will make: others that happen to be empty stay.
if(PROJECT_IS_TOP_LEVEL)
  set(destinations
    ${CMAKE_INSTALL_BINDIR}
    ${CMAKE_INSTALL_LIBDIR}/cmake/fsdpckpt
    ${CMAKE_INSTALL_LIBDIR}/fsdpckpt
    ${CMAKE_INSTALL_LIBDIR}/pkgconfig
    ${CMAKE_INSTALL_INCLUDEDIR}/fsdpckpt
    ${CMAKE_INSTALL_MANDIR}/man1
    ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
    ${CMAKE_INSTALL_DATADIR}/zsh/site-functions
    ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
  install(CODE "set(record \"${PROJECT_BINARY_DIR}/install_directories.txt\")
    set(destinations \"${destinations}\")
    include(\"${CMAKE_CURRENT_LIST_DIR}/record_directories.cmake\")")
  add_custom_target(uninstall
    COMMAND ${CMAKE_COMMAND} -DBUILD_DIR=${PROJECT_BINARY_DIR} -P ${CMAKE_CURRENT_LIST_DIR}/uninstall.cmake
    COMMENT "Uninstalling" VERBATIM USES_TERMINAL)
endif()
