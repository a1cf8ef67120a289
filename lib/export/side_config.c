/*
 * config.json of a model whose weights were dequantized: without what says how they were quantized, and with the dtype
 * that they have now. All other bytes stay, because JSON libraries write numbers in ways of their own.
 */
#include "fsdpckpt/export.h"

#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/json_file.h"
#include "io/path.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_BYTES = 64 << 20, MOST_EDITS = 8 /* keys are unique */ };

/* Bytes that are replaced. */
typedef struct edit {
    size_t from, to;
    const char *by; /* a text in quotes; NULL: nothing */
} edit;

typedef struct editor {
    const char *text; /* a JSON object, so that quotes and brackets match */
    size_t at, size;
    const char *dtype; /* NULL: stays */
    edit edits[MOST_EDITS];
    size_t count;
    bool quantized; /* something about quantization was removed */
} editor;

static bool is_one_of(const char *text, size_t len, const char *const *list, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (strlen(list[i]) == len && memcmp(list[i], text, len) == 0) {
            return true;
        }
    }
    return false;
}

static void skip_space(editor *e) {
    while (e->at < e->size && isspace((unsigned char)e->text[e->at])) {
        e->at++;
    }
}

static void skip_string(editor *e) {
    for (e->at++; e->at < e->size && e->text[e->at] != '"'; e->at++) {
        e->at += e->text[e->at] == '\\';
    }
    e->at++;
}

/* Goes to the end of a value: what is in it does not matter. */
static void skip_value(editor *e) {
    int depth = 0;
    do {
        const char c = e->text[e->at];
        if (c == '"') {
            skip_string(e);
            continue;
        }
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        e->at++;
    } while (e->at < e->size && (depth > 0 || !strchr(",}] \t\r\n", e->text[e->at])));
}

static void add_edit(editor *e, size_t from, size_t to, const char *by) {
    if (e->count < MOST_EDITS) {
        e->edits[e->count++] = (edit){from, to, by};
    }
}

/* Removes a member with the comma before it, or, of the first one, with that after it. */
static void remove_member(editor *e, size_t start, size_t comma) {
    size_t end = e->at;
    skip_space(e);
    if (comma == 0 && e->text[e->at] == ',') {
        end = e->at + 1;
    }
    add_edit(e, comma > 0 ? comma : start, end, NULL);
    e->quantized = true;
}

/* Goes through an object, whose bracket is next. @param inner of the model's part about language */
static void edit_object(editor *e, bool inner) { // NOLINT(misc-no-recursion): two levels
    static const char *const quantization[] = {"quantization_config", "compression_config"};
    static const char *const dtypes[] = {"torch_dtype", "dtype"};
    static const char *const parts[] = {"text_config"};
    size_t comma = 0;
    for (e->at++, skip_space(e); e->at < e->size && e->text[e->at] == '"'; skip_space(e)) {
        const size_t start = e->at;
        skip_string(e);
        const char *key = e->text + start + 1;
        const size_t len = e->at - start - 2;
        skip_space(e);
        e->at++; /* the colon */
        skip_space(e);
        const size_t value = e->at;
        bool removed = false;
        if (!inner && e->text[value] == '{' && is_one_of(key, len, parts, 1)) {
            edit_object(e, true);
        } else {
            skip_value(e);
            removed = is_one_of(key, len, quantization, 2);
            if (removed) {
                remove_member(e, start, comma);
            } else if (e->dtype && e->text[value] == '"' && is_one_of(key, len, dtypes, 2)) {
                add_edit(e, value + 1, e->at - 1, e->dtype);
            }
        }
        skip_space(e);
        if (e->text[e->at] == ',') {
            comma = removed && comma == 0 ? 0 : e->at;
            e->at++;
        }
    }
    e->at++;
}

static fc_code write_edited(const editor *e, const char *path, fc_error *err) {
    uint64_t offset = 0;
    size_t at = 0;
    const int fd = fc_open(path, O_WRONLY | O_TRUNC, 0);
    fc_code rc = fd >= 0 ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be written", path);
    for (size_t i = 0; rc == FC_OK && i <= e->count; i++) {
        const edit last = {e->size, e->size, NULL}, *next = i < e->count ? &e->edits[i] : &last;
        rc = fc_pwrite_full(fd, e->text + at, next->from - at, offset, path, err);
        offset += next->from - at;
        at = next->to;
        if (rc == FC_OK && next->by) {
            rc = fc_pwrite_full(fd, next->by, strlen(next->by), offset, path, err);
            offset += strlen(next->by);
        }
    }
    return fc_close_written(fd, rc, path, err);
}

fc_code fc_side_config_dequantize(const char *folder, fc_dtype dtype, bool *removed, fc_error *err) {
    char path[4096];
    char *text = NULL, *plain = NULL;
    json_t *root = NULL;
    editor *e = calloc(1, sizeof *e);
    fc_code rc = e ? FC_OK : fc_no_memory(err, folder);
    *removed = false;
    snprintf(path, sizeof path, "%s/config.json", folder);
    if (rc != FC_OK || fc_access(path, F_OK) != 0) {
        goto out;
    }
    FC_TRY_GOTO(fc_read_whole(path, "a model's configuration", MOST_BYTES, &text, &e->size, err), rc, out);
    plain = malloc(e->size + 1);
    FC_TRY_GOTO(plain ? FC_OK : fc_no_memory(err, path), rc, out);
    memcpy(plain, text, e->size);
    fc_json_hide_nonfinite(plain, e->size);
    root = json_loadb(plain, e->size, JSON_REJECT_DUPLICATES, NULL);
    if (!json_is_object(root)) {
        rc = fc_fail(err, FC_EUSAGE, "%s: is no JSON object, so what it says of quantization cannot be removed", path);
        goto out;
    }
    e->text = text;
    e->dtype = dtype == FC_OPAQUE ? NULL : fc_dtype_get(dtype)->torch_name;
    skip_space(e);
    edit_object(e, false);
    *removed = e->quantized;
    rc = e->count > 0 ? write_edited(e, path, err) : FC_OK;
out:
    json_decref(root);
    free(plain);
    free(text);
    free(e);
    return rc;
}
