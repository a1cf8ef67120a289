/*
 * Declarations shared by view_plan.c, which plans the datasets of a view, and view.c, which writes them.
 */
#pragma once

#include "hdf5/writer/image_external.h"
#include "hdf5/writer/image_map.h"

#include "fsdpckpt/view.h"

/** An external dataset over bytes in files of the source. */
typedef struct fc_h5_base {
    int ndim;
    const int64_t *shape;
    fc_h5_segment *segments; /**< `file` is set by view.c */
    uint32_t *files;         /**< one per segment: index into the source's files */
    size_t nsegments;
} fc_h5_base;

/** A box of a tensor whose elements are in a base. */
typedef struct fc_h5_view_box {
    size_t base;
    const int64_t *offsets, *sizes; /**< the box in the tensor, in elements */
    fc_h5_run run;
    bool whole; /**< whether it is the whole base, instead of `run` */
} fc_h5_view_box;

typedef enum fc_h5_view_kind {
    FC_H5_VIEW_EMPTY,     /**< no elements */
    FC_H5_VIEW_EXTERNAL,  /**< bases[0] is the whole tensor */
    FC_H5_VIEW_ASSEMBLED, /**< a virtual dataset over several bases */
    FC_H5_VIEW_COPIED     /**< the bytes are in the view */
} fc_h5_view_kind;

typedef struct fc_h5_viewed {
    fc_h5_view_kind kind;
    const fc_h5_base *bases;
    size_t nbases;
    const fc_h5_view_box *patches;
    size_t npatches;
    size_t
        address; /**< COPIED: offset of the address of the bytes in fc_h5_image.objects, or SIZE_MAX; set by view.c */
    uint64_t offset; /**< COPIED: offset of the bytes in the file; set by view.c */
} fc_h5_viewed;

/**
 * Plans how each of target->tensors is viewed. Everything is allocated from `arena`.
 * @return FC_EUNSUPPORTED with the tensors that cannot be viewed.
 */
fc_code fc_h5_view_plan(const fc_target *target, fc_arena *arena, fc_h5_viewed *out, fc_error *err);
