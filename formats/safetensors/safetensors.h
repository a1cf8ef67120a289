/*
 * Declarations shared by the files of the safetensors format. safetensors.c holds the format table and opens
 * checkpoints. files.c and index.c find the files. header.c reads the header of one file, and kept.c reads its
 * `__metadata__`. manifest.c builds tensors from the entries of all files, objects.c builds objects from
 * `__metadata__`. writer.c and header_out.c write.
 */
#pragma once

#include "fsdpckpt/format.h"
#include "safetensors/files.h"
#include "safetensors/header.h"

/** The content of an object: fc_tensor.detail. In the arena. */
typedef struct fc_st_object {
    const unsigned char *bytes;
    size_t size;      /**< bytes */
    const char *json; /**< The object decoded to JSON. */
} fc_st_object;

/** A checkpoint while it is opened. */
typedef struct fc_st_reader {
    fc_checkpoint *checkpoint;
    const fc_open_options *options;
    fc_st_files files;
    fc_st_header *headers; /**< one per data file; malloc'ed */
    fc_tensor *tensors;    /**< in the arena */
    size_t ntensors;
} fc_st_reader;

/** Builds o->tensors from the entries of all files, with room for `extra` more. (manifest.c) */
fc_code fc_st_build_tensors(fc_st_reader *o, size_t extra, fc_error *err);

/** Returns an upper bound for the number of objects. (objects.c) */
size_t fc_st_count_objects(const fc_st_reader *o);

/** Appends the objects found in `__metadata__` of all files to o->tensors. (objects.c) */
fc_code fc_st_build_objects(fc_st_reader *o, fc_error *err);

/* The members of fc_format_safetensors.writer. (writer.c) */
fc_code fc_st_create(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err);
size_t fc_st_split(fc_writer *writer, const fc_target_file *file, size_t first);
fc_code fc_st_reserve(fc_writer *writer, fc_target_file *file, fc_error *err);
fc_code fc_st_finish_file(fc_writer *writer, const fc_target_file *file, fc_error *err);
fc_code fc_st_finish(fc_writer *writer, const uint64_t *digests, fc_error *err);
void fc_st_destroy(fc_writer *writer);
bool fc_st_is_directory(const fc_target *target);
size_t fc_st_count_files(const fc_target *target);
const char *fc_st_index(const fc_target *target);
