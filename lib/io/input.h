/*
 * Reads a file for one worker: cached data is copied from the page cache, the rest is read past it. A checkpoint that
 * is larger than the memory and read once gains nothing from the cache, and filling it costs more CPU than everything
 * else. Measured on ext4 with a cold cache: half the time and a sixth of the CPU. Loads of a training program are read
 * again, so they set cache_only (fc_fits_cache in fsdpckpt/read.h).
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FC_INPUT_BLOCK = 4096,
    /* Shorter reads go through the page cache, with its read-ahead. In bytes. */
    FC_INPUT_DIRECT_LEAST = 64 << 10,
};

typedef struct fc_input {
    const char *path; /* borrowed */
    int fd;           /* -1 when not open. Not shared, because its flags change while it is read. */
    bool cache_only;  /* reads past the cache are refused or not wanted, or the kernel does not report what is cached */
} fc_input;

/** Opens the file like fc_open_input. */
fc_code fc_input_open(fc_input *input, const char *path, fc_error *err);
void fc_input_close(fc_input *input);

/** fc_pread_expect for the file. */
void fc_input_expect(const fc_input *input, uint64_t size, uint64_t offset);

/** The size in bytes of the buffer that fc_input_read_near needs for `size` bytes. */
#define FC_INPUT_ROOM(size) ((size) + 2 * FC_INPUT_BLOCK)

/**
 * Reads exactly `size` bytes at `offset` to some place in `buffer`, which is aligned to a block.
 * @param buffer FC_INPUT_ROOM(size) bytes.
 * @param bytes  receives their address in the buffer.
 */
fc_code fc_input_read_near(fc_input *input, unsigned char *buffer, size_t size, uint64_t offset,
                           const unsigned char **bytes, fc_error *err);

/**
 * Reads exactly `size` bytes at `offset` to `out`.
 * @param window FC_INPUT_ROOM(window_size) bytes, aligned to a block, to read uncached data through.
 */
fc_code fc_input_read(fc_input *input, unsigned char *out, size_t size, uint64_t offset, unsigned char *window,
                      size_t window_size, fc_error *err);
