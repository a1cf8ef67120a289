/*
 * One worker's way into a file that is being made: whole blocks past the page cache where the file system allows it,
 * the rest through it. Measured on ext4: a third of the time of buffered writes and their fsync, a fifth of the CPU.
 */
#ifndef FSDPCKPT_IO_OUTPUT_H
#define FSDPCKPT_IO_OUTPUT_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/error.h"

#include <stddef.h>
#include <stdint.h>

enum {
    /* Direct writes begin and end at multiples of this in the file and in memory. A page, so that no page of the file
       is written both ways: each way would have to wait for the other. */
    FC_OUTPUT_BLOCK = 4096,
    /* Runs with fewer bytes in whole blocks are left to the page cache, which joins them to larger writes. */
    FC_OUTPUT_DIRECT_LEAST = 64 << 10,
};

typedef struct fc_output {
    const char *path; /* borrowed */
    int fd;           /* through the page cache */
    int direct;       /* past it; -1: not opened yet, -2: refused */
    size_t block;
} fc_output;

/** Opens the existing file `path` for writing. One descriptor a worker: writes to a shared one take turns. */
fc_code fc_output_open(fc_output *output, const char *path, fc_error *err);

/** Also after a failed open, or on an output with fd -1 that was never opened. @return rc, or the error of closing. */
fc_code fc_output_close(fc_output *output, fc_code rc, fc_error *err);

/**
 * Writes exactly `size` bytes at `offset`. They go out directly as far as they are whole blocks and `bytes` is as far
 * from a block's start in memory as `offset` is in the file.
 */
fc_code fc_output_write(fc_output *output, const unsigned char *bytes, size_t size, uint64_t offset, fc_error *err);

/** Gives every byte of the file `path` its place on the disk, so that workers need not and space cannot run out. */
fc_code fc_output_allocate(const char *path, fc_error *err);

/** fsync of the file `path`: what this machine has written of it is on the disk. */
fc_code fc_output_sync(const char *path, fc_error *err);

#endif
