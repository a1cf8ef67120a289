/*
 * Compares the CRC-32s of zip records that hold more than one chunk. Parts of a record were summed up while they were
 * moved; the gaps between them are read here.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/comm.h"

struct fc_record_run;

/** The sums known so far. Start with everything zero except `checkpoint`. */
typedef struct fc_record_crcs {
    const fc_checkpoint *checkpoint;
    struct fc_record_run *runs;
    size_t count, capacity;
} fc_record_crcs;

void fc_record_crcs_free(fc_record_crcs *records);

/**
 * Records that `moved` bytes of a chunk were read. If they are contiguous and complete (`known`), `sum` is their bare
 * CRC as if zeros followed up to the record's end.
 */
fc_code fc_record_crcs_add(fc_record_crcs *records, const fc_tensor *tensor, size_t chunk, uint64_t moved, bool known,
                           uint32_t sum, fc_error *err);

/**
 * Compares every record to which something was added, and reads the missing bytes from its file. Skips a record if that
 * would mean reading far more than was moved. Each rank of `comm` (may be NULL) checks its share of the records.
 * @return FC_ECORRUPT when a record does not match its CRC-32.
 */
fc_code fc_record_crcs_check(fc_record_crcs *records, const fc_comm *comm, fc_error *err);
