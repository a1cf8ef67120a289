# A shared library exports what its public headers declare. All else is free to change, and abidiff compares only what
# others can call (scripts/abi). Unit tests call private functions, so a shared build with tests exports everything.
set(FSDPCKPT_EXPORTS ${PROJECT_BINARY_DIR}/fsdpckpt.map)
file(GLOB headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/lib/include/fsdpckpt/*.h ${PROJECT_SOURCE_DIR}/lib/include/fsdpckpt/*/*.h
  ${PROJECT_SOURCE_DIR}/train/include/fsdpckpt/train/*.h)
# fsdpckpt-train, which requires exactly this version, calls these; tests/rooms compares.
set(names fc_crc64 fc_grow fc_notes_add fc_pool_clear fc_pool_give fc_pool_take)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${headers})
foreach(header ${headers})
  file(READ ${header} text)
  string(REGEX MATCHALL "fc_[a-z0-9_]+" words "${text}")
  list(APPEND names ${words})
endforeach()
list(REMOVE_DUPLICATES names)
list(SORT names)
list(JOIN names "; " names)
file(CONFIGURE OUTPUT ${FSDPCKPT_EXPORTS} CONTENT "{ global: @names@; local: *; };\n" @ONLY)
if(BUILD_SHARED_LIBS AND NOT FSDPCKPT_TESTS)
  foreach(library ${libraries})
    target_link_options(${library} PRIVATE "LINKER:--version-script=${FSDPCKPT_EXPORTS}")
    set_target_properties(${library} PROPERTIES LINK_DEPENDS ${FSDPCKPT_EXPORTS})
  endforeach()
endif()
