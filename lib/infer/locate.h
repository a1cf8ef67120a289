/*
 * Where the elements of tensors are in another one.
 */
#pragma once

#include "infer/search.h"

enum { FC_LOCATE_AXES = 16, FC_LOCATE_MOST = 1 << 22 };

#define FC_LOCATE_UNKNOWN INT64_MIN

typedef struct fc_located_axis {
    int64_t size;
    int64_t stride; /**< in elements of the other tensor */
    int to, from;   /**< the dimension of the tensor, and that of the other one; set by derive.c */
} fc_located_axis;

/** The axes of a tensor, or of several that follow each other. */
typedef struct fc_located {
    fc_located_axis axes[FC_LOCATE_AXES]; /**< the innermost first */
    int count;
    int64_t base;
} fc_located;

/**
 * Finds where the elements of the parts of a match are in its one tensor. Values that occur several times do not count.
 * @param out   one per part.
 * @param found whether they follow axes; false also for a tensor of more than FC_LOCATE_MOST elements.
 */
fc_code fc_locate(const fc_search *s, const fc_match *m, fc_located *out, bool *found, fc_error *err);
