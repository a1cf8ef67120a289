/*
 * What is to be read to verify a checkpoint: regions, each with the digest that is recorded for it.
 */
#ifndef FSDPCKPT_VERIFY_REGIONS_H
#define FSDPCKPT_VERIFY_REGIONS_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/verify.h"

/** What is read of a region, and what it is compared with. */
typedef enum fc_region_kind {
    FC_REGION_CRC64, /**< a box of elements with a digest of its own */
    FC_REGION_BOX,   /**< a box of elements without one: read for the tensor's digest, or to see that it can be read */
    FC_REGION_BYTES, /**< stored bytes, with a CRC-32 */
    FC_REGION_FILE   /**< a file as it is, with or for a seal */
} fc_region_kind;

typedef struct fc_region {
    fc_region_kind kind;
    uint64_t expected;
    size_t number;           /**< of the tensor */
    const fc_tensor *tensor; /**< in the checkpoint */
    fc_tensor own;           /**< the same with the chunks of this region alone; it keeps its address */
    const int64_t *dims;     /**< 2 × ndim: the box */
    uint32_t file;
    uint64_t offset, length; /**< in the file; FC_REGION_BYTES: what is read */
    fc_sealed_file *sealed;  /**< FC_REGION_FILE */
    bool counts;             /**< for the tensor's digest: it is not a replica of another one */
} fc_region;

typedef struct fc_regions {
    fc_region *items; /**< malloc'ed */
    size_t count, capacity;
    fc_arena *arena;
    unsigned char *broken; /**< one a tensor: its chunks do not cover it, so that it has no digest as a whole */
    fc_digest *whole;      /**< one a tensor */
} fc_regions;

/**
 * Lists the regions. What is wrong with a tensor's headers is found here.
 * @param all every box is to be read, also those whose record has a CRC-32.
 */
fc_code fc_regions_new(const fc_checkpoint *checkpoint, bool all, fc_findings *findings, fc_verify_report *report,
                       fc_regions *out, fc_error *err);

/** Lists the files of the manifest. Those that are not as long as the seal says are findings, if `compare`. */
fc_code fc_regions_of_files(const fc_checkpoint *checkpoint, fc_seal *seal, bool compare, fc_findings *findings,
                            fc_regions *out, fc_error *err);
void fc_regions_free(fc_regions *regions);

#endif
