/*
 * Computes the digest of a header, compares it with the recorded one, and reports headers that have changed.
 */
#include "safetensors/header_digest.h"

#include "fsdpckpt/verify.h"
#include "safetensors/kept.h"

#include "base/crc.h"
#include "verify/report.h"

#include <string.h>

static const char hexadecimal[] = "0123456789abcdef";

size_t fc_st_digest_offset(const char *text, size_t size) {
    static const char mark[] = "\"" ST_HEADER_DIGEST "\":\""; /* inside a string the quotation marks would be escaped */
    const char *found = memmem(text, size, mark, sizeof mark - 1);
    size_t at = found ? (size_t)(found - text) + sizeof mark - 1 : 0;
    return size - at > ST_DIGITS ? at : 0;
}

uint64_t fc_st_digest_of(const char *text, size_t size, size_t at) {
    static const char zeros[] = "0000000000000000";
    uint64_t crc = fc_crc64(0, text, at);
    crc = fc_crc64(crc, zeros, ST_DIGITS);
    return fc_crc64(crc, text + at + ST_DIGITS, size - at - ST_DIGITS);
}

void fc_st_digits(uint64_t value, char *out) {
    for (int i = ST_DIGITS - 1; i >= 0; i--, value >>= 4) {
        out[i] = hexadecimal[value & 15];
    }
}

int fc_st_read_digits(const char *text, uint64_t *out) {
    int wrong = 0;
    *out = 0;
    for (int i = 0; i < ST_DIGITS; i++) {
        const char *digit = text[i] ? strchr(hexadecimal, text[i]) : NULL;
        *out = *out << 4 | (digit ? (uint64_t)(digit - hexadecimal) : 0);
        wrong += digit == NULL;
    }
    return wrong;
}

/* Whether two texts of `size` bytes whose CRCs have this XOR differ in one bit. CRCs are linear, so the CRC of that bit
   and the zeros after it must be the difference. */
static bool is_one_bit(uint64_t difference, size_t size) {
    uint64_t table[256]; /* the CRC after one zero byte */
    for (int i = 0; i < 256; i++) {
        const unsigned char byte = (unsigned char)i;
        table[i] = fc_crc64_bare(&byte, 1);
    }
    for (int bit = 0; bit < 8; bit++) {
        uint64_t crc = table[1 << bit];
        for (size_t zeros = 0; zeros < size; zeros++) {
            if (crc == difference) {
                return true;
            }
            crc = table[crc & 255] ^ crc >> 8;
        }
    }
    return false;
}

/* Whether two digests with this XOR differ in one hexadecimal digit. */
static bool is_one_digit(uint64_t difference) {
    while (difference && !(difference & 15)) {
        difference >>= 4;
    }
    return difference <= 15;
}

fc_st_header_state fc_st_digest_compare(const char *text, size_t size, size_t at) {
    uint64_t recorded, digest = fc_st_digest_of(text, size, at);
    int wrong = fc_st_read_digits(text + at, &recorded);
    if (wrong > 1) {
        return ST_HEADER_REWRITTEN;
    }
    if (wrong == 0 && recorded == digest) {
        return ST_HEADER_GOOD;
    }
    return is_one_digit(recorded ^ digest) || is_one_bit(recorded ^ digest, size) ? ST_HEADER_DAMAGED
                                                                                  : ST_HEADER_REWRITTEN;
}

static fc_st_header_state state_of(const fc_checkpoint *checkpoint, size_t index) {
    const fc_st_state *state = checkpoint->state; /* the index, which follows the data files, has no state */
    return index < state->count ? (fc_st_header_state)state->headers[index] : ST_HEADER_UNKNOWN;
}

fc_code fc_st_check_file(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    if (state_of(checkpoint, index) != ST_HEADER_DAMAGED) {
        return FC_OK;
    }
    return fc_fail(err, FC_ECORRUPT,
                   "%s: the header is damaged: its CRC-64 differs from " ST_HEADER_DIGEST
                   " in its __metadata__, so one bit of a name, shape or offset is wrong; restore the file",
                   checkpoint->files[index].path);
}

/* Objects are stored in the headers, those of other programs possibly in several, so all must have a digest. */
static void count_objects(const fc_checkpoint *checkpoint, struct fc_verify_report *report) {
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        if (t->object && t->nchunks > 0) {
            fc_verify_covered(checkpoint, t, report);
        }
    }
}

fc_code fc_st_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                     fc_error *err) {
    const fc_st_state *all = checkpoint->state;
    size_t covered = 0;
    (void)err;
    for (size_t i = 0; i < checkpoint->nfiles; i++) {
        const fc_defect at = {.file = checkpoint->files[i].name};
        const fc_st_header_state state = state_of(checkpoint, i);
        fc_error found;
        if (fc_st_check_file(checkpoint, i, &found) != FC_OK) {
            fc_report_defect(findings, &at, "%s", found.message);
        } else if (state == ST_HEADER_REWRITTEN) {
            fc_report_defect(
                findings, &at,
                "%s: the header has changed since fsdpckpt wrote it: its CRC-64 differs from " ST_HEADER_DIGEST
                " in its __metadata__; the file is damaged, or another program rewrote it",
                checkpoint->files[i].path);
        } else if (state == ST_HEADER_BARE) {
            fc_report_defect(findings, &at,
                             "%s: the header has " ST_VERSION " but no " ST_HEADER_DIGEST
                             ": the file is damaged, or another program rewrote it",
                             checkpoint->files[i].path);
        }
        covered += state == ST_HEADER_GOOD || state == ST_HEADER_DAMAGED || state == ST_HEADER_REWRITTEN;
    }
    report->headers_digested += covered;
    if (covered == all->count) {
        count_objects(checkpoint, report);
    }
    return FC_OK;
}
