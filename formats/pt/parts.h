/*
 * Models in several torch.save files, each with whole tensors. parts.c finds files whose names count them, index.c
 * reads an index, and joins the tensors of the files.
 */
#pragma once

#include "safetensors/files.h"

/** Lists the models whose files have names such as pytorch_model-00001-of-00002.bin, and no index, and those of
 *  torchtune, hf_model_0001_0.pt: fc_format_reader.list. */
fc_code fc_pt_list_parts(const char *directory, fc_listing *out, fc_error *err);

/** @return whether fc_listed.name is that of such a model. */
bool fc_pt_is_parts(const char *group);

/** Makes the manifest of the files of checkpoint->group in the directory checkpoint->path. */
fc_code fc_pt_open_parts(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err);

/** Makes the manifest of `files`, which all have names of their own. @param path what messages name */
fc_code fc_pt_join_files(fc_checkpoint *checkpoint, const fc_st_files *files, const char *path,
                         const fc_open_options *options, fc_error *err);
