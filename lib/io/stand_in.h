/*
 * Recognises files that a failed download or copy left in place of a checkpoint's file, and those of other programs.
 */
#pragma once

#include "fsdpckpt/error.h"

/**
 * Call it for a file with the wrong size or content.
 * @return FC_ECORRUPT if it is empty, or begins like a web page, an XML error or a Git LFS pointer, or with zeros.
 * FC_EUNSUPPORTED if it is an archive or another program's weights (foreign.h). The message says which. FC_OK for any
 * other file, or if it cannot be read.
 */
fc_code fc_check_stand_in(const char *path, fc_error *err);
