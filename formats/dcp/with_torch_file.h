/*
 * A DCP checkpoint with a torch.save file next to its `.metadata`, which holds the values that are not sharded:
 * Megatron writes `common.pt`, Lightning `meta.pt`. The values of that file follow DCP's in the manifest, and the file
 * is the last of checkpoint->files.
 */
#pragma once

#include "fsdpckpt/format.h"

/** Whether the directory has both `.metadata` and the file `name`. */
bool fc_dcp_has_file(const char *directory, const char *name, fc_error *err);

/**
 * Opens checkpoint->path as DCP and adds the values of its file `name` (static storage). A name that both have is an
 * error. If the file is `optional`, such an error and a file of another kind become a note, and only DCP's values are
 * read.
 */
fc_code fc_dcp_open_with_file(fc_checkpoint *checkpoint, const char *name, bool optional,
                              const fc_open_options *options, fc_error *err);

/* Members of fc_format for checkpoints that fc_dcp_open_with_file or fc_torch_open_file opened. */
void fc_dcp_close_with_file(fc_checkpoint *checkpoint);
fc_code fc_dcp_extent_with_file(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                                fc_error *err);
fc_code fc_dcp_read_with_file(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf,
                              fc_error *err);
fc_code fc_dcp_read_part_with_file(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, uint64_t at,
                                   void *buf, size_t size, fc_error *err);
fc_code fc_dcp_object_json_with_file(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                     const char **json, fc_error *err);
fc_code fc_dcp_digest_with_file(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                                fc_error *err);
fc_code fc_dcp_verify_with_file(const fc_checkpoint *checkpoint, struct fc_findings *findings,
                                struct fc_verify_report *report, fc_error *err);
fc_code fc_dcp_verify_chunk_with_file(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index,
                                      fc_extent *extent, fc_digest *digest, struct fc_findings *findings,
                                      fc_error *err);
fc_code fc_dcp_check_object_with_file(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_error *err);
