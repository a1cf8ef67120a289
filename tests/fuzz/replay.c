/*
 * Runs a fuzzer on the inputs that earlier runs of it kept, because each reaches code that the others do not. It is
 * linked with one fuzzer, in place of libFuzzer, so that the inputs are tests of every build.
 *
 * usage: replay FILE    FILE is compressed by zlib: per input its length in four bytes, little-endian, and its bytes
 */
#include "fuzz.h"

#include <zlib.h>

enum { MOST_BYTES = 1 << 16 };

int main(int argc, char **argv) {
    static unsigned char bytes[MOST_BYTES];
    gzFile file = argc == 2 ? gzopen(argv[1], "rb") : NULL;
    uint32_t size;
    size_t count = 0;
    int got = 0;
    while (file && (got = gzread(file, &size, sizeof size)) == sizeof size) {
        /* A copy of the exact size, so that AddressSanitizer sees reads behind it. */
        unsigned char *input = size <= MOST_BYTES ? malloc(size ? size : 1) : NULL;
        if (!input || gzread(file, bytes, size) != (int)size) {
            got = -1;
            free(input);
            break;
        }
        memcpy(input, bytes, size);
        LLVMFuzzerTestOneInput(input, size);
        free(input);
        count++;
    }
    if (!file || got != 0 || count == 0) {
        fprintf(stderr, "%s: cannot be read\n", argc == 2 ? argv[1] : "usage: replay FILE");
        return 1;
    }
    gzclose(file);
    printf("%zu inputs\n", count);
    return 0;
}
