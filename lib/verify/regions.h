/*
 * The regions to read when a checkpoint is verified, each with its recorded digest.
 */
#pragma once

#include "fsdpckpt/verify.h"
#include "integrity/tile_digest.h"

/** What is read, and what it is compared with. */
typedef enum fc_region_kind {
    FC_REGION_CRC64, /**< a box of elements with its own digest */
    FC_REGION_BOX,   /**< a box of elements without one, read for the tensor's digest or to prove that it is readable */
    FC_REGION_BYTES, /**< stored bytes with a CRC-32 */
    FC_REGION_FILE   /**< a whole file, compared with a seal or read for a new one */
} fc_region_kind;

typedef struct fc_region {
    fc_region_kind kind;
    uint64_t expected;
    size_t number;           /**< index of the tensor */
    const fc_tensor *tensor; /**< in the checkpoint */
    fc_tensor own;           /**< a copy with only this region's chunks; its address must not change while it is read */
    const int64_t *dims;     /**< the box: ndim offsets, then ndim sizes */
    uint32_t file;
    uint64_t offset, length; /**< in bytes, in the file; FC_REGION_BYTES reads exactly these */
    fc_sealed_file *sealed;  /**< FC_REGION_FILE only */
    bool counts;             /**< whether it counts for the tensor's digest, i.e. is not a replica */
} fc_region;

typedef struct fc_regions {
    fc_region *items; /**< from malloc */
    size_t count, capacity;
    fc_arena *arena;
    unsigned char
        *broken; /**< one per tensor: its headers or chunks are defective, so its whole digest cannot be compared */
    fc_digest *whole; /**< one per tensor: its recorded digest */
} fc_regions;

/**
 * Lists the regions, and reports defects in the tensors' headers.
 * @param all whether to read every box, including those whose record has a CRC-32.
 */
fc_code fc_regions_new(const fc_checkpoint *checkpoint, bool all, fc_findings *findings, fc_verify_report *report,
                       fc_regions *out, fc_error *err);

/** Lists the files of the manifest. If `compare`, files whose size differs from the seal's are reported. */
fc_code fc_regions_of_files(const fc_checkpoint *checkpoint, fc_seal *seal, bool compare, fc_findings *findings,
                            fc_regions *out, fc_error *err);
void fc_regions_free(fc_regions *regions);

/** Digests a header file that the manifest does not list, and records its digest, or compares it and reports. */
fc_code fc_digest_header_file(fc_sealed_file *file, bool compare, fc_findings *findings, fc_error *err);
