/*
 * A hash table from names to numbers, hashed with XXH3. Names are borrowed and need not end in NUL. It matches the
 * names of two checkpoints, finds duplicates, and finds the children of a node of a tree. A seed of the process keeps
 * the author of a file from choosing names that collide.
 */
#pragma once

#include "fsdpckpt/arena.h"

#include <stddef.h>
#include <stdint.h>

#define FC_NO_NAME ((size_t)-1)

typedef struct fc_name_table fc_name_table;

/** @return a table with room for `capacity` names in `arena`, or NULL when out of memory. It grows when it is full. */
fc_name_table *fc_name_table_new(fc_arena *arena, size_t capacity);

/**
 * Adds a name unless it is already there. The name is borrowed: it must live as long as the table.
 * @return the number of the name: `value`, or the number that it already had. FC_NO_NAME when out of memory, which
 * cannot be while the table has room.
 */
size_t fc_name_table_put(fc_name_table *table, const char *name, size_t len, size_t value);

/** Like fc_name_table_put for the name (any bytes) that `parent` has; fc_name_table_put has parent 0. */
size_t fc_name_table_put_child(fc_name_table *table, uint64_t parent, const void *name, size_t len, size_t value);

/** Changes the number of a name; does nothing when the table does not have the name. */
void fc_name_table_set(fc_name_table *table, const char *name, size_t len, size_t value);

/** @return the number of a name, or FC_NO_NAME. */
size_t fc_name_table_find(const fc_name_table *table, const char *name, size_t len);

/** @return the number of the name that `parent` has, or FC_NO_NAME. */
size_t fc_name_table_find_child(const fc_name_table *table, uint64_t parent, const void *name, size_t len);
