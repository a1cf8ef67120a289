/*
 * The tiles of a box: how much of it one worker moves at a time.
 */
#pragma once

#include "fsdpckpt/box.h"

/** An iterator over the tiles of a box: boxes whose elements are contiguous in the row-major order of that box. */
typedef struct fc_tiles {
    int ndim;
    int64_t box_offsets[FC_MAX_DIMS];
    int64_t box_sizes[FC_MAX_DIMS];
    int64_t limit;    /**< most elements per tile */
    int64_t multiple; /**< tiles begin at multiples of this many elements, in row-major order, if the rows allow it */
    const int64_t *chunk; /**< see fc_tiles_within_chunks; NULL: not asked for */
    int64_t next;         /**< the element, in row-major order, at which the next tile begins */
    int64_t total;        /**< the element at which the iteration ends */
} fc_tiles;

/** One tile, in global coordinates. */
typedef struct fc_tile {
    int64_t start;   /**< number of elements before it in the row-major order of the box */
    int64_t count;   /**< number of its elements */
    bool ends_chunk; /**< it is the last of several within a chunk: see fc_tiles_within_chunks */
    int64_t offsets[FC_MAX_DIMS];
    int64_t sizes[FC_MAX_DIMS];
} fc_tile;

/** Begins an iteration over `box`. See fc_tiles for `limit` and `multiple`, which are at least 1. */
void fc_tiles_begin(fc_tiles *tiles, const fc_box *box, int64_t limit, int64_t multiple);

/** Limits the iteration to elements `first` to `end`, exclusive, in row-major order. Call it before the first tile. */
void fc_tiles_only(fc_tiles *tiles, int64_t first, int64_t end);

/**
 * Where a tile is shorter than a chunk along the dimension that tiles divide, lets it end with the chunk. So no two
 * chunks are begun for one tile.
 * @param sizes of a chunk; all begin at multiples of them in the tensor. Borrowed.
 */
void fc_tiles_within_chunks(fc_tiles *tiles, const int64_t *sizes);

/** Returns the next tile in `tile`. @return false when none is left. */
bool fc_tiles_next(fc_tiles *tiles, fc_tile *tile);
