# What makes mistakes in memory harder to exploit, as far as the compiler and the linker support it. tests/install reads the
# installed command and checks it. Sanitizers find the mistakes themselves and do not go together with all of this.
include(CheckCCompilerFlag)
include(CheckCSourceCompiles)
include(CheckLinkerFlag)
include(CheckPIESupported)

option(FSDPCKPT_HARDENING "Stack protector, _FORTIFY_SOURCE, full RELRO, position-independent executables" ON)

if(FSDPCKPT_HARDENING AND NOT FSDPCKPT_SANITIZE)
  foreach(flag stack-protector-strong stack-clash-protection cf-protection)
    string(MAKE_C_IDENTIFIER "FSDPCKPT_HAS_${flag}" known)
    check_c_compiler_flag(-f${flag} ${known})
    if(${known})
      add_compile_options($<$<COMPILE_LANGUAGE:C>:-f${flag}>)
    endif()
  endforeach()

  # A C library that does not know level 3 says so in a warning and takes it for 2. Without optimisation there is none.
  foreach(level 3 2)
    if(NOT FSDPCKPT_FORTIFY)
      set(CMAKE_REQUIRED_FLAGS "-O2 -Werror -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=${level}")
      check_c_source_compiles("#include <string.h>
        int main(void) { return 0; }" FSDPCKPT_FORTIFY_${level})
      unset(CMAKE_REQUIRED_FLAGS)
      if(FSDPCKPT_FORTIFY_${level})
        set(FSDPCKPT_FORTIFY ${level})
      endif()
    endif()
  endforeach()
  if(FSDPCKPT_FORTIFY)
    add_compile_options("$<$<AND:$<COMPILE_LANGUAGE:C>,$<NOT:$<CONFIG:Debug>>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=${FSDPCKPT_FORTIFY}>")
  endif()

  foreach(flag relro now noexecstack)
    check_linker_flag(C "LINKER:-z,${flag}" FSDPCKPT_HAS_Z_${flag})
    if(FSDPCKPT_HAS_Z_${flag})
      add_link_options("LINKER:-z,${flag}")
    endif()
  endforeach()

  # Most compilers make position-independent executables by themselves, from cheaper code than -fPIC.
  check_c_source_compiles("#ifndef __PIE__
    #error not by default
    #endif
    int main(void) { return 0; }" FSDPCKPT_PIE_BY_DEFAULT)
  check_pie_supported(LANGUAGES C)
  if(NOT FSDPCKPT_PIE_BY_DEFAULT AND CMAKE_C_LINK_PIE_SUPPORTED)
    set(CMAKE_POSITION_INDEPENDENT_CODE ON)
  endif()
endif()
