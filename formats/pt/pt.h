/*
 * The torch.save format: a .pt file, the files that an index names, or a directory of one file per rank. pt.c is the
 * format's table, index.c reads an index, ranks.c reads a directory of ranks; writer.c, tree.c and ties.c write.
 * torch/file/file.h reads one file.
 */
#pragma once

#include "fsdpckpt/format.h"

/** @return whether `path` is an index: pytorch_model.bin.index.json, as save_pretrained writes it. */
bool fc_pt_is_index(const char *path);

/** Makes the manifest of the files that the index at `path` names. */
fc_code fc_pt_open_index(fc_checkpoint *checkpoint, const char *path, const fc_open_options *options, fc_error *err);

/** fc_format_verifier.verify. */
fc_code fc_pt_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                     fc_error *err);
