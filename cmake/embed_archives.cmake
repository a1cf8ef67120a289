# Lets a shared object contain static archives that were compiled for executables, as Debian compiles its own (-fPIE).
# Such code differs in two ways: it takes for granted that a symbol is not replaced by one of another library, which
# -Bsymbolic and hidden symbols ensure, and it reads variables of other libraries directly. The only such variables are
# libc's stdin, stdout and stderr, for which --wrap puts in variables of the shared object itself (embed_stdio.c).
set(FSDPCKPT_EMBED_STDIO ${CMAKE_CURRENT_LIST_DIR}/embed_stdio.c)
function(fsdpckpt_embed_archives target)
  target_sources(${target} PRIVATE ${FSDPCKPT_EMBED_STDIO})
  target_link_options(${target} PRIVATE -Wl,-Bsymbolic -Wl,--exclude-libs,ALL -Wl,-z,text
    -Wl,--wrap=stdin,--wrap=stdout,--wrap=stderr)
endfunction()
