/*
 * CRC-32s of records that are more than one chunk of a checkpoint: some of a record's bytes were summed up while they
 * were moved, what lies between them is read here.
 */
#ifndef FSDPCKPT_ENGINE_RECORD_CRC_H
#define FSDPCKPT_ENGINE_RECORD_CRC_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/comm.h"

struct fc_record_run;

/** What is known of records; all 0 but for the checkpoint to start with. */
typedef struct fc_record_crcs {
    const fc_checkpoint *checkpoint;
    struct fc_record_run *runs;
    size_t count, capacity;
} fc_record_crcs;

void fc_record_crcs_free(fc_record_crcs *records);

/** Adds that `moved` bytes of a chunk were read. Where they are all of it and lie one behind the other they are `known`
    by the bare CRC `sum`, which has zeros behind it up to the record's end. */
fc_code fc_record_crcs_add(fc_record_crcs *records, const fc_tensor *tensor, size_t chunk, uint64_t moved, bool known,
                           uint32_t sum, fc_error *err);

/** @return FC_ECORRUPT when a record of which something was added is not what its CRC-32 says; but one of which far
   more would have to be read for that than was moved is passed over. Each rank of `comm`, which may be NULL, checks its
    share of the records. */
fc_code fc_record_crcs_check(fc_record_crcs *records, const fc_comm *comm, fc_error *err);

#endif
