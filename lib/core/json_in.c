/*
 * JSON read as it stands: see json_in.h. RFC 8259, strict, except that a byte order mark at the start is skipped.
 */
#include "core/json_in.h"

#include "core/checked.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Nesting in what is stepped over; far above anything that a person or a program writes. */
enum { MAX_NESTING = 64 };

void fc_json_begin(fc_json *j, char *text, size_t size, const char *path, fc_error *err) {
    bool marked = size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0;
    *j = (fc_json){.at = marked ? text + 3 : text, .end = text + size, .path = path, .line = 1, .err = err};
    j->line_start = j->at;
}

fc_code fc_json_fail(fc_json *j, fc_code code, const char *fmt, ...) {
    char text[768];
    va_list args;
    if (j->code != FC_OK) {
        return j->code;
    }
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    j->code = code;
    return fc_fail(j->err, code, "%s:%zu:%zu: %s", j->path, j->line, (size_t)(j->at - j->line_start) + 1, text);
}

static fc_code unexpected(fc_json *j, const char *wanted) {
    unsigned char c = (unsigned char)*j->at;
    if (j->at >= j->end) {
        return fc_json_fail(j, FC_ECORRUPT, "the file ends where %s should be: it is incomplete", wanted);
    }
    return c < 0x20 || c > 0x7e ? fc_json_fail(j, FC_ECORRUPT, "%s should be here, not the byte 0x%02x", wanted, c)
                                : fc_json_fail(j, FC_ECORRUPT, "%s should be here, not '%c'", wanted, c);
}

static void skip_space(fc_json *j) {
    for (;; j->at++) {
        if (*j->at == '\n') {
            j->line++;
            j->line_start = j->at + 1;
        } else if (*j->at != ' ' && *j->at != '\t' && *j->at != '\r') {
            return;
        }
    }
}

char fc_json_peek(fc_json *j) {
    if (j->code != FC_OK) {
        return '\0';
    }
    skip_space(j);
    char c = *j->at;
    if (c == '-' || (c >= '0' && c <= '9')) {
        return '0';
    }
    return c != '\0' && strchr("{[\"tfn", c) ? c : '\0';
}

fc_code fc_json_finish(fc_json *j) {
    if (j->code == FC_OK) {
        skip_space(j);
    }
    return j->code == FC_OK && j->at != j->end ? unexpected(j, "the end of the file") : j->code;
}

bool fc_json_open(fc_json *j, char bracket, const char *what) {
    if (fc_json_peek(j) != bracket) {
        if (j->code == FC_OK) {
            unexpected(j, what);
        }
        return false;
    }
    j->at++;
    return true;
}

bool fc_json_more(fc_json *j, char closing, bool *first) {
    if (j->code != FC_OK) {
        return false;
    }
    skip_space(j);
    if (*j->at == closing) {
        j->at++;
        return false;
    }
    if (!*first) {
        if (*j->at != ',') {
            unexpected(j, closing == ']' ? "',' or ']'" : "',' or '}'");
            return false;
        }
        j->at++;
    }
    *first = false;
    return true;
}

/* Four hexadecimal digits. @return false, with nothing consumed, when they are something else. */
static bool read_hex(const char *s, uint32_t *out) {
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) {
        char c = s[i];
        uint32_t digit = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                         : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a') + 10
                         : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A') + 10
                                                : 16;
        if (digit == 16) { /* also at the terminating NUL, so nothing beyond is read */
            return false;
        }
        value = value << 4 | digit;
    }
    *out = value;
    return true;
}

static char *put_utf8(char *to, uint32_t code) {
    if (code < 0x80) {
        *to++ = (char)code;
    } else if (code < 0x800) {
        *to++ = (char)(0xc0 | code >> 6);
        *to++ = (char)(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
        *to++ = (char)(0xe0 | code >> 12);
        *to++ = (char)(0x80 | (code >> 6 & 0x3f));
        *to++ = (char)(0x80 | (code & 0x3f));
    } else {
        *to++ = (char)(0xf0 | code >> 18);
        *to++ = (char)(0x80 | (code >> 12 & 0x3f));
        *to++ = (char)(0x80 | (code >> 6 & 0x3f));
        *to++ = (char)(0x80 | (code & 0x3f));
    }
    return to;
}

/* The escape at `at`, which is its backslash, into `*to`; the decoded bytes are never more than the escape's. */
static bool read_escape(fc_json *j, char **to) {
    static const char letters[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    char c = j->at[1];
    const char *letter = c != '\0' ? strchr(letters, c) : NULL;
    uint32_t code, low;
    if (letter) {
        *(*to)++ = values[letter - letters];
        j->at += 2;
        return true;
    }
    if (c != 'u' || !read_hex(j->at + 2, &code)) {
        fc_json_fail(j, FC_ECORRUPT, "not an escape of JSON");
        return false;
    }
    if (code >= 0xd800 && code < 0xdc00 && j->at[6] == '\\' && j->at[7] == 'u' && read_hex(j->at + 8, &low) &&
        low >= 0xdc00 && low < 0xe000) {
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        j->at += 6;
    }
    if (code == 0 || (code >= 0xd800 && code < 0xe000)) {
        fc_json_fail(j, FC_ECORRUPT, code ? "half of a surrogate pair" : "\\u0000 cannot be part of a name");
        return false;
    }
    *to = put_utf8(*to, code);
    j->at += 6;
    return true;
}

/* The bytes of the UTF-8 sequence of two or more at `s`; 0 when there is none. A NUL ends every loop in time. */
static size_t utf8_length(const unsigned char *s) {
    size_t n = s[0] >= 0xc2 && s[0] < 0xe0 ? 2 : (s[0] & 0xf0) == 0xe0 ? 3 : s[0] >= 0xf0 && s[0] < 0xf5 ? 4 : 0;
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    bool overlong = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool beyond = (s[0] == 0xed && s[1] >= 0xa0) || (s[0] == 0xf4 && s[1] >= 0x90);
    return n > 0 && (overlong || beyond) ? 0 : n;
}

static bool is_plain(char c) {
    return (unsigned char)c >= 0x20 && (unsigned char)c < 0x80 && c != '"' && c != '\\';
}

const char *fc_json_string(fc_json *j, const char *what) {
    if (fc_json_peek(j) != '"') {
        if (j->code == FC_OK) {
            unexpected(j, what);
        }
        return NULL;
    }
    char *text = ++j->at, *to = text;
    for (;;) {
        size_t plain = 0;
        while (is_plain(j->at[plain])) {
            plain++;
        }
        if (to != j->at) {
            memmove(to, j->at, plain);
        }
        to += plain;
        j->at += plain;
        if (*j->at == '"') {
            j->at++;
            *to = '\0';
            return text;
        }
        size_t n = utf8_length((const unsigned char *)j->at);
        if (n > 0) {
            memmove(to, j->at, n);
            to += n;
            j->at += n;
        } else if (*j->at != '\\') {
            if ((unsigned char)*j->at >= 0x80) {
                fc_json_fail(j, FC_ECORRUPT, "not UTF-8");
            } else {
                unexpected(j, "the end of the string");
            }
            return NULL;
        } else if (!read_escape(j, &to)) {
            return NULL;
        }
    }
}

const char *fc_json_key(fc_json *j) {
    const char *key = fc_json_string(j, "a member's name in quotation marks");
    if (!key) {
        return NULL;
    }
    skip_space(j);
    if (*j->at != ':') {
        unexpected(j, "':'");
        return NULL;
    }
    j->at++;
    return key;
}

/* Steps over a number. @return whether it is an integer >= 0 that fits. */
static bool read_number(fc_json *j, int64_t *out) {
    int64_t value = 0;
    bool whole = *j->at != '-';
    j->at += !whole;
    const char *digits = j->at;
    for (; *j->at >= '0' && *j->at <= '9'; j->at++) {
        whole = whole && fc_mul_i64(value, 10, &value) && fc_add_i64(value, *j->at - '0', &value);
    }
    bool good = j->at > digits && (*digits != '0' || j->at == digits + 1);
    if (good && *j->at == '.') {
        whole = false;
        digits = ++j->at;
        for (; *j->at >= '0' && *j->at <= '9'; j->at++) {
        }
        good = j->at > digits;
    }
    if (good && (*j->at == 'e' || *j->at == 'E')) {
        whole = false;
        j->at++;
        j->at += *j->at == '+' || *j->at == '-';
        digits = j->at;
        for (; *j->at >= '0' && *j->at <= '9'; j->at++) {
        }
        good = j->at > digits;
    }
    if (!good) {
        unexpected(j, "a digit");
    }
    *out = value;
    return whole;
}

bool fc_json_count(fc_json *j, int64_t *out, const char *what) {
    if (fc_json_peek(j) != '0') {
        if (j->code == FC_OK) {
            unexpected(j, what);
        }
        return false;
    }
    const char *text = j->at;
    bool whole = read_number(j, out);
    if (j->code == FC_OK && !whole) {
        int n = (int)(j->at - text < 40 ? j->at - text : 40);
        j->at -= j->at - text;
        fc_json_fail(j, FC_ECORRUPT, "%s should be here, not %.*s", what, n, text);
    }
    return j->code == FC_OK;
}

/* A string, number or word. */
static void skip_scalar(fc_json *j) {
    static const char *const words[] = {"true", "false", "null"};
    int64_t value;
    char kind = fc_json_peek(j);
    if (kind == '"') {
        fc_json_string(j, "a string");
        return;
    }
    if (kind == '0') {
        read_number(j, &value);
        return;
    }
    for (size_t i = 0; i < sizeof words / sizeof *words && j->code == FC_OK; i++) {
        if (strncmp(j->at, words[i], strlen(words[i])) == 0) {
            j->at += strlen(words[i]);
            return;
        }
    }
    if (j->code == FC_OK) {
        unexpected(j, "a value");
    }
}

void fc_json_skip(fc_json *j) {
    char closing[MAX_NESTING];
    bool first[MAX_NESTING];
    int depth = 0;
    do {
        if (depth > 0) {
            if (!fc_json_more(j, closing[depth - 1], &first[depth - 1])) {
                depth--;
                continue;
            }
            if (closing[depth - 1] == '}') {
                fc_json_key(j);
            }
        }
        char kind = fc_json_peek(j);
        if (kind != '{' && kind != '[') {
            skip_scalar(j);
        } else if (depth == MAX_NESTING) {
            fc_json_fail(j, FC_EUNSUPPORTED, "nested deeper than %d levels", MAX_NESTING);
        } else {
            closing[depth] = kind == '{' ? '}' : ']';
            first[depth++] = true;
            j->at++;
        }
    } while (depth > 0 && j->code == FC_OK);
}
