/*
 * Finds the files of a checkpoint: one file, the files that a Hugging Face index names, the shard files of torch's
 * HuggingFaceStorageWriter, or all safetensors files of a directory.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/format.h"

#define ST_EXTENSION ".safetensors"
#define ST_INDEX_EXTENSION ".safetensors.index.json"
#define ST_INDEX_NAME "model.safetensors.index.json"

typedef enum fc_st_kind {
    ST_ONE,    /**< one file */
    ST_INDEX,  /**< the files of an index, which maps each tensor to its file */
    ST_SHARDS, /**< shard files, one or more per rank */
    ST_RANKS,  /**< files of tensor-parallel ranks that do not say how they fit together: names get "rank<r>." */
    ST_MANY    /**< several files without an index */
} fc_st_kind;

/** One tensor of the index's weight_map. */
typedef struct fc_st_mapped {
    const char *name;
    uint32_t file; /**< Index of fc_st_files.files. */
} fc_st_mapped;

/** The files of a checkpoint. Everything but `map` is in the arena. */
typedef struct fc_st_files {
    fc_st_kind kind;
    const char *directory;
    const fc_file *files; /**< The data files, followed by the index if there is one. */
    size_t nfiles;        /**< Number of data files. */
    uint32_t *ranks;      /**< ST_SHARDS: the rank of each file; else NULL. */
    const fc_file *index; /**< ST_INDEX: the index; else NULL. */
    fc_st_mapped *map;    /**< ST_INDEX: malloc'ed, sorted by name; else NULL. */
    size_t nmap;
    const char *index_metadata; /**< The index's metadata without the sizes, as JSON text; NULL if there is none. */
    bool may_be_empty;          /**< Set it to accept an index that maps no tensor. */
    bool has_total;             /**< The index has a total_size. */
    int64_t total;              /**< total_size, bytes. */
    bool assumed;               /* several files, but neither an index nor their names tell how many there should be */
} fc_st_files;

/** Returns whether the file looks like safetensors. */
bool fc_st_files_probe(const fc_probe *probe);

/** Finds the files of the checkpoint at checkpoint->path. @param out freed with fc_st_files_free, also on failure. */
fc_code fc_st_files_find(fc_checkpoint *checkpoint, const fc_open_options *options, fc_st_files *out, fc_error *err);
void fc_st_files_free(fc_st_files *files);

/** Reads the index at `path`, whose files are in out->directory. (index.c) */
fc_code fc_st_index_read(fc_arena *arena, const char *path, fc_st_files *out, fc_error *err);
