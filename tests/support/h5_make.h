/*
 * A synthetic checkpoint for tests of the HDF5 writer: tensors of every kind on a given mesh. Their bytes follow from
 * the number of the tensor and the position of the element, so any program can check them. Byte i (row-major in the
 * full tensor) of tensor t is (i·131 + ⌊i/256⌋·7 + t·29) mod 256; of a bool, that mod 2.
 */
#pragma once

#include "fsdpckpt/format.h"

typedef struct h5_made {
    fc_arena *arena;
    fc_checkpoint source;
    fc_mesh mesh;
    fc_target target;
    fc_tensor *sources; /* the source tensors of `tensors` */
    fc_target_tensor *tensors;
    size_t capacity;
} h5_made;

/** Makes an empty checkpoint on a mesh of `ndim` dimensions, named "replicate", "dp" and "tp". */
void h5_made_begin(h5_made *made, int ndim, const char *const *names, const int64_t *sizes);
void h5_made_end(h5_made *made);

/**
 * Adds a tensor. `path` has elements separated by "|"; one that starts with "#" is a list index, "~" an empty key.
 * @param tp_dim the dimension that TP cuts, or -1.
 */
fc_target_tensor *h5_made_add(h5_made *made, const char *path, fc_dtype dtype, int ndim, const int64_t *shape,
                              int tp_dim);

/** Adds an object of `bytes` bytes with the JSON text `json`. */
void h5_made_object(h5_made *made, const char *path, int64_t bytes, const char *json);

/** Adds the values of the oracle test: every dtype, unusual names, lists, 0-dimensional, empty and uneven tensors,
 * objects. */
void h5_made_zoo(h5_made *made);

/** Makes the target file of `rank`, allocated from made->arena. */
fc_target_file h5_made_file(h5_made *made, int64_t rank);

/** Writes the bytes of the items that `file` owns at the offsets from reserve. */
fc_code h5_made_fill(const h5_made *made, const fc_target_file *file, fc_error *err);

/** Writes the whole checkpoint: create, reserve and fill each target file, finish, destroy. */
fc_code h5_made_write(h5_made *made, const char *staging, fc_error *err);
