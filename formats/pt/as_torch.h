/*
 * Opens a rank's file that may also be safetensors or JSON as if torch.save had written it.
 */
#pragma once

#include "torch/file/file.h"

/** Like fc_torch_file_open. A file of another kind has `described` set. */
fc_code fc_pt_open_as_torch(const char *path, uint32_t index, torch_file *f, fc_error *err);

/** fc_format_reader.check_header. */
fc_code fc_pt_check_header(const fc_checkpoint *checkpoint, size_t index, fc_error *err);
