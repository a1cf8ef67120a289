/*
 * Loads JSON files that people write. See json_file.h.
 */
#include "io/json_file.h"

#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "net/remote.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Far larger than any plan or policy, and small enough to parse. */
enum { MAX_BYTES = 1 << 20 };

/*
 * Reads files without fc_read_whole, because the path may be a pipe, such as <(jq .plan config.json).
 * @param out receives the text, to be freed by the caller; NULL on failure.
 */
static fc_code read_text(const char *path, const char *what, char **out, size_t *len, fc_error *err) {
    fc_code code = FC_OK;
    *out = NULL;
    FC_TRY(fc_check_given(path, what, err));
    if (fc_is_remote(path)) {
        return fc_read_whole(path, what, MAX_BYTES, out, len, err);
    }
    FILE *f = fopen(path, "rb");
    if (!f) {
        return fc_fail_errno(err, errno, "%s", path);
    }
    char *text = malloc(MAX_BYTES + 1);
    if (!text) {
        code = fc_no_memory(err, path);
        goto out;
    }
    *len = fread(text, 1, MAX_BYTES + 1, f);
    if (ferror(f)) {
        code = fc_fail_errno(err, errno, "%s", path);
    } else if (*len > MAX_BYTES) {
        code = fc_fail(err, FC_EUSAGE, "%s: larger than 1 MiB, so it is not %s", path, what);
    } else {
        *out = text;
        text = NULL;
    }
out:
    free(text);
    fclose(f);
    return code;
}

void fc_json_hide_nonfinite(char *text, size_t len) {
    static const struct {
        const char *word, *by;
        size_t len;
    } words[] = {{"NaN", "[] ", 3}, {"Infinity", "[]      ", 8}, {"-Infinity", "[]       ", 9}};
    bool quoted = false;
    for (size_t at = 0; at < len;) {
        size_t taken = 0;
        for (size_t i = 0; !quoted && taken == 0 && i < sizeof words / sizeof *words; i++) {
            if (len - at >= words[i].len && memcmp(text + at, words[i].word, words[i].len) == 0) {
                taken = words[i].len;
                memcpy(text + at, words[i].by, taken);
            }
        }
        quoted = quoted != (text[at] == '"');
        at += taken > 0 ? taken : quoted && text[at] == '\\' ? 2 : 1;
    }
}

/* @param python whether the file may have the numbers that only Python's JSON has. */
static fc_code load(const char *path, const char *what, const char *example, bool python, json_t **out, fc_error *err) {
    char *text = NULL;
    size_t len = 0;
    json_error_t wrong;
    *out = NULL;
    FC_TRY(read_text(path, what, &text, &len, err));
    if (python) {
        fc_json_hide_nonfinite(text, len);
    }
    json_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &wrong);
    free(text);
    if (!root) {
        return fc_fail(err, FC_EUSAGE, "%s:%d:%d: not %s: %s", path, wrong.line, wrong.column, what, wrong.text);
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return fc_fail(err, FC_EUSAGE, "%s: %s must be an object such as %s", path, what, example);
    }
    *out = root;
    return FC_OK;
}

fc_code fc_json_load(const char *path, const char *what, const char *example, json_t **out, fc_error *err) {
    return load(path, what, example, false, out, err);
}

const char *const *fc_json_strings(const json_t *value, fc_arena *arena, bool *malformed) {
    size_t count = json_is_array(value) ? json_array_size(value) : 1;
    const char **out = fc_arena_calloc(arena, count + 1, sizeof *out);
    *malformed = false;
    for (size_t i = 0; out && i < count; i++) {
        const json_t *one = json_is_array(value) ? json_array_get(value, i) : value;
        if (!json_is_string(one)) {
            *malformed = true;
            return NULL;
        }
        out[i] = fc_arena_strndup(arena, json_string_value(one), json_string_length(one));
        if (!out[i]) {
            return NULL;
        }
    }
    return out;
}

fc_code fc_json_load_config(const char *path, fc_arena *arena, const char **file, json_t **out, fc_error *err) {
    struct stat st;
    const bool folder = fc_stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    *file = fc_arena_printf(arena, "%s%s", path, folder ? "/config.json" : "");
    return *file ? load(*file, "a model's configuration", "{\"num_attention_heads\": 32}", true, out, err)
                 : fc_no_memory(err, path);
}
