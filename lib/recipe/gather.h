/*
 * Tensors whose parts are too small to be chunks of their own, such as interleaved columns: they are divided into
 * blocks, and a block is gathered in memory when it is read.
 */
#pragma once

#include "integrity/source_crc.h"
#include "recipe/parts.h"

#include <stdatomic.h>

/** A tensor that is gathered. */
typedef struct fc_gathered {
    fc_parted parted; /**< its parts are in the arena */
} fc_gathered;

/** Returns whether the parts of the tensor are so small that gathering blocks is faster. */
bool fc_gather_pays(const fc_parted *parted);

/** Divides the tensor into blocks, which become the chunks of `out`. */
fc_code fc_gather_new(const fc_parted *parted, fc_arena *arena, fc_tensor *out, fc_gathered **gathered, fc_error *err);

/** Reads block `index` into `buf`. Thread-safe. @param crc collects the CRCs of what is read of the source. */
fc_code fc_gather_read(const fc_checkpoint *source, const fc_tensor *tensor, const fc_gathered *g, size_t index,
                       fc_source_crc *crc, unsigned char *buf, fc_error *err);
