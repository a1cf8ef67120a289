/*
 * Declarations shared by reader.c, tensors.c and sharded.c, which read HDF5 in the parent process.
 */
#pragma once

#include "fsdpckpt/format.h"
#include "hdf5/reader_process/kept.h"
#include "hdf5/reader_process/records.h"
#include "hdf5/reader_process/server.h"
#include "hdf5/reader_process/starter.h"

#include <stdatomic.h>

/** A dataset with chunks of a tensor. fc_chunk.detail is its index here (high half) and the filter mask. */
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
    const char *plugins; /**< a folder of plugins of libhdf5; NULL: none */
    /* For a checkpoint that was opened from tables (tables.c). fc_chunk.detail is the row of the box;
     * for a compressed box, it also has a filter mask of 4 bits, and FC_H5_COMPRESSED. */
    const struct fc_h5_file_row *files; /**< by rank; NULL: the files were walked. A full file has no rows */
    const struct fc_h5_box_row *boxes;
    const struct fc_h5_grid_row *grids;
    const int64_t *dims;      /**< the table `dims` */
    const int64_t **box_dims; /**< per compressed box: its offsets and sizes; NULL if no box is compressed */
    atomic_bool *known;       /**< by rank: whether the file is known to be the one that index.h5 describes */
    fc_h5_starter starter;    /**< used if a dataset is read through libhdf5 */
    fc_h5_kept *kept;         /**< for its processes; NULL: no file is on a server */
    fc_h5_span span;          /**< where the HDF5 file is in its file; the length is 0 if it is all of it */
    uint32_t span_crc;        /**< the CRC-32 that is recorded for it */
    fc_h5_server *server;     /**< reads headers while the checkpoint is opened; NULL: each file has its process */
} fc_h5_state;

#define FC_H5_COMPRESSED (UINT64_C(1) << 63)
enum { FC_H5_MASK_BITS = 4 };

/** @return the dataset that a chunk is in, of a checkpoint that was not opened from tables. */
const fc_h5_stored *fc_h5_stored_of(const fc_checkpoint *checkpoint, const fc_chunk *chunk);

/** Makes the job of the process that reads a box; the request has its chunk, size and number of dimensions. */
fc_h5_make_job fc_h5_make_box_job;

/** A list of chunks under construction. */
typedef struct fc_h5_chunks {
    fc_arena *arena;
    fc_chunk *items;
    size_t count, cap;
} fc_h5_chunks;

/** Called with the headers of file number `index`. */
typedef fc_code (*fc_h5_visit)(void *context, size_t index, const fc_h5_file *file, fc_error *err);

/** @return a note for the user about the protection that a reader process lacked; NULL if it lacked none. */
const char *fc_h5_missing_note(unsigned missing);

/**
 * Reads the headers of `count` files in reader processes, in order. `datasets` is an estimate of the number of datasets
 * per file.
 */
fc_code fc_h5_scan_files(fc_arena *arena, const char *const *paths, size_t count, size_t datasets, bool follow_external,
                         fc_h5_visit visit, void *context, fc_error *err);

/** Like fc_h5_scan_files, in the process of `server` if one process is enough. `server` may be NULL. */
fc_code fc_h5_scan_files_by(fc_h5_server *server, fc_arena *arena, const char *const *paths, size_t count,
                            size_t datasets, bool follow_external, fc_h5_visit visit, void *context, fc_error *err);

/** Like fc_h5_scan_files_by for one file, whose HDF5 file is at `span`. Offsets are from its start. */
fc_code fc_h5_scan_span(fc_h5_server *server, fc_arena *arena, const char *path, const fc_h5_span *span,
                        bool follow_external, fc_h5_visit visit, void *context, fc_error *err);

/**
 * Adds the chunks of one dataset at `base` of a tensor (NULL: the dataset is the whole tensor), written by `rank`. An
 * object and an unreadable dataset become one chunk.
 */
fc_code fc_h5_add_chunks(fc_checkpoint *checkpoint, fc_h5_dataset *dataset, uint32_t file, const int64_t *base,
                         uint32_t rank, fc_h5_chunks *chunks, fc_error *err);

/** Sets the name and path of `tensor` from its dataset. `ours`: link names are encoded. */
fc_code fc_h5_name_tensor(fc_arena *arena, const fc_h5_dataset *dataset, bool ours, const char *file, fc_tensor *tensor,
                          fc_error *err);

/**
 * Makes all names distinct. In a foreign file, "a.b" in "c" and "b.c" in "a" could have the same name; with
 * `may_rename` the later one gets its HDF5 path as its name. Otherwise equal names are an error.
 */
fc_code fc_h5_check_names(fc_arena *arena, fc_tensor *tensors, size_t count, bool may_rename, const char *file,
                          fc_error *err);

/**
 * Sets the type and shape of a tensor from its dataset, and whether it is an object. Chunks and names are set
 * separately.
 */
fc_code fc_h5_fill_tensor(fc_checkpoint *checkpoint, const fc_h5_dataset *dataset, fc_tensor *tensor, fc_error *err);

/** @return FC_ECORRUPT if the attribute `dtype` of one of our datasets contradicts its HDF5 type. */
fc_code fc_h5_check_dtype(const fc_h5_dataset *dataset, const char *path, fc_error *err);

/** Makes `tensor` a dataset of file `file`. `ours`: this program wrote it. */
fc_code fc_h5_add_dataset(fc_checkpoint *checkpoint, fc_h5_dataset *dataset, uint32_t file, bool ours,
                          fc_tensor *tensor, fc_error *err);

/** Makes `tensor` an object called `path` with JSON text. Both are in the checkpoint's arena, or static. */
fc_code fc_h5_add_text(fc_checkpoint *checkpoint, const char *path, fc_h5_bytes text, fc_tensor *tensor, fc_error *err);

/** Makes `tensor` the object with the file's foreign attributes, see full.c. */
fc_code fc_h5_add_attributes(fc_checkpoint *checkpoint, const fc_h5_file *file, fc_tensor *tensor, fc_error *err);

/** Stores whether this program wrote the file: its root group has our schema. See fc_own_file. */
fc_code fc_h5_is_ours(const char *path, bool *ours, fc_error *err);

/** @return whether the file looks like HDF5. */
bool fc_h5_has_signature(const char *path);

/** Opens one file as a full checkpoint: from its tables if it has them. */
fc_code fc_h5_open_full(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err);

/** Like fc_h5_open_full, but ignores the tables. */
fc_code fc_h5_walk_full(fc_checkpoint *checkpoint, fc_error *err);

/**
 * Opens a checkpoint from the tables of the file at `path`, except for the names and sizes of its files. @param sharded
 * whether it is index.h5, or a full file. @param used receives whether there are usable tables; if not, nothing was
 * done.
 */
fc_code fc_h5_open_tables(fc_checkpoint *checkpoint, const char *path, bool sharded, bool *used, fc_error *err);

/**
 * Checks that file `index` of checkpoint->files is the one that index.h5 was written with. Reads it only once.
 * Thread-safe.
 */
fc_code fc_h5_check_identity(const fc_checkpoint *checkpoint, size_t index, fc_error *err);

/** Reports a file of the wrong size. */
fc_code fc_h5_other_size(const char *path, uint64_t size, uint64_t expected, fc_error *err);

/** Opens a directory of shard files by walking all of them, even if there are tables. */
fc_code fc_h5_walk_sharded(fc_checkpoint *checkpoint, const char *directory, fc_error *err);

/** Opens a directory of shard files. */
fc_code fc_h5_open_sharded(fc_checkpoint *checkpoint, const char *directory, const fc_open_options *options,
                           fc_error *err);
