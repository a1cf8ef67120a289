/*
 * JSON written as it comes: no tree in memory, so a checkpoint of a million pieces costs nothing. The writer keeps
 * track of commas and, where asked to, of lines: a value of the upper levels starts a line of its own.
 */
#ifndef FSDPCKPT_CLI_JSON_OUT_H
#define FSDPCKPT_CLI_JSON_OUT_H

#include "text.h"

#include "fsdpckpt/checkpoint.h"

typedef struct json_out {
    text_out *out;
    int depth;
    int line_depth; /**< values up to this depth start a line; deeper ones stay on it */
    bool first;     /**< nothing written yet on this level */
    bool after_key;
} json_out;

void jw_begin(json_out *j, text_out *out, int line_depth);
/* The prefix is jw_, as jansson owns json_. */

/** A member's name; a value must follow. */
void jw_key(json_out *j, const char *key);
void jw_open(json_out *j, char bracket);
void jw_close(json_out *j, char bracket);
/** Bytes that are no UTF-8 become U+FFFD. NULL writes null. */
void jw_string(json_out *j, const char *s);
void jw_int(json_out *j, int64_t n);
void jw_uint(json_out *j, uint64_t n);
void jw_number(json_out *j, double n);
void jw_bool(json_out *j, bool value);
/** Text that is JSON already. */
void jw_raw(json_out *j, const char *json);
/** An array of integers. */
void jw_ints(json_out *j, int count, const int64_t *values);
/** A place in the nested state dict: an array of keys, and of numbers for list indexes. */
void jw_path(json_out *j, const fc_path *path);

/** jw_key, then the value. */
#define JSON_MEMBER(j, kind, key, value) (jw_key(j, key), jw_##kind(j, value))

#endif
