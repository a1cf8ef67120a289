/*
 * Turns a tensor of parts into chunks: see chunks.h. Along each dimension a chunk is a run of one axis; the other axes
 * are walked index by index. A chunk ends where a chunk of the source ends.
 */
#include "recipe/chunks.h"

#include "base/grow.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

/* Far more than real models have. A chunk needs about 200 bytes. */
enum { MOST_CHUNKS = 1 << 22 };

/* The coverage of the source tensor that was used last: consecutive parts often have the same one. */
typedef struct lookup {
    const fc_tensor *tensor;
    fc_coverage *coverage;
} lookup;

typedef struct builder {
    const fc_checkpoint *source;
    const fc_parted *parted;
    fc_arena *arena;
    fc_chunk *chunks;
    fc_recipe_place *places;
    size_t count, chunk_capacity, place_capacity;
    lookup known;
    const fc_recipe_steps *steps; /* of the part */
    fc_error *err;
} builder;

/* A part that is being made into chunks: its axes are runs, at most one along each dimension of the tensor. */
typedef struct walk {
    builder *b;
    fc_part part;
    int halved; /* an axis along which the part must be halved, because a chunk of the source ends in it; -1: none */
} walk;

/* Adds one chunk: `part` is within chunk `index` of its source. */
static fc_code add_chunk(builder *b, const fc_part *part, size_t index) {
    const int ndim = b->parted->ndim, sdims = part->source ? part->source->ndim : 0;
    const size_t dims_size = (2 * (size_t)ndim + (size_t)sdims + 1) * sizeof(int64_t);
    FC_TRY(fc_list_budget_take(b->parted->budget, 1, sizeof *b->chunks + sizeof *b->places + dims_size, b->err));
    int64_t *dims = fc_arena_calloc(b->arena, 2 * (size_t)ndim + (size_t)sdims + 1, sizeof *dims);
    if (b->count == MOST_CHUNKS) {
        return fc_fail(b->err, FC_EUNSUPPORTED, "it would be more than %d parts of its sources", MOST_CHUNKS);
    }
    FC_NEED(dims && fc_grow(&b->chunks, &b->chunk_capacity, b->count + 1, sizeof *b->chunks) &&
                fc_grow(&b->places, &b->place_capacity, b->count + 1, sizeof *b->places),
            b->err, b->source->path);
    fc_chunk chunk = {.rank = FC_NO_RANK};
    if (part->source) {
        chunk = part->source->chunks[index];
    }
    chunk.dims = dims;
    memcpy(dims, part->tbase, (size_t)ndim * sizeof *dims);
    for (int d = 0; d < ndim; d++) {
        dims[ndim + d] = 1;
    }
    for (int a = 0; a < part->naxes; a++) {
        dims[ndim + part->axes[a].tdim] = part->axes[a].size;
    }
    memcpy(dims + 2 * ndim, part->sbase, (size_t)sdims * sizeof *dims);
    b->chunks[b->count] = chunk;
    b->places[b->count++] = (fc_recipe_place){part->source, b->steps, dims + 2 * ndim, index};
    return FC_OK;
}

/* Limits axis `a` to the places that are in [low, high) along its source dimension. @return false if none is. */
static bool clip(fc_part *p, int a, int64_t low, int64_t high) {
    fc_part_axis *x = &p->axes[a];
    const int64_t base = p->sbase[x->sdim];
    int64_t from = low > base ? (low - base + x->sstep - 1) / x->sstep : 0;
    int64_t to = (high - 1 - base) / x->sstep;
    to = to >= x->size ? x->size - 1 : to;
    if (from > to) {
        return false;
    }
    p->tbase[x->tdim] += from;
    p->sbase[x->sdim] += from * x->sstep;
    x->size = to - from + 1;
    return true;
}

/* @return the axis with the largest step along `sdim` if there are several, else -1. */
static int outer_of_several(const fc_part *p, int sdim) {
    int count = 0, found = -1;
    for (int a = 0; a < p->naxes; a++) {
        if (p->axes[a].sdim == sdim) {
            count++;
            found = found < 0 || p->axes[a].sstep > p->axes[found].sstep ? a : found;
        }
    }
    return count > 1 ? found : -1;
}

/* Finds an axis to halve: one of several along a source dimension along which the overlap does not contain the hull. */
static fc_code find_halved(void *context, const fc_overlap *overlap, fc_error *err) {
    walk *c = context;
    int64_t offsets[FC_PART_DIMS], sizes[FC_PART_DIMS];
    (void)err;
    fc_part_hull(&c->part, offsets, sizes);
    for (int d = 0; d < c->part.source->ndim; d++) {
        const int a = sizes[d] == overlap->sizes[d] ? -1 : outer_of_several(&c->part, d);
        c->halved = a >= 0 ? a : c->halved;
    }
    return FC_OK;
}

static fc_code emit(void *context, const fc_overlap *overlap, fc_error *err) {
    const walk *c = context;
    fc_part part = c->part;
    (void)err;
    for (int a = 0; a < part.naxes; a++) {
        const int d = part.axes[a].sdim;
        if (outer_of_several(&c->part, d) < 0 &&
            !clip(&part, a, overlap->offsets[d], overlap->offsets[d] + overlap->sizes[d])) {
            return FC_OK;
        }
    }
    for (int d = 0; d < part.source->ndim; d++) { /* a step may be larger than the overlap */
        if (part.sbase[d] < overlap->offsets[d] || part.sbase[d] >= overlap->offsets[d] + overlap->sizes[d]) {
            return FC_OK;
        }
    }
    return add_chunk(c->b, &part, overlap->chunk);
}

static fc_code add_halves(builder *b, const fc_part *part) { // NOLINT(misc-no-recursion): halves
    walk c = {b, *part, -1};
    int64_t offsets[FC_PART_DIMS], sizes[FC_PART_DIMS];
    fc_part_hull(part, offsets, sizes);
    const fc_box hull = {part->source->ndim, offsets, sizes};
    FC_TRY(fc_coverage_visit(b->known.coverage, &hull, find_halved, &c, b->err));
    if (c.halved < 0) {
        return fc_coverage_visit(b->known.coverage, &hull, emit, &c, b->err);
    }
    fc_part low = *part, high = *part;
    const fc_part_axis *x = &part->axes[c.halved];
    const int64_t half = x->size / 2;
    low.axes[c.halved].size = half;
    high.axes[c.halved].size = x->size - half;
    high.tbase[x->tdim] += half;
    high.sbase[x->sdim] += half * x->sstep;
    for (int i = 0; i < 2; i++) {
        fc_part *p = i == 0 ? &low : &high;
        if (p->axes[c.halved].size == 1) { /* one index only: no axis is left */
            fc_part_remove_axis(p, c.halved);
        }
        FC_TRY(add_halves(b, p));
    }
    return FC_OK;
}

/* Walks the indices of all axes that are not runs. */
static fc_code walk_part(builder *b, const fc_part *part) { // NOLINT(misc-no-recursion): one level per axis
    for (int a = 0; a < part->naxes; a++) {
        const fc_part_axis *x = &part->axes[a];
        if (x->tstep == 1) {
            continue;
        }
        fc_part one = *part;
        fc_part_remove_axis(&one, a);
        for (int64_t i = 0; i < x->size; i++) {
            FC_TRY(walk_part(b, &one));
            one.tbase[x->tdim] += x->tstep;
            one.sbase[x->sdim] += x->sstep;
        }
        return FC_OK;
    }
    return part->source ? add_halves(b, part) : add_chunk(b, part, 0);
}

/* Sets the steps of a part. Most parts of a tensor have the same. */
static fc_code set_steps(builder *b, const fc_part *part) {
    fc_recipe_steps steps = {.sstep = {0}};
    bool same = b->steps;
    for (int d = 0; d < FC_PART_DIMS; d++) {
        steps.sdim[d] = -1;
    }
    for (int a = 0; a < part->naxes; a++) {
        if (part->axes[a].tstep == 1) {
            steps.sdim[part->axes[a].tdim] = part->axes[a].sdim;
            steps.sstep[part->axes[a].tdim] = part->axes[a].sstep;
        }
    }
    for (int d = 0; d < FC_PART_DIMS && same; d++) {
        same = steps.sdim[d] == b->steps->sdim[d] && steps.sstep[d] == b->steps->sstep[d];
    }
    b->steps = same ? b->steps : fc_arena_copy(b->arena, &steps, 1, sizeof steps);
    return b->steps ? FC_OK : fc_no_memory(b->err, b->source->path);
}

static fc_code begin_part(builder *b, const fc_part *part) {
    FC_TRY(set_steps(b, part));
    if (part->source && part->source != b->known.tensor) {
        fc_coverage_free(b->known.coverage);
        b->known = (lookup){part->source, NULL};
        FC_TRY_CONTEXT(fc_coverage_within(b->source, part->source, NULL, &b->known.coverage, b->err), b->err, "%s",
                       b->source->path);
    }
    return FC_OK;
}

static fc_code finish(builder *b, fc_tensor *out, const fc_recipe_place **places) {
    fc_chunk *chunks = fc_arena_copy(b->arena, b->chunks, b->count, sizeof *chunks);
    fc_recipe_place *own = fc_arena_copy(b->arena, b->places, b->count, sizeof *own);
    FC_NEED(chunks && own, b->err, b->source->path);
    out->chunks = chunks;
    out->nchunks = b->count;
    *places = own;
    return FC_OK;
}

fc_code fc_recipe_chunks(const fc_checkpoint *source, const fc_parted *parted, fc_arena *arena, fc_tensor *out,
                         const fc_recipe_place **places, fc_error *err) {
    builder b = {.source = source, .parted = parted, .arena = arena, .err = err};
    fc_code rc = FC_OK;
    for (size_t i = 0; i < parted->nparts && !source->format->layout_only; i++) {
        FC_TRY_GOTO(begin_part(&b, &parted->parts[i]), rc, out);
        FC_TRY_GOTO(walk_part(&b, &parted->parts[i]), rc, out);
    }
    rc = finish(&b, out, places);
out:
    fc_coverage_free(b.known.coverage);
    free(b.chunks);
    free(b.places);
    return rc;
}
