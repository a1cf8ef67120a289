/*
 * Bounds the size of a compiled POSIX extended regular expression. The C library expands counted repetitions and needs
 * memory for each pair of atoms that may be skipped, so a few hundred bytes can take gigabytes.
 */
#pragma once

#include <stdbool.h>

/** @return whether compiling `pattern` takes at most some tens of MiB. It need not be valid. */
bool fc_regex_is_small(const char *pattern);
