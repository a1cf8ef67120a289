/*
 * Lets libhdf5 before 2.0 open objects that HDF5 2.0 wrote. What is new in them and matters here are two version
 * numbers in object headers, so the file driver shows libhdf5 the older numbers, with the checksums that belong to
 * them:
 *
 * - layout 5 is layout 4, except that the sizes of filtered chunks have 8 bytes in the index. chunk_index.c reads such
 *   indexes.
 * - datatype 5 is datatype 3, except that it may be a complex number, which stays unreadable.
 */
#pragma once

#include "hdf5/reader_process/vfd.h"

/** The index of filtered chunks that libhdf5 would misread. */
typedef struct fc_h5_chunk_index {
    int kind;         /**< an fc_h5_index_kind; 0: libhdf5 reads all of the dataset's chunks */
    uint64_t address; /**< of its header in the file; UINT64_MAX: no chunk is stored */
} fc_h5_chunk_index;

typedef enum fc_h5_index_kind {
    FC_H5_FIXED_ARRAY = 3,
    FC_H5_EXTENSIBLE_ARRAY = 4,
    FC_H5_TREE = 5,
} fc_h5_index_kind;

/** What was found in the header of an object. */
typedef struct fc_h5_newer {
    bool is_newer; /**< HDF5 2.0 wrote it, and it was patched: other processes cannot read it through libhdf5 */
    fc_h5_chunk_index index;
} fc_h5_newer;

/** Adds the patches of the object whose header is at `object` to those of the driver. Damaged headers get none. */
void fc_h5_newer_patch(const fc_h5_source *source, uint64_t object, fc_h5_newer *out);

/** Finds the root group's object header. @return false if its superblock is not one of HDF5 1.10 and later. */
bool fc_h5_newer_root(const fc_h5_source *source, uint64_t *object);
