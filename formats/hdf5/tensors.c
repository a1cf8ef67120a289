/*
 * Makes tensors and chunks from the records of datasets: names, boxes, and the parts that a list of chunks does not
 * cover. records.c has checked everything in an fc_h5_dataset against its file.
 */
#include "base/checked.h"
#include "base/grow.h"
#include "checkpoint/path.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "hdf5/names.h"
#include "hdf5/reader.h"
#include "hdf5/writer/tree.h"

#include <stdlib.h>
#include <string.h>

enum { LIBRARY_BOX = 8 << 20, MAX_LIBRARY_BOXES = 1 << 20 };

/* ---- chunks ---- */

/* @return a new chunk with room for its dims, or NULL. */
static fc_chunk *new_chunk(fc_h5_chunks *chunks, int ndim, int64_t **dims) {
    if (!fc_arena_grow(chunks->arena, &chunks->items, &chunks->cap, chunks->count, chunks->count + 1,
                       sizeof *chunks->items)) {
        return NULL;
    }
    *dims = fc_arena_calloc(chunks->arena, 2 * (size_t)ndim, sizeof **dims);
    if (!*dims) {
        return NULL;
    }
    fc_chunk *chunk = &chunks->items[chunks->count++];
    chunk->dims = *dims;
    return chunk;
}

/* The dataset whose chunks are added, and its place in a tensor. */
typedef struct adding {
    fc_h5_chunks *chunks;
    const fc_h5_dataset *d;
    const int64_t *base;
    uint32_t file, rank;
    uint64_t index; /* index in fc_h5_state.stored */
    int64_t grid[FC_MAX_DIMS];
    int64_t unit[FC_MAX_DIMS];
    bool failed;
} adding;

/* Adds the box at `at` of `sizes`, clipped to the dataset. `length` 0: its elements have no bytes of their own. */
static void add_box(adding *a, const int64_t *at, const int64_t *sizes, uint64_t offset, uint64_t length,
                    uint32_t mask) {
    const fc_h5_dataset *d = a->d;
    int64_t *dims;
    fc_chunk *chunk = new_chunk(a->chunks, d->ndim, &dims);
    if (!chunk) {
        a->failed = true;
        return;
    }
    for (int k = 0; k < d->ndim; k++) {
        int64_t left = d->shape[k] - at[k];
        dims[k] = at[k] + (a->base ? a->base[k] : 0);
        dims[d->ndim + k] = sizes[k] < left ? sizes[k] : left;
    }
    chunk->place =
        length > 0 ? fc_place_bytes(a->file, offset, length) : (fc_place){.kind = FC_PLACE_FILE, .file = a->file};
    chunk->rank = a->rank;
    chunk->detail = a->index << 32 | mask;
}

static void add_whole(adding *a, uint64_t offset, uint64_t length) {
    static const int64_t origin[FC_MAX_DIMS];
    add_box(a, origin, a->d->shape, offset, length, 0);
}

/* Adds [from, to) of the row-major order of the grid as boxes of fill values, from dimension `k` inwards. `at` holds
 * the grid position in the dimensions before `k`. */
static void add_missing(adding *a, int k, int64_t *at, int64_t from, int64_t to) {
    const fc_h5_dataset *d = a->d;
    if (from >= to) {
        return;
    }
    int64_t inner = 1;
    for (int i = k + 1; i < d->ndim; i++) {
        inner *= a->grid[i];
    }
    int64_t first = from / inner, last = to / inner, head = from % inner, tail = to % inner;
    at[k] = first;
    if (first == last) {
        add_missing(a, k + 1, at, head, tail);
        return;
    }
    if (head > 0) {
        add_missing(a, k + 1, at, head, inner);
        first++;
    }
    if (first < last) {
        int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
        for (int i = 0; i < d->ndim; i++) {
            /* The last box is clipped later. The product stays below shape + chunk. */
            offsets[i] = i < k ? at[i] * a->unit[i] : i == k ? first * a->unit[i] : 0;
            sizes[i] = i < k ? a->unit[i] : d->shape[i];
            if (i == k && last < a->grid[k]) {
                sizes[i] = (last - first) * a->unit[i];
            }
        }
        add_box(a, offsets, sizes, 0, 0, 0);
    }
    if (tail > 0) {
        at[k] = last;
        add_missing(a, k + 1, at, 0, tail);
    }
}

static void set_grid(adding *a, const int64_t *unit) {
    for (int k = 0; k < a->d->ndim; k++) {
        a->unit[k] = unit[k];
        a->grid[k] = a->d->shape[k] == 0 ? 0 : (a->d->shape[k] - 1) / unit[k] + 1;
    }
}

static int64_t grid_number(const adding *a, const int64_t *at) {
    int64_t number = 0;
    for (int k = 0; k < a->d->ndim; k++) {
        number = number * a->grid[k] + at[k] / a->unit[k];
    }
    return number;
}

typedef struct numbered {
    int64_t number;
    size_t chunk;
} numbered;

static int compare_chunk_numbers(const void *a, const void *b) {
    int64_t x = ((const numbered *)a)->number, y = ((const numbered *)b)->number;
    return (x > y) - (x < y);
}

/* Adds stored chunks in row-major order, and boxes of fill values for the rest. */
static fc_code add_stored_chunks(adding *a, const char *path, fc_error *err) {
    const fc_h5_dataset *d = a->d;
    int64_t at[FC_MAX_DIMS], total = 1, next = 0;
    numbered *order = malloc((d->nchunks + 1) * sizeof *order);
    fc_code rc = FC_OK;
    FC_NEED(order, err, path);
    set_grid(a, d->chunk);
    for (int k = 0; k < d->ndim; k++) {
        total *= a->grid[k]; /* at most the number of elements */
    }
    for (size_t i = 0; i < d->nchunks; i++) {
        order[i] = (numbered){grid_number(a, d->chunks[i].at), i};
    }
    fc_sort_items(order, d->nchunks, sizeof *order, compare_chunk_numbers);
    for (size_t i = 0; i < d->nchunks; i++) {
        const fc_h5_stored_chunk *c = &d->chunks[order[i].chunk];
        if (order[i].number < next) {
            rc = fc_fail(err, FC_ECORRUPT, "%s: corrupt HDF5 file: dataset /%s stores one chunk twice", path, d->path);
            goto out;
        }
        add_missing(a, 0, at, next, order[i].number);
        add_box(a, c->at, d->chunk, c->offset, c->size, c->mask);
        next = order[i].number + 1;
    }
    add_missing(a, 0, at, next, total);
out:
    free(order);
    return rc;
}

/*
 * Adds boxes of whole units of about LIBRARY_BOX bytes; each takes a reader process and a buffer. @return false if
 * there are too many.
 */
static bool add_library_boxes(adding *a) {
    const fc_h5_dataset *d = a->d;
    int64_t unit[FC_MAX_DIMS] = {0}, at[FC_MAX_DIMS] = {0}, count = 1;
    uint64_t bytes = d->element;
    for (int k = 0; k < d->ndim; k++) {
        unit[k] = d->chunk[k] < d->shape[k] ? d->chunk[k] : d->shape[k];
        bytes *= (uint64_t)unit[k]; /* at most the whole dataset */
    }
    for (int k = d->ndim - 1; k >= 0; k--) {
        int64_t need = (d->shape[k] - 1) / unit[k] + 1,
                room = LIBRARY_BOX / (int64_t)(bytes < LIBRARY_BOX ? bytes : LIBRARY_BOX);
        int64_t times = need < room ? need : room;
        bytes *= (uint64_t)times;
        unit[k] = times == need ? d->shape[k] : unit[k] * times;
        if (times < need) {
            break;
        }
    }
    set_grid(a, unit);
    for (int k = 0; k < d->ndim; k++) {
        if (!fc_mul_i64(count, a->grid[k], &count) || count > MAX_LIBRARY_BOXES) {
            return false;
        }
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t left = i;
        for (int k = d->ndim - 1; k >= 0; k--) {
            at[k] = left % a->grid[k] * a->unit[k];
            left /= a->grid[k];
        }
        add_box(a, at, unit, 0, 0, 0);
    }
    return true;
}

/* Lists an unreadable dataset as an object of one byte; asking for its extent fails with the reason. */
static void make_unreadable(fc_h5_dataset *d) {
    static const int64_t one = 1;
    d->kind = FC_H5_UNREADABLE;
    d->where = d->where == FC_H5_ELSEWHERE || d->where == FC_H5_BY_LIBRARY ? d->where : FC_H5_NOWHERE;
    d->dtype = FC_OPAQUE;
    d->element = 1;
    d->ndim = 1;
    d->shape = &one;
}

static fc_code new_stored(fc_checkpoint *checkpoint, const fc_h5_stored *stored, uint64_t *index, fc_error *err) {
    fc_h5_state *state = checkpoint->state;
    FC_NEED(state->nstored < UINT32_MAX && fc_arena_grow(checkpoint->arena, &state->stored, &state->stored_cap,
                                                         state->nstored, state->nstored + 1, sizeof *state->stored),
            err, checkpoint->path);
    *index = state->nstored;
    state->stored[state->nstored++] = *stored;
    return FC_OK;
}

/* The boxes of a tensor that libhdf5 decodes. One that is too large for that is unreadable. */
static void add_decoded(adding *a, fc_h5_dataset *d) {
    if (!add_library_boxes(a)) {
        d->code = FC_EUNSUPPORTED;
        d->message = "too large to be decoded box by box";
        make_unreadable(d);
        a->base = NULL;
        add_whole(a, 0, 0);
    }
}

fc_code fc_h5_add_chunks(fc_checkpoint *checkpoint, fc_h5_dataset *d, uint32_t file, const int64_t *base, uint32_t rank,
                         fc_h5_chunks *chunks, fc_error *err) {
    adding a = {.chunks = chunks, .d = d, .base = base, .file = file, .rank = rank};
    if (d->kind == FC_H5_UNREADABLE) {
        make_unreadable(d);
    }
    if (fc_is_empty(d->ndim, d->shape)) {
        return FC_OK;
    }
    fc_h5_stored stored = {d, base, file};
    FC_TRY(new_stored(checkpoint, &stored, &a.index, err));
    if (d->kind == FC_H5_TENSOR && d->where == FC_H5_IN_CHUNKS) {
        FC_TRY(add_stored_chunks(&a, checkpoint->files[file].path, err));
    } else if (d->kind == FC_H5_TENSOR && d->where == FC_H5_BY_LIBRARY) {
        add_decoded(&a, d);
    } else {
        add_whole(&a, d->offset, d->where == FC_H5_AT_OFFSET ? d->length : 0);
    }
    return a.failed ? fc_no_memory(err, checkpoint->path) : FC_OK;
}

/* ---- names ---- */

/* Whether `text` is an integer in Python's notation: "-7", but not "07". */
static bool is_integer(const char *text) {
    const char *digits = text + (*text == '-');
    size_t n = strspn(digits, "0123456789");
    return n > 0 && n <= 18 && digits[n] == '\0' && (digits[0] != '0' || (n == 1 && digits == text));
}

static fc_code split_path(fc_arena *arena, const fc_h5_dataset *d, bool ours, fc_path *path, fc_error *err) {
    size_t n = 1, i = 0;
    for (const char *p = d->path; *p; p++) {
        n += *p == '/';
    }
    fc_path_element *elements = fc_arena_calloc(arena, n, sizeof *elements);
    FC_NEED(elements, err, NULL);
    for (const char *p = d->path;; i++) {
        size_t len = strcspn(p, "/");
        const unsigned char kind = d->lists.data[i];
        const char *link = fc_arena_strndup(arena, p, len);
        FC_NEED(link, err, NULL);
        elements[i] = (fc_path_element){.key = link,
                                        .is_index = kind == FC_H5_LIST || kind == FC_H5_TUPLE,
                                        .is_tuple = kind == FC_H5_TUPLE,
                                        .is_number = kind == FC_H5_NUMBERS && is_integer(link)};
        FC_TRY(ours ? fc_h5_name_decode(arena, link, &elements[i].key, err) : FC_OK);
        if (p[len] == '\0') {
            break;
        }
        p += len + 1;
    }
    *path = (fc_path){elements, n};
    return FC_OK;
}

fc_code fc_h5_name_tensor(fc_arena *arena, const fc_h5_dataset *d, bool ours, const char *file, fc_tensor *tensor,
                          fc_error *err) {
    FC_TRY_CONTEXT(split_path(arena, d, ours, &tensor->path, err), err, "%s: dataset /%s", file, d->path);
    tensor->name = ours && d->fqn ? d->fqn : fc_path_spell(arena, &tensor->path, '.');
    return tensor->name ? FC_OK : fc_no_memory(err, file);
}

fc_code fc_h5_check_names(fc_arena *arena, fc_tensor *tensors, size_t count, bool may_rename, const char *file,
                          fc_error *err) {
    fc_code rc = FC_OK;
    bool renamed = false;
    fc_tensor **sorted = fc_list_named(tensors, count, sizeof *tensors);
    FC_NEED(sorted, err, file);
    const char *before = count > 0 ? sorted[0]->name : NULL;
    for (size_t i = 1; rc == FC_OK && i < count; i++) {
        if (strcmp(before, sorted[i]->name) != 0) {
            before = sorted[i]->name;
        } else if (!may_rename) {
            rc = fc_fail(err, FC_ECORRUPT, "%s: two datasets have the name %s", file, before);
        } else {
            sorted[i]->name = fc_path_spell(arena, &sorted[i]->path, '/');
            rc = sorted[i]->name ? FC_OK : fc_no_memory(err, file);
            renamed = true;
        }
    }
    free(sorted);
    return rc == FC_OK && renamed ? fc_h5_check_names(arena, tensors, count, false, file, err) : rc;
}
