/*
 * What nanotron writes into `__metadata__` of a shard: the shape of the whole tensor, and which slices of the shard are
 * which slices of the whole.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

/** A box of a shard that is a box of the whole tensor. */
typedef struct fc_nano_pair {
    int64_t local[FC_MAX_DIMS], global[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
} fc_nano_pair;

/** Reads a shape such as "(48, 16)", also with the names of NumPy's types. @return its dimensions; -1: it is none. */
int fc_nano_shape(const char *text, int64_t shape[FC_MAX_DIMS]);

/**
 * Reads the next pair of `local_global_slices_pairs`, such as "None,None,None#0,24,None", and steps over it.
 * @return false if it is none, or does not fit the two shapes.
 */
bool fc_nano_take_pair(const char **at, int ndim, const int64_t *shard, const int64_t *whole, fc_nano_pair *out);
