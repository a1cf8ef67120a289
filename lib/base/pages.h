/*
 * Large buffers on pages of their own. The pages go back to the system when the buffer is freed; malloc would keep them
 * in the heap of the worker thread that freed them.
 */
#pragma once

#include <stddef.h>

/** @return `size` zeroed bytes that start on a page boundary, or NULL when out of memory. */
void *fc_pages_new(size_t size);

/** Frees a buffer of fc_pages_new. @param size the size that it was allocated with. */
void fc_pages_free(void *pages, size_t size);
