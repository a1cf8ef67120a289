/*
 * One msgpack file of Flax while its headers are read. msgpack.c reads headers, walk.c takes nested dicts apart,
 * array.c describes arrays, objects.c makes objects of everything else, and flax.c is the format.
 */
#pragma once

#include "flax/msgpack.h"
#include "fsdpckpt/checkpoint.h"

enum { FC_FLAX_MAX_DEPTH = 128 };

/** The types of Flax's extensions. */
enum { FC_FLAX_ARRAY = 1, FC_FLAX_COMPLEX = 2, FC_FLAX_SCALAR = 3 };

typedef struct fc_flax_walk {
    fc_mp_reader r;
    uint32_t file;   /**< index into fc_checkpoint.files */
    fc_arena *arena; /**< owns the tensors, their names and their chunks */
    fc_tensor *tensors;
    size_t count, capacity;
    fc_path_element path[FC_FLAX_MAX_DEPTH];
    size_t depth;
    fc_error *err;
} fc_flax_walk;

/** fc_tensor.detail of an object: its bytes. */
typedef struct fc_flax_object {
    const char *text;
    size_t size;
} fc_flax_object;

/** Adds the values of the file at w->r.path to w->tensors. */
fc_code fc_flax_walk_file(fc_flax_walk *w);

/** Adds a tensor or object with the name of the current path. */
fc_code fc_flax_add(fc_flax_walk *w, fc_tensor **out);

/** Adds an unreadable value. The reason is formatted. */
fc_code fc_flax_refuse(fc_flax_walk *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/** Adds the array or scalar whose header is `head`. */
fc_code fc_flax_add_array(fc_flax_walk *w, const fc_mp_head *head);

/** Adds the array that Flax stored in several; its first key was read. @param pairs the number of pairs of its map. */
fc_code fc_flax_add_chunked(fc_flax_walk *w, uint64_t pairs);

/** Adds an object: the value whose header, at `start` of the file, is `head`. */
fc_code fc_flax_add_object(fc_flax_walk *w, const fc_mp_head *head, uint64_t start);

/** Reads a key that must be the text `wanted`. */
fc_code fc_flax_expect_key(fc_flax_walk *w, const char *wanted);
