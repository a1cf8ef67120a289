/*
 * Moving tensors from a checkpoint to target files: one file, and the conversion as a whole.
 */
#pragma once

#include "fsdpckpt/comm.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/select.h"

FC_BEGIN_DECLS

struct fc_source_crc; /* lib/integrity/source_crc.h */
struct fc_resume;     /* lib/move/resume.h */

typedef struct fc_move_options {
    fc_work_options work;
    bool crc32;        /**< whether to compute fc_target_item.crc32 */
    uint64_t *digests; /**< in/out: one sum for each of target->tensors, 0 at the start; may be NULL. This call adds
                          what it writes. fc_crc64_finish turns the final sum into the tensor's CRC-64. Sums of
                          several ranks are combined by XOR */
    struct fc_source_crc
        *recorded; /**< set by fc_convert to compare what is read with the CRC-32s of the source; NULL: no comparison */
    fc_writer *writer; /**< set by fc_convert: its finish_item is called for each item that is moved; NULL: it is not */
    struct fc_resume *resume; /**< set by fc_convert: notes what is finished; NULL: the file is moved as a whole */
    uint32_t share, shares; /**< if several processes write one file, this one writes share number `share` of `shares`,
                               divided by bytes. 0 and 0: everything; share = shares > 1: nothing */
} fc_move_options;

/** The options of fc_convert. */
typedef struct fc_convert_options {
    const fc_format *format; /**< the format of the target */
    fc_selection selection;
    bool force;         /**< replace an existing target */
    bool dry_run;       /**< plan and check everything, but write nothing */
    bool trust_objects; /**< also write objects that are not known to be harmless into formats that run them on load */
    bool partial;       /**< the source is only a part of what was opened, so the target must not replace it */
    /** Other files and directories that are read, so the target must not replace them; ended by NULL. NULL: none. */
    const char *const *inputs;
    /** Adds files to a target that is a directory, before the commit. NULL: there are none. */
    fc_code (*add_files)(void *context, const char *staging, fc_error *err);
    void *add_context;
    const char *const *added; /**< their names, relative to the target and ended by NULL; `force` may replace them */
    fc_reporter reporter;     /**< receives a line for each killed run that was cleaned up */
    fc_work_options work;
    fc_comm *comm;  /**< the ranks that share the work. All call fc_convert with the same source and target, on a shared
                       file system. Its device uses host memory. NULL: this process alone */
    bool resumable; /**< if the conversion fails, or this process dies, what is written stays next to the target, and
                       the next call with the same source and options goes on with it. One process, no compression */
    const char *const *texts; /**< with `resumable`: the options that decide on the values and that nothing else here
                                 shows, as texts in the order of the caller, ended by NULL. NULL: none */
    bool own_shards; /**< the source is in memory (memory.h), and each rank has the data of some of its chunks: it
                        writes those, in whichever file they belong. The target may have any layout, but no compression
                      */
} fc_convert_options;

/** The result of a conversion; with dry_run, an estimate. */
typedef struct fc_convert_report {
    fc_selected selected;
    size_t files;                         /**< number of files of the target, including its indexes */
    size_t indexes;                       /**< number of these that are an index: one per section, or 0 */
    const char *index;                    /**< the name of the file that spans the others; NULL: there is none */
    size_t reshaped;                      /**< number of tensors that other programs see with another dtype and shape */
    uint64_t data_bytes;                  /**< bytes of tensors and objects in the target, each counted once */
    uint64_t stored_bytes;                /**< their bytes in the files, after compression; with dry_run the most */
    uint64_t header_bytes;                /**< bytes of headers, estimated high */
    uint64_t largest_file, smallest_file; /**< data bytes of the largest and the smallest shard file */
    uint64_t memory;                      /**< the most bytes that the buffers of the engine may use */
} fc_convert_report;

/**
 * Converts `source` to a target at `path`. Nothing is written unless every element is covered exactly once. With
 * options->comm, rank 0 writes the headers and commits, all ranks move data, and all return the same code.
 * @param path   may be NULL with dry_run; then neither the place nor the free space is checked.
 * @param report may be NULL.
 */
fc_code fc_convert(const fc_checkpoint *source, const char *path, const fc_convert_options *options,
                   fc_convert_report *report, fc_error *err);

FC_END_DECLS
