/*
 * An arena: many small allocations that are freed together. Not thread-safe.
 */
#pragma once

#include <stddef.h>

#include "fsdpckpt/decls.h"

FC_BEGIN_DECLS

typedef struct fc_arena fc_arena;

/** @return a new, empty arena owned by the caller, or NULL when out of memory. */
fc_arena *fc_arena_new(void);

/** Frees the arena and everything allocated from it. NULL is allowed. */
void fc_arena_free(fc_arena *arena);

/** @return `size` uninitialised bytes aligned to 16, or NULL when out of memory. `size` 0 is allowed. */
void *fc_arena_alloc(fc_arena *arena, size_t size);

/** Like fc_arena_alloc for `count` × `size` zeroed bytes; NULL also when the product overflows. */
void *fc_arena_calloc(fc_arena *arena, size_t count, size_t size);

/** @return a copy of `count` elements of `size` bytes, or NULL when out of memory. `from` may be NULL if there are
 * none. */
void *fc_arena_copy(fc_arena *arena, const void *from, size_t count, size_t size);

/** @return a NUL-terminated copy of the first `len` bytes of `s`, or NULL when out of memory. */
char *fc_arena_strndup(fc_arena *arena, const char *s, size_t len);

/** @return a formatted, NUL-terminated string, or NULL when out of memory. */
char *fc_arena_printf(fc_arena *arena, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/** @return how many bytes the arena has taken from the system, which is more than was allocated from it. */
size_t fc_arena_size(const fc_arena *arena);

FC_END_DECLS
