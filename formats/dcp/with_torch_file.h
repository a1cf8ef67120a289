/*
 * A DCP checkpoint with a torch.save file beside its `.metadata`, which holds what is not sharded: as Megatron
 * (`common.pt`) and Lightning (`meta.pt`) leave it. The readers of both formats, one behind the other: what the file
 * holds follows DCP's tensors, and the file is the last of checkpoint->files.
 */
#ifndef FSDPCKPT_FORMATS_DCP_WITH_TORCH_FILE_H
#define FSDPCKPT_FORMATS_DCP_WITH_TORCH_FILE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/format.h"

/** Whether the directory has both `.metadata` and the file `name`. */
bool fc_pt_is_beside_dcp(const char *directory, const char *name);

/** Opens checkpoint->path as DCP and adds the values of its file `name` (static). A name that both have is an error;
    where the file is `optional`, that or a file that holds something else is a note, and only DCP's values are there.
 */
fc_code fc_pt_open_beside_dcp(fc_checkpoint *checkpoint, const char *name, bool optional,
                              const fc_open_options *options, fc_error *err);

/* Hooks of fc_format, for what was opened so, and for what only fc_pt_open_file opened. */
void fc_pt_close_beside_dcp(fc_checkpoint *checkpoint);
fc_code fc_pt_extent_beside_dcp(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                                fc_error *err);
fc_code fc_pt_object_json_beside_dcp(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                     const char **json, fc_error *err);
fc_code fc_pt_digest_beside_dcp(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                                fc_error *err);
fc_code fc_pt_verify_beside_dcp(const fc_checkpoint *checkpoint, struct fc_findings *findings,
                                struct fc_verify_report *report, fc_error *err);
fc_code fc_pt_verify_chunk_beside_dcp(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index,
                                      fc_extent *extent, fc_digest *digest, struct fc_findings *findings,
                                      fc_error *err);
fc_code fc_pt_check_object_beside_dcp(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_error *err);

#endif
