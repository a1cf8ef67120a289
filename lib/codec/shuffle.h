/*
 * HDF5's shuffle filter: byte planes of elements, so that bytes that resemble each other lie together. In memory only.
 */
#ifndef FSDPCKPT_CODEC_SHUFFLE_H
#define FSDPCKPT_CODEC_SHUFFLE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include <stddef.h>

/**
 * Puts the first byte of every element first, then the second ones …; what is no whole element stays at the end.
 * @param element bytes, at least 1.
 * `in` and `out` do not overlap.
 */
void fc_shuffle(const unsigned char *in, unsigned char *out, size_t size, size_t element);

/**
 * `count` elements from planes that lie `plane` bytes apart, all of them or some.
 * @param in the first byte of the first of them.
 */
void fc_unshuffle_run(const unsigned char *in, size_t plane, unsigned char *out, size_t count, size_t element);

/** The inverse of fc_shuffle. */
void fc_unshuffle(const unsigned char *in, unsigned char *out, size_t size, size_t element);

#endif
