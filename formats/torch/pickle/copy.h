/*
 * Copies values of a loaded pickle into another one: a leaf of a `.pt` file becomes an object with its own pickle, and
 * an object of any format becomes a leaf of a new `.pt` file. The meaning stays the same, as if Python had pickled it
 * again: classes, identities within the value, cycles of containers.
 *
 * Storages get new keys, and the caller copies their records.
 */
#pragma once

#include "torch/pickle/pickle.h"
#include "torch/pickle/write.h"

/** A small hash table from values to numbers. Zeroed at first. */
typedef struct fc_pv_map {
    struct fc_pv_map_slot *slots;
    size_t nslots, used;
} fc_pv_map;

/**
 * @return the address of the number of `v`, which is 0 at first; valid until the next call. NULL when out of memory.
 */
uint32_t *fc_pv_map_at(fc_pv_map *map, fc_pv v);
/** @return the value in slot `i` of map->nslots, or 0, for walking over all values. */
fc_pv fc_pv_map_key(const fc_pv_map *map, size_t i);
void fc_pv_map_free(fc_pv_map *map);

/** Copies values from `p` into `w`. Start with zeros except for these two and `first_storage`. */
typedef struct fc_pickle_copy {
    const fc_pickle *p;
    fc_torch_pickler *w;
    uint64_t first_storage; /**< the new key of the first storage; further ones count up */
    fc_pv *storages;        /**< the ids of the storages found so far, in the order of their new keys */
    size_t nstorages, storages_capacity;
    fc_pv_map memo, keys;
    int depth;
} fc_pickle_copy;

/**
 * Copies `v`. @return FC_EUNSUPPORTED for values that protocol 2 cannot express or that are nested deeper than Python
 * allows.
 */
fc_code fc_pickle_copy_value(fc_pickle_copy *copy, fc_pv v, fc_error *err);

/** Frees the content of `copy`, but neither the pickle nor the pickler. */
void fc_pickle_copy_free(fc_pickle_copy *copy);
