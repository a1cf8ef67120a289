/*
 * Decodes chunks that are too large to be held twice: from the file through two small windows directly into the
 * elements.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

/** Reads `size` stored bytes of the chunk, starting `at` bytes after its start. */
typedef fc_code (*fc_stored_fn)(void *context, uint64_t at, unsigned char *bytes, size_t size, fc_error *err);

/** Returns whether the filters allow it: deflate, with or without shuffle, and nothing else. */
bool fc_decode_lean_can(const fc_extent *extent);

/**
 * Like fc_decode_filters, but slower and without a workspace: it needs only `window_size` bytes (at least 2) in
 * addition to the result.
 */
fc_code fc_decode_lean(const fc_extent *extent, fc_stored_fn read, void *context, unsigned char *window,
                       size_t window_size, uint32_t element, unsigned char *out, fc_error *err);
