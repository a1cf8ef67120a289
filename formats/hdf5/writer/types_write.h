/*
 * The HDF5 datatype of each element type; the table is in docs/HDF5_SCHEMA.md, "Tensors".
 */
#pragma once

#include "fsdpckpt/dtype.h"

#include <hdf5.h>

/** @return a new datatype, to be closed with H5Tclose, or a negative number with the reason in HDF5's error stack. */
hid_t fc_h5_type_new(fc_dtype dtype);

enum { FC_H5_ELEMENT_MAX = 16 /**< bytes of the largest element */ };

/**
 * Writes the little-endian element that programs read if a shard file is missing: NaN, or the extreme of an integer.
 */
void fc_h5_absent_value(fc_dtype dtype, unsigned char value[FC_H5_ELEMENT_MAX]);
