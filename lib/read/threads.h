/*
 * Chooses the number of worker threads and runs them. Used by all jobs of the engine.
 */
#pragma once

#include <stdint.h>

/** Returns the number of processors that this process may use. */
int fc_processors(void);

/**
 * Returns the default number of workers. It exceeds the number of processors, because workers wait while their bytes go
 * to the disk.
 */
int fc_default_threads(void);

/** Returns the default number of workers of each of several processes of this machine that read at once. */
int fc_shared_threads(int processes);

/**
 * Returns how many threads move `bytes`: `wanted` (0: the default), at most FC_MOST_THREADS, and at most one for each
 * `least` bytes, because less does not justify a thread.
 */
int fc_useful_threads(int wanted, uint64_t bytes, uint64_t least);

/** Returns how many source files each of `threads` workers may keep open within the process's limit. */
int fc_files_per_worker(int threads);

/**
 * Runs `work` in `count` threads, one of them the calling thread, and waits for them. The job is done even when no
 * thread can be started. Signals are delivered to the calling thread only.
 * @param count at most FC_MOST_THREADS.
 */
void fc_threads_run(int count, void *(*work)(void *context), void *context);
