/*
 * A plugin of libhdf5 with a filter that no program has: it inverts the bits and puts a byte before them. h5py writes
 * with it, fsdpckpt reads with it. Decoding fails where a file can be opened, so that the test notices a process that
 * is not confined.
 */
#include <H5PLextern.h>

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

enum { FILTER = 300 /* of the range for tests */, MARK = 0x42 };

static size_t invert(unsigned flags, size_t nparameters, const unsigned parameters[], size_t size, size_t *room,
                     void **buffer) {
    const unsigned decode = flags & H5Z_FLAG_REVERSE ? 1 : 0;
    unsigned char *bytes = *buffer, *out = NULL;
    (void)nparameters, (void)parameters;
    if (decode) {
        const int fd = open("/", O_RDONLY | O_DIRECTORY);
        if (fd >= 0) {
            close(fd);
            return 0;
        }
        if (size < 2 || bytes[0] != MARK) {
            return 0;
        }
    }
    const size_t made = decode ? size - 1 : size + 1;
    out = malloc(made);
    if (!out) {
        return 0;
    }
    out[0] = MARK;
    for (size_t i = 0; i < (decode ? made : size); i++) {
        out[i + !decode] = (unsigned char)~bytes[i + decode];
    }
    free(bytes);
    *buffer = out;
    *room = made;
    return made;
}

static const H5Z_class2_t filter = {H5Z_CLASS_T_VERS, FILTER, 1, 1, "inverted", NULL, NULL, invert};

H5PL_type_t H5PLget_plugin_type(void) {
    return H5PL_TYPE_FILTER;
}

const void *H5PLget_plugin_info(void) {
    return &filter;
}
