/*
 * The digest of a header, which is stored in the header itself: the CRC-64 of the file up to its data, computed with
 * the 16 digits of the digest set to '0'.
 */
#pragma once

#include "fsdpckpt/format.h"

enum { ST_DIGITS = 16 };

/** Whether a header has changed since fsdpckpt wrote it. */
typedef enum fc_st_header_state {
    ST_HEADER_UNKNOWN, /**< The header has no digest. */
    ST_HEADER_GOOD,
    ST_HEADER_DAMAGED,   /**< One bit has flipped. */
    ST_HEADER_REWRITTEN, /**< More has changed: another program rewrote it and kept our members of __metadata__. */
    ST_HEADER_BARE       /**< fsdpckpt wrote it, but the digest is missing. */
} fc_st_header_state;

/** fc_checkpoint.state: the header states of the data files. In the arena. */
typedef struct fc_st_state {
    const unsigned char *headers; /**< One fc_st_header_state per data file. */
    size_t count;
} fc_st_state;

/** Returns the offset of the digest's digits in a header of `size` bytes, counted from the start of the file; 0 if it
 *  has none. */
size_t fc_st_digest_offset(const char *text, size_t size);

/** Returns the digest of a header whose digits are at offset `at`. */
uint64_t fc_st_digest_of(const char *text, size_t size, size_t at);

/** Compares a header with the digest at offset `at`. */
fc_st_header_state fc_st_digest_compare(const char *text, size_t size, size_t at);

/** Writes 16 hexadecimal digits to `out`, without a NUL. */
void fc_st_digits(uint64_t value, char *out);

/** Reads 16 hexadecimal digits. @return how many of the 16 characters are not digits. */
int fc_st_read_digits(const char *text, uint64_t *out);

/** fc_format.check_file: returns FC_ECORRUPT if the header of the file is damaged. */
fc_code fc_st_check_file(const fc_checkpoint *checkpoint, size_t index, fc_error *err);

/** fc_format.verify: reports a defect for each header that has changed since fsdpckpt wrote it. */
fc_code fc_st_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                     fc_error *err);
