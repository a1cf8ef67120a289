/*
 * Classifies HDF5 datatypes. Runs in the reader process.
 */
#pragma once

#define H5_USE_110_API
#include <hdf5.h>

#include "fsdpckpt/dtype.h"

typedef enum fc_h5_class {
    FC_H5_NUMBERS,     /**< an fc_dtype */
    FC_H5_STRINGS,     /**< fixed or variable-length text */
    FC_H5_FIXED_BYTES, /**< no fc_dtype, but plain bytes of fixed size, which have the same meaning elsewhere */
    FC_H5_POINTERS     /**< references and variable-length data: the stored bytes have no meaning outside the file */
} fc_h5_class;

typedef struct fc_h5_type {
    fc_h5_class cls;
    fc_dtype dtype; /**< NUMBERS */
    bool swap;      /**< NUMBERS: stored big-endian */
    size_t size;    /**< bytes per element */
} fc_h5_type;

/**
 * Classifies `type`. `name` is the dataset's attribute `dtype` or NULL: it gives opaque bytes a meaning and, in files
 * of ours (`trusted_name`), decides about everything that the writer stores as this HDF5 type.
 */
fc_h5_type fc_h5_type_read(hid_t type, const char *name, bool trusted_name);

/** Writes a short text for people, such as "compound of 24 bytes", to `buf`. */
void fc_h5_type_text(hid_t type, char *buf, size_t size);
