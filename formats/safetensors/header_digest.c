/*
 * From the text of a header to its digest, and from what was found of it when the files were opened to findings.
 */
#include "safetensors/header_digest.h"

#include "fsdpckpt/digest.h"
#include "fsdpckpt/verify.h"
#include "safetensors/header.h"
#include "safetensors/kept.h"

#include <string.h>

size_t fc_st_digest_place(const char *text, size_t size) {
    static const char mark[] = "\"" ST_HEADER_DIGEST "\":\""; /* within a text the quotation marks would be escaped */
    const char *found = memmem(text, size, mark, sizeof mark - 1);
    size_t place = found ? (size_t)(found - text) + sizeof mark - 1 : 0;
    return size - place > ST_DIGITS ? place : 0;
}

/* Where the string that begins at `at` ends: behind its quotation mark. */
static size_t skip_string(const char *text, size_t size, size_t at) {
    for (at++; at < size && text[at] != '"'; at++) {
        at += text[at] == '\\';
    }
    return at < size ? at + 1 : size;
}

/* A walk over a header, member by member: those of the outermost object, and those of `__metadata__` in it. */
typedef struct walk {
    const char *text;
    size_t place, start; /* of the digits; of the member, 0: none has begun */
    int depth;
    bool within; /* __metadata__ */
    uint64_t sum;
} walk;

static void end_member(walk *w, size_t end) {
    if (w->start && !(w->start <= w->place && w->place < end)) {
        w->sum += fc_crc64(w->within, w->text + w->start, end - w->start);
    }
    w->start = 0;
}

static void open_level(walk *w, size_t at) {
    static const char key[] = "\"__metadata__\":";
    if (w->depth++ == 1 && w->start && at - w->start == sizeof key - 1 &&
        memcmp(w->text + w->start, key, sizeof key - 1) == 0) {
        w->within = true;
        w->start = 0;
    }
}

static void close_level(walk *w, size_t at) {
    if (w->depth == (w->within ? 2 : 1)) {
        end_member(w, at);
        w->within = false;
    }
    w->depth--;
}

uint64_t fc_st_digest_of(const char *text, size_t size, size_t place) {
    walk w = {.text = text, .place = place};
    for (size_t i = ST_LENGTH_BYTES; i < size;) {
        const char c = text[i];
        if (c == '"') {
            w.start = w.start ? w.start : i;
            i = skip_string(text, size, i);
            continue;
        }
        if (c == '{' || c == '[') {
            open_level(&w, i);
        } else if (c == '}' || c == ']') {
            close_level(&w, i);
        } else if (c == ',' && w.depth == (w.within ? 2 : 1)) {
            end_member(&w, i);
        }
        i++;
    }
    return w.sum;
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
