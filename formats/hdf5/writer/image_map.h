/*
 * The list of mappings of a virtual dataset in an image.
 */
#pragma once

#include "hdf5/writer/image.h"

/** A list under construction. Start with zeros; it can be reused for further datasets. */
typedef struct fc_h5_list {
    fc_h5_buffer bytes;
    uint64_t count;
} fc_h5_list;

/** Elements of a dataset of one dimension: `count` blocks, `stride` apart. */
typedef struct fc_h5_run {
    int64_t extent; /**< of the dataset */
    int64_t start, stride, count, block;
} fc_h5_run;

void fc_h5_list_begin(fc_h5_list *list);

/** Maps the box onto the dataset at the path `source` of `file`, which is in the same directory ("." is this file).
 * Both are copied.
 * @param run the elements of the source; NULL: all of it. */
void fc_h5_list_add(fc_h5_list *list, const char *file, const char *source, const fc_h5_run *run, int ndim,
                    const int64_t *offsets, const int64_t *sizes);

/** Puts the list into the global heap. */
fc_h5_heap_id fc_h5_list_end(fc_h5_list *list, fc_h5_image *image);
void fc_h5_list_free(fc_h5_list *list);
