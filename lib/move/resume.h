/*
 * Conversions that can be resumed. While tiles are moved, tile records are written to the journal in the staging
 * directory (tile_journal.h). The next run lays out the same target anew, and its headers with it, but goes on with the
 * files of the earlier run: it skips the finished tiles, and takes their digests, and what was read for them of the
 * sources, from the journal.
 *
 * Each staged file has a second name, tiles/N, by which a later run finds it. So the writers of formats know nothing of
 * all this.
 */
#pragma once

#include "fsdpckpt/move.h"
#include "move/tile_journal.h"

struct fc_batch; /* queue.h */

typedef struct fc_resume fc_resume;

/** How a conversion is resumed. */
typedef struct fc_resume_options {
    const char *path;                  /**< of the target */
    const char *folder;                /**< the staging directory */
    const fc_convert_options *convert; /**< its options */
    uint64_t bytes;                    /**< that will be moved */
    fc_source_crc *recorded;           /**< the sums of the source, to which those of finished tiles are added */
} fc_resume_options;

/**
 * Opens the journal, and compares what it says with the source and the options of this run.
 * @param out receives NULL after a failure.
 * @return FC_EUSAGE or FC_ECORRUPT if the run that began it had others.
 */
fc_code fc_resume_open(const fc_target *target, const fc_resume_options *options, fc_resume **out, fc_error *err);
void fc_resume_free(fc_resume *resume);

/** Returns the most bytes of a tile, for which few are lost if the run dies while all threads have one. */
size_t fc_resume_tile_bytes(const fc_resume *resume, int threads);

/** Returns whether a later run could use anything of what is written. */
bool fc_resume_has_tiles(const fc_resume *resume);

/** Call it for each file of the target, in order, when its headers are written: takes over the one of an earlier run.
 */
fc_code fc_resume_file(fc_resume *resume, const fc_target_file *file, fc_error *err);

/** Returns the finished tiles of an item of the file that was begun last, in order. */
const fc_done_tiles *fc_resume_done(const fc_resume *resume, size_t item, size_t *count);

/** A worker is about to take a batch. It waits while another one notes which tiles are finished. */
void fc_resume_enter(fc_resume *resume);

/**
 * A worker has moved its batch, which it still holds. Writes a tile record from time to time.
 * @param batch may be empty.
 * @param moved false: it failed, so there will be no more records.
 */
fc_code fc_resume_leave(fc_resume *resume, const struct fc_batch *batch, bool moved, fc_error *err);

/** Writes what is finished, after the workers of a conversion that failed have ended. */
void fc_resume_flush(fc_resume *resume);
