/*
 * From the text of a header to its digest, and from what was found of it when the files were opened to findings.
 */
#include "safetensors/header_digest.h"

#include "fsdpckpt/verify.h"
#include "safetensors/kept.h"

#include "base/crc.h"

#include <string.h>

static const char hexadecimal[] = "0123456789abcdef";

size_t fc_st_digest_place(const char *text, size_t size) {
    static const char mark[] = "\"" ST_HEADER_DIGEST "\":\""; /* within a text the quotation marks would be escaped */
    const char *found = memmem(text, size, mark, sizeof mark - 1);
    size_t place = found ? (size_t)(found - text) + sizeof mark - 1 : 0;
    return size - place > ST_DIGITS ? place : 0;
}

uint64_t fc_st_digest_of(const char *text, size_t size, size_t place) {
    static const char zeros[] = "0000000000000000";
    uint64_t crc = fc_crc64(0, text, place);
    crc = fc_crc64(crc, zeros, ST_DIGITS);
    return fc_crc64(crc, text + place + ST_DIGITS, size - place - ST_DIGITS);
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

/* Whether CRCs of `size` bytes that differ so are of texts that differ in one bit: CRCs are linear, so that bit alone,
   with the zeros behind it, must have the difference for its CRC. */
static bool is_one_bit(uint64_t difference, size_t size) {
    uint64_t table[256]; /* the step over one zero */
    for (int i = 0; i < 256; i++) {
        const unsigned char byte = (unsigned char)i;
        table[i] = fc_crc64_bare(&byte, 1);
    }
    for (int bit = 0; bit < 8; bit++) {
        uint64_t crc = table[1 << bit];
        for (size_t behind = 0; behind < size; behind++) {
            if (crc == difference) {
                return true;
            }
            crc = table[crc & 255] ^ crc >> 8;
        }
    }
    return false;
}

/* Whether they differ in one hexadecimal digit. */
static bool is_one_digit(uint64_t difference) {
    while (difference && !(difference & 15)) {
        difference >>= 4;
    }
    return difference <= 15;
}

st_header_state fc_st_digest_compare(const char *text, size_t size, size_t place) {
    uint64_t recorded, digest = fc_st_digest_of(text, size, place);
    int wrong = fc_st_read_digits(text + place, &recorded);
    if (wrong > 1) {
        return ST_HEADER_REWRITTEN;
    }
    if (wrong == 0 && recorded == digest) {
        return ST_HEADER_GOOD;
    }
    return is_one_digit(recorded ^ digest) || is_one_bit(recorded ^ digest, size) ? ST_HEADER_DAMAGED
                                                                                  : ST_HEADER_REWRITTEN;
}

static st_header_state state_of(const fc_checkpoint *checkpoint, size_t index) {
    const st_state *state = checkpoint->state; /* behind the data files there may be an index */
    return index < state->count ? (st_header_state)state->headers[index] : ST_HEADER_UNKNOWN;
}

fc_code fc_st_check_file(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    if (state_of(checkpoint, index) != ST_HEADER_DAMAGED) {
        return FC_OK;
    }
    return fc_fail(
        err, FC_ECORRUPT,
        "%s: its header is damaged: it does not have the CRC-64 that " ST_HEADER_DIGEST
        " in its __metadata__ says: one bit of a name, a shape or the place of data is wrong: restore the file",
        checkpoint->files[index].path);
}

/* Objects lie in the headers; the members of `__metadata__` that others wrote may lie in all of them. */
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
    const st_state *all = checkpoint->state;
    size_t covered = 0;
    (void)err;
    for (size_t i = 0; i < checkpoint->nfiles; i++) {
        const fc_defect place = {.file = checkpoint->files[i].name};
        const st_header_state state = state_of(checkpoint, i);
        fc_error found;
        if (fc_st_check_file(checkpoint, i, &found) != FC_OK) {
            fc_report_defect(findings, &place, "%s", found.message);
        } else if (state == ST_HEADER_REWRITTEN) {
            fc_report_defect(
                findings, &place,
                "%s: its header has changed since fsdpckpt wrote it: it does not have the CRC-64 that " ST_HEADER_DIGEST
                " in its __metadata__ says; it is damaged, or another program wrote it anew",
                checkpoint->files[i].path);
        } else if (state == ST_HEADER_BARE) {
            fc_report_defect(findings, &place,
                             "%s: its header has " ST_VERSION " and no " ST_HEADER_DIGEST
                             ", which fsdpckpt writes: it is damaged, or was changed by another program",
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
