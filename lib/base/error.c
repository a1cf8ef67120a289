/*
 * Builds error values: a code and one printable line.
 * The function names are in parentheses because error.h defines macros of the same names for the analyzer.
 */
#include "fsdpckpt/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Messages quote names from hostile files: a newline or an escape sequence must not reach the terminal. */
static void make_printable(char *s) {
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c < 0x20 || c == 0x7f) {
            *s = '?';
        }
    }
}

/* Ends a truncated message in "...", without splitting a UTF-8 sequence. */
static void mark_truncated(char *buf, size_t size) {
    size_t end = size - 4;
    while (end > 0 && ((unsigned char)buf[end] & 0xc0) == 0x80) {
        end--;
    }
    memcpy(buf + end, "...", 4);
}

static void format_message(fc_error *err, const char *fmt, va_list args) {
    int n = vsnprintf(err->message, sizeof err->message, fmt, args);
    if (n < 0) {
        err->message[0] = '\0';
    } else if ((size_t)n >= sizeof err->message) {
        mark_truncated(err->message, sizeof err->message);
    }
    make_printable(err->message);
}

static void set(fc_error *err, fc_code code, const char *fmt, va_list args) {
    format_message(err, fmt, args);
    err->code = code;
    err->hint = FC_HINT_NONE;
    err->about[0] = '\0';
}

fc_code(fc_fail)(fc_error *err, fc_code code, const char *fmt, ...) {
    if (err) {
        va_list args;
        va_start(args, fmt);
        set(err, code, fmt, args);
        va_end(args);
    }
    return code;
}

fc_code(fc_advise)(fc_error *err, fc_code code, fc_hint hint, const char *about) {
    if (err) {
        err->hint = hint;
        int n = snprintf(err->about, sizeof err->about, "%s", about ? about : "");
        if (n < 0 || (size_t)n >= sizeof err->about) {
            err->about[0] = '\0'; /* a shortened name would be the name of something else */
        }
        make_printable(err->about);
    }
    return code;
}

fc_code(fc_no_memory)(fc_error *err, const char *path) {
    return path ? fc_fail(err, FC_ENOMEM, "%s: out of memory", path) : fc_fail(err, FC_ENOMEM, "out of memory");
}

static void append(fc_error *err, const char *text) {
    size_t used = strlen(err->message);
    int n = snprintf(err->message + used, sizeof err->message - used, ": %s", text);
    if (n >= 0 && (size_t)n >= sizeof err->message - used) {
        mark_truncated(err->message, sizeof err->message);
    }
}

fc_code(fc_fail_errno)(fc_error *err, int errnum, const char *fmt, ...) {
    fc_code code = errnum == ENOMEM ? FC_ENOMEM : FC_EIO;
    if (err) {
        char text[128];
        va_list args;
        va_start(args, fmt);
        set(err, code, fmt, args);
        va_end(args);
        /* The GNU strerror_r may return a static string instead of filling the buffer. */
        append(err, strerror_r(errnum, text, sizeof text));
    }
    return code;
}

fc_code(fc_context)(fc_error *err, fc_code code, const char *fmt, ...) {
    if (err) {
        fc_error inner = *err;
        va_list args;
        va_start(args, fmt);
        format_message(err, fmt, args);
        va_end(args);
        append(err, inner.message);
        err->code = code;
    }
    return code;
}

int fc_exit_status(fc_code code) {
    return code == FC_ENOMEM ? FC_EIO : (int)code;
}
