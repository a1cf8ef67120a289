/*
 * Reads boxes whose CRCs are collected by the caller, who compares them once everything is read.
 */
#pragma once

#include "fsdpckpt/read.h"
#include "integrity/source_crc.h"

/** Like fc_read_box, but adds the CRCs of what it reads to `crc` instead of comparing them. `crc` may be NULL. */
fc_code fc_read_box_crc(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, fc_dtype dtype,
                        void *buf, fc_source_crc *crc, fc_error *err);

/** Reads a box to compute the CRC-64 of its elements; an fc_read_again. */
fc_code fc_read_crc64(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, uint64_t *crc64,
                      fc_error *err);

/** Reads a whole tensor only to compare it with the recorded digests and CRCs. */
fc_code fc_compare_tensor(const fc_checkpoint *checkpoint, const fc_tensor *tensor, fc_error *err);
