/*
 * Large buffers with pages of their own, which go back to the system when they are freed. The allocator would keep them
 * for the thread that freed them: a heap a worker, of whatever it once needed.
 */
#ifndef FSDPCKPT_BASE_PAGES_H
#define FSDPCKPT_BASE_PAGES_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include <stddef.h>

/** `size` bytes, zeros, at the beginning of a page. @return NULL when out of memory. */
void *fc_pages_new(size_t size);

/** @param pages of `size` bytes, or NULL. */
void fc_pages_free(void *pages, size_t size);

#endif
