/*
 * Decodes bzip2 in memory. Without libbz2 every function fails with FC_EUNSUPPORTED and names the Debian package. The
 * input may be hostile: nothing is written past the room that the caller gives, and libbz2 needs at most 4 MiB.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Whether this build has libbz2. */
bool fc_bzip2_is_built_in(void);

/**
 * Decodes a stream that must decode to exactly `out_size` bytes. Bytes after its end are ignored.
 * @return FC_ECORRUPT if it is damaged or has another size, FC_EUNSUPPORTED, FC_ENOMEM.
 */
fc_code fc_bzip2_decode(const unsigned char *in, size_t in_size, unsigned char *out, size_t out_size, fc_error *err);

/**
 * Counts the bytes that a stream decodes to, by decoding it.
 * @param most more than this is FC_ECORRUPT.
 */
fc_code fc_bzip2_count(const unsigned char *in, size_t in_size, uint64_t most, uint64_t *size, fc_error *err);
