/*
 * A table from names to numbers, hashed with XXH3; names are borrowed and need not end in NUL. For joining names of
 * two checkpoints and for looking up parts of names.
 */
#ifndef FSDPCKPT_BASE_NAME_TABLE_H
#define FSDPCKPT_BASE_NAME_TABLE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/arena.h"

#include <stdbool.h>
#include <stddef.h>

#define FC_NO_NAME ((size_t)-1)

typedef struct fc_name_table fc_name_table;

/** @return a table for up to `capacity` names in `arena`, or NULL when out of memory. */
fc_name_table *fc_name_table_new(fc_arena *arena, size_t capacity);

/** Adds a name unless it is there. @return its number: `value`, or the one it had. More than the capacity: FC_NO_NAME.
 */
size_t fc_name_table_put(fc_name_table *table, const char *name, size_t len, size_t value);

/** Gives a name that is there another number. */
void fc_name_table_set(fc_name_table *table, const char *name, size_t len, size_t value);

/** @return the number of a name, or FC_NO_NAME. */
size_t fc_name_table_find(const fc_name_table *table, const char *name, size_t len);

#endif
