/*
 * What the two halves of a view share: view_plan.c decides which datasets there are, view.c writes them.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_VIEW_VIEW_H
#define FSDPCKPT_FORMATS_HDF5_VIEW_VIEW_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "hdf5/writer/image_external.h"
#include "hdf5/writer/image_map.h"

#include "fsdpckpt/view.h"

/** An external dataset over bytes of the source's files. */
typedef struct fc_h5_base {
    int ndim;
    const int64_t *shape;
    fc_h5_segment *segments; /**< `file` is set by view.c */
    uint32_t *files;         /**< one a segment: index into the source's files */
    size_t nsegments;
} fc_h5_base;

/** A box of a tensor that is elements of a base. */
typedef struct fc_h5_view_box {
    size_t base;
    const int64_t *offsets, *sizes; /**< in the tensor */
    fc_h5_run run;
    bool whole; /**< all of the base, and not `run` of it */
} fc_h5_view_box;

typedef enum fc_h5_view_kind {
    FC_H5_VIEW_EMPTY,     /**< no elements */
    FC_H5_VIEW_EXTERNAL,  /**< bases[0] is the tensor */
    FC_H5_VIEW_ASSEMBLED, /**< a virtual dataset of the patches */
    FC_H5_VIEW_COPIED     /**< the bytes are in the view */
} fc_h5_view_kind;

typedef struct fc_h5_viewed {
    fc_h5_view_kind kind;
    const fc_h5_base *bases;
    size_t nbases;
    const fc_h5_view_box *patches;
    size_t npatches;
    uint64_t offset; /**< COPIED: where the bytes go in the file, set by view.c */
} fc_h5_viewed;

/**
 * Decides how each of wanted->tensors is seen. Everything lives in `arena`.
 * @return FC_EUNSUPPORTED naming those that cannot be viewed.
 */
fc_code fc_h5_view_plan(const fc_target *target, fc_arena *arena, fc_h5_viewed *out, fc_error *err);

#endif
