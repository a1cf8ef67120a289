/*
 * The data files of an open checkpoint: their descriptors and a buffer of what is read ahead.
 */
#pragma once

#include "fsdpckpt/format.h"

/** checkpoint->state: a cache of descriptors. */
typedef struct fc_dcp_state fc_dcp_state;
fc_dcp_state *fc_dcp_state_new(size_t nfiles);
void fc_dcp_state_free(fc_dcp_state *state);

/** @return the open streams of compressed items. */
struct fc_dcp_streams *fc_dcp_streams_of(const fc_checkpoint *checkpoint);

/** An fc_format_reader.rest: closes the descriptors that are not acquired, and frees what was read ahead. */
void fc_dcp_rest(const fc_checkpoint *checkpoint);

/** Opens `file`, or finds it in the cache. It stays open until fc_dcp_release. Thread-safe. */
fc_code fc_dcp_acquire(const fc_checkpoint *checkpoint, uint32_t file, int *fd, fc_error *err);
void fc_dcp_release(const fc_checkpoint *checkpoint, uint32_t file);

/**
 * Reads a small item of an acquired file. If items are read in order, one pread serves many of them. Thread-safe.
 * @return malloc'ed memory of `length` bytes, or NULL if the caller must read the item itself.
 */
unsigned char *fc_dcp_read_ahead(const fc_checkpoint *checkpoint, uint32_t file, uint64_t offset, uint64_t length);
