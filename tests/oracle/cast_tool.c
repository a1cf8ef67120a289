/*
 * cast_tool FROM TO: converts the elements on stdin to stdout with fc_cast. cast.py compares them with torch's.
 */
#include "fsdpckpt/cast.h"
#include "fsdpckpt/move.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Odd, so that blocks of fc_cast and tails both occur and buffers are read at every alignment. */
enum { CHUNK = 65537 };

int main(int argc, char **argv) {
    fc_dtype from, to;
    if (argc != 3 || !fc_dtype_find(argv[1], strlen(argv[1]), &from) || !fc_dtype_find(argv[2], strlen(argv[2]), &to)) {
        fprintf(stderr, "usage: cast_tool FROM TO < elements > elements\n");
        return 2;
    }
    char *in = malloc((size_t)CHUNK * 8 + 1);
    char *out = malloc((size_t)CHUNK * 8 + 1);
    int status = in && out ? 0 : 4;
    while (status == 0) {
        size_t n = fread(in + 1, fc_dtype_size(from), CHUNK, stdin);
        if (n == 0) {
            break;
        }
        fc_cast(from, in + 1, to, out + 1, n);
        if (fwrite(out + 1, fc_dtype_size(to), n, stdout) != n) {
            status = 4;
        }
    }
    if (ferror(stdin) || fflush(stdout) != 0) {
        status = 4;
    }
    free(in);
    free(out);
    return status;
}
