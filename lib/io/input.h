/*
 * One worker's way out of a file: what the page cache holds is copied from there, what it does not is read past it.
 * A checkpoint that is read once and larger than the memory gains nothing from the cache, and filling it costs more
 * CPU than all else together. Measured on ext4, cold: half the time and a sixth of the CPU.
 */
#ifndef FSDPCKPT_IO_INPUT_H
#define FSDPCKPT_IO_INPUT_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FC_INPUT_BLOCK = 4096,
    /* Less than this is left to the page cache and its read-ahead. */
    FC_INPUT_DIRECT_LEAST = 64 << 10,
};

typedef struct fc_input {
    const char *path; /* borrowed */
    int fd;           /* -1: none. Not shared: its flags change while it is read. */
    bool cache_only;  /* reading past it is refused, or what it holds is not told */
} fc_input;

/** As fc_open_input. */
fc_code fc_input_open(fc_input *input, const char *path, fc_error *err);
void fc_input_close(fc_input *input);

/** Bytes that a buffer of fc_input_read_near takes for `size` bytes. */
#define FC_INPUT_ROOM(size) ((size) + 2 * FC_INPUT_BLOCK)

/**
 * Reads exactly `size` bytes at `offset` to some place in `buffer`, which begins at a block in memory.
 * @param buffer FC_INPUT_ROOM(size) bytes.
 * @param bytes  out: where in the buffer they are.
 */
fc_code fc_input_read_near(fc_input *input, unsigned char *buffer, size_t size, uint64_t offset,
                           const unsigned char **bytes, fc_error *err);

/**
 * Reads exactly `size` bytes at `offset` to `out`.
 * @param window FC_INPUT_ROOM(window_size) bytes that begin at a block, through which those that are not cached go.
 */
fc_code fc_input_read(fc_input *input, unsigned char *out, size_t size, uint64_t offset, unsigned char *window,
                      size_t window_size, fc_error *err);

#endif
