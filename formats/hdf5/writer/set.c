/*
 * Attributes as messages of an object header.
 */
#include "hdf5/writer/set.h"

/* Datatype messages as H5Tencode writes them, without its first two bytes. */
static const unsigned char text_type[] = {0x19, 1, 1, 0, 16, 0, 0, 0, 0x10, 0, 0, 0, 1, 0, 0, 0, 0, 0, 8, 0};
static const unsigned char int_type[] = {0x10, 8, 0, 0, 8, 0, 0, 0, 0, 0, 64, 0};
static const unsigned char uint_type[] = {0x10, 0, 0, 0, 8, 0, 0, 0, 0, 0, 64, 0};
static const unsigned char reference_type[] = {0x17, 0, 0, 0, 8, 0, 0, 0};

enum { SCALAR = -1 };

/* Writes an attribute message up to its values. @param count their number, or SCALAR. */
static size_t begin_attribute(fc_h5_holder *h, const char *name, const unsigned char *type, size_t size,
                              int64_t count) {
    fc_h5_buffer *to = h->messages;
    const size_t start = fc_h5_message_begin(to, FC_H5_M_ATTRIBUTE);
    const bool list = count != SCALAR;
    fc_h5_add_number(to, 3, 1); /* version */
    fc_h5_add_number(to, 0, 1);
    fc_h5_add_number(to, strlen(name) + 1, 2);
    fc_h5_add_number(to, size, 2);
    fc_h5_add_number(to, list ? 12 : 4, 2); /* size of the dataspace in bytes */
    fc_h5_add_number(to, 0, 1);             /* character set of the name: ASCII */
    fc_h5_add_bytes(to, name, strlen(name) + 1);
    fc_h5_add_bytes(to, type, size);
    fc_h5_add_number(to, 2, 1); /* version of the dataspace, dimensions, flags, kind */
    fc_h5_add_number(to, list, 1);
    fc_h5_add_number(to, 0, 1);
    fc_h5_add_number(to, list, 1);
    if (list) {
        fc_h5_add_number(to, (uint64_t)count, 8);
    }
    h->last = to->size;
    return start;
}

static void add_text(fc_h5_holder *h, const char *text) {
    const fc_h5_heap_id id = fc_h5_image_heap_add(h->image, text, strlen(text));
    fc_h5_add_number(h->messages, id.size, 4);
    fc_h5_add_number(h->messages, id.collection, 8);
    fc_h5_add_number(h->messages, id.object, 4);
}

void fc_h5_set_text(fc_h5_holder *h, fc_h5_attribute attribute, const char *value) {
    const char *name = fc_h5_attribute_get(attribute)->name;
    const size_t message = begin_attribute(h, name, text_type, sizeof text_type, SCALAR);
    add_text(h, value);
    fc_h5_message_end(h->messages, message);
}

void fc_h5_set_texts(fc_h5_holder *h, fc_h5_attribute attribute, size_t count, const char *const *values) {
    const char *name = fc_h5_attribute_get(attribute)->name;
    const size_t message = begin_attribute(h, name, text_type, sizeof text_type, (int64_t)count);
    for (size_t i = 0; i < count; i++) {
        add_text(h, values[i]);
    }
    fc_h5_message_end(h->messages, message);
}

void fc_h5_set_ints(fc_h5_holder *h, fc_h5_attribute attribute, size_t count, const int64_t *values) {
    const char *name = fc_h5_attribute_get(attribute)->name;
    const size_t message = begin_attribute(h, name, int_type, sizeof int_type, (int64_t)count);
    for (size_t i = 0; i < count; i++) {
        fc_h5_add_number(h->messages, (uint64_t)values[i], 8);
    }
    fc_h5_message_end(h->messages, message);
}

void fc_h5_set_number(fc_h5_holder *h, fc_h5_attribute attribute, uint64_t value) {
    const fc_h5_attribute_info *info = fc_h5_attribute_get(attribute);
    const bool reference = info->type == FC_H5_REFERENCE;
    const size_t message = begin_attribute(h, info->name,
                                           reference                 ? reference_type
                                           : info->type == FC_H5_INT ? int_type
                                                                     : uint_type,
                                           reference ? sizeof reference_type : sizeof int_type, SCALAR);
    fc_h5_add_number(h->messages, value, 8);
    fc_h5_message_end(h->messages, message);
}
