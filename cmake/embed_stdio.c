/*
 * The streams of code that embed_archives.cmake links into a shared object: the linker replaces stdin by __wrap_stdin.
 */
#include <stdio.h>

#define HIDDEN __attribute__((visibility("hidden")))

extern FILE *__real_stdin, *__real_stdout, *__real_stderr;
HIDDEN FILE *__wrap_stdin, *__wrap_stdout, *__wrap_stderr;

static void __attribute__((constructor)) copy_streams(void) {
    __wrap_stdin = __real_stdin;
    __wrap_stdout = __real_stdout;
    __wrap_stderr = __real_stderr;
}
