/*
 * Memory that the fetcher shares, into which it writes what it reads: nothing is copied on the way, and the reader
 * wakes once for each read. The fetcher can change these bytes at any time, so they are only for data that is moved,
 * never for what is parsed or decoded.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/** Where memory is not shared. */
#define FC_NOT_SHARED UINT64_MAX

/** Makes the memory, before the fetcher is started. It costs only what is used of it.
 * @param size receives its size in bytes @return NULL: there will be none, and bytes come through sockets */
unsigned char *fc_shared_make(size_t *size);

/** Returns `size` bytes that start on a page boundary: shared ones, while there are any, else others. NULL: out of
 * memory. The fetcher of this process must have been started. */
void *fc_shared_new(size_t size);

/** Frees a buffer of fc_shared_new or fc_pages_new. @param size the size that it was allocated with */
void fc_shared_free(void *pages, size_t size);

/** The fetcher may still write into this buffer, or into the one that contains it: it is never given out again. */
void fc_shared_lose(const void *buffer);

/** Returns the offset of a buffer within the shared memory, or FC_NOT_SHARED. */
uint64_t fc_shared_offset(const void *buffer, size_t size);
