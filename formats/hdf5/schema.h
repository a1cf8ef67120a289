/*
 * The table of the schema's attributes (docs/HDF5_SCHEMA.md): their names and types. The reader and the writer
 * both use it.
 */
#pragma once

#include <stdint.h>

/** The schema that is written, and the newest one that is read. */
enum { FC_H5_SCHEMA = 2 };

/** A set of attributes has the bits 1 << number. */
typedef enum fc_h5_attribute {
    FC_H5_A_SCHEMA,
    FC_H5_A_PRODUCER,
    FC_H5_A_LAYOUT,
    FC_H5_A_MESH_SHAPE,
    FC_H5_A_MESH_NAMES,
    FC_H5_A_WORLD_SIZE,
    FC_H5_A_RANK,
    FC_H5_A_TABLES,
    FC_H5_A_TABLES_AT,
    FC_H5_A_MISSING,
    FC_H5_A_HEADER_CRC64,
    FC_H5_A_KIND,
    FC_H5_A_DTYPE,
    FC_H5_A_FQN,
    FC_H5_A_PLACEMENTS,
    FC_H5_A_GLOBAL_SHAPE,
    FC_H5_A_OFFSETS,
    FC_H5_A_OWNER,
    FC_H5_A_ENCODING,
    FC_H5_A_JSON,
    FC_H5_A_CRC64,
    FC_H5_A_COUNT
} fc_h5_attribute;

typedef enum fc_h5_attribute_type {
    FC_H5_TEXT,     /**< a variable-length UTF-8 string */
    FC_H5_TEXTS,    /**< a list of strings */
    FC_H5_INT,      /**< int64 */
    FC_H5_INTS,     /**< a list of integers, which may be empty */
    FC_H5_UINT,     /**< uint64 */
    FC_H5_REFERENCE /**< an object reference: the address of an object header */
} fc_h5_attribute_type;

typedef struct fc_h5_attribute_info {
    const char *name;
    fc_h5_attribute_type type;
} fc_h5_attribute_info;

const fc_h5_attribute_info *fc_h5_attribute_get(fc_h5_attribute attribute);

/** @return the attribute with that name, or FC_H5_A_COUNT. */
fc_h5_attribute fc_h5_attribute_find(const char *name);
