/*
 * The portions of a box that is read but not moved. A portion is a tile, or a box of any size whose elements are all
 * the same one: HDF5 stores a fill value once, and torch.save an expanded tensor. So the time that it takes to digest,
 * compare or count elements depends on what is stored, not on the shape.
 */
#pragma once

#include "fsdpckpt/plan.h"
#include "plan/tiles.h"

/** One portion, in global coordinates. */
typedef struct fc_portion {
    int64_t offsets[FC_MAX_DIMS];
    int64_t sizes[FC_MAX_DIMS];
    int64_t count; /**< number of its elements */
    bool repeats;  /**< whether they are equal on each side: then read one (fc_source_fill_one) */
} fc_portion;

/** A tensor to read. Two sides are compared with each other, and have the same shape. */
typedef struct fc_portions_side {
    const fc_checkpoint *checkpoint;
    const fc_tensor *tensor;
    const fc_coverage *coverage;
} fc_portions_side;

/** An iterator. Start it zeroed. */
typedef struct fc_portions {
    fc_portions_side sides[2];
    int nsides;
    fc_box box;    /* borrowed */
    int64_t limit; /* most elements per tile */
    bool by_chunk; /* whether each side has repeating chunks: then every chunk of the first side is walked by itself */
    fc_tiles tiles;
    size_t next;  /* position of the next chunk of the first side */
    size_t chunk; /* a repeating chunk of the first side */
    size_t *met;  /* the chunks of the second side that meet it */
    size_t nmet, met_capacity, next_met;
} fc_portions;

/**
 * Begins an iteration over `box`, whose offsets and sizes must outlive it. Each element is in one portion.
 * @param sides `nsides`, one or two
 * @param limit most elements per tile, at least 1
 */
fc_code fc_portions_begin(fc_portions *portions, const fc_portions_side *sides, int nsides, const fc_box *box,
                          int64_t limit, fc_error *err);

/** The same for tiles in row-major order, whatever repeats. */
void fc_portions_begin_tiles(fc_portions *portions, const fc_box *box, int64_t limit);

/** Returns the next portion. @param any receives false when none is left */
fc_code fc_portions_next(fc_portions *portions, fc_portion *out, bool *any, fc_error *err);

void fc_portions_free(fc_portions *portions);

/** @return the box of a portion. */
static inline fc_box fc_portion_box(const fc_portion *portion, int ndim) {
    return (fc_box){ndim, portion->offsets, portion->sizes};
}
