/*
 * Reads msgpack from a range of a file, one value's header at a time, through a small window. Payloads are skipped or
 * read by the caller, so a file of any size takes the same memory. The format: github.com/msgpack/msgpack, spec.md.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum fc_mp_kind {
    FC_MP_NIL,
    FC_MP_BOOL,
    FC_MP_INT,
    FC_MP_UINT, /**< above INT64_MAX */
    FC_MP_FLOAT,
    FC_MP_STR,
    FC_MP_BIN,
    FC_MP_ARRAY,
    FC_MP_MAP,
    FC_MP_EXT
} fc_mp_kind;

/** The header of a value. */
typedef struct fc_mp_head {
    fc_mp_kind kind;
    uint64_t length; /**< bytes of a STR, BIN or EXT, which follow; items of an ARRAY, pairs of a MAP */
    int64_t integer; /**< of an INT; of a BOOL 0 or 1; of a UINT its bits */
    double real;
    int extension; /**< the type of an EXT, -128 to 127 */
} fc_mp_head;

typedef struct fc_mp_reader {
    int fd;
    const char *path;
    uint64_t at, end; /**< the next byte, and where the range ends */
    uint64_t window_at;
    size_t window_size;
    unsigned char window[4096];
} fc_mp_reader;

/** Fails with the file and the offset `at`. */
fc_code fc_mp_fail(const fc_mp_reader *r, uint64_t at, fc_code code, const char *what, fc_error *err);

/** Reads the header of the next value. Its payload is within the range, or FC_ECORRUPT is returned. */
fc_code fc_mp_next(fc_mp_reader *r, fc_mp_head *out, fc_error *err);

/** Reads `n` bytes of a payload. */
fc_code fc_mp_read(fc_mp_reader *r, void *out, size_t n, fc_error *err);

/** Skips what follows the header of a value. */
fc_code fc_mp_skip(fc_mp_reader *r, const fc_mp_head *head, fc_error *err);
