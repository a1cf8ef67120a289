/*
 * HDF5 values as JSON text: attributes and string datasets. Runs in the reader process. The mapping is that of
 * docs/HDF5_SCHEMA.md, "Objects"; a value without a meaning outside its file is represented by its type.
 */
#pragma once

#define H5_USE_110_API
#include <hdf5.h>

#include "base/text.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Appends the value of an attribute. */
void fc_text_attribute(fc_text *text, hid_t attribute);

/** Appends the strings of a dataset, nested like its shape. @return false when they cannot be read. */
bool fc_text_dataset(fc_text *text, hid_t dataset);

/**
 * @return a scalar string attribute in a new buffer, which the caller frees; NULL if it is not a string or contains
 * NUL.
 */
char *fc_h5_attribute_text(hid_t object, const char *name);

/** Reads an attribute that is one uint64. @return false if it is something else. */
bool fc_h5_read_u64(hid_t object, const char *name, uint64_t *value);

/**
 * Reads the integers of an attribute into `values`. @return their number; -1 if it is missing, not integers >= 0, or
 * too long.
 */
int64_t fc_h5_read_i64s(hid_t object, const char *name, int64_t *values, size_t max);

/** @return the strings of an attribute, joined with newlines, which the caller frees; NULL if it has none. */
char *fc_h5_read_names(hid_t object, const char *name);
