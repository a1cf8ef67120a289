/*
 * Which files a checkpoint consists of: one file; those that a Hugging Face index names; the shards of torch's
 * HuggingFaceStorageWriter; or all safetensors files of a directory.
 */
#ifndef FSDPCKPT_FORMATS_SAFETENSORS_FILES_H
#define FSDPCKPT_FORMATS_SAFETENSORS_FILES_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/format.h"

#define ST_EXTENSION ".safetensors"
#define ST_INDEX_EXTENSION ".safetensors.index.json"
#define ST_INDEX_NAME "model.safetensors.index.json"

typedef enum st_kind {
    ST_ONE,    /**< one file */
    ST_INDEX,  /**< those of an index, which says which tensor is where */
    ST_SHARDS, /**< pieces of tensors, a file or more a rank */
    ST_MANY    /**< several files without an index */
} st_kind;

/** A name of the index and the file it says. */
typedef struct st_mapped {
    const char *name;
    uint32_t file;
} st_mapped;

typedef struct st_files {
    st_kind kind;
    const char *directory;
    const fc_file *files; /**< data files, then the index where there is one */
    size_t nfiles;        /**< data files */
    uint32_t *ranks;      /**< ST_SHARDS: of each file; else NULL */
    const fc_file *index; /**< ST_INDEX; else NULL */
    st_mapped *map;       /**< ST_INDEX: malloc'ed, sorted by name; else NULL */
    size_t nmap;
    const char *index_metadata; /**< JSON text of what the index says beyond the sizes; NULL: nothing */
    bool has_total;             /**< the index says how many bytes the tensors take: */
    int64_t total;
} st_files;

/** Whether the input is one of ours. */
bool fc_st_files_probe(const fc_probe *probe);

/** Finds the files of the checkpoint at `path`. @param out to be given to fc_st_files_free, also on failure. */
fc_code fc_st_files_find(fc_arena *arena, const char *path, const fc_open_options *options, st_files *out,
                         fc_error *err);
void fc_st_files_free(st_files *files);

/** Reads the index at `path`, in the directory out->directory. (index.c) */
fc_code fc_st_index_read(fc_arena *arena, const char *path, st_files *out, fc_error *err);

/** Refuses files that are links out of the directory, other than those of the cache of huggingface_hub. */
fc_code fc_st_check_links(const st_files *files, fc_error *err);

/** `name` in the directory, as an fc_file. */
bool fc_st_make_file(fc_arena *arena, const char *directory, const char *name, fc_file *out);

#endif
