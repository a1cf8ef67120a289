/*
 * What the parts of the safetensors format share. safetensors.c is the format's table; files.c and index.c find the
 * files; header.c reads one file's header, kept.c what is kept in it; manifest.c makes tensors of the entries of all
 * files, objects.c objects of what is kept; writer.c and header_out.c write.
 */
#ifndef FSDPCKPT_FORMATS_SAFETENSORS_SAFETENSORS_H
#define FSDPCKPT_FORMATS_SAFETENSORS_SAFETENSORS_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/format.h"
#include "safetensors/files.h"
#include "safetensors/header.h"

/** An object: fc_tensor.detail. */
typedef struct st_object {
    const unsigned char *bytes;
    size_t size;
    const char *json; /**< its safe decoding */
} st_object;

/** While a checkpoint is opened. */
typedef struct st_opening {
    fc_checkpoint *checkpoint;
    const fc_open_options *options;
    st_files files;
    st_header *headers; /**< one a data file */
    fc_tensor *tensors; /**< in the arena */
    size_t ntensors;
} st_opening;

/** Entries of all files → o->tensors; with room for `extra` more behind them. (manifest.c) */
fc_code fc_st_build_tensors(st_opening *o, size_t extra, fc_error *err);

/** At most how many objects there are. (objects.c) */
size_t fc_st_count_objects(const st_opening *o);

/** `__metadata__` of all files → objects, behind the tensors. (objects.c) */
fc_code fc_st_build_objects(st_opening *o, fc_error *err);

fc_code fc_st_create(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err);
size_t fc_st_split(fc_writer *writer, const fc_target_file *file, size_t first);
fc_code fc_st_reserve(fc_writer *writer, fc_target_file *file, fc_error *err);
fc_code fc_st_finish_file(fc_writer *writer, const fc_target_file *file, fc_error *err);
fc_code fc_st_finish(fc_writer *writer, const uint64_t *digests, fc_error *err);
void fc_st_destroy(fc_writer *writer);
bool fc_st_is_directory(const fc_target *target);
size_t fc_st_count_files(const fc_target *target);
const char *fc_st_index(const fc_target *target);

#endif
