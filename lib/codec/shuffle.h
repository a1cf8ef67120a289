/*
 * HDF5's shuffle filter, in memory: it groups the bytes of elements into planes, because similar bytes compress better
 * next to each other.
 */
#pragma once

#include <stddef.h>

/**
 * Writes the first byte of every element, then the second byte of every element, and so on. Bytes that do not fill an
 * element stay at the end. `in` and `out` must not overlap.
 * @param size bytes in `in`.
 * @param element bytes per element, at least 1.
 */
void fc_shuffle(const unsigned char *in, unsigned char *out, size_t size, size_t element);

/**
 * Restores `count` consecutive elements from shuffled data.
 * @param in the first byte of the first element to restore.
 * @param plane bytes from one plane to the next.
 */
void fc_unshuffle_run(const unsigned char *in, size_t plane, unsigned char *out, size_t count, size_t element);

/** The inverse of fc_shuffle. */
void fc_unshuffle(const unsigned char *in, unsigned char *out, size_t size, size_t element);
