/*
 * Reads a JSON object member by member. jansson parses only the strings and the small values: its tree takes many times
 * the memory of the text, so it never holds more than one member. Used for headers, for the index, and for JSON text in
 * `__metadata__`.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** A position in JSON text. */
typedef struct fc_st_json {
    const char *text;  /**< Not NUL-terminated. */
    size_t size, at;   /**< Bytes of text, and the current position. */
    const char *path;  /**< The file, for messages. */
    const char *where; /**< The member of `__metadata__` that holds the text; NULL if the text is a header or index. */
    uint64_t offset;   /**< Offset of the text in the file, if `where` is NULL. */
} fc_st_json;

/** The limit for a value other than a string, in bytes. A tensor's entry takes a few hundred. */
enum { ST_JSON_VALUE = 64 << 10 };

/** Returns FC_ECORRUPT with a message for position `at` of the text. */
fc_code fc_st_json_fail(const fc_st_json *json, size_t at, const char *what, fc_error *err);

/** Consumes the "{" of an object and the whitespace before it. */
fc_code fc_st_json_enter(fc_st_json *json, fc_error *err);

/**
 * Consumes the next key of the object and its colon, or the end of the object.
 * @param first must be true for the first member.
 * @param key released by the caller with json_decref; NULL at the end of the object.
 */
fc_code fc_st_json_key(fc_st_json *json, bool first, json_t **key, fc_error *err);

/** Consumes a value. Strings may have any length. @param value released by the caller with json_decref. */
fc_code fc_st_json_value(fc_st_json *json, json_t **value, fc_error *err);

/** Returns whether the next character starts an object. */
bool fc_st_json_at_object(fc_st_json *json);

/** Fails unless only whitespace is left. */
fc_code fc_st_json_end(fc_st_json *json, fc_error *err);

/** Called for each member of an object. `key` is NUL-terminated; `value` is borrowed. */
typedef fc_code fc_st_json_member(void *context, const char *key, json_t *value, fc_error *err);

/** Consumes an object and calls `member` for each of its members. */
fc_code fc_st_json_object(fc_st_json *json, fc_st_json_member *member, void *context, fc_error *err);

/** Like fc_st_json_object, and fails if anything follows the object. */
fc_code fc_st_json_members(fc_st_json *json, fc_st_json_member *member, void *context, fc_error *err);
