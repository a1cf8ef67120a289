/*
 * The DCP writer: writer.c lays out the data files, one item per stored box, and writes the archives around the data;
 * metadata_out.c writes `.metadata`.
 */
#pragma once

#include "fsdpckpt/format.h"
#include "torch/pickle/write.h"

/** A stored item, as a _StorageInfo describes it. */
typedef struct fc_dcp_item {
    uint64_t offset; /* in the file of `rank`, in bytes */
    uint64_t length;
    uint32_t tensor; /* index into target->tensors */
    uint32_t rank;
    bool verbatim; /* an object whose bytes the engine copies */
} fc_dcp_item;

enum { FC_DCP_FILE_NAME = 48 };

/** Writes the name of the data file of `rank`. */
void fc_dcp_file_name(uint32_t rank, char name[FC_DCP_FILE_NAME]);

/**
 * Computes the box of an item: the rank's box, or the whole of a tensor without elements.
 * @param dims receives 2 × ndim numbers.
 */
fc_code fc_dcp_item_box(const fc_target *target, const fc_dcp_item *item, int64_t *dims, fc_error *err);

/**
 * Writes `.metadata` into `directory`.
 * @param items sorted by tensor, then rank.
 */
fc_code fc_dcp_write_metadata(const fc_target *target, const char *directory, const fc_dcp_item *items, size_t nitems,
                              fc_error *err);

bool fc_dcp_is_directory(const fc_target *target);
size_t fc_dcp_files(const fc_target *target);
const char *fc_dcp_index(const fc_target *target);
fc_code fc_dcp_create(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err);
fc_code fc_dcp_reserve(fc_writer *writer, fc_target_file *file, fc_error *err);
fc_code fc_dcp_finish_item(fc_writer *writer, const fc_target_item *item, int fd, fc_error *err);
fc_code fc_dcp_finish(fc_writer *writer, const uint64_t *digests, fc_error *err);
void fc_dcp_destroy(fc_writer *writer);
fc_code fc_dcp_take_notes(fc_writer *writer, unsigned char **bytes, size_t *size, fc_error *err);
fc_code fc_dcp_add_notes(fc_writer *writer, const void *notes, size_t size, fc_error *err);
