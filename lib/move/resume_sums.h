/*
 * What a conversion that can be resumed has read of its sources: the sums that are compared with the CRCs that these
 * record, as numbers for the journal.
 */
#pragma once

#include "move/tile_journal.h"

/** The sums of a source and of its own inputs. Starts zeroed. */
typedef struct fc_resume_sums {
    struct fc_source_sums *sources;
    size_t count, capacity;
} fc_resume_sums;

/** What was added to sums since the last call of fc_resume_sums_note. Starts zeroed; the caller frees `list`. */
typedef struct fc_noted_sums {
    fc_done_sum *list;
    size_t count, capacity;
} fc_noted_sums;

/** Finds all sums. @param recorded those of `source` itself. @param sums free it also after a failure */
fc_code fc_resume_sums_find(fc_resume_sums *sums, const fc_checkpoint *source, fc_source_crc *recorded, fc_error *err);
void fc_resume_sums_free(fc_resume_sums *sums);

/** Adds what a journal has to the sums. @param folder what a person removes to begin again */
fc_code fc_resume_sums_load(const fc_resume_sums *sums, const fc_tile_journal *journal, const char *folder,
                            fc_error *err);

/** Adds what was read since the last call to `noted`. No worker may be reading. */
fc_code fc_resume_sums_note(const fc_resume_sums *sums, fc_noted_sums *noted, fc_error *err);
