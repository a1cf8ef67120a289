/*
 * Paths of values in a nested state dict, and the names that they spell; paths of files in a directory.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

/** @return the keys of `path` with `separator` between them, in `arena`; NULL when out of memory. FQNs have dots. */
const char *fc_path_spell(fc_arena *arena, const fc_path *path, char separator);

/** Copies a path with its keys to `arena`. @return false when out of memory. */
bool fc_path_copy(fc_arena *arena, const fc_path *path, fc_path *out);

/** Returns whether the elements of `path`, joined with ".", are `name`, as in DCP's flatten_state_dict. */
bool fc_path_spells(const fc_path *path, const char *name);

/**
 * Appends `suffix` to the name of a value and to the last key of its path, both of which are made anew in `arena`: the
 * value of a rank that differs from another rank's is called "lr.rank_3". @return false when out of memory.
 */
bool fc_path_add_suffix(fc_arena *arena, const char *suffix, const char **name, fc_path *path);

/** Sets `out` to the file `name` of the directory, in `arena`. @return false when out of memory. */
bool fc_file_in(fc_arena *arena, const char *directory, const char *name, fc_file *out);

/** Calls fc_check_link for each of the files of `directory`. */
fc_code fc_check_links(const char *directory, const fc_file *files, size_t count, fc_error *err);
