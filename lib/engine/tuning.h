/*
 * The sizes on which the engine's speed depends, in one place. All in bytes unless said otherwise.
 */
#ifndef FSDPCKPT_ENGINE_TUNING_H
#define FSDPCKPT_ENGINE_TUNING_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

enum {
    /* Memory for all buffers together unless the caller says otherwise, so that the whole process stays below 64 MiB;
       and the least that is accepted. */
    FC_DEFAULT_MEMORY = 56 << 20,
    FC_LEAST_MEMORY = 1 << 20,

    /* A tile: read, gathered and written as one. Stays in the second-level cache, so it is copied to and from the page
       cache once and never sees main memory in between. */
    FC_TILE_BYTES = 1024 << 10,
    FC_LEAST_TILE_BYTES = 32 << 10,

    /* A tile of a tensor whose chunks must be decoded whole, or lie in another order than row-major: the larger it is,
       the fewer tiles each chunk meets, and the longer the runs of a transposed one. */
    FC_LARGE_TILE_BYTES = 4 << 20,

    /* The window of source bytes from which strided pieces are gathered. */
    FC_SCRATCH_BYTES = 512 << 10,

    /* Runs of at least this length are read straight to their place; shorter ones through the window. A system call
       costs about as much as copying 3 KiB (measured on a warm page cache). */
    FC_DIRECT_RUN = 16 << 10,

    /* Bytes between two runs that are rather read and dropped than skipped with a system call of its own. */
    FC_GAP_READ = 4 << 10,

    /* Small values that lie side by side in the target go out in one write: so many at most. */
    FC_BATCH_TILES = 64,

    /* Resolved chunks and open source files that each worker remembers. */
    FC_EXTENT_CACHE = 64,
    FC_OPEN_FILES = 32,

    /* Workers a processor unless the caller says otherwise, up to so many that a fast disk has its queue full. */
    FC_THREADS_PROCESSOR = 4,
    FC_THREADS_DISK = 16,

    /* Where several processes write one file, each gets runs of whole multiples of this: values below it are moved by
       one of them. */
    FC_SHARE_BYTES = 256 << 10,

    FC_MOST_THREADS = 256
};

#endif
