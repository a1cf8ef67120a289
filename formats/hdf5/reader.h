/*
 * The parent's side of reading HDF5: what reader.c, tensors.c and sharded.c share.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_READER_H
#define FSDPCKPT_FORMATS_HDF5_READER_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/format.h"
#include "hdf5/reader_process/records.h"
#include "hdf5/reader_process/starter.h"

#include <stdatomic.h>

/** A dataset that holds chunks of a tensor. fc_chunk.detail is its index here (high half) and the filter mask. */
typedef struct fc_h5_stored {
    const fc_h5_dataset *dataset;
    const int64_t *base; /**< offsets of the dataset in the tensor; NULL for zeros */
    uint32_t file;
} fc_h5_stored;

/** fc_checkpoint.state; everything is in the checkpoint's arena. */
typedef struct fc_h5_state {
    fc_h5_stored *stored;
    size_t nstored, stored_cap;
    bool follow_external;
    /* Of a checkpoint that was opened from the tables of index.h5 (tables.c); fc_chunk.detail is the row of its box; of
     * a compressed one with 4 bits of filter mask behind it, and FC_H5_COMPRESSED: */
    const struct fc_h5_file_row *files; /**< by rank; NULL: it was walked */
    const struct fc_h5_box_row *boxes;
    const struct fc_h5_grid_row *grids;
    const int64_t *dims;      /**< the table of that name */
    const int64_t **box_dims; /**< of compressed boxes: offsets and sizes; NULL: none is compressed */
    atomic_bool *known;       /**< by rank: the file has the identity that index.h5 says */
    fc_h5_starter starter;    /**< where some dataset is read through libhdf5 */
} fc_h5_state;

#define FC_H5_COMPRESSED (UINT64_C(1) << 63)
enum { FC_H5_MASK_BITS = 4 };

/** A chunk list being made. */
typedef struct fc_h5_chunks {
    fc_arena *arena;
    fc_chunk *items;
    size_t count, cap;
} fc_h5_chunks;

/** Called with what was read of file number `index`. */
typedef fc_code (*fc_h5_visit)(void *context, size_t index, const fc_h5_file *file, fc_error *err);

/** @return what people are to know about a reader process that lacked some protection; NULL if it had. */
const char *fc_h5_missing_note(unsigned missing);

/** Reads the headers of `count` files in reader processes, in order. `datasets`: how many each may have, a guess. */
fc_code fc_h5_scan_files(fc_arena *arena, const char *const *paths, size_t count, size_t datasets, bool follow_external,
                         fc_h5_visit visit, void *context, fc_error *err);

/**
 * Adds the chunks of one dataset at `base` of a tensor (NULL: it is the whole tensor), written by `rank`.
 * An object and an unreadable dataset become one chunk.
 */
fc_code fc_h5_add_chunks(fc_checkpoint *checkpoint, fc_h5_dataset *dataset, uint32_t file, const int64_t *base,
                         uint32_t rank, fc_h5_chunks *chunks, fc_error *err);

/** The name and path of a dataset's value, into `tensor`. `ours`: link names are encoded. */
fc_code fc_h5_name_tensor(fc_arena *arena, const fc_h5_dataset *dataset, bool ours, const char *file, fc_tensor *tensor,
                          fc_error *err);

/**
 * Makes sure that the names are all different. In a foreign file "a.b" in "c" and "b.c" in "a" would share one; with
 * `may_rename` the later one is called by its HDF5 path instead.
 */
fc_code fc_h5_check_names(fc_arena *arena, fc_tensor *tensors, size_t count, bool may_rename, const char *file,
                          fc_error *err);

/** What a tensor takes over from its dataset: type, shape, and that it is an object. Chunks and name come apart. */
fc_code fc_h5_fill_tensor(fc_checkpoint *checkpoint, const fc_h5_dataset *dataset, fc_tensor *tensor, fc_error *err);

/** A dataset of ours whose attribute `dtype` contradicts its HDF5 type is damaged. */
fc_code fc_h5_check_dtype(const fc_h5_dataset *dataset, const char *path, fc_error *err);

/** Makes `tensor` the object that carries the file's foreign attributes, see full.c. */
fc_code fc_h5_add_attributes(fc_checkpoint *checkpoint, const fc_h5_file *file, fc_tensor *tensor, fc_error *err);

/** Opens one file as a full checkpoint. */
fc_code fc_h5_open_full(fc_checkpoint *checkpoint, fc_error *err);

/** Opens a sharded checkpoint from the tables of index.h5 at `path`, but for the names and sizes of its files.
 *  @param used receives whether there are tables that can be used: else nothing was done. */
fc_code fc_h5_open_tables(fc_checkpoint *checkpoint, const char *path, bool *used, fc_error *err);

/** Whether file `index` of checkpoint->files is the one that index.h5 was written with. Looks once; thread-safe. */
fc_code fc_h5_check_identity(const fc_checkpoint *checkpoint, size_t index, fc_error *err);

/** The error for a file of another size. */
fc_code fc_h5_other_size(const char *path, uint64_t size, uint64_t expected, fc_error *err);

/** Opens a directory of shard files by walking all of them, whatever tables there are. */
fc_code fc_h5_walk_sharded(fc_checkpoint *checkpoint, const char *directory, fc_error *err);

/** Opens a directory of shard files. */
fc_code fc_h5_open_sharded(fc_checkpoint *checkpoint, const char *directory, const fc_open_options *options,
                           fc_error *err);

#endif
