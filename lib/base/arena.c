/*
 * The arena: a list of blocks that are filled from the front and freed together. A manifest of a million chunks is one
 * arena.
 */
#include "fsdpckpt/arena.h"

#include "base/checked.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* If both are 16, every allocation gets a block of its own. The fault tests are built so, and can fail each of them. */
#ifndef FIRST_BLOCK
#define FIRST_BLOCK 4096
#define LARGEST_BLOCK (1 << 20)
#endif

enum { ALIGNMENT = 16 };

typedef struct block {
    struct block *next;
    size_t size; /* of the whole block in bytes, this header included */
} block;

struct fc_arena {
    block *blocks;
    unsigned char *at, *end; /* the free bytes of the newest block */
    size_t next_size;        /* bytes of the next block; doubles up to LARGEST_BLOCK, so small checkpoints stay small */
    size_t total;            /* bytes of all blocks */
};

static const size_t header_size = (sizeof(block) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;

fc_arena *fc_arena_new(void) {
    fc_arena *arena = calloc(1, sizeof *arena);
    if (arena) {
        arena->next_size = FIRST_BLOCK;
    }
    return arena;
}

void fc_arena_free(fc_arena *arena) {
    if (!arena) {
        return;
    }
    for (block *b = arena->blocks, *next; b; b = next) {
        next = b->next;
        free(b);
    }
    free(arena);
}

static block *add_block(fc_arena *arena, size_t payload) {
    size_t size;
    if (!fc_add_size(payload, header_size, &size)) {
        return NULL;
    }
    block *b = malloc(size);
    if (b) {
        b->size = size;
        b->next = arena->blocks;
        arena->blocks = b;
        arena->total += size;
    }
    return b;
}

void *fc_arena_alloc(fc_arena *arena, size_t size) {
    size_t rounded;
    if (!fc_add_size(size, ALIGNMENT - 1, &rounded)) {
        return NULL;
    }
    rounded -= rounded % ALIGNMENT;
    if (rounded <= (size_t)(arena->end - arena->at) && arena->at) {
        void *p = arena->at;
        arena->at += rounded;
        return p;
    }
    if (rounded > LARGEST_BLOCK / 4) {
        /* Large requests get a block of their own and leave the current one in use. */
        block *b = add_block(arena, rounded);
        return b ? (unsigned char *)b + header_size : NULL;
    }
    while (arena->next_size - header_size < rounded) {
        arena->next_size *= 2;
    }
    block *b = add_block(arena, arena->next_size - header_size);
    if (!b) {
        return NULL;
    }
    arena->at = (unsigned char *)b + header_size + rounded;
    arena->end = (unsigned char *)b + b->size;
    if (arena->next_size < LARGEST_BLOCK) {
        arena->next_size *= 2;
    }
    return (unsigned char *)b + header_size;
}

void *fc_arena_calloc(fc_arena *arena, size_t count, size_t size) {
    size_t total;
    if (!fc_mul_size(count, size, &total)) {
        return NULL;
    }
    void *p = fc_arena_alloc(arena, total);
    if (p) {
        memset(p, 0, total);
    }
    return p;
}

void *fc_arena_copy(fc_arena *arena, const void *from, size_t count, size_t size) {
    size_t total;
    void *p = fc_mul_size(count, size, &total) ? fc_arena_alloc(arena, total) : NULL;
    if (p && total > 0) {
        memcpy(p, from, total);
    }
    return p;
}

char *fc_arena_strndup(fc_arena *arena, const char *s, size_t len) {
    size_t size;
    char *p = fc_add_size(len, 1, &size) ? fc_arena_alloc(arena, size) : NULL;
    if (p) {
        memcpy(p, s, len);
        p[len] = '\0';
    }
    return p;
}

char *fc_arena_printf(fc_arena *arena, const char *fmt, ...) {
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    char *p = n < 0 ? NULL : fc_arena_alloc(arena, (size_t)n + 1);
    if (p) {
        vsnprintf(p, (size_t)n + 1, fmt, again);
    }
    va_end(again);
    return p;
}

size_t fc_arena_size(const fc_arena *arena) {
    return arena->total;
}
