/*
 * The tables of index.h5 and of full files: the whole manifest of a checkpoint in one block of bytes, so that it opens
 * with one read. docs/HDF5_SCHEMA.md, "Tables", describes them for other programs. These structs are the bytes of their
 * rows, without padding, little-endian. Every change increments FC_H5_TABLES_VERSION.
 */
#pragma once

#include <assert.h>
#include <stdint.h>

enum { FC_H5_TABLES_VERSION = 3, FC_H5_TABLES_ALIGN = 64 };

#define FC_H5_TABLES_MAGIC "fsdptabl"

/** In the order in which they follow the manifest. */
typedef enum fc_h5_table {
    FC_H5_T_FILES,
    FC_H5_T_MESH,
    FC_H5_T_TENSORS,
    FC_H5_T_DIMS,
    FC_H5_T_PLACEMENTS,
    FC_H5_T_BOXES,
    FC_H5_T_GRIDS,
    FC_H5_T_CHUNKS,
    FC_H5_T_TEXT,
    FC_H5_T_COUNT
} fc_h5_table;

/** The one row of `manifest`, at which the root attribute `tables_at` points. */
typedef struct fc_h5_manifest_row {
    char magic[8];
    uint64_t version;
    uint64_t file_size; /**< size of the file when it was written */
    uint64_t bytes;     /**< bytes of all tables, from this row on */
    uint64_t crc64;     /**< their CRC-64, with this field as 0 */
    uint64_t
        objects[2]; /**< the part of the file with all object headers: its offset and bytes. The tables are in it */
    uint64_t objects_crc64; /**< its CRC-64 without the tables, with header_crc64 and the checksum over it as 0; another
                               program that changes the file changes this */
    uint64_t producer[2];   /**< text: first byte and length */
    uint64_t tables[FC_H5_T_COUNT]
                   [2]; /**< per table: offset of its first row from this row in bytes, and the number of rows */
} fc_h5_manifest_row;

/** `files`: shard files by rank. A full file has none. */
typedef struct fc_h5_file_row {
    uint64_t size;
    uint64_t header_crc64;    /**< value of the root attribute with that name … */
    uint64_t header_crc64_at; /**< … and its offset in the file, in bytes */
} fc_h5_file_row;

/** `mesh`: its dimensions, outermost first. A full file has none. */
typedef struct fc_h5_mesh_row {
    char name[16]; /**< padded with NULs */
    int64_t size;
} fc_h5_mesh_row;

/**
 * `tensors`: tensors and objects in the order of the file. Their texts follow each other: path, kinds (one byte per
 * path element), fqn, encoding, json. A length of 0 stands for a missing attribute.
 */
typedef struct fc_h5_tensor_row {
    uint64_t text; /**< first byte in the table `text` */
    uint32_t path, kinds, fqn, encoding;
    uint64_t json;
    char dtype[16]; /**< torch's name, padded with NULs */
    uint64_t dims;  /**< first number in the table `dims` */
    uint32_t ndim;
    uint32_t placements; /**< index of a row of `placements`; FC_H5_NO_PLACEMENTS for an object and in a full file */
    uint64_t box, boxes; /**< index of the first row in `boxes`, and the number of rows */
    uint64_t crc64;      /**< CRC-64 of the whole value */
} fc_h5_tensor_row;

#define FC_H5_NO_PLACEMENTS UINT32_MAX

/** `placements`: each distinct list once, in the form of the attribute. */
typedef struct fc_h5_placements_row {
    uint64_t text, size;
} fc_h5_placements_row;

/**
 * `boxes`: stored boxes that are not empty, those of a tensor in the order of their ranks. The offsets and sizes of a
 * box follow from the placements and the rank.
 */
typedef struct fc_h5_box_row {
    uint64_t offset, length; /**< location in the file in bytes; for a compressed box, a range of rows of `chunks` */
    uint64_t crc64;
    uint32_t rank; /**< whose file; 0 in a full file */
    uint32_t grid; /**< row of the table `grids`; FC_H5_NO_GRID: not compressed */
} fc_h5_box_row;

#define FC_H5_NO_GRID UINT32_MAX

/** `grids`: how compressed boxes are divided into HDF5 chunks, each distinct way once. */
typedef struct fc_h5_grid_row {
    uint64_t dims; /**< sizes of an HDF5 chunk: the first number in the table `dims` */
    uint32_t ndim;
    uint8_t filters[4]; /**< HDF5's numbers in the order in which they are applied, padded with 0 */
} fc_h5_grid_row;

/** `chunks`: HDF5 chunks; those of a box follow each other in row-major order. */
typedef struct fc_h5_chunk_row {
    uint64_t offset; /**< location in the file, in bytes */
    uint32_t length;
    uint32_t mask; /**< bit i is set: filter i was skipped */
} fc_h5_chunk_row;

static_assert(sizeof(fc_h5_manifest_row) == 80 + 16 * FC_H5_T_COUNT && sizeof(fc_h5_file_row) == 24 &&
                  sizeof(fc_h5_mesh_row) == 24 && sizeof(fc_h5_tensor_row) == 88 &&
                  sizeof(fc_h5_placements_row) == 16 && sizeof(fc_h5_box_row) == 32 && sizeof(fc_h5_grid_row) == 16 &&
                  sizeof(fc_h5_chunk_row) == 16,
              "rows have no padding");
