/*
 * Maps words of other tools to our commands, options and dtypes. Commands and options are only suggested ("did you mean
 * …?"); dtypes are accepted.
 */
#pragma once

#include "fsdpckpt/dtype.h"

#include <stdbool.h>
#include <stddef.h>

/** @return the command that `word` probably means, misspelt or in the words of another tool, or NULL. */
const char *words_command(const char *word);

/** @return the option of the set `takes` that `word` (len bytes, without dashes) probably means, or NULL. */
const char *words_option(const char *word, size_t len, unsigned long long takes);

/** @return what to do instead of giving the option `arg` (len bytes, with dashes) to the command `name` (NULL: none),
 * which takes the set `takes`, or NULL. */
const char *words_reply(const char *name, const char *arg, size_t len, unsigned long long takes);

/** Finds a dtype by any common name in any letter case: "bf16", "torch.half", "FP16". */
bool words_dtype(const char *word, fc_dtype *out);

enum { WORDS_DTYPES_MAX = 128 };
/** Lists the types to which --dtype converts, separated by blanks. @param buf has WORDS_DTYPES_MAX bytes. @return buf
 */
const char *words_dtypes(char *buf);

/** @return the short name of the floating-point type that `word` probably means, or NULL. */
const char *words_near_dtype(const char *word);
