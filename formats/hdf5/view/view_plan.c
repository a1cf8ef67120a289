/*
 * Plans how each tensor of a checkpoint is viewed without copying it: external datasets over the extents of its chunks,
 * and the boxes that they fill. Asks the source for every chunk's extent; writes nothing.
 *
 * Chunks that are stacked along dimension 0 become one external dataset with one segment each. If that is the whole
 * tensor (a full checkpoint, Shard(0)), it is the dataset of the tensor. Otherwise (Shard(1), 2D) the tensor is a
 * virtual dataset over several. For a chunk that is strided in its storage, the source is a one-dimensional dataset
 * over that storage.
 */
#include "hdf5/view/view.h"

#include "base/checked.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/try.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tensors up to COPY_BYTES may be copied. More than MAX_PATCHES of one chunk would take libhdf5 seconds to open. */
enum { COPY_BYTES = 64 << 10, MAX_PATCHES = 4096, MAX_GRID_DIMS = 12 };

/* A chunk and its extent. */
typedef struct located {
    const int64_t *dims; /* 2 × ndim */
    fc_extent extent;
    bool contiguous;
} located;

/* The plan of one tensor. */
typedef struct plan {
    const fc_checkpoint *source;
    const fc_tensor *tensor;
    fc_arena *arena;
    uint32_t element;
    located *chunks;
    size_t nchunks;
    fc_h5_base *bases;
    size_t nbases;
    fc_h5_view_box *patches;
    size_t npatches, patch_room;
    const char *why; /* the reason why the tensor cannot be viewed; else NULL */
} plan;

static const char *reason(const fc_extent *e, fc_dtype dtype) {
    if (e->codec == FC_CODEC_FILTERED) {
        return "compressed";
    }
    if (e->codec == FC_CODEC_INLINE) {
        return "stored in a header";
    }
    if (e->codec != FC_CODEC_RAW) {
        return "encoded";
    }
    if (e->swap && fc_dtype_get(dtype)->swap_size > 1) {
        return "stored in the other byte order";
    }
    return e->negate ? "lazily negated" : e->conjugate ? "lazily conjugated" : NULL;
}

static fc_code locate_overlap(void *context, const fc_overlap *overlap, fc_error *err) {
    plan *p = context;
    located *l = &p->chunks[p->nchunks];
    l->dims = p->tensor->chunks[overlap->chunk].dims;
    FC_TRY(fc_checkpoint_extent(p->source, p->tensor, overlap->chunk, &l->extent, err));
    p->why = p->why ? p->why : reason(&l->extent, p->tensor->dtype);
    l->contiguous = fc_is_row_major(p->tensor->ndim, l->dims + p->tensor->ndim, l->extent.strides);
    p->nchunks++;
    return FC_OK;
}

/* Sorts chunks by column, and from top to bottom within a column. Strided chunks come last. */
static int compare_chunk_columns(const void *pa, const void *pb, void *context) {
    const located *a = pa, *b = pb;
    int ndim = *(const int *)context;
    if (a->contiguous != b->contiguous) {
        return a->contiguous ? -1 : 1;
    }
    for (int d = 1; d < 2 * ndim; d++) {
        if (d != ndim && a->dims[d] != b->dims[d]) {
            return a->dims[d] < b->dims[d] ? -1 : 1;
        }
    }
    return ndim == 0 ? 0 : (a->dims[0] > b->dims[0]) - (a->dims[0] < b->dims[0]);
}

static bool same_column(int ndim, const located *a, const located *b) {
    for (int d = 1; d < 2 * ndim; d++) {
        if (d != ndim && a->dims[d] != b->dims[d]) {
            return false;
        }
    }
    return a->dims[0] + a->dims[ndim] == b->dims[0];
}

static size_t segments_of(uint64_t bytes) {
    return (size_t)((bytes + FC_H5_SEGMENT - 1) / FC_H5_SEGMENT);
}

static uint64_t bytes_of(const plan *p, const located *l) {
    const fc_box box = {p->tensor->ndim, l->dims, l->dims + p->tensor->ndim};
    return (uint64_t)fc_box_volume(&box) * p->element;
}

/* Appends bytes of a file; extends the last segment if they follow it directly. */
static void add_bytes(fc_h5_base *base, uint32_t file, uint64_t offset, uint64_t length) {
    while (length > 0) {
        size_t n = base->nsegments;
        const bool follows = n > 0 && base->files[n - 1] == file &&
                             base->segments[n - 1].offset + base->segments[n - 1].length == offset &&
                             base->segments[n - 1].length < FC_H5_SEGMENT;
        if (!follows) {
            base->files[n] = file;
            base->segments[base->nsegments++] = (fc_h5_segment){NULL, offset, 0};
        }
        fc_h5_segment *last = &base->segments[base->nsegments - 1];
        uint64_t more = FC_H5_SEGMENT - last->length < length ? FC_H5_SEGMENT - last->length : length;
        last->length += more;
        offset += more;
        length -= more;
    }
}

static fc_code new_base(plan *p, int ndim, const int64_t *shape, size_t segments, fc_h5_base **out, fc_error *err) {
    fc_h5_base *base = &p->bases[p->nbases++];
    int64_t *copy = fc_arena_calloc(p->arena, (size_t)ndim + 1, sizeof *copy);
    *base = (fc_h5_base){.ndim = ndim,
                         .shape = copy,
                         .segments = fc_arena_calloc(p->arena, segments, sizeof *base->segments),
                         .files = fc_arena_calloc(p->arena, segments, sizeof *base->files)};
    FC_NEED(copy && base->segments && base->files, err, p->tensor->name);
    for (int d = 0; d < ndim; d++) {
        copy[d] = shape[d];
    }
    *out = base;
    return FC_OK;
}

static fc_code new_patch(plan *p, const fc_h5_view_box *patch, fc_error *err) {
    if (p->npatches == p->patch_room) {
        size_t room = p->patch_room ? 2 * p->patch_room : 4;
        fc_h5_view_box *grown = fc_arena_calloc(p->arena, room, sizeof *grown);
        FC_NEED(grown, err, p->tensor->name);
        if (p->npatches > 0) {
            memcpy(grown, p->patches, p->npatches * sizeof *grown);
        }
        p->patches = grown;
        p->patch_room = room;
    }
    p->patches[p->npatches++] = *patch;
    return FC_OK;
}

/* Makes one dataset of the chunks [first, first + count). */
static fc_code add_stack(plan *p, size_t first, size_t count, size_t segments, fc_error *err) {
    int ndim = p->tensor->ndim;
    int64_t shape[FC_MAX_DIMS];
    const located *top = &p->chunks[first];
    fc_h5_base *base = NULL;
    for (int d = 0; d < ndim; d++) {
        shape[d] = top->dims[ndim + d];
    }
    for (size_t i = 1; i < count; i++) {
        shape[0] += p->chunks[first + i].dims[ndim];
    }
    FC_TRY(new_base(p, ndim, shape, segments, &base, err));
    for (size_t i = first; i < first + count; i++) {
        const fc_extent *e = &p->chunks[i].extent;
        add_bytes(base, e->file, e->offset + e->first, bytes_of(p, &p->chunks[i]));
    }
    fc_h5_view_box patch = {.base = p->nbases - 1, .offsets = top->dims, .sizes = base->shape, .whole = true};
    return new_patch(p, &patch, err);
}

/* @param next receives the index of the first strided chunk; those before it are in stacks. */
static fc_code add_stacks(plan *p, size_t *next, fc_error *err) {
    int ndim = p->tensor->ndim;
    size_t i = 0;
    fc_code rc = FC_OK;
    while (i < p->nchunks && p->chunks[i].contiguous && rc == FC_OK) {
        size_t count = 1, segments = segments_of(bytes_of(p, &p->chunks[i]));
        if (segments > FC_H5_SEGMENTS) {
            p->why = "larger than one dataset can be"; /* a chunk of 2.7 TB */
            return FC_OK;
        }
        while (i + count < p->nchunks && p->chunks[i + count].contiguous && ndim > 0 &&
               same_column(ndim, &p->chunks[i + count - 1], &p->chunks[i + count])) {
            size_t more = segments_of(bytes_of(p, &p->chunks[i + count])) + 1;
            if (segments + more > FC_H5_SEGMENTS) {
                break;
            }
            segments += more;
            count++;
        }
        rc = add_stack(p, i, count, segments + 1, err);
        i += count;
    }
    *next = i;
    return rc;
}

/* ---- strided chunks ---- */

/* The dimensions of a chunk that have more than one index. */
typedef struct grid {
    int count;
    int dim[MAX_GRID_DIMS];
    int64_t sizes[MAX_GRID_DIMS], strides[MAX_GRID_DIMS];
} grid;

/*
 * Whether the dimensions that are not in `mask`, walked in order, are blocks at equal distances; if so, fills in `run`.
 * Blocks that follow each other directly are merged.
 */
static bool is_run(const grid *c, unsigned mask, fc_h5_run *run) {
    int64_t sizes[MAX_GRID_DIMS], strides[MAX_GRID_DIMS];
    int n = 0; /* number of levels, from the innermost outwards */
    for (int i = c->count - 1; i >= 0; i--) {
        if (mask >> i & 1) {
            continue;
        }
        if (n > 0 && sizes[n - 1] <= INT64_MAX / (strides[n - 1] ? strides[n - 1] : 1) &&
            c->strides[i] == sizes[n - 1] * strides[n - 1]) {
            sizes[n - 1] *= c->sizes[i];
        } else {
            sizes[n] = c->sizes[i];
            strides[n++] = c->strides[i];
        }
    }
    run->stride = run->count = run->block = 1;
    if (n > 0 && strides[0] == 1) {
        run->block = run->stride = sizes[0];
        n--;
        memmove(sizes, sizes + 1, (size_t)n * sizeof *sizes);
        memmove(strides, strides + 1, (size_t)n * sizeof *strides);
    }
    if (n == 1) {
        run->count = sizes[0];
        run->stride = strides[0];
    }
    return n == 0 || (n == 1 && run->stride >= run->block && run->stride > 0);
}

/* Chooses the dimensions to walk index by index so that the others form as few runs as possible. */
static bool choose_walk(const grid *c, unsigned *mask, int64_t *runs) {
    bool found = false;
    for (unsigned m = 0; m < 1u << c->count; m++) {
        int64_t n = 1;
        fc_h5_run run;
        bool fits = true;
        for (int i = 0; i < c->count && fits; i++) {
            fits = !(m >> i & 1) || (fc_mul_i64(n, c->sizes[i], &n) && n <= MAX_PATCHES);
        }
        if (fits && (!found || n < *runs) && is_run(c, m, &run)) {
            *mask = m;
            *runs = n;
            found = true;
        }
    }
    return found;
}

static bool list_grid(int ndim, const int64_t *sizes, const int64_t *strides, grid *c) {
    c->count = 0;
    for (int d = 0; d < ndim; d++) {
        if (sizes[d] > 1) {
            if (c->count == MAX_GRID_DIMS) {
                return false;
            }
            c->dim[c->count] = d;
            c->sizes[c->count] = sizes[d];
            c->strides[c->count++] = strides[d];
        }
    }
    return true;
}

/* Adds run number `n` of a chunk: one index of each walked dimension, and all of the others. */
static fc_code add_run(plan *p, const located *l, const grid *c, unsigned mask, int64_t n, fc_h5_run run,
                       fc_error *err) {
    int ndim = p->tensor->ndim;
    int64_t *dims = fc_arena_alloc(p->arena, 2 * (size_t)ndim * sizeof *dims);
    FC_NEED(dims, err, p->tensor->name);
    memcpy(dims, l->dims, 2 * (size_t)ndim * sizeof *dims);
    for (int i = c->count - 1; i >= 0; i--) {
        if (mask >> i & 1) {
            int64_t index = n % c->sizes[i];
            n /= c->sizes[i];
            dims[c->dim[i]] += index;
            dims[ndim + c->dim[i]] = 1;
            run.start += index * c->strides[i];
        }
    }
    fc_h5_view_box patch = {.base = p->nbases - 1, .offsets = dims, .sizes = dims + ndim, .run = run};
    return new_patch(p, &patch, err);
}

static fc_code add_strided(plan *p, const located *l, fc_error *err) {
    const fc_extent *e = &l->extent;
    const int64_t *sizes = l->dims + p->tensor->ndim;
    grid c;
    unsigned mask = 0;
    int64_t runs = 0, span = 1; /* elements from the first to the last, which cannot overflow within the extent */
    if (!list_grid(p->tensor->ndim, sizes, e->strides, &c) || !choose_walk(&c, &mask, &runs)) {
        p->why = "strided in its storage, which would take too many datasets";
        return FC_OK;
    }
    for (int i = 0; i < c.count; i++) {
        span += (c.sizes[i] - 1) * c.strides[i];
    }
    uint64_t bytes = (uint64_t)span * p->element;
    if (segments_of(bytes) > FC_H5_SEGMENTS) {
        p->why = "larger than one dataset can be";
        return FC_OK;
    }
    fc_h5_base *base = NULL;
    FC_TRY(new_base(p, 1, &span, segments_of(bytes) + 1, &base, err));
    add_bytes(base, e->file, e->offset + e->first, bytes);
    fc_h5_run run = {.extent = span};
    (void)is_run(&c, mask, &run);
    for (int64_t n = 0; n < runs; n++) {
        FC_TRY(add_run(p, l, &c, mask, n, run, err));
    }
    return FC_OK;
}

/* ---- one tensor ---- */

static fc_code find_chunks(plan *p, fc_error *err) {
    const int64_t origin[FC_MAX_DIMS] = {0};
    const fc_box whole = {p->tensor->ndim, origin, p->tensor->shape};
    fc_coverage *coverage = NULL;
    p->chunks = calloc(p->tensor->nchunks + 1, sizeof *p->chunks);
    FC_NEED(p->chunks, err, p->tensor->name);
    fc_code rc;
    FC_TRY_GOTO(fc_coverage_within(p->source, p->tensor, NULL, &coverage, err), rc, out);
    rc = fc_coverage_visit(coverage, &whole, locate_overlap, p, err);
out:
    fc_coverage_free(coverage);
    return rc;
}

static fc_code plan_pieces(plan *p, fc_error *err) {
    size_t i = 0;
    p->bases = fc_arena_calloc(p->arena, p->nchunks, sizeof *p->bases);
    FC_NEED(p->bases, err, p->tensor->name);
    int ndim = p->tensor->ndim;
    fc_sort_items_by(p->chunks, p->nchunks, sizeof *p->chunks, compare_chunk_columns, &ndim);
    FC_TRY(add_stacks(p, &i, err));
    for (; i < p->nchunks && !p->why; i++) {
        FC_TRY(add_strided(p, &p->chunks[i], err));
    }
    return FC_OK;
}

static bool is_whole(const plan *p) {
    const int64_t *shape = p->tensor->shape;
    return p->npatches == 1 && p->patches[0].whole &&
           (p->tensor->ndim == 0 || memcmp(p->bases[0].shape, shape, (size_t)p->tensor->ndim * sizeof *shape) == 0);
}

/* @param why receives the reason if the tensor cannot be viewed, else NULL. */
static fc_code plan_tensor(const fc_target *target, const fc_tensor *t, fc_arena *arena, fc_h5_viewed *out,
                           const char **why, fc_error *err) {
    const fc_box whole = {t->ndim, t->shape, t->shape};
    plan p = {.source = target->source, .tensor = t, .arena = arena, .element = fc_dtype_size(t->dtype)};
    *why = NULL;
    *out = (fc_h5_viewed){.kind = FC_H5_VIEW_EMPTY};
    if (fc_box_volume(&whole) == 0) {
        return FC_OK;
    }
    out->kind = FC_H5_VIEW_COPIED;
    if (t->object) {
        return FC_OK;
    }
    fc_code rc;
    FC_TRY_GOTO(find_chunks(&p, err), rc, out);
    if (!p.why) {
        FC_TRY_GOTO(plan_pieces(&p, err), rc, out);
    }
    if (!p.why) {
        *out = (fc_h5_viewed){.kind = is_whole(&p) ? FC_H5_VIEW_EXTERNAL : FC_H5_VIEW_ASSEMBLED,
                              .bases = p.bases,
                              .nbases = p.nbases,
                              .patches = p.patches,
                              .npatches = p.npatches};
    }
    if ((uint64_t)fc_box_volume(&whole) * p.element > COPY_BYTES) {
        *why = p.why;
    }
out:
    free(p.chunks);
    return rc;
}

/* The tensors that cannot be viewed, as many as fit on the line. */
typedef struct refusals {
    size_t count, named;
    char text[640];
} refusals;

static void note_refusal(refusals *r, const char *name, const char *why) {
    size_t used = strlen(r->text), left = sizeof r->text - used;
    int n = r->named < r->count ? (int)left
                                : snprintf(r->text + used, left, "%s'%.200s' (%s)", used ? ", " : "", name, why);
    if (n >= 0 && (size_t)n < left) {
        r->named++;
    } else {
        r->text[used] = '\0';
    }
    r->count++;
}

fc_code fc_h5_view_plan(const fc_target *target, fc_arena *arena, fc_h5_viewed *out, fc_error *err) {
    refusals refused = {0};
    for (size_t i = 0; i < target->ntensors; i++) {
        const char *why;
        FC_TRY_CONTEXT(plan_tensor(target, target->tensors[i].source, arena, &out[i], &why, err), err, "%s",
                       target->source->path);
        if (why) {
            note_refusal(&refused, target->tensors[i].name, why);
        }
    }
    if (refused.count == 0) {
        return FC_OK;
    }
    char more[64] = "";
    if (refused.named < refused.count) {
        snprintf(more, sizeof more, " and %zu more", refused.count - refused.named);
    }
    return fc_advise(err,
                     fc_fail(err, FC_EUNSUPPORTED,
                             "%s: cannot be viewed: %s%s; consolidate the checkpoint instead, or leave them out",
                             target->source->path, refused.text, more),
                     FC_HINT_EXCLUDE, NULL);
}
