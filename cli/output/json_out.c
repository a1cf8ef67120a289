/*
 * JSON written as a stream: see json_out.h.
 */
#include "output/json_out.h"

#include <math.h>
#include <string.h>

void jw_document(json_out *j, text_out *out, int line_depth, const char *kind) {
    *j = (json_out){.out = out, .line_depth = line_depth, .first = true};
    jw_open(j, '{');
    JSON_MEMBER(j, string, "fsdpckpt", kind);
    JSON_MEMBER(j, uint, "schema", JSON_SCHEMA_VERSION);
}

void jw_end_document(json_out *j) {
    jw_close(j, '}');
    text_puts(j->out, "\n");
}

/* Writes what precedes a value or a key: a comma, a new line, or nothing after a key. */
static void write_separator(json_out *j) {
    if (j->after_key) {
        j->after_key = false;
        return;
    }
    if (!j->first) {
        text_write(j->out, ",", 1);
    }
    if (j->depth > 0 && j->depth <= j->line_depth) {
        text_write(j->out, "\n", 1);
        text_repeat(j->out, "  ", (size_t)j->depth);
    } else if (!j->first) {
        text_write(j->out, " ", 1);
    }
    j->first = false;
}

/* \u and the UTF-16 code units, as JSON wants it. */
static void write_escape(text_out *out, uint32_t code) {
    if (code > 0xffff) {
        text_printf(out, "\\u%04x", (unsigned)(0xd7c0 + (code >> 10)));
        code = 0xdc00 + (code & 0x3ff);
    }
    text_printf(out, "\\u%04x", (unsigned)code);
}

static void write_escaped(text_out *out, const char *s) {
    const char *start = s;
    text_write(out, "\"", 1);
    while (*s) {
        size_t plain = 0;
        while (s[plain] >= 0x20 && s[plain] < 0x7f && s[plain] != '"' && s[plain] != '\\' &&
               !text_is_second_hash(start, s + plain)) {
            plain++;
        }
        text_write(out, s, plain);
        s += plain;
        if (!*s) {
            break;
        }
        uint32_t code;
        size_t len = text_utf8(s, &code);
        if (len == 0) {
            text_puts(out, "\xef\xbf\xbd");
            s++;
        } else if (text_is_unsafe(code) || text_is_second_hash(start, s)) {
            write_escape(out, code);
            s += len;
        } else {
            if (code == '"' || code == '\\') {
                text_write(out, "\\", 1);
            }
            text_write(out, s, len);
            s += len;
        }
    }
    text_write(out, "\"", 1);
}

void jw_key(json_out *j, const char *key) {
    write_separator(j);
    write_escaped(j->out, key);
    text_write(j->out, ": ", 2);
    j->after_key = true;
}

void jw_open(json_out *j, char bracket) {
    write_separator(j);
    text_write(j->out, &bracket, 1);
    j->depth++;
    j->first = true;
}

void jw_close(json_out *j, char bracket) {
    bool lines = j->depth <= j->line_depth && !j->first;
    j->depth--;
    if (lines) {
        text_write(j->out, "\n", 1);
        text_repeat(j->out, "  ", (size_t)j->depth);
    }
    text_write(j->out, &bracket, 1);
    j->first = false;
}

void jw_string(json_out *j, const char *s) {
    write_separator(j);
    if (s) {
        write_escaped(j->out, s);
    } else {
        text_puts(j->out, "null");
    }
}

void jw_int(json_out *j, int64_t n) {
    write_separator(j);
    text_int(j->out, n);
}

void jw_uint(json_out *j, uint64_t n) {
    write_separator(j);
    text_uint(j->out, n);
}

void jw_number(json_out *j, double n) {
    write_separator(j);
    text_printf(j->out, "%.6g", isfinite(n) ? n : 0.0);
}

void jw_bool(json_out *j, bool value) {
    write_separator(j);
    text_puts(j->out, value ? "true" : "false");
}

void jw_copy(text_out *out, const char *json) {
    const char *start = json;
    while (*json) {
        size_t plain = 0;
        while (json[plain] > 0 && json[plain] < 0x7f && !text_is_second_hash(start, json + plain)) {
            plain++;
        }
        text_write(out, json, plain);
        json += plain;
        uint32_t code;
        size_t len = *json ? text_utf8(json, &code) : 0;
        if (len > 0 && (text_is_unsafe(code) || text_is_second_hash(start, json))) {
            write_escape(out, code);
        } else if (*json) {
            text_write(out, len > 0 ? json : "\xef\xbf\xbd", len > 0 ? len : 3);
        }
        json += *json && len == 0 ? 1 : len;
    }
}

void jw_raw(json_out *j, const char *json) {
    write_separator(j);
    jw_copy(j->out, json);
}

void jw_ints(json_out *j, int count, const int64_t *values) {
    jw_open(j, '[');
    for (int i = 0; i < count; i++) {
        jw_int(j, values[i]);
    }
    jw_close(j, ']');
}

void jw_member_open(json_out *j, const char *key, char bracket) {
    jw_key(j, key);
    jw_open(j, bracket);
}

void jw_member_ints(json_out *j, const char *key, int count, const int64_t *values) {
    jw_key(j, key);
    jw_ints(j, count, values);
}

void jw_member_strings(json_out *j, const char *key, const char *const *strings, size_t count) {
    jw_member_open(j, key, '[');
    for (size_t i = 0; i < count && strings[i]; i++) {
        jw_string(j, strings[i]);
    }
    jw_close(j, ']');
}

void jw_uints(json_out *j, const json_uint *members) {
    for (; members->key; members++) {
        JSON_MEMBER(j, uint, members->key, members->value);
    }
}

void jw_path(json_out *j, const fc_path *path) {
    jw_open(j, '[');
    for (size_t i = 0; i < path->count; i++) {
        const fc_path_element *e = &path->elements[i];
        if (e->is_index && e->key[0] && strspn(e->key, "0123456789") == strlen(e->key)) {
            jw_raw(j, e->key);
        } else {
            jw_string(j, e->key);
        }
    }
    jw_close(j, ']');
}
