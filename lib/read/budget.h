/*
 * Divides the memory of a job among its workers and the cache of decoded chunks.
 */
#pragma once

#include "fsdpckpt/read.h"

#include <stdbool.h>

/** What each worker holds. */
typedef struct fc_worker_needs {
    int sources;  /**< each has a window */
    int tiles;    /**< buffers for a tile */
    size_t extra; /**< bytes in addition */
    bool remote;  /**< files are on servers, where bytes that are asked for at once matter more than decoded chunks */
} fc_worker_needs;

/** How the memory is divided. */
typedef struct fc_budget {
    int threads;
    int files;         /**< open source files per source */
    size_t tile;       /**< bytes */
    size_t large_tile; /**< bytes, for tensors that gain from large tiles */
    size_t window;     /**< bytes per source */
    uint64_t decoded;  /**< bytes for all decoded chunks of one side */
} fc_budget;

/** Returns whether files of the checkpoint are on servers. */
bool fc_reads_from_servers(const fc_checkpoint *checkpoint);

/** Returns the number of workers that each of `processes` wants: `given`; if that is 0, the default for files on
 * servers, and 0 for other files. */
int fc_wanted_threads(int given, bool remote, int processes);

/** Returns the memory of a job in bytes: what the options say, or the default. */
uint64_t fc_memory_of(const fc_work_options *options);

/** Fails if `memory` is too little for any job. 0: the default. */
fc_code fc_memory_check(uint64_t memory, fc_error *err);

/**
 * Divides the memory. The workers get at most half of it, or three quarters for files on servers, and at least the
 * minimum; decoded chunks get the rest.
 * @param options NULL: the defaults
 * @param threads the most that are useful; fewer if the memory does not suffice
 */
fc_code fc_budget_divide(const fc_work_options *options, int threads, const fc_worker_needs *each, fc_budget *out,
                         fc_error *err);
