/*
 * Sets attributes of the schema in an image. schema.c has their names and types.
 */
#pragma once

#include "hdf5/schema.h"
#include "hdf5/writer/image.h"

/** The attributes of an object, as messages. */
typedef struct fc_h5_holder {
    fc_h5_image *image;
    fc_h5_buffer *messages;
    size_t last; /**< out: offset in `messages` of the value that was set last */
} fc_h5_holder;

void fc_h5_set_text(fc_h5_holder *holder, fc_h5_attribute attribute, const char *value);
void fc_h5_set_texts(fc_h5_holder *holder, fc_h5_attribute attribute, size_t count, const char *const *values);
void fc_h5_set_ints(fc_h5_holder *holder, fc_h5_attribute attribute, size_t count, const int64_t *values);
/** Sets an attribute with one number, which is signed, unsigned or a reference according to the schema. */
void fc_h5_set_number(fc_h5_holder *holder, fc_h5_attribute attribute, uint64_t value);
