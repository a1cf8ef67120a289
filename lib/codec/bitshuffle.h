/*
 * Bitshuffle, in memory: the bits of elements in planes, as lib/codec/shuffle.h does it with bytes. The first plane has
 * the lowest bit of the first byte of every element.
 */
#pragma once

#include <stddef.h>

/**
 * Restores elements from their bits. `in` and `out` must not overlap.
 * @param count elements, a multiple of 8.
 * @param element bytes per element.
 */
void fc_unshuffle_bits(const unsigned char *in, unsigned char *out, size_t count, size_t element);
