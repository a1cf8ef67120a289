/*
 * "Did you mean …?": the nearest of several names to a misspelt one. Used for options, commands and tensor names.
 */
#ifndef FSDPCKPT_CLI_SUGGEST_H
#define FSDPCKPT_CLI_SUGGEST_H

#include "fsdpckpt/error.h"

#include <stddef.h>

#define SUGGEST_NONE ((size_t)-1)

/**
 * Edits (insert, delete, replace, swap of neighbours) between two texts, or `limit` + 1 when there are more than
 * `limit`. Texts longer than 256 bytes count as too far.
 */
size_t suggest_distance(const char *a, size_t alen, const char *b, size_t blen, size_t limit);

/**
 * Makes `candidate` the best suggestion for `word` when it is near and nearer than `*best`; start with NULL and
 * SUGGEST_NONE. Near is a third of the word, or the word as a beginning of the candidate.
 */
void suggest_consider(const char *word, size_t len, const char *candidate, const char **best, size_t *score);

/**
 * FC_EUSAGE: the checkpoint at `path` has no tensor or object `name`, but perhaps one called so.
 * @param names the first of `count` names, the next one `stride` bytes after it.
 */
fc_code suggest_name(const char *path, const char *const *names, size_t stride, size_t count, const char *name,
                     fc_error *err);

/** Adds "did you mean …?" to an error about `path`, which does not exist, where its directory has a similar name. */
void suggest_path(const char *path, fc_error *err);

#endif
