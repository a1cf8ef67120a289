/*
 * Folds names that differ only in numbers: the 32 names layers.0.wq.weight … layers.31.wq.weight become one line,
 * layers.{0..31}.wq.weight. The caller decides which names may share a line.
 */
#pragma once

#include "fsdpckpt/arena.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** A name and its kind; only names of the same kind are folded together. */
typedef struct fold_name {
    const char *name;
    uint32_t kind;
} fold_name;

/** One or more names. */
typedef struct fold_line {
    const char *pattern;   /**< the name itself if it is the only one */
    size_t first;          /**< index of the first of its names */
    size_t count;          /**< the number of names that the line stands for */
    const size_t *members; /**< their indexes, in the order of the pattern: the last number changes fastest */
} fold_line;

/**
 * Folds `count` different names. A component of a name (between dots) that is a decimal number may vary. Several
 * numbers may vary if all combinations exist: layers.{0..3}.experts.{0..7}.w. A set of numbers is written as numbers
 * and ranges,
 * `{0..2,4..31}`, with the step if it is not 1: `{0..30..2}`. Each name is in exactly one line.
 * @param arena owns the result; its patterns may point to the names.
 * @param out   receives the lines, in the order of their first names.
 * @return false when out of memory.
 */
bool fold_names(const fold_name *names, size_t count, fc_arena *arena, fold_line **out, size_t *nlines);

/** @return the length of the first component of `pattern`; dots inside the braces of a fold do not end it. */
size_t fold_component(const char *pattern);
