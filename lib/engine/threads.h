/*
 * Worker threads: how many are sensible, and running them. Shared by all jobs of the engine.
 */
#ifndef FSDPCKPT_ENGINE_THREADS_H
#define FSDPCKPT_ENGINE_THREADS_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

/** Processors that this process may use. */
int fc_processors(void);

/**
 * Workers unless the caller says otherwise. One waits while its bytes go to the disk, so there are a few more than
 * processors that this process may use.
 */
int fc_default_threads(void);

/** Source files that each of `threads` workers may keep open, so that all stay below the process's limit. */
int fc_files_per_worker(int threads);

/**
 * Runs `work` in `count` threads and waits for them. This thread is one of them, so that the job is done even where no
 * thread can be started. Signals stay with the caller.
 * @param count at most FC_MOST_THREADS.
 */
void fc_threads_run(int count, void *(*work)(void *context), void *context);

#endif
