/*
 * Loads a JSON file that a person wrote: a TP plan or a wrap policy. A file that is larger than any of these is
 * refused, and a mistake is reported with its position.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/error.h"

#include <jansson.h>
#include <stdbool.h>

/**
 * @param what    the kind of file, for messages: "a TP plan".
 * @param example an example of such a file, for messages.
 * @param out     receives the object, which the caller releases with json_decref; NULL on failure.
 * @return FC_EUSAGE when it is missing or not a JSON object, FC_EIO when it cannot be read.
 */
fc_code fc_json_load(const char *path, const char *what, const char *example, json_t **out, fc_error *err);

/**
 * Replaces NaN, Infinity and -Infinity, which Python's json writes and reads although JSON has no such values, by empty
 * lists and spaces, so that the length stays and nothing takes them for numbers. Texts that Python refuses stay
 * malformed, because an empty list may stand nowhere else than these words.
 */
void fc_json_hide_nonfinite(char *text, size_t len);

/**
 * Loads a model's config.json. Python's NaN and Infinity in it are empty lists: see fc_json_hide_nonfinite.
 * @param path the file, or its folder.
 * @param file receives the path of the file, which `arena` owns.
 */
fc_code fc_json_load_config(const char *path, fc_arena *arena, const char **file, json_t **out, fc_error *err);

/** Copies the strings of a JSON string or array of strings into a NULL-terminated array.
 *  @return NULL when out of memory, or when `value` is anything else (`*malformed` is then true). */
const char *const *fc_json_strings(const json_t *value, fc_arena *arena, bool *malformed);
