/*
 * The engine: executes the tiles of a part with worker threads. Read, gather, cast, write.
 */
#ifndef FSDPCKPT_MOVE_H
#define FSDPCKPT_MOVE_H

#include "fsdpckpt/comm.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/plan.h"

#include <stdatomic.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Shared by the caller, its signal handler and the workers. */
typedef struct fc_progress {
    atomic_uint_fast64_t done;  /**< bytes written */
    atomic_uint_fast64_t total; /**< bytes to write; 0: not known yet */
    atomic_bool cancel;         /**< set it to stop: the job returns FC_EINTERRUPTED and leaves nothing behind */
} fc_progress;

struct fc_source_crc; /* lib/engine/source_crc.h */

typedef struct fc_move_options {
    int threads;           /**< 0: what keeps processors and disk busy */
    uint64_t memory;       /**< bytes for all buffers; 0: 56 MiB */
    fc_progress *progress; /**< may be NULL */
    bool crc32;            /**< set the items' crc32, too */
    uint64_t *digests; /**< in/out, may be NULL: a sum for each of wanted->tensors, 0 to start. What is stored in files
                            of its owner is added to it; when all parts are done, fc_crc64_finish makes the tensor's
                            CRC-64 of it. Sums of several ranks combine by XOR */
    struct fc_source_crc *recorded; /**< fc_convert's: compares what is read with the source's CRC-32s. NULL: no */
    uint32_t share, shares; /**< of several processes that write one file together, this one moves part `share` of
                                 `shares`, by bytes. 0 and 0: everything; share = shares > 1: nothing */
} fc_move_options;

/**
 * Writes the owned, contiguous items of `part` into part->path and sets their CRCs. Each byte of an item is written
 * exactly once; a hole or overlap in the source is FC_ECORRUPT before anything of that tensor is written.
 * With several shares, the CRCs are those of the items with zeros in the place of what the others move.
 */
fc_code fc_move_file(const fc_target *target, const fc_target_file *file, const fc_move_options *options,
                     fc_error *err);

/**
 * Compresses the chunked items of `part` into part->path and sets their CRCs, at the places that the writer gives:
 * always in the same order, so that what is written does not depend on the number of threads.
 * @param stored receives the bytes written.
 */
fc_code fc_compress_file(const fc_target *target, const fc_target_file *file, fc_writer *writer,
                         const fc_move_options *options, uint64_t *stored, fc_error *err);

/**
 * Reads the box `box` of `tensor` into `buf` as contiguous row-major native bytes of dtype `dtype`. One thread.
 * A tensor that is read whole is compared with the digests and CRCs that are recorded of it: FC_ECORRUPT.
 */
fc_code fc_read_box(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, fc_dtype dtype,
                    void *buf, fc_error *err);

/** Takes the next `size` bytes; any code but FC_OK ends the reading and is returned. */
typedef fc_code fc_read_visit(void *context, const void *bytes, size_t size, fc_error *err);

/** The same bytes piece by piece in row-major order, in constant memory; what is recorded is compared behind the last.
 */
fc_code fc_read_stream(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, fc_dtype dtype,
                       fc_read_visit *visit, void *context, fc_error *err);

/**
 * Converts `count` elements as torch's Tensor.to(dtype) does (round to nearest even, NaN kept; through float32
 * where torch goes through it). Only between FC_CLASS_FLOAT types; `src` and `dst` do not overlap.
 */
void fc_cast(fc_dtype from, const void *src, fc_dtype to, void *dst, size_t count);

/** The whole way from an open checkpoint to a committed target. */
typedef struct fc_convert_options {
    const fc_format *format; /**< of the target */
    fc_selection selection;
    bool force;         /**< replace an existing target */
    bool dry_run;       /**< plan and check everything, write nothing */
    bool trust_objects; /**< write objects that are not known to be harmless into formats that run them on load */
    fc_move_options move;
    fc_comm *comm; /**< ranks that share the work: all call fc_convert with the same source and target, on a file system
                        that all of them see. Its device is the host. NULL: this process alone */
    bool own_parts; /**< the source is in memory (memory.h), each rank has its own part of it alone: rank r of `comm`
                         moves the file of rank r of the target, whose mesh is as large */
} fc_convert_options;

/** What a conversion did, or with dry_run would do. */
typedef struct fc_convert_report {
    fc_selected selected;
    size_t files;                         /**< of the target, with its index */
    const char *index;                    /**< the name of the file that spans the others; NULL: there is none */
    uint64_t data_bytes;                  /**< tensor and object bytes in the target, each stored once */
    uint64_t stored_bytes;                /**< what data_bytes take in the files, compressed; with dry_run at most */
    uint64_t header_bytes;                /**< estimated, on the safe side */
    uint64_t largest_part, smallest_part; /**< data bytes of the ranks' files */
    uint64_t memory;                      /**< bytes of all buffers of the engine, at most */
} fc_convert_report;

/**
 * Converts `source` into `target`. Every target element is covered exactly once or nothing is written.
 * With options->comm, rank 0 writes the headers and commits, all ranks move data, and all return the same.
 * @param target may be NULL with dry_run: then neither the place nor the free space is checked.
 * @param report may be NULL.
 */
fc_code fc_convert(const fc_checkpoint *source, const char *path, const fc_convert_options *options,
                   fc_convert_report *report, fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
