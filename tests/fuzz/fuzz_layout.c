/*
 * Fuzzes the plan and the reading: the input chooses a tensor, how it is cut in the source, and the mesh of the target.
 * The oracle is naive: the boxes that the ranks store must hold each element exactly once, with the value that it has.
 */
#include "fsdpckpt/layout.h"
#include "fsdpckpt/memory.h"
#include "fsdpckpt/move.h"
#include "fsdpckpt/select.h"

#include "fuzz.h"

enum { DIMS = 4, MOST_CHUNKS = 64, MOST_ELEMENTS = 4096 };

typedef struct choices {
    const uint8_t *data;
    size_t size;
} choices;

/* @return a number from 0 to `most`. */
static int64_t choose(choices *c, int64_t most) {
    if (c->size == 0 || most <= 0) {
        return 0;
    }
    c->size--;
    return *c->data++ % (most + 1);
}

typedef struct source_tensor {
    int ndim;
    int64_t shape[DIMS], strides[DIMS];
    int64_t dims[MOST_CHUNKS][2 * DIMS];
    fc_memory_chunk chunks[MOST_CHUNKS];
    size_t nchunks;
    uint16_t values[MOST_ELEMENTS];
} source_tensor;

static int64_t index_of(const source_tensor *t, const int64_t *at) {
    int64_t index = 0;
    for (int d = 0; d < t->ndim; d++) {
        index += at[d] * t->strides[d];
    }
    return index;
}

/* Cuts a box in two, again and again, as the input chooses. */
static void cut(source_tensor *t, choices *c, const int64_t *offsets, const int64_t *sizes, int depth) {
    const int d = t->ndim ? (int)choose(c, t->ndim - 1) : 0;
    if (depth > 0 && t->ndim > 0 && sizes[d] > 1 && choose(c, 3) > 0) {
        int64_t o[DIMS], s[DIMS];
        memcpy(o, offsets, sizeof o);
        memcpy(s, sizes, sizeof s);
        s[d] = 1 + choose(c, sizes[d] - 2);
        cut(t, c, o, s, depth - 1);
        o[d] += s[d];
        s[d] = sizes[d] - s[d];
        cut(t, c, o, s, depth - 1);
        return;
    }
    int64_t *dims = t->dims[t->nchunks];
    memcpy(dims, offsets, (size_t)t->ndim * sizeof *dims);
    memcpy(dims + t->ndim, sizes, (size_t)t->ndim * sizeof *dims);
    t->chunks[t->nchunks++] = (fc_memory_chunk){dims, dims + t->ndim, t->strides, t->values + index_of(t, offsets)};
}

static bool make_tensor(source_tensor *t, choices *c) {
    static const int64_t zeros[DIMS];
    int64_t elements = 1;
    t->ndim = (int)choose(c, DIMS);
    t->nchunks = 0;
    for (int d = 0; d < t->ndim; d++) {
        t->shape[d] = choose(c, 9);
    }
    for (int d = t->ndim - 1; d >= 0; d--) {
        t->strides[d] = elements;
        elements *= t->shape[d] ? t->shape[d] : 1;
    }
    for (int i = 0; i < MOST_ELEMENTS; i++) {
        t->values[i] = (uint16_t)(i * 40503 + 7);
    }
    if (elements > MOST_ELEMENTS) {
        return false;
    }
    cut(t, c, zeros, t->shape, 5);
    return true;
}

/* Reads one stored box, and compares and counts its elements. */
static void check_item(const fc_checkpoint *source, const source_tensor *t, const int64_t *dims, uint8_t *seen) {
    const fc_box box = {t->ndim, dims, dims + t->ndim};
    const int64_t volume = fc_box_volume(&box);
    int64_t at[DIMS] = {0};
    uint16_t found[MOST_ELEMENTS];
    fc_error err;
    if (!fc_box_within(&box, t->shape) || volume > MOST_ELEMENTS ||
        (volume > 0 && fc_read_box(source, &source->tensors[0], &box, FC_I16, found, &err) != FC_OK)) {
        abort();
    }
    for (int64_t i = 0; i < volume; i++) {
        int64_t place[DIMS];
        for (int d = 0; d < t->ndim; d++) {
            place[d] = dims[d] + at[d];
        }
        const int64_t index = index_of(t, place);
        if (found[i] != t->values[index] || seen[index]++) {
            abort();
        }
        for (int d = t->ndim - 1; d >= 0 && ++at[d] == dims[t->ndim + d]; d--) {
            at[d] = 0;
        }
    }
}

static void check_target(const fc_checkpoint *source, const source_tensor *t, const fc_target *target) {
    static uint8_t seen[MOST_ELEMENTS];
    int64_t elements = 0;
    fc_error err;
    memset(seen, 0, sizeof seen);
    for (int64_t rank = 0; rank < fc_mesh_ranks(target->mesh); rank++) {
        fc_arena *arena = fc_arena_new();
        fc_target_file file;
        if (fc_target_file_of(target, (uint32_t)rank, arena, &file, &err) != FC_OK) {
            abort();
        }
        for (size_t i = 0; i < file.nitems; i++) {
            if (file.items[i].owned) {
                check_item(source, t, file.items[i].dims, seen);
            }
        }
        fc_arena_free(arena);
    }
    const bool known = fc_numel(t->ndim, t->shape, &elements);
    for (int64_t i = 0; known && i < elements; i++) {
        if (seen[i] != 1) {
            abort();
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static source_tensor t;
    choices c = {data, size};
    fc_error err;
    if (!make_tensor(&t, &c)) {
        return 0;
    }
    const fc_memory_tensor tensor = {.name = fuzz_names[choose(&c, FUZZ_NAMES - 1)],
                                     .dtype = FC_I16,
                                     .ndim = t.ndim,
                                     .shape = t.shape,
                                     .chunks = t.chunks,
                                     .nchunks = t.nchunks};
    fc_arena *arena = fc_arena_new();
    fc_checkpoint *source = NULL;
    const fc_tp_plan *plan = NULL;
    fc_mesh mesh = {.ndim = (int)choose(&c, 2), .names = {"dp", "tp"}};
    fc_target target;
    fc_selected counts;
    for (int i = 0; i < mesh.ndim; i++) {
        mesh.sizes[i] = 1 + choose(&c, 6);
    }
    if (fc_checkpoint_in_memory("fuzz", &tensor, 1, &source, &err) != FC_OK ||
        fc_tp_plan_load("auto", arena, &plan, &err) != FC_OK) {
        abort();
    }
    const fc_selection how = {.mesh = &mesh, .tp_plan = plan, .self_contained = false};
    if (fc_target_new(source, &how, arena, &target, &counts, &err) == FC_OK) {
        check_target(source, &t, &target);
    }
    fc_checkpoint_close(source);
    fc_arena_free(arena);
    return 0;
}
