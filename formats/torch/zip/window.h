/*
 * The windows over an archive, which zip.c and read.c share.
 */
#pragma once

#include "torch/zip/zip.h"

/** Reads `size` bytes at `at` (from the start of the range) into `window`. */
fc_code fc_zip_load(fc_zip *zip, fc_zip_window *window, uint64_t at, uint64_t size, fc_error *err);

/**
 * Makes `size` bytes at `at` (from the start of the range, within it) readable: from a window that contains them,
 * otherwise by a pread. Valid until the next call.
 */
fc_code fc_zip_view(fc_zip *zip, uint64_t at, uint64_t size, const unsigned char **bytes, fc_error *err);
