/*
 * Fuzzes the plan of a view: the input chooses a tensor, how it is cut, and how each chunk is stored in its file. The
 * oracle is naive: the plan must lead from each element to its own bytes in its own file, exactly once.
 */
#include "fsdpckpt/format.h"
#include "fsdpckpt/select.h"
#include "hdf5/view/view.h"

#include "fuzz_tensor.h"

enum { FILES = 3, ELEMENT = 4 };

static source_tensor t;
static fc_extent extents[MOST_CHUNKS];
static struct place {
    uint32_t file;
    uint64_t at;
} places[MOST_ELEMENTS]; /* where each element is */

static fc_code extent_of(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                         fc_error *err) {
    (void)checkpoint, (void)tensor, (void)err;
    *out = extents[index];
    return FC_OK;
}

/* Chooses strides with the dimensions in any order, gaps, and now and then one that repeats elements. @return the
 * elements that they span. */
static int64_t choose_strides(choices *c, const int64_t *sizes, int64_t *strides) {
    int order[DIMS];
    int64_t stride = 1, span = 1;
    const bool plain = choose(c, 2) == 0;
    for (int i = 0; i < t.ndim; i++) {
        const int j = plain ? i : (int)choose(c, i);
        order[i] = order[j];
        order[j] = i;
    }
    for (int i = t.ndim - 1; i >= 0; i--) {
        const int d = order[i];
        const int64_t gap = plain ? 0 : choose(c, 7);
        strides[d] = gap == 7 ? 0 : stride;
        span += (sizes[d] - 1) * strides[d];
        stride = gap == 7 ? stride : stride * sizes[d] + gap / 2;
    }
    return span;
}

static void place_chunk(choices *c, size_t number, uint64_t *ends) {
    const int64_t *dims = t.dims[number], *sizes = dims + t.ndim;
    const fc_box box = {t.ndim, dims, sizes};
    const int64_t volume = fc_box_volume(&box);
    int64_t at[DIMS] = {0};
    fc_extent *e = &extents[number];
    *e = (fc_extent){
        .codec = FC_CODEC_RAW, .file = (uint32_t)choose(c, FILES - 1), .first = ELEMENT * (uint64_t)choose(c, 2)};
    const int64_t span = volume > 0 ? choose_strides(c, sizes, e->strides) : 0;
    e->offset = ends[e->file] + (uint64_t)choose(c, 3);
    e->length = e->decoded = e->first + (uint64_t)span * ELEMENT;
    ends[e->file] = e->offset + e->length;
    for (int64_t i = 0; i < volume; i++) {
        uint64_t where = e->offset + e->first;
        int64_t global[DIMS];
        for (int d = 0; d < t.ndim; d++) {
            where += (uint64_t)(at[d] * e->strides[d]) * ELEMENT;
            global[d] = dims[d] + at[d];
        }
        places[index_of(&t, global)] = (struct place){e->file, where};
        next_index(t.ndim, sizes, at);
    }
}

/* @return the place of byte `at` of a base, whose segments follow each other. */
static struct place find_byte(const fc_h5_base *base, uint64_t at) {
    for (size_t i = 0; i < base->nsegments; i++) {
        if (at < base->segments[i].length) {
            if (base->segments[i].length - at < ELEMENT && i + 1 == base->nsegments) {
                abort();
            }
            return (struct place){base->files[i], base->segments[i].offset + at};
        }
        at -= base->segments[i].length;
    }
    abort();
}

static int64_t element_of(const fc_h5_view_box *patch, const fc_h5_base *base, int64_t i) {
    const fc_h5_run *run = &patch->run;
    if (patch->whole) {
        return i;
    }
    const int64_t element = run->start + i / run->block * run->stride + i % run->block;
    if (base->ndim != 1 || run->extent != base->shape[0] || i / run->block >= run->count || element >= run->extent) {
        abort();
    }
    return element;
}

static void check_patch(const fc_h5_viewed *viewed, const fc_h5_view_box *patch, uint8_t *seen) {
    const fc_h5_base *base = &viewed->bases[patch->base];
    const fc_box box = {t.ndim, patch->offsets, patch->sizes};
    const int64_t volume = fc_box_volume(&box);
    int64_t at[DIMS] = {0};
    if (patch->base >= viewed->nbases || !fc_box_within(&box, t.shape)) {
        abort();
    }
    for (int64_t i = 0; i < volume; i++) {
        int64_t global[DIMS];
        for (int d = 0; d < t.ndim; d++) {
            global[d] = patch->offsets[d] + at[d];
        }
        const int64_t index = index_of(&t, global);
        const struct place found = find_byte(base, (uint64_t)element_of(patch, base, i) * ELEMENT);
        if (seen[index]++ || found.file != places[index].file || found.at != places[index].at) {
            abort();
        }
        next_index(t.ndim, patch->sizes, at);
    }
}

static void check_view(const fc_h5_viewed *viewed) {
    static uint8_t seen[MOST_ELEMENTS];
    int64_t elements = 0;
    memset(seen, 0, sizeof seen);
    if (!fc_numel(t.ndim, t.shape, &elements) || (elements == 0) != (viewed->kind == FC_H5_VIEW_EMPTY)) {
        abort();
    }
    if (viewed->kind == FC_H5_VIEW_COPIED) {
        return;
    }
    for (size_t i = 0; i < viewed->npatches; i++) {
        check_patch(viewed, &viewed->patches[i], seen);
    }
    for (int64_t i = 0; i < elements; i++) {
        if (seen[i] != 1) {
            abort();
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const fc_format format = {.name = "fuzz", .reader = {.extent = extent_of}};
    static const fc_selection everything;
    static const fc_file files[FILES] = {{"a", "a"}, {"b", "b"}, {"c", "c"}};
    choices c = {data, size};
    uint64_t ends[FILES] = {0};
    fc_chunk chunks[MOST_CHUNKS];
    if (!make_tensor(&t, &c)) {
        return 0;
    }
    for (size_t i = 0; i < t.nchunks; i++) {
        place_chunk(&c, i, ends);
        chunks[i] = (fc_chunk){.dims = t.dims[i],
                               .place = fc_place_bytes(extents[i].file, extents[i].offset, extents[i].length)};
    }
    fc_tensor tensor = {
        .name = "t", .dtype = FC_F32, .ndim = t.ndim, .shape = t.shape, .chunks = chunks, .nchunks = t.nchunks};
    const fc_checkpoint source = {
        .format = &format, .path = "fuzz", .files = files, .nfiles = FILES, .tensors = &tensor, .ntensors = 1};
    fc_arena *arena = fc_arena_new();
    fc_h5_viewed viewed;
    fc_target target;
    fc_selected counts;
    fc_error err;
    if (fc_target_new(&source, &everything, arena, &target, &counts, &err) != FC_OK ||
        fc_h5_view_plan(&target, arena, &viewed, &err) != FC_OK) {
        abort();
    }
    check_view(&viewed);
    fc_arena_free(arena);
    return 0;
}
