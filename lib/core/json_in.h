/*
 * JSON read as it stands: a pull parser over text in memory, without a tree. Strings are decoded in place, so a name
 * costs nothing but its bytes, and a file of 100,000 tensors costs its text. Errors stick: after the first one every
 * call returns at once, and the caller looks at `code` where it suits.
 */
#ifndef FSDPCKPT_CORE_JSON_IN_H
#define FSDPCKPT_CORE_JSON_IN_H

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fc_json {
    char *at;
    char *end; /* where the terminating NUL is */
    const char *path;
    const char *line_start;
    size_t line;
    fc_code code; /* FC_OK until something was wrong */
    fc_error *err;
} fc_json;

/**
 * Starts at the first value of `text`, which is `size` bytes long, followed by a NUL, and written to while it is read.
 * @param path for messages.
 */
void fc_json_begin(fc_json *j, char *text, size_t size, const char *path, fc_error *err);

/** Nothing but white space may follow. @return the code of the whole reading. */
fc_code fc_json_finish(fc_json *j);

/** Fails with "<path>:<line>:<column>: " before the message; the first failure stays. */
fc_code fc_json_fail(fc_json *j, fc_code code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/** What the next value begins with: one of { [ " t f n, '0' for a number; '\0' at the end or for anything else. */
char fc_json_peek(fc_json *j);

/** Steps into an array or object. `what` names it in the message when there is something else. */
bool fc_json_open(fc_json *j, char bracket, const char *what);

/**
 * Whether the array or object has another value; steps out when not, and also at an error.
 * @param first true before the first value, set to false.
 */
bool fc_json_more(fc_json *j, char closing, bool *first);

/** The key of the next member of an object, decoded and NUL-terminated, in the text. NULL after an error. */
const char *fc_json_key(fc_json *j);

/** The string that comes next, as fc_json_key. Text without NUL and in valid UTF-8, anything else is an error. */
const char *fc_json_string(fc_json *j, const char *what);

/** The integer >= 0 that comes next. @return false after an error: a fraction, an exponent, above INT64_MAX … */
bool fc_json_count(fc_json *j, int64_t *out, const char *what);

/** Steps over the next value, whatever it is; it must still be JSON. */
void fc_json_skip(fc_json *j);

#endif
