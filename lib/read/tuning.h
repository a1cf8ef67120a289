/*
 * The sizes that decide the engine's speed, all in bytes unless noted.
 */
#pragma once

enum {
    /*
     * The default memory for all buffers, which keeps the whole process below 64 MiB, and the least that is accepted.
     */
    FC_DEFAULT_MEMORY = 56 << 20,
    FC_LEAST_MEMORY = 1 << 20,

    /*
     * A tile is read, gathered and written at once. It fits the second-level cache, so between the page cache and the
     * target it never reaches main memory.
     */
    FC_TILE_BYTES = 1024 << 10,
    FC_LEAST_TILE_BYTES = 32 << 10,

    /*
     * A tile of a tensor whose chunks must be decoded as a whole or are not row-major. Larger tiles overlap each chunk
     * less often, and make the runs of a transposed tensor longer.
     */
    FC_LARGE_TILE_BYTES = 4 << 20,

    /* The window of source bytes from which strided elements are gathered. */
    FC_SCRATCH_BYTES = 512 << 10,

    /*
     * Runs of at least this length are read directly into the tile, shorter ones through the window. A system call
     * costs about as much as copying 3 KiB (measured on a warm page cache).
     */
    FC_DIRECT_RUN = 16 << 10,

    /* A gap between two runs up to this size is read and dropped rather than skipped with another system call. */
    FC_GAP_READ = 4 << 10,

    /* At most this many small values that are adjacent in the target share one write. */
    FC_BATCH_TILES = 64,

    /* Resolved extents and open source files that each worker remembers. */
    FC_EXTENT_CACHE = 64,
    FC_OPEN_FILES = 32,

    /* Default workers per processor, and the number that keeps a fast disk's queue full. */
    FC_THREADS_PROCESSOR = 4,
    FC_THREADS_DISK = 16,

    /* The least number for each of several processes that read together. With one, 4 ranks read a cold checkpoint in
     * 2.2 times the time; with 8 on two processors, in 1.3 times. */
    FC_THREADS_SHARED = 4,

    /* When several processes write one file, each moves multiples of this. A smaller value is moved by one of them. */
    FC_SHARE_BYTES = 256 << 10,

    /*
     * The default number of workers for files on servers, each of which waits for one request, and the smallest tile
     * that is worth a request. With tiles of 1 MiB and 20 ms before each answer, 32 workers read 1 GB/s and more.
     */
    FC_THREADS_REMOTE = 32,
    FC_LEAST_REMOTE_BYTES = 256 << 10,

    /* Bytes between two runs that cost less than another request. The fetcher can drop more of them (MOST_GAP). */
    FC_GAP_REMOTE = 128 << 10,

    FC_MOST_THREADS = 256
};
