/*
 * The HDF5 datatype of each element type; the table is in docs/HDF5_SCHEMA.md, "Tensors".
 */
#ifndef FSDPCKPT_FORMATS_HDF5_TYPES_WRITE_H
#define FSDPCKPT_FORMATS_HDF5_TYPES_WRITE_H

#include "fsdpckpt/dtype.h"

#include <hdf5.h>

/** @return a new datatype, to be closed with H5Tclose, or a negative number with the reason in HDF5's error stack. */
hid_t fc_h5_type_new(fc_dtype dtype);

#endif
