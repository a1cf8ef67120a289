/*
 * Values of a loaded pickle, written into another one: a leaf of a `.pt` file becomes an object with a pickle of its
 * own, an object of any format becomes a leaf of the `.pt` file that is written. What it means stays the same, as
 * Python would have pickled it again: classes, identities within the value, cycles of containers.
 *
 * Storages get new keys: the caller copies their records.
 */
#ifndef FSDPCKPT_FORMATS_TORCH_PICKLE_COPY_H
#define FSDPCKPT_FORMATS_TORCH_PICKLE_COPY_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "torch/pickle.h"
#include "torch/pickle_write.h"

/** A small hash table from values to numbers. Zeroed at first. */
typedef struct fc_pv_map {
    struct fc_pv_map_slot *slots;
    size_t nslots, used;
} fc_pv_map;

/** @return where the number of `v` is, 0 at first; NULL when out of memory. Valid until the next call. */
uint32_t *fc_pv_map_at(fc_pv_map *map, fc_pv v);
/** The value in slot `i` of map->nslots, or 0: to walk over all of them. */
fc_pv fc_pv_map_key(const fc_pv_map *map, size_t i);
void fc_pv_map_free(fc_pv_map *map);

/** One writing of values from `p` into `w`; zeroed but for these two and `first_storage`. */
typedef struct fc_pickle_copy {
    const fc_pickle *p;
    fc_torch_pickler *w;
    uint64_t first_storage; /**< the new key of the first storage that is met; the others count on */
    fc_pv *storages;        /**< the ids of those that were met, in the order of their new keys */
    size_t nstorages, storages_capacity;
    fc_pv_map memo, keys;
    int depth;
} fc_pickle_copy;

/** Writes `v`. FC_EUNSUPPORTED for what protocol 2 cannot say and for values nested deeper than Python would. */
fc_code fc_pickle_copy_value(fc_pickle_copy *copy, fc_pv v, fc_error *err);

/** Frees what `copy` holds, not the pickle and not the pickler. */
void fc_pickle_copy_free(fc_pickle_copy *copy);

#endif
