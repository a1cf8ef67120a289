/*
 * Lists in memory of their own that grow while they are filled: what is found in a file is not known in advance.
 */
#ifndef FSDPCKPT_BASE_GROW_H
#define FSDPCKPT_BASE_GROW_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include <stdbool.h>
#include <stddef.h>

/**
 * Makes room for `needed` elements of `size` bytes in a list that malloc made, or that is NULL.
 * @param list the address of the pointer to its first element.
 * @param capacity how many fit; changed with it.
 * @return false: out of memory, and the list is as it was.
 */
bool fc_grow(void *list, size_t *capacity, size_t needed, size_t size);

#endif
