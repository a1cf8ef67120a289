/*
 * inspect for a delta and for a directory of versions, as text and as JSON.
 */
#include "versions.h"

#include "options/suggest.h"
#include "output/json_out.h"

#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The numbers of a version, of a tensor, or of one tensor in a version. */
typedef struct amounts {
    size_t tensors;
    uint64_t bytes;    /* FC_DELTA_UNKNOWN, here and below */
    uint64_t elements; /* of the tensors whose elements are known */
    uint64_t stored, changed_bytes, changed_elements;
    bool decoded; /* all frames; without --stats none is */
} amounts;

static uint64_t add_known(uint64_t a, uint64_t b) {
    return a == FC_DELTA_UNKNOWN || b == FC_DELTA_UNKNOWN || a > UINT64_MAX - b ? FC_DELTA_UNKNOWN : a + b;
}

static void add_frame(amounts *sum, const fc_delta_changed *f) {
    const bool known = f->bytes != FC_DELTA_UNKNOWN && f->element_bytes > 0;
    sum->tensors++;
    sum->stored += f->stored_bytes;
    sum->bytes = add_known(sum->bytes, f->bytes);
    sum->elements = add_known(sum->elements, known ? f->bytes / f->element_bytes : FC_DELTA_UNKNOWN);
    sum->decoded &= f->decoded;
    sum->changed_bytes += f->changed_bytes;
    sum->changed_elements += f->changed_elements;
}

/* Sums up the frames of a version. @param tensor if not NULL, only its frame. */
static amounts sum_version(const fc_delta_seen *v, const char *tensor) {
    amounts sum = {.decoded = true};
    if (!v->frames) {
        return (amounts){.tensors = v->tensors, .bytes = v->stored_bytes, .stored = v->stored_bytes};
    }
    for (size_t i = 0; i < v->tensors; i++) {
        if (!tensor || strcmp(v->frames[i].name, tensor) == 0) {
            add_frame(&sum, &v->frames[i]);
        }
    }
    return sum;
}

/* ---- text ---- */

enum { COLUMNS = 10, CELL = 48 };

/* The cells of one line. An empty one is printed as "-", and a column of empty ones not at all. */
typedef struct version_line {
    const char *name; /* of a tensor; printed last */
    char cells[COLUMNS][CELL];
} version_line;

static void put_share(char cell[CELL], bool known, uint64_t part, uint64_t whole) {
    if (known && whole > 0) {
        snprintf(cell, CELL, "%.3g %%", 100.0 * (double)part / (double)whole);
    }
}

/* Fills the cells from `first` on: size, stored, ratio, and with --stats what changes. */
static void put_amounts(version_line *line, int first, const amounts *a, bool stats) {
    char text[TEXT_SIZE_MAX];
    const bool sized = a->bytes != FC_DELTA_UNKNOWN;
    snprintf(line->cells[first], CELL, "%s", sized ? text_bytes(text, a->bytes) : "");
    snprintf(line->cells[first + 1], CELL, "%s", text_bytes(text, a->stored));
    if (sized && a->stored > 0) {
        snprintf(line->cells[first + 2], CELL, "%.1f", (double)a->bytes / (double)a->stored);
    }
    if (stats) {
        snprintf(line->cells[first + 3], CELL, "%s", a->decoded ? text_bytes(text, a->changed_bytes) : "");
        put_share(line->cells[first + 4], a->decoded && sized, a->changed_bytes, a->bytes);
        put_share(line->cells[first + 5], a->decoded && a->elements != FC_DELTA_UNKNOWN, a->changed_elements,
                  a->elements);
    }
}

static void put_version(version_line *line, const fc_delta_seen *v, const char *tensor, bool stats) {
    const amounts sum = sum_version(v, tensor);
    snprintf(line->cells[0], CELL, "%" PRId64, v->number);
    if (v->damaged) {
        snprintf(line->cells[2], CELL, "damaged");
        return;
    }
    if (!v->frames) {
        char text[TEXT_SIZE_MAX];
        snprintf(line->cells[2], CELL, "full");
        snprintf(line->cells[3], CELL, "%zu", sum.tensors);
        snprintf(line->cells[5], CELL, "%s", text_bytes(text, sum.stored));
        return;
    }
    snprintf(line->cells[1], CELL, "%" PRId64, v->base);
    snprintf(line->cells[2], CELL, "%s", fc_delta_encoding_name(v->encoding));
    snprintf(line->cells[3], CELL, "%zu", sum.tensors);
    put_amounts(line, 4, &sum, stats);
}

/* Prints lines under their headings. Numbers are on the right. */
static void print_lines(text_out *out, const char *const *headings, const version_line *lines, size_t count) {
    for (size_t row = 0; row <= count; row++) {
        const char *separator = "";
        for (int c = 0; c < COLUMNS; c++) {
            size_t width = 0;
            for (size_t i = 0; i < count; i++) {
                const size_t length = strlen(lines[i].cells[c]);
                width = length > width ? length : width;
            }
            if (width == 0 || !headings[c]) {
                continue;
            }
            width = strlen(headings[c]) > width ? strlen(headings[c]) : width;
            const char *cell = row == 0 ? headings[c] : lines[row - 1].cells[c];
            const char *text = *cell ? cell : "-";
            text_puts(out, separator);
            text_repeat(out, " ", width - strlen(text));
            text_puts(out, text);
            separator = "  ";
        }
        if (count > 0 && lines[0].name) {
            text_name_in(out, separator, row == 0 ? "NAME" : lines[row - 1].name, "");
        }
        text_puts(out, "\n");
    }
    text_puts(out, "\n");
}

static const char *const version_headings[COLUMNS] = {"VERSION", "BASE",  "KIND",    "TENSORS",  "SIZE",
                                                      "STORED",  "RATIO", "CHANGED", "OF BYTES", "OF ELEMENTS"};
static const char *const tensor_headings[COLUMNS] = {"SIZE", "STORED", "RATIO", "CHANGED", "OF BYTES", "OF ELEMENTS"};

static fc_code print_versions(const cli_call *call, const fc_delta_survey *s, fc_error *err) {
    const options *o = call->options;
    version_line *lines = fc_arena_calloc(call->arena, s->count, sizeof *lines);
    size_t count = 0;
    FC_NEED(lines, err, o->operands[0]);
    for (size_t i = 0; i < s->count; i++) {
        const fc_delta_seen *v = &s->versions[i];
        if (!o->tensor || (v->frames && sum_version(v, o->tensor).tensors > 0)) {
            put_version(&lines[count++], v, o->tensor, o->stats);
        }
    }
    print_lines(call->out, version_headings, lines, count);
    return FC_OK;
}

/* The tensors of a single delta. */
static fc_code print_tensors(const cli_call *call, const fc_delta_seen *v, fc_error *err) {
    version_line *lines = fc_arena_calloc(call->arena, v->tensors + 1, sizeof *lines);
    FC_NEED(lines, err, v->path);
    for (size_t i = 0; i < v->tensors; i++) {
        amounts sum = {.decoded = true};
        add_frame(&sum, &v->frames[i]);
        lines[i].name = v->frames[i].name;
        put_amounts(&lines[i], 0, &sum, call->options->stats);
    }
    if (v->tensors > 0) {
        print_lines(call->out, tensor_headings, lines, v->tensors);
    }
    return FC_OK;
}

static void print_count(text_out *out, size_t count, const char *one, const char *many, uint64_t bytes) {
    char text[TEXT_SIZE_MAX];
    text_printf(out, "%zu %s, %s", count, count == 1 ? one : many, text_bytes(text, bytes));
}

static void print_survey_summary(const cli_call *call, const fc_delta_survey *s, const versions_faults *faults) {
    size_t deltas = 0, full = 0;
    uint64_t delta_bytes = 0, full_bytes = 0;
    for (size_t i = 0; i < s->count; i++) {
        const fc_delta_seen *v = &s->versions[i];
        deltas += v->frames != NULL;
        full += !v->frames && !v->damaged;
        *(v->frames ? &delta_bytes : &full_bytes) += v->stored_bytes;
    }
    text_name(call->out, call->options->operands[0]);
    text_puts(call->out, ": ");
    print_count(call->out, deltas, "delta", "deltas", delta_bytes);
    if (full > 0) {
        text_puts(call->out, "; ");
        print_count(call->out, full, "full version", "full versions", full_bytes);
    }
    text_puts(call->out, "\n");
    for (size_t i = 0; i < faults->count; i++) {
        text_name(call->out, faults->items[i].message);
        text_puts(call->out, "\n");
    }
}

/* ---- JSON ---- */

static void write_known(json_out *j, const char *key, bool known, uint64_t value) {
    jw_key(j, key);
    if (known) {
        jw_uint(j, value);
    } else {
        jw_string(j, NULL);
    }
}

static void write_amounts(json_out *j, const amounts *a) {
    const bool elements = a->elements != FC_DELTA_UNKNOWN;
    write_known(j, "bytes", a->bytes != FC_DELTA_UNKNOWN, a->bytes);
    write_known(j, "elements", elements, a->elements);
    JSON_MEMBER(j, uint, "stored_bytes", a->stored);
    write_known(j, "changed_bytes", a->decoded, a->changed_bytes);
    write_known(j, "changed_elements", a->decoded && elements, a->changed_elements);
}

static void write_frames(json_out *j, const fc_delta_seen *v, const char *tensor) {
    jw_member_open(j, "changes", '[');
    for (size_t i = 0; v->frames && i < v->tensors; i++) {
        const fc_delta_changed *f = &v->frames[i];
        if (!tensor || strcmp(f->name, tensor) == 0) {
            amounts sum = {.decoded = true};
            add_frame(&sum, f);
            jw_open(j, '{');
            JSON_MEMBER(j, string, "name", f->name);
            write_amounts(j, &sum);
            jw_close(j, '}');
        }
    }
    jw_close(j, ']');
}

static void write_version(json_out *j, const fc_delta_seen *v, const char *tensor) {
    amounts sum = sum_version(v, tensor);
    sum.elements = v->frames ? sum.elements : FC_DELTA_UNKNOWN;
    jw_open(j, '{');
    JSON_MEMBER(j, int, "version", v->number);
    JSON_MEMBER(j, string, "path", v->path);
    JSON_MEMBER(j, string, "kind", v->damaged ? "damaged" : v->frames ? "delta" : "full");
    write_known(j, "base_version", v->base != FC_DELTA_NO_NUMBER, (uint64_t)v->base);
    JSON_MEMBER(j, string, "delta_encoding", v->frames ? fc_delta_encoding_name(v->encoding) : NULL);
    JSON_MEMBER(j, string, "checksum_format", v->frames ? fc_delta_checksum_name(v->checksum) : NULL);
    JSON_UINTS(j, {"files", v->files}, {"tensors", sum.tensors});
    write_amounts(j, &sum);
    write_frames(j, v, tensor);
    jw_close(j, '}');
}

static void write_survey(const cli_call *call, const fc_delta_survey *s, const versions_faults *faults) {
    static const char *const kinds[] = {[FC_DELTA_DAMAGED] = "damaged",
                                        [FC_DELTA_GAP] = "gap",
                                        [FC_DELTA_FORK] = "fork",
                                        [FC_DELTA_BAD_FRAME] = "frame",
                                        [FC_DELTA_BAD_SUM] = "checksum"};
    json_out j;
    jw_document(&j, call->out, 4, "versions");
    JSON_MEMBER(&j, string, "source", call->options->operands[0]);
    jw_member_open(&j, "versions", '[');
    for (size_t i = 0; i < s->count; i++) {
        write_version(&j, &s->versions[i], call->options->tensor);
    }
    jw_close(&j, ']');
    jw_member_open(&j, "faults", '[');
    for (size_t i = 0; i < faults->count; i++) {
        jw_open(&j, '{');
        JSON_MEMBER(&j, string, "kind", kinds[faults->items[i].kind]);
        JSON_MEMBER(&j, int, "version", faults->items[i].number);
        JSON_MEMBER(&j, string, "message", faults->items[i].message);
        jw_close(&j, '}');
    }
    jw_close(&j, ']');
    jw_end_document(&j);
}

/* ---- both ---- */

/* Refuses a name that no version changes. */
static fc_code check_tensor(const cli_call *call, const fc_delta_survey *s, fc_error *err) {
    const char *tensor = call->options->tensor;
    size_t count = 0, total = 0;
    for (size_t i = 0; i < s->count; i++) {
        total += s->versions[i].frames ? s->versions[i].tensors : 0;
    }
    const char **names = fc_arena_calloc(call->arena, total + 1, sizeof *names);
    FC_NEED(names, err, call->options->operands[0]);
    for (size_t i = 0; i < s->count; i++) {
        const fc_delta_seen *v = &s->versions[i];
        for (size_t k = 0; v->frames && k < v->tensors; k++) {
            names[count++] = v->frames[k].name;
        }
    }
    fc_sort_texts(names, count);
    return !tensor || fc_find_text(names, count, tensor) < count
               ? FC_OK
               : suggest_name(call->options->operands[0], names, sizeof *names, count, tensor, err);
}

/* Damage is an error here; check reports the rest. */
static fc_code find_damage(const versions_faults *faults, fc_error *err) {
    for (size_t i = 0; i < faults->count; i++) {
        const fc_delta_fault_kind kind = faults->items[i].kind;
        if (kind != FC_DELTA_GAP && kind != FC_DELTA_FORK) {
            return fc_fail(err, faults->items[i].code, "%s", faults->items[i].message);
        }
    }
    return FC_OK;
}

fc_code versions_inspect(cli_call *call, fc_error *err) {
    const options *o = call->options;
    versions_faults faults = {.count = 0};
    fc_delta_survey s;
    FC_TRY(versions_look(call, o->stats ? FC_DELTA_FRAMES : FC_DELTA_SIZES, &faults, &s, err));
    FC_TRY(check_tensor(call, &s, err));
    if (options_silent(o)) {
        return find_damage(&faults, err);
    }
    if (o->json) {
        write_survey(call, &s, &faults);
        return find_damage(&faults, err);
    }
    FC_TRY(print_versions(call, &s, err));
    if (s.count == 1 && s.versions[0].frames && !o->tensor) {
        FC_TRY(print_tensors(call, &s.versions[0], err));
    }
    print_survey_summary(call, &s, &faults);
    return find_damage(&faults, err);
}
