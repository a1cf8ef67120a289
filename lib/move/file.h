/*
 * Writes one file of a target: its tiles, or its compressed chunks.
 */
#pragma once

#include "fsdpckpt/move.h"

/**
 * Writes the owned, contiguous items of `file` to file->path and sets their CRCs. Each byte of an item is written
 * exactly once. A hole or overlap in the source is FC_ECORRUPT before any byte of the tensor is written. With several
 * shares, the CRCs are those of the items with zeros in place of the bytes that other processes move.
 */
fc_code fc_move_file(const fc_target *target, const fc_target_file *file, const fc_move_options *options,
                     fc_error *err);

/** Returns the memory for work on the file `path` without that for its parts, if the file is made in a bucket. */
uint64_t fc_memory_beside_parts(const char *path, const fc_work_options *work);

/**
 * Compresses the chunked items of `file` into file->path, at the places that the writer gives, and sets their CRCs. The
 * order is always the same, so the numbers of threads and ranks do not change the file.
 * @param writer places chunks; used on rank 0.
 * @param comm   the ranks that compress the file together, which all call this; the CRCs are then those of zeros in
 *               place of what other ranks compress. NULL: this process alone.
 * @param stored receives the number of bytes written.
 */
fc_code fc_compress_file(const fc_target *target, const fc_target_file *file, fc_writer *writer, fc_comm *comm,
                         const fc_move_options *options, uint64_t *stored, fc_error *err);
