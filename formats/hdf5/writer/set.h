/*
 * Sets attributes of the schema, in a file that libhdf5 writes or in an image. Names and types are schema.c's.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_WRITER_SET_H
#define FSDPCKPT_FORMATS_HDF5_WRITER_SET_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "hdf5/schema.h"
#include "hdf5/writer/image.h"
#include "hdf5/writer/out.h"

/** The object that gets attributes: `id` of `out`, or, where `out` is NULL, the messages of one in `image`. */
typedef struct fc_h5_holder {
    fc_h5_out *out;
    hid_t id;
    fc_h5_image *image;
    fc_h5_buffer *messages;
    size_t last; /**< out: where the value that was set last is in `messages` */
} fc_h5_holder;

/** An object of a file that libhdf5 writes. */
static inline fc_h5_holder fc_h5_held(fc_h5_out *out, hid_t id) {
    return (fc_h5_holder){.out = out, .id = id};
}

/** The path of the file, for messages. */
const char *fc_h5_holder_path(const fc_h5_holder *holder);

fc_code fc_h5_set_text(fc_h5_holder *holder, fc_h5_attribute attribute, const char *value, fc_error *err);
fc_code fc_h5_set_texts(fc_h5_holder *holder, fc_h5_attribute attribute, size_t count, const char *const *values,
                        fc_error *err);
fc_code fc_h5_set_ints(fc_h5_holder *holder, fc_h5_attribute attribute, size_t count, const int64_t *values,
                       fc_error *err);
/** One number: signed, unsigned or a reference, as the schema says. */
fc_code fc_h5_set_number(fc_h5_holder *holder, fc_h5_attribute attribute, uint64_t value, fc_error *err);

#endif
