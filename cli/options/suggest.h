/*
 * Finds the name closest to a misspelt option, command, file or tensor name, for "did you mean …?".
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stddef.h>

#define SUGGEST_NONE ((size_t)-1)

/**
 * @return the number of edits (insert, delete, replace, swap of neighbours) between two texts, or `limit` + 1 if there
 * are more than `limit` or a text is longer than 256 bytes.
 */
size_t suggest_distance(const char *a, size_t alen, const char *b, size_t blen, size_t limit);

/**
 * Makes `candidate` the best suggestion for `word` if it is closer than `*best` and close enough: the edits are at most
 * a third of the word, or the candidate starts with the word. Start with NULL and SUGGEST_NONE.
 */
void suggest_consider(const char *word, size_t len, const char *candidate, const char **best, size_t *score);

/**
 * Reports that the checkpoint at `path` has no tensor or object `name`, with similar names. @return FC_EUSAGE.
 * @param names the first of `count` names, the next one `stride` bytes after it.
 */
fc_code suggest_name(const char *path, const char *const *names, size_t stride, size_t count, const char *name,
                     fc_error *err);

/** Adds "did you mean …?" to an error about the missing `path` if its directory has a similar name. */
void suggest_path(const char *path, fc_error *err);
