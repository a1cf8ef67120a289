/*
 * Declarations shared by the files of this folder: the reader's and the writer's halves of the format's table. libhdf5
 * reads input only in a child process (reader). In this process it only encodes types for the writer, which makes the
 * files without it.
 */
#pragma once

#include "fsdpckpt/format.h"

/**
 * The attribute `layout` of a view, and the group of the sources of its virtual datasets. No key of a state dict has
 * that link name.
 */
#define FC_H5_VIEW_LAYOUT "view"
#define FC_H5_VIEW_PIECES "%pieces"

bool fc_h5_probe(const fc_probe *probe);
/** fc_format_reader.list. */
fc_code fc_h5_list_checkpoints(const char *directory, fc_listing *out, fc_error *err);
fc_code fc_h5_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err);
fc_code fc_h5_check_header(const fc_checkpoint *checkpoint, size_t index, fc_error *err);
void fc_h5_close(fc_checkpoint *checkpoint);
fc_code fc_h5_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                     fc_error *err);
fc_code fc_h5_read(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf, fc_error *err);
fc_code fc_h5_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena, const char **json,
                          fc_error *err);
fc_code fc_h5_check_file(const fc_checkpoint *checkpoint, size_t index, fc_error *err);
fc_code fc_h5_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                     fc_error *err);
fc_code fc_h5_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                     fc_error *err);

fc_code fc_h5_create(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err);
fc_code fc_h5_reserve(fc_writer *writer, fc_target_file *file, fc_error *err);
fc_code fc_h5_place(fc_writer *writer, const fc_target_item *item, const int64_t *start, bool raw, uint64_t size,
                    uint64_t *offset, fc_error *err);
fc_code fc_h5_finish_file(fc_writer *writer, const fc_target_file *file, fc_error *err);
const char *fc_h5_index(const fc_target *target);
fc_code fc_h5_finish(fc_writer *writer, const uint64_t *digests, fc_error *err);
void fc_h5_destroy(fc_writer *writer);
fc_code fc_h5_take_notes(fc_writer *writer, unsigned char **bytes, size_t *size, fc_error *err);
fc_code fc_h5_add_notes(fc_writer *writer, const void *notes, size_t size, fc_error *err);
