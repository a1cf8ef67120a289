/*
 * Writes JSON as a stream, without a tree in memory, so a document of a million chunks needs no memory. The writer adds
 * the commas, and starts a new line for each value of the upper levels.
 *
 * Every document begins with jw_document: {"fsdpckpt": KIND, "schema": N, … docs/schemas/KIND.json describes it.
 */
#pragma once

#include "output/text.h"

#include "fsdpckpt/checkpoint.h"

typedef struct json_out {
    text_out *out;
    int depth;
    int line_depth; /**< values up to this depth start a new line; deeper ones stay on the line */
    bool first;     /**< nothing has been written on this level yet */
    bool after_key;
} json_out;

/* The prefix is jw_, because jansson uses json_. */

/** The version of every document ("schema"). It changes when the meaning of a member does; members are only added. */
enum { JSON_SCHEMA_VERSION = 1 };

/** Begins a document: opens its object and writes `kind` and the version. End it with jw_end_document. */
void jw_document(json_out *j, text_out *out, int line_depth, const char *kind);
/** Closes the document and ends the line. */
void jw_end_document(json_out *j);

/** A member's name; a value must follow. */
void jw_key(json_out *j, const char *key);
void jw_open(json_out *j, char bracket);
void jw_close(json_out *j, char bracket);
/** Writes a string. Bytes that are not UTF-8 become U+FFFD; NULL becomes null. */
void jw_string(json_out *j, const char *s);
void jw_int(json_out *j, int64_t n);
void jw_uint(json_out *j, uint64_t n);
void jw_number(json_out *j, double n);
void jw_bool(json_out *j, bool value);
/** Writes JSON text. Characters in its strings that must not reach a terminal become escapes. */
void jw_copy(text_out *out, const char *json);

/** Writes text that is already JSON. */
void jw_raw(json_out *j, const char *json);
/** Writes an array of integers. */
void jw_ints(json_out *j, int count, const int64_t *values);
/** Writes a path in the nested state dict: an array of keys, with numbers for list indexes. */
void jw_path(json_out *j, const fc_path *path);

/** Opens an object or array that is a member. */
void jw_member_open(json_out *j, const char *key, char bracket);
/** A member that is an array of integers, or of strings: `count` of them, or fewer if NULL ends the list. */
void jw_member_ints(json_out *j, const char *key, int count, const int64_t *values);
void jw_member_strings(json_out *j, const char *key, const char *const *strings, size_t count);

/** A member that is a count. */
typedef struct json_uint {
    const char *key;
    uint64_t value;
} json_uint;

/** Writes such members; one without a key ends the list. */
void jw_uints(json_out *j, const json_uint *members);

/** Writes several counts: JSON_UINTS(j, {"tensors", n}, {"bytes", m}). */
#define JSON_UINTS(j, ...) jw_uints(j, (const json_uint[]){__VA_ARGS__, {NULL, 0}})

/** Writes a key and its value. */
#define JSON_MEMBER(j, kind, key, value) (jw_key(j, key), jw_##kind(j, value))
