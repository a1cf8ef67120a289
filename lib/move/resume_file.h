/*
 * The staged files of a conversion that can be resumed.
 */
#pragma once

#include "move/tile_journal.h"

#include "fsdpckpt/move.h"

/** Returns a digest of where the items of a file are. */
uint64_t fc_staged_layout(const fc_target *target, const fc_target_file *file);

/**
 * Lets `file`, whose headers are written, be the file `number` of an earlier run: gives that the headers, and the name.
 * @param tiles the directory of the staged files.
 * @param then what the journal says of it.
 * @param now receives what is true of `file`, for the journal, if it is not taken over.
 * @param taken whether it is.
 */
fc_code fc_staged_take(const fc_target *target, const fc_target_file *file, int tiles, uint64_t number,
                       const fc_written_file *then, fc_written_file *now, bool *taken, fc_error *err);

/** Gives `file` the second name of number `number`. @return FC_EUNSUPPORTED if the file system has no such names. */
fc_code fc_staged_name(const fc_target_file *file, int tiles, uint64_t number, fc_error *err);

/**
 * Gives `file`, whose headers are written and which is made in a bucket, the upload of an earlier run, or a new one.
 * @param done its tiles that the journal has, with their items in the file
 * @param now receives what is true of `file`, for the journal. Its `upload` belongs to the file; NULL: it is sent as a
 * whole at the end
 * @param taken whether it has that of the earlier run
 */
fc_code fc_staged_take_upload(const fc_target *target, const fc_target_file *file, const fc_written_file *then,
                              const fc_done_tiles *done, size_t count, fc_written_file *now, bool *taken,
                              fc_error *err);

enum { FC_STAGED_NAME = 24 };
/** Writes the name of number `number` in `tiles`. */
void fc_staged_name_of(uint64_t number, char name[FC_STAGED_NAME]);
