/*
 * External storage: a local heap with the names of files, and the message that refers to them.
 */
#include "hdf5/writer/image_external.h"

#include <string.h>

enum {
    HEAP_HEAD = 32,
    NO_FREE_SPACE = 1,
    LATE_NEVER = 0x06, /* when space is allocated and fill values are written, as libhdf5 encodes it */
    NAME_ALIGN = 8
};

/* @return the bytes that a name takes, with its NUL and padding. */
static size_t name_size(const char *name) {
    return (strlen(name) / NAME_ALIGN + 1) * NAME_ALIGN;
}

/* Segments of the same file are adjacent and share its name. */
static bool has_new_name(const fc_h5_segment *segments, size_t i) {
    return i == 0 || strcmp(segments[i].file, segments[i - 1].file) != 0;
}

size_t fc_h5_image_add_names(fc_h5_image *image, const fc_h5_segment *segments, size_t count) {
    fc_h5_buffer *to = &image->objects;
    size_t bytes = NAME_ALIGN; /* an empty name comes first */
    for (size_t i = 0; i < count; i++) {
        bytes += has_new_name(segments, i) ? name_size(segments[i].file) : 0;
    }
    fc_h5_pad(to, 8);
    const size_t start = to->size;
    fc_h5_add_bytes(to, "HEAP\0\0\0\0", 8);
    fc_h5_add_number(to, bytes, 8);
    fc_h5_add_number(to, NO_FREE_SPACE, 8);
    fc_h5_image_add_inner(image, start + HEAP_HEAD);
    fc_h5_add_zeros(to, NAME_ALIGN);
    for (size_t i = 0; i < count; i++) {
        if (has_new_name(segments, i)) {
            fc_h5_add_bytes(to, segments[i].file, strlen(segments[i].file));
            fc_h5_add_zeros(to, name_size(segments[i].file) - strlen(segments[i].file));
        }
    }
    return start;
}

void fc_h5_image_external(fc_h5_image *image, size_t names, const fc_h5_segment *segments, size_t count) {
    fc_h5_buffer *to = &image->objects;
    size_t name = NAME_ALIGN;
    uint64_t bytes = 0;
    fc_h5_image_fill(to, LATE_NEVER, NULL, 0);
    const size_t message = fc_h5_message_begin(to, FC_H5_M_FILES);
    fc_h5_add_number(to, 1, 4);     /* version */
    fc_h5_add_number(to, count, 2); /* slots, and the used ones */
    fc_h5_add_number(to, count, 2);
    fc_h5_image_add_inner(image, names);
    for (size_t i = 0; i < count; i++) {
        name += i > 0 && has_new_name(segments, i) ? name_size(segments[i - 1].file) : 0;
        fc_h5_add_number(to, name, 8);
        fc_h5_add_number(to, segments[i].offset, 8);
        fc_h5_add_number(to, segments[i].length, 8);
        bytes += segments[i].length;
    }
    fc_h5_message_end(to, message);
    fc_h5_image_add_contiguous(to, FC_H5_UNDEFINED, bytes);
}
