/*
 * Opens DCP checkpoints. dcp.c contains the format's table and finds `.metadata`, load.c makes the manifest from it,
 * and ranks.c merges the metadata of ranks.
 */
#pragma once

#include "fsdpckpt/format.h"

/** Members of fc_own_file. (own_files.c) */
fc_code fc_dcp_is_metadata(const char *path, bool *is, fc_error *err);
fc_code fc_dcp_is_data(const char *path, bool *is, fc_error *err);

/** fc_format.unverified of the formats that read DCP alone. */
#define DCP_UNVERIFIED ".metadata, and the gaps between the records of the data files, or their safetensors headers"

/**
 * Like fc_format_reader.open, but without the note, so that the caller can add files. @param directory receives the
 * directory.
 */
fc_code fc_dcp_open(fc_checkpoint *checkpoint, const fc_open_options *options, const char **directory, fc_error *err);

/** The files and notes of a target that is DCP alone. */
extern const fc_own_file fc_dcp_own_files[];
extern const fc_format_notes fc_dcp_notes;

/** The members `open` and `close` of fc_format_reader, for a checkpoint that is DCP alone. */
fc_code fc_dcp_open_whole(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err);
void fc_dcp_close(fc_checkpoint *checkpoint);

/**
 * Reads the metadata file `metadata_path` of `directory` and sets all of `checkpoint` except its state. @param of_rank
 * it is that of one rank: its values must stay as they are listed, because they are compared first.
 */
fc_code fc_dcp_load(fc_checkpoint *checkpoint, const fc_open_options *options, const char *directory,
                    const char *metadata_path, bool of_rank, fc_error *err);

/** Finds the highest rank with a `__<rank>.metadata` in the directory, plus 1. */
fc_code fc_dcp_count_ranks(const char *directory, size_t *ranks, fc_error *err);

/** Opens a checkpoint in which each rank wrote its own metadata. */
fc_code fc_dcp_open_ranks(fc_checkpoint *checkpoint, const fc_open_options *options, const char *directory,
                          fc_error *err);
