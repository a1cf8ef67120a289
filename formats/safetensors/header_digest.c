/*
 * From the text of a header to its digest, and from what was found of it when the files were opened to findings.
 */
#include "safetensors/header_digest.h"

#include "fsdpckpt/digest.h"
#include "fsdpckpt/verify.h"
#include "safetensors/kept.h"

#include <string.h>

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
        out[i] = "0123456789abcdef"[value & 15];
    }
}

static st_header_state state_of(const fc_checkpoint *checkpoint, size_t index) {
    const st_state *state = checkpoint->state; /* behind the data files there may be an index */
    return index < state->count ? (st_header_state)state->headers[index] : ST_HEADER_UNKNOWN;
}

fc_code fc_st_check_file(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    if (state_of(checkpoint, index) != ST_HEADER_DAMAGED) {
        return FC_OK;
    }
    return fc_fail(err, FC_ECORRUPT,
                   "%s: its header is damaged: it does not have the CRC-64 that " ST_HEADER_DIGEST
                   " in its __metadata__ says: a name, a shape or the place of data may be wrong: restore the file; if "
                   "another program changed it on purpose, take that key out",
                   checkpoint->files[index].path);
}

/* Objects lie in the headers; the members of `__metadata__` that others wrote may lie in all of them. */
static void count_objects(const fc_checkpoint *checkpoint, struct fc_verify_report *report) {
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        if (t->object && t->nchunks > 0) {
            report->digested++;
            report->undigested--;
            report->undigested_bytes -= (uint64_t)t->shape[0];
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
        } else if (state == ST_HEADER_BARE) {
            fc_report_defect(findings, &place,
                             "%s: its header has " ST_VERSION " and no " ST_HEADER_DIGEST
                             ", which fsdpckpt writes: it is damaged, or was changed by another program",
                             checkpoint->files[i].path);
        }
        covered += state == ST_HEADER_GOOD || state == ST_HEADER_DAMAGED;
    }
    report->headers_digested += covered;
    if (covered == all->count) {
        count_objects(checkpoint, report);
    }
    return FC_OK;
}
