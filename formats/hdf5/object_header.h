/*
 * Reads object headers of a file as bytes: their messages, and the value of an attribute. Uses the file format, not
 * libhdf5.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** An 8-byte value in an object header of version 2, whose checksum covers it. */
typedef struct fc_h5_field {
    uint64_t value;        /**< its offset in the file, in bytes */
    uint64_t start, check; /**< the 4-byte checksum at `check` covers the bytes from `start` up to it */
} fc_h5_field;

/** Gives access to the bytes of a file. The result is valid until the next call; NULL if the file has no such bytes. */
typedef struct fc_h5_view {
    const unsigned char *(*bytes)(void *context, uint64_t at, uint64_t size);
    void *context;
} fc_h5_view;

enum { FC_H5_TYPE_MESSAGE = 3, FC_H5_LAYOUT_MESSAGE = 8, FC_H5_ATTRIBUTE_MESSAGE = 12 };

/** A message of an object header of version 2. */
typedef struct fc_h5_message {
    int type, flags;
    const unsigned char *bytes; /**< valid until the view is used again */
    uint64_t at, size;          /**< where the bytes are in the file */
    uint64_t start, check;      /**< as in fc_h5_field */
} fc_h5_message;

/** @return false to end the walk. */
typedef bool (*fc_h5_message_fn)(void *context, const fc_h5_message *message);

/** Visits the messages of the object whose header is at `object`, as far as they can be read. Safe on any bytes. */
void fc_h5_each_message(const fc_h5_view *view, uint64_t object, fc_h5_message_fn visit, void *context);

/** Finds the 8-byte attribute `name` of the object whose header is at `object`. Safe on any bytes. */
bool fc_h5_find_field(const fc_h5_view *view, uint64_t object, const char *name, fc_h5_field *out);

/** Finds the root group's object header through the superblock (version 2 or 3, without a user block). */
bool fc_h5_find_root(const fc_h5_view *view, uint64_t *object);

/** @return HDF5's checksum of metadata: Bob Jenkins' lookup3. */
uint32_t fc_h5_checksum(const unsigned char *bytes, size_t size);
