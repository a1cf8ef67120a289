/*
 * HDF5 values as JSON text: attributes and string datasets. Runs in the reader process.
 * The mapping is that of docs/HDF5_SCHEMA.md, "Objects"; what has no value outside its file is named by its type.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_READER_PROCESS_VALUES_H
#define FSDPCKPT_FORMATS_HDF5_READER_PROCESS_VALUES_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#define H5_USE_110_API
#include <hdf5.h>

#include "base/text.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** The value of an attribute. */
void fc_text_attribute(fc_text *text, hid_t attribute);

/** The strings of a dataset, nested as its shape. @return false when they cannot be read. */
bool fc_text_dataset(fc_text *text, hid_t dataset);

/** A scalar string attribute into a fresh buffer (caller frees), or NULL when it is none or has NUL in it. */
char *fc_h5_attribute_text(hid_t object, const char *name);

/** The one uint64 of an attribute. @return false when it is something else. */
bool fc_h5_read_u64(hid_t object, const char *name, uint64_t *value);

/** The integers of an attribute, into `values`. @return their number, or -1 when it is missing, none, or too many. */
int64_t fc_h5_read_i64s(hid_t object, const char *name, int64_t *values, size_t max);

#endif
