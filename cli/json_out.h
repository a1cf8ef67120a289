/*
 * JSON written as it comes: no tree in memory, so a checkpoint of a million pieces costs nothing. The writer keeps
 * track of commas and, where asked to, of lines: a value of the upper levels starts a line of its own.
 */
#ifndef FSDPCKPT_CLI_JSON_OUT_H
#define FSDPCKPT_CLI_JSON_OUT_H

#include "text.h"

typedef struct json_out {
    text_out *out;
    int depth;
    int line_depth; /**< values up to this depth start a line; deeper ones stay on it */
    bool first;     /**< nothing written yet on this level */
    bool after_key;
} json_out;

void json_begin(json_out *j, text_out *out, int line_depth);
/** A member's name; a value must follow. */
void json_key(json_out *j, const char *key);
void json_open(json_out *j, char bracket);
void json_close(json_out *j, char bracket);
/** Bytes that are no UTF-8 become U+FFFD. NULL writes null. */
void json_string(json_out *j, const char *s);
void json_int(json_out *j, int64_t n);
void json_uint(json_out *j, uint64_t n);
void json_number(json_out *j, double n);
void json_bool(json_out *j, bool value);
/** Text that is JSON already. */
void json_raw(json_out *j, const char *json);
/** An array of integers. */
void json_ints(json_out *j, int count, const int64_t *values);

/** json_key, then the value. */
#define JSON_MEMBER(j, kind, key, value) (json_key(j, key), json_##kind(j, value))

#endif
