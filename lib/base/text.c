/*
 * JSON text, UTF-8 and sorted texts. See text.h.
 */
#include "base/text.h"

#include "base/base64.h"
#include "base/grow.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void fc_text_free(fc_text *text) {
    free(text->data);
    *text = (fc_text){0};
}

void fc_text_bytes(fc_text *t, const void *s, size_t len) {
    if (t->failed || len > FC_MAX_TEXT - t->size) {
        t->failed = true;
        return;
    }
    if (!fc_grow(&t->data, &t->cap, t->size + len, 1)) {
        t->failed = t->no_memory = true;
        return;
    }
    memcpy(t->data + t->size, s, len);
    t->size += len;
}

void fc_text_raw(fc_text *text, const char *s) {
    fc_text_bytes(text, s, strlen(s));
}

/* The length of the UTF-8 sequence at `s`, or 0: no overlong forms, no surrogates, nothing above U+10FFFF. */
static size_t sequence(const unsigned char *s, size_t left) {
    unsigned char c = s[0];
    size_t n = c < 0x80 ? 1 : c >= 0xc2 && c < 0xe0 ? 2 : c >= 0xe0 && c < 0xf0 ? 3 : c >= 0xf0 && c < 0xf5 ? 4 : 0;
    if (n == 0 || n > left) {
        return 0;
    }
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    if ((c == 0xe0 && s[1] < 0xa0) || (c == 0xed && s[1] >= 0xa0) || (c == 0xf0 && s[1] < 0x90) ||
        (c == 0xf4 && s[1] >= 0x90)) {
        return 0;
    }
    return n;
}

bool fc_is_utf8(const char *s, size_t len) {
    for (size_t i = 0; i < len;) {
        size_t n = sequence((const unsigned char *)s + i, len - i);
        if (n == 0) {
            return false;
        }
        i += n;
    }
    return true;
}

bool fc_is_plain_text(const char *s, size_t len) {
    return len == 0 || (memchr(s, '\0', len) == NULL && fc_is_utf8(s, len));
}

void fc_text_base64(fc_text *t, const unsigned char *p, size_t len) {
    enum { AT_ONCE = 48 }; /* a multiple of 3, so that pieces join */
    char text[AT_ONCE / 3 * 4];
    fc_text_bytes(t, "\"", 1);
    for (size_t i = 0; i < len && !t->failed; i += AT_ONCE) {
        size_t n = len - i < AT_ONCE ? len - i : AT_ONCE;
        fc_base64_encode(p + i, n, text);
        fc_text_bytes(t, text, fc_base64_length(n));
    }
    fc_text_bytes(t, "\"", 1);
}

void fc_text_string(fc_text *text, const char *s, size_t len) {
    if (!fc_is_utf8(s, len)) {
        fc_text_raw(text, "{\"$bytes\": ");
        fc_text_base64(text, (const unsigned char *)s, len);
        fc_text_bytes(text, "}", 1);
        return;
    }
    fc_text_bytes(text, "\"", 1);
    size_t start = 0;
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)s[i];
        char escape[8];
        if (c >= 0x20 && c != '"' && c != '\\' && c != 0x7f) {
            continue;
        }
        fc_text_bytes(text, s + start, i - start);
        start = i + 1;
        if (c == '"' || c == '\\') {
            snprintf(escape, sizeof escape, "\\%c", c);
        } else {
            snprintf(escape, sizeof escape, "\\u%04x", c);
        }
        fc_text_bytes(text, escape, strlen(escape));
    }
    fc_text_bytes(text, s + start, len - start);
    fc_text_bytes(text, "\"", 1);
}

void fc_text_nul(fc_text *text) {
    fc_text_bytes(text, "", 1);
    if (text->failed) {
        text->size = 0;
    } else {
        text->size--;
    }
}

void fc_make_utf8(char *s) {
    size_t left = strlen(s);
    while (left > 0) {
        size_t n = sequence((const unsigned char *)s, left);
        if (n == 0) {
            *s = '?';
            n = 1;
        }
        s += n;
        left -= n;
    }
}

/* ---- checking JSON ---- */

typedef struct json_at {
    const char *p, *end;
} json_at;

static void skip_space(json_at *j) {
    while (j->p < j->end && (*j->p == ' ' || *j->p == '\t' || *j->p == '\n' || *j->p == '\r')) {
        j->p++;
    }
}

static bool take_char(json_at *j, char c) {
    if (j->p < j->end && *j->p == c) {
        j->p++;
        return true;
    }
    return false;
}

static bool check_string(json_at *j) {
    if (!take_char(j, '"')) {
        return false;
    }
    while (j->p < j->end && *j->p != '"') {
        unsigned char c = (unsigned char)*j->p++;
        if (c < 0x20) {
            return false;
        }
        if (c != '\\') {
            continue;
        }
        char e = j->p < j->end ? *j->p++ : '\0';
        if (e == 'u') {
            for (int i = 0; i < 4; i++, j->p++) {
                if (j->p >= j->end || !strchr("0123456789abcdefABCDEF", *j->p) || *j->p == '\0') {
                    return false;
                }
            }
        } else if (e == '\0' || !strchr("\"\\/bfnrt", e)) {
            return false;
        }
    }
    return take_char(j, '"');
}

static bool check_digits(json_at *j) {
    const char *start = j->p;
    while (j->p < j->end && *j->p >= '0' && *j->p <= '9') {
        j->p++;
    }
    return j->p > start;
}

static bool check_number(json_at *j) {
    take_char(j, '-');
    if (!take_char(j, '0') && !check_digits(j)) {
        return false;
    }
    if (take_char(j, '.') && !check_digits(j)) {
        return false;
    }
    if (take_char(j, 'e') || take_char(j, 'E')) {
        if (!take_char(j, '+')) {
            take_char(j, '-');
        }
        return check_digits(j);
    }
    return true;
}

static bool check_word(json_at *j, const char *word) {
    size_t n = strlen(word);
    if ((size_t)(j->end - j->p) < n || memcmp(j->p, word, n) != 0) {
        return false;
    }
    j->p += n;
    return true;
}

static bool check_value(json_at *j, int depth) {
    if (j->p >= j->end || depth > 1000) {
        return false;
    }
    char open = *j->p;
    if (open == '"') {
        return check_string(j);
    }
    if (open != '[' && open != '{') {
        return open == 't'   ? check_word(j, "true")
               : open == 'f' ? check_word(j, "false")
               : open == 'n' ? check_word(j, "null")
                             : check_number(j);
    }
    char closing = open == '[' ? ']' : '}';
    j->p++;
    skip_space(j);
    if (take_char(j, closing)) {
        return true;
    }
    do {
        skip_space(j);
        if (open == '{') {
            if (!check_string(j)) {
                return false;
            }
            skip_space(j);
            if (!take_char(j, ':')) {
                return false;
            }
            skip_space(j);
        }
        if (!check_value(j, depth + 1)) {
            return false;
        }
        skip_space(j);
    } while (take_char(j, ','));
    return take_char(j, closing);
}

bool fc_is_json(const char *s, size_t len) {
    json_at j = {s, s + len};
    if (!fc_is_utf8(s, len)) {
        return false;
    }
    skip_space(&j);
    if (!check_value(&j, 0)) {
        return false;
    }
    skip_space(&j);
    return j.p == j.end;
}
