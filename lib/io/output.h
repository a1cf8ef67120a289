/*
 * Writes to a file under construction for one worker: whole blocks past the page cache where the file system allows it,
 * the rest through it. On ext4 that took a third of the time of buffered writes with fsync (Linux 6.1) or the same
 * (6.18), and half of the processor time or less. A file that is read again soon goes through the cache as a whole, and
 * the kernel begins at once to write it to the disk.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    /* Direct writes begin and end at multiples of this, in the file and in memory. It is a page, so that no page of the
       file is written both ways: each way would have to wait for the other. */
    FC_OUTPUT_BLOCK = 4096,
    /* Runs with fewer bytes in whole blocks go through the page cache, which combines them. In bytes. */
    FC_OUTPUT_DIRECT_LEAST = 64 << 10,
};

typedef struct fc_output {
    const char *path; /* borrowed */
    int fd;           /* goes through the page cache */
    int direct;       /* goes past it; -1 when not opened yet, -2 when refused */
    size_t block;
    bool cached;                   /* all goes through the page cache */
    struct fc_staged_file *staged; /* the file is made in a bucket, which gets its parts; else NULL */
} fc_output;

/**
 * Opens the existing file `path` for writing. Each worker opens it, because writes to one descriptor take turns.
 * @param cached whether the file is read again soon, so that the page cache should hold it.
 */
fc_code fc_output_open(fc_output *output, const char *path, bool cached, fc_error *err);

/** Closes it. Allowed after a failed open, and on an output with fd -1. @return rc, or the error of close. */
fc_code fc_output_close(fc_output *output, fc_code rc, fc_error *err);

/**
 * Writes exactly `size` bytes at `offset`. Whole blocks are written directly if `bytes` has the same alignment in
 * memory as `offset` in the file.
 */
fc_code fc_output_write(fc_output *output, const unsigned char *bytes, size_t size, uint64_t offset, fc_error *err);

/** Allocates disk space for the whole file `path`, so that space cannot run out later. */
fc_code fc_output_allocate(const char *path, fc_error *err);
