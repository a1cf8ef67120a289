/*
 * Walking the JSON of a header member by member: jansson parses the strings and the small values, so that its tree,
 * which takes many times the text, never holds more than one of them. Used for headers, and for the objects that stand
 * as text in `__metadata__`.
 */
#ifndef FSDPCKPT_FORMATS_SAFETENSORS_JSON_H
#define FSDPCKPT_FORMATS_SAFETENSORS_JSON_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** A place in JSON text. */
typedef struct st_json {
    const char *text; /**< not NUL-terminated */
    size_t size, at;
    const char *path;  /**< the file, for messages */
    const char *where; /**< the member of `__metadata__` that this is the text of; NULL: the header itself */
    uint64_t offset;   /**< of the text in the file, when `where` is NULL */
} st_json;

/** The most text that one value other than a string may take: a tensor's entry has a few hundred bytes. */
enum { ST_JSON_VALUE = 64 << 10 };

/** Fails as corrupt at the place `at` of the text. */
fc_code fc_st_json_fail(const st_json *json, size_t at, const char *what, fc_error *err);

/** Takes the "{" of an object, and blanks before it. */
fc_code fc_st_json_enter(st_json *json, fc_error *err);

/**
 * Takes the next key of the object and the colon behind it, or the end of the object.
 * @param first the object's first member is asked for. @param key out: to be given to json_decref; NULL at the end.
 */
fc_code fc_st_json_key(st_json *json, bool first, json_t **key, fc_error *err);

/** Takes a value; `*value` is to be given to json_decref. A string may be of any length. */
fc_code fc_st_json_value(st_json *json, json_t **value, fc_error *err);

/** Whether the next character is the start of an object. */
bool fc_st_json_at_object(st_json *json);

/** Makes sure that nothing but blanks is left. */
fc_code fc_st_json_end(st_json *json, fc_error *err);

/** What fc_st_json_members calls for each member; `key` is the NUL-terminated name. */
typedef fc_code st_json_member(void *context, const char *key, json_t *value, fc_error *err);

/** Calls `member` for each member of the object that the text consists of. */
fc_code fc_st_json_members(st_json *json, st_json_member *member, void *context, fc_error *err);

#endif
