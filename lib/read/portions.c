/*
 * Divides a box into portions. See portions.h.
 *
 * If no chunk repeats one element, on one side at least, the portions are the tiles of the box. Otherwise they follow
 * the chunks of the first side. A chunk that is stored is divided into tiles. One that repeats an element meets chunks
 * of the second side: where these repeat one, too, the common box is a portion; where they are stored, it is divided
 * into tiles. So nothing but stored chunks, and boxes that two chunks have in common, costs time.
 */
#include "read/portions.h"

#include "base/checked.h"
#include "base/grow.h"
#include "fsdpckpt/try.h"
#include "plan/coverage.h"
#include "plan/tiles.h"

#include <stdlib.h>
#include <string.h>

/*
 * Whether fewer bytes may be stored than the elements of a chunk have. Such a chunk may be compressed, too.
 */
static bool is_small(const fc_tensor *tensor, const fc_chunk *chunk, int64_t volume) {
    uint64_t bytes;
    return volume > 1 &&
           (chunk->place.kind != FC_PLACE_BYTES ||
            !fc_mul_u64((uint64_t)volume, fc_dtype_size(tensor->dtype), &bytes) || chunk->place.length < bytes);
}

/* Whether all elements of a chunk are the same one. */
static fc_code find_repeat(const fc_portions_side *side, size_t index, bool *repeats, fc_error *err) {
    const fc_chunk *chunk = &side->tensor->chunks[index];
    const fc_box box = fc_chunk_box(side->tensor, chunk);
    fc_extent extent;
    *repeats = false;
    if (side->tensor->object || !is_small(side->tensor, chunk, fc_box_volume(&box))) {
        return FC_OK;
    }
    FC_TRY(fc_checkpoint_extent(side->checkpoint, side->tensor, index, &extent, err));
    *repeats = extent.codec == FC_CODEC_RAW || extent.codec == FC_CODEC_INLINE;
    for (int d = 0; d < box.ndim; d++) {
        *repeats = *repeats && (extent.strides[d] == 0 || box.sizes[d] == 1);
    }
    return FC_OK;
}

static fc_code has_repeat(const fc_portions_side *side, bool *found, fc_error *err) {
    *found = false;
    for (size_t i = 0; i < fc_coverage_count(side->coverage) && !*found; i++) {
        FC_TRY(find_repeat(side, fc_coverage_chunk(side->coverage, i), found, err));
    }
    return FC_OK;
}

fc_code fc_portions_begin(fc_portions *portions, const fc_portions_side *sides, int nsides, const fc_box *box,
                          int64_t limit, fc_error *err) {
    fc_portions_free(portions);
    *portions = (fc_portions){.nsides = nsides, .box = *box, .limit = limit, .by_chunk = true};
    for (int i = 0; i < nsides; i++) {
        portions->sides[i] = sides[i];
    }
    for (int i = 0; i < nsides && portions->by_chunk; i++) {
        FC_TRY(has_repeat(&sides[i], &portions->by_chunk, err));
    }
    if (!portions->by_chunk) {
        fc_tiles_begin(&portions->tiles, box, limit, 1);
    }
    return FC_OK;
}

void fc_portions_begin_tiles(fc_portions *portions, const fc_box *box, int64_t limit) {
    fc_portions_free(portions);
    *portions = (fc_portions){.box = *box, .limit = limit};
    fc_tiles_begin(&portions->tiles, box, limit, 1);
}

void fc_portions_free(fc_portions *portions) {
    free(portions->met);
    *portions = (fc_portions){0};
}

static fc_code note_met(void *context, const fc_overlap *overlap, fc_error *err) {
    fc_portions *p = context;
    FC_NEED(fc_grow(&p->met, &p->met_capacity, p->nmet + 1, sizeof *p->met), err, p->sides[0].checkpoint->path);
    p->met[p->nmet++] = overlap->chunk;
    return FC_OK;
}

/* Sets the box of a portion to what a chunk of a side has in common with `box`. */
static fc_box meet(const fc_portions_side *side, size_t chunk, const fc_box *box, fc_portion *out) {
    const fc_box own = fc_chunk_box(side->tensor, &side->tensor->chunks[chunk]);
    fc_box_intersect(&own, box, out->offsets, out->sizes);
    return fc_portion_box(out, box->ndim);
}

/* Makes a box a portion if it repeats an element, else begins its tiles. */
static bool settle(fc_portions *p, const fc_box *box, bool repeats, fc_portion *out) {
    if (repeats) {
        out->count = fc_box_volume(box);
        out->repeats = true;
    } else {
        fc_tiles_begin(&p->tiles, box, p->limit, 1);
    }
    return repeats;
}

/* Continues with what a repeating chunk of the first side and the next chunk of the second have in common. */
static fc_code next_met(fc_portions *p, fc_portion *out, bool *made, fc_error *err) {
    const size_t met = p->met[p->next_met++];
    fc_portion outer;
    const fc_box own = meet(&p->sides[0], p->chunk, &p->box, &outer);
    const fc_box box = meet(&p->sides[1], met, &own, out);
    bool repeats;
    FC_TRY(find_repeat(&p->sides[1], met, &repeats, err));
    *made = settle(p, &box, repeats, out);
    return FC_OK;
}

/* Continues with the next chunk of the first side. */
static fc_code next_chunk(fc_portions *p, fc_portion *out, bool *made, fc_error *err) {
    bool repeats;
    p->chunk = fc_coverage_chunk(p->sides[0].coverage, p->next++);
    const fc_box box = meet(&p->sides[0], p->chunk, &p->box, out);
    FC_TRY(find_repeat(&p->sides[0], p->chunk, &repeats, err));
    if (!repeats || p->nsides == 1) {
        *made = settle(p, &box, repeats, out);
        return FC_OK;
    }
    p->nmet = p->next_met = 0;
    return fc_coverage_visit(p->sides[1].coverage, &box, note_met, p, err);
}

static bool next_tile(fc_portions *p, fc_portion *out) {
    fc_tile tile;
    if (!fc_tiles_next(&p->tiles, &tile)) {
        return false;
    }
    memcpy(out->offsets, tile.offsets, sizeof out->offsets);
    memcpy(out->sizes, tile.sizes, sizeof out->sizes);
    out->count = tile.count;
    out->repeats = false;
    return true;
}

fc_code fc_portions_next(fc_portions *portions, fc_portion *out, bool *any, fc_error *err) {
    fc_portions *p = portions;
    *any = next_tile(p, out);
    while (!*any && p->by_chunk) {
        if (p->next_met < p->nmet) {
            FC_TRY(next_met(p, out, any, err));
        } else if (p->next < fc_coverage_count(p->sides[0].coverage)) {
            FC_TRY(next_chunk(p, out, any, err));
        } else {
            break;
        }
        *any = *any || next_tile(p, out);
    }
    return FC_OK;
}
