/*
 * Words that people bring along from other tools, and what they are called here: commands, options, types. Used for
 * "did you mean …?" only, but for the types, which are understood.
 */
#ifndef FSDPCKPT_CLI_WORDS_H
#define FSDPCKPT_CLI_WORDS_H

#include "fsdpckpt/dtype.h"

#include <stdbool.h>
#include <stddef.h>

/** The command that `word` probably means: a misspelt one, or what another tool calls it. NULL: none. */
const char *words_command(const char *word);

/** The option of the set `takes` that `word` (len bytes, without dashes) probably means, or NULL. */
const char *words_option(const char *word, size_t len, unsigned long long takes);

/** Finds a floating-point type by any usual name, in any case: "bf16", "torch.half", "FP16". */
bool words_dtype(const char *word, fc_dtype *out);

/** The short name of the floating-point type that `word` probably means, or NULL. */
const char *words_near_dtype(const char *word);

#endif
