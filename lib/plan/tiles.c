/*
 * Tiles: divides a box into boxes that are contiguous in its row-major order. The engine takes them one at a time, so a
 * plan of any size needs no memory.
 *
 * A tile spans all trailing dimensions that fit the limit, a range of the dimension before them, and a single index of
 * every other dimension. Only such boxes are contiguous.
 */
#include "plan/tiles.h"

#include <stddef.h>

void fc_tiles_begin(fc_tiles *tiles, const fc_box *box, int64_t limit, int64_t multiple) {
    tiles->ndim = box->ndim;
    for (int d = 0; d < box->ndim; d++) {
        tiles->box_offsets[d] = box->offsets[d];
        tiles->box_sizes[d] = box->sizes[d];
    }
    tiles->limit = limit < 1 ? 1 : limit;
    tiles->multiple = multiple < 1 ? 1 : multiple;
    tiles->chunk = NULL;
    tiles->next = 0;
    tiles->total = fc_box_volume(box);
}

void fc_tiles_within_chunks(fc_tiles *tiles, const int64_t *sizes) {
    tiles->chunk = sizes;
}

void fc_tiles_only(fc_tiles *tiles, int64_t first, int64_t end) {
    tiles->next = first;
    tiles->total = end < tiles->total ? end : tiles->total;
}

/* @return the dimension that tiles divide; `inner` receives the number of elements per index of it. Tiles take one
   index of every earlier dimension. If the walk starts or ends within an index, the tile is divided along a later
   dimension. */
static int divided_dimension(const fc_tiles *tiles, int64_t *inner) {
    int d = tiles->ndim - 1;
    int64_t whole = 1;
    while (d > 0 && whole <= tiles->limit / tiles->box_sizes[d]) {
        whole *= tiles->box_sizes[d];
        d--;
    }
    while (d < tiles->ndim - 1 && (tiles->next % whole != 0 || whole > tiles->total - tiles->next)) {
        d++;
        whole /= tiles->box_sizes[d];
    }
    *inner = whole;
    return d;
}

/* Distributes `size` indices evenly over tiles of at most `most`, so that no sliver remains at the end. */
static int64_t even_share(int64_t size, int64_t most) {
    int64_t count = (size - 1) / most + 1;
    return (size - 1) / count + 1;
}

static int64_t greatest_common_divisor(int64_t a, int64_t b) {
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Rounds `rows` of `inner` elements each, at most `most` rows, so that the next tile begins at a multiple of
 * `multiple`. */
static int64_t round_rows(int64_t rows, int64_t inner, int64_t most, int64_t multiple) {
    int64_t step = multiple / greatest_common_divisor(multiple, inner);
    if (step > most) {
        return rows;
    }
    int64_t up = (rows - 1) / step + 1; /* in steps; up * step exceeds rows by less than most */
    return up <= most / step ? up * step : most / step * step;
}

/* Limits the rows of a tile that begins at `index` of dimension `d` to those of a chunk that has more, which are
 * divided into equal shares. */
static int64_t end_with_chunk(const fc_tiles *tiles, int d, int64_t index, int64_t most) {
    const int64_t left = tiles->chunk[d] - (tiles->box_offsets[d] + index) % tiles->chunk[d];
    const int64_t share = even_share(tiles->chunk[d], most);
    return left < share ? left : share;
}

bool fc_tiles_next(fc_tiles *tiles, fc_tile *tile) {
    if (tiles->next >= tiles->total) {
        return false;
    }
    tile->start = tiles->next;
    tile->ends_chunk = false;
    if (tiles->ndim == 0) {
        tile->count = 1;
        tiles->next = 1;
        return true;
    }
    int64_t inner;
    int divided = divided_dimension(tiles, &inner);
    int64_t outer = tiles->next / inner; /* row-major position over the dimensions 0 … divided */
    for (int d = tiles->ndim - 1; d > divided; d--) {
        tile->offsets[d] = tiles->box_offsets[d];
        tile->sizes[d] = tiles->box_sizes[d];
    }
    int64_t size = tiles->box_sizes[divided];
    int64_t index = outer % size;
    int64_t most = tiles->limit / inner < 1 ? 1 : tiles->limit / inner;
    const bool within = tiles->chunk && tiles->chunk[divided] > most;
    int64_t rows = within ? end_with_chunk(tiles, divided, index, most)
                          : round_rows(even_share(size, most), inner, most, tiles->multiple);
    if (rows > size - index) {
        rows = size - index;
    }
    if (rows > (tiles->total - tiles->next) / inner) {
        rows = (tiles->total - tiles->next) / inner;
    }
    const int64_t end = index + rows;
    tile->ends_chunk = within && (end == size || (tiles->box_offsets[divided] + end) % tiles->chunk[divided] == 0);
    tile->offsets[divided] = tiles->box_offsets[divided] + index;
    tile->sizes[divided] = rows;
    outer /= size;
    for (int d = divided - 1; d >= 0; d--) {
        tile->offsets[d] = tiles->box_offsets[d] + outer % tiles->box_sizes[d];
        tile->sizes[d] = 1;
        outer /= tiles->box_sizes[d];
    }
    tile->count = rows * inner;
    tiles->next += tile->count;
    return true;
}
