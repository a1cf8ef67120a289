/*
 * Describes the tensors of a state dict by the boxes of all ranks. Ranks lay out flat parameters on their own (those of
 * tensor parallelism may be uneven), so each lists its boxes and sends the list to all. The data stays where it is.
 */
#include "base/checked.h"
#include "base/crc.h"
#include "base/grow.h"
#include "fsdpckpt/memory.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "train/state_list.h"

#include <stdlib.h>
#include <string.h>

enum { DIGEST = -1 };

/* A box of any rank. Several may be equal: replicas. */
typedef struct any_box {
    const fc_state_tensor *tensor;
    const int64_t *dims;
    const int64_t *strides;
    const void *data; /* NULL: another rank's */
} any_box;

/* ---- exchange ---- */

/* Ranks of tensor parallelism hold the same elements of a tensor that it does not shard, but in other boxes if their
 * flat parameters have other sizes. So one of them gives the tensor. */
static bool gives(const fc_state_list *list, const fc_state_box *box) {
    const fc_state_tensor *t = &list->tensors[box->tensor];
    return list->tp < 0 || t->placements[list->tp].kind != FC_REPLICATE ||
           (int64_t)(box->tensor % (size_t)list->mesh.sizes[list->tp]) == list->tp_rank;
}

static int64_t digest_of(const fc_state_list *list) {
    uint64_t crc = 0;
    for (size_t i = 0; i < list->ntensors; i++) {
        const fc_state_tensor *t = &list->tensors[i];
        crc = fc_crc64(crc, t->name, strlen(t->name) + 1);
        crc = fc_crc64(crc, &t->dtype, sizeof t->dtype);
        crc = fc_crc64(crc, t->shape, (size_t)t->ndim * sizeof *t->shape);
    }
    return (int64_t)(crc >> 1);
}

/* A list begins with DIGEST and a digest of the tensors. A box is the index of its tensor, then 2 × ndim numbers. */
static fc_code write_boxes(const fc_state_list *list, fc_notes *out, fc_error *err) {
    const int64_t head[] = {DIGEST, digest_of(list)};
    FC_NEED(fc_notes_add(out, head, sizeof head), err, NULL);
    for (size_t i = 0; i < list->nboxes; i++) {
        const fc_state_box *box = &list->boxes[i];
        const int64_t index = (int64_t)box->tensor;
        const size_t bytes = 2 * (size_t)list->tensors[box->tensor].ndim * sizeof *box->dims;
        if (gives(list, box)) {
            FC_NEED(fc_notes_add(out, &index, sizeof index) && fc_notes_add(out, box->dims, bytes), err, NULL);
        }
    }
    return FC_OK;
}

/* Sends the bytes of each rank to all. `*all` and its size: one after the other, from malloc. */
static fc_code gather_bytes(fc_comm *ranks, const fc_notes *mine, int64_t **all, size_t *total, fc_error *err) {
    const size_t n = (size_t)ranks->size;
    uint64_t *counts = calloc(n, sizeof *counts), own = mine->size;
    size_t *sizes = calloc(2 * n, sizeof *sizes), *at = sizes ? sizes + n : NULL;
    bool fits = true;
    fc_code rc;
    *all = NULL;
    *total = 0;
    FC_TRY_GOTO(fc_comm_agree(ranks, counts && sizes ? FC_OK : fc_no_memory(err, NULL), err), rc, out);
    FC_TRY_GOTO(ranks->all_gather(ranks, &own, counts, sizeof own, err), rc, out);
    for (size_t r = 0; counts && sizes && r < n; r++) {
        sizes[r] = (size_t)counts[r];
        at[r] = *total;
        fits = fits && fc_add_size(*total, sizes[r], total);
    }
    *all = fits ? malloc(*total + 1) : NULL;
    FC_TRY_GOTO(fc_comm_agree(ranks, *all ? FC_OK : fc_no_memory(err, NULL), err), rc, out);
    rc = ranks->all_gather_v(ranks, mine->data, *all, sizes, at, err);
out:
    free(counts);
    free(sizes);
    return rc;
}

/* ---- merging ---- */

typedef struct any_boxes {
    any_box *boxes;
    size_t count, capacity;
} any_boxes;

static fc_code add_any(any_boxes *out, any_box box, fc_error *err) {
    FC_NEED(fc_grow(&out->boxes, &out->capacity, out->count + 1, sizeof *out->boxes), err, NULL);
    out->boxes[out->count++] = box;
    return FC_OK;
}

static fc_code read_boxes(const fc_state_list *list, const int64_t *numbers, size_t count, any_boxes *out,
                          fc_error *err) {
    const int64_t digest = digest_of(list);
    for (size_t i = 0; i < count;) {
        const int64_t index = numbers[i++];
        if (index == DIGEST && i < count && numbers[i] == digest) {
            i++;
            continue;
        }
        const bool known = index >= 0 && index < (int64_t)list->ntensors;
        const size_t dims = known ? 2 * (size_t)list->tensors[index].ndim : 0;
        if (!known || count - i < dims) {
            return fc_fail(err, FC_EUSAGE, "the ranks do not list the same tensors in their state");
        }
        FC_TRY(add_any(out, (any_box){&list->tensors[index], numbers + i, NULL, NULL}, err));
        i += dims;
    }
    return FC_OK;
}

static fc_code add_own(const fc_state_list *list, void *const *memory, any_boxes *out, fc_error *err) {
    for (size_t i = 0; i < list->nboxes; i++) {
        const fc_state_box *box = &list->boxes[i];
        const void *data = fc_state_box_data(list, box, memory);
        const any_box own = {&list->tensors[box->tensor], box->dims, box->strides, data};
        FC_TRY(gives(list, box) ? add_any(out, own, err) : FC_OK);
    }
    return FC_OK;
}

static int compare_places(const any_box *a, const any_box *b) {
    FC_ORDER_BY(a->tensor, b->tensor);
    return fc_order_row(a->dims, b->dims, 2 * (size_t)a->tensor->ndim);
}

/* Of equal boxes, that with data is first. */
static int compare_box_places(const void *x, const void *y) {
    const any_box *a = x, *b = y;
    const int order = compare_places(a, b);
    return order != 0 ? order : (a->data == NULL) - (b->data == NULL);
}

static void sort_and_merge(any_boxes *all) {
    size_t kept = 0;
    fc_sort_items(all->boxes, all->count, sizeof *all->boxes, compare_box_places);
    for (size_t i = 0; i < all->count; i++) {
        if (kept == 0 || compare_places(&all->boxes[kept - 1], &all->boxes[i]) != 0) {
            all->boxes[kept++] = all->boxes[i];
        }
    }
    all->count = kept;
}

/* ---- the checkpoint ---- */

static void describe(const fc_state_list *list, const any_boxes *all, fc_memory_chunk *chunks,
                     fc_memory_tensor *tensors) {
    size_t at = 0;
    for (size_t i = 0; i < all->count; i++) {
        const any_box *box = &all->boxes[i];
        chunks[i] = (fc_memory_chunk){box->dims, box->dims + box->tensor->ndim, box->strides, box->data};
    }
    for (size_t i = 0; i < list->ntensors; i++) {
        const fc_state_tensor *t = &list->tensors[i];
        const size_t first = at;
        while (at < all->count && all->boxes[at].tensor == t) {
            at++;
        }
        tensors[i] = (fc_memory_tensor){.name = t->name,
                                        .path = t->path,
                                        .dtype = t->dtype,
                                        .ndim = t->ndim,
                                        .shape = t->shape,
                                        .chunks = chunks + first,
                                        .nchunks = at - first};
    }
}

static fc_code set_layout(const fc_state_list *list, fc_checkpoint *made, fc_error *err) {
    const size_t width = (size_t)list->mesh.ndim;
    fc_placement *placements = calloc(list->ntensors * width + 1, sizeof *placements);
    FC_NEED(placements, err, NULL);
    for (size_t i = 0; i < list->ntensors; i++) {
        memcpy(placements + i * width, list->tensors[i].placements, width * sizeof *placements);
    }
    fc_code rc = fc_memory_set_layout(made, &list->mesh, placements, err);
    free(placements);
    return rc;
}

static fc_code make_checkpoint(const fc_state_list *list, const any_boxes *all, fc_checkpoint **out, fc_error *err) {
    fc_memory_chunk *chunks = calloc(all->count + 1, sizeof *chunks);
    fc_memory_tensor *tensors = calloc(list->ntensors + 1, sizeof *tensors);
    fc_code rc = chunks && tensors ? FC_OK : fc_no_memory(err, NULL);
    if (rc == FC_OK) {
        describe(list, all, chunks, tensors);
        rc = fc_checkpoint_in_memory("the state", tensors, list->ntensors, out, err);
    }
    free(chunks);
    free(tensors);
    return rc == FC_OK ? set_layout(list, *out, err) : rc;
}

static fc_code merge(const fc_state_list *list, void *const *memory, const int64_t *numbers, size_t count,
                     fc_checkpoint **out, fc_error *err) {
    any_boxes all = {NULL, 0, 0};
    fc_code rc;
    FC_TRY_GOTO(add_own(list, memory, &all, err), rc, out);
    FC_TRY_GOTO(read_boxes(list, numbers, count, &all, err), rc, out);
    sort_and_merge(&all);
    rc = make_checkpoint(list, &all, out, err);
out:
    free(all.boxes);
    return rc;
}

fc_code fc_state_gather(const fc_state_list *list, void *const *memory, fc_comm *ranks, fc_checkpoint **out,
                        fc_error *err) {
    fc_notes mine = {NULL, 0, 0};
    int64_t *all = NULL;
    size_t bytes;
    fc_code rc;
    *out = NULL;
    FC_TRY_GOTO(fc_comm_agree(ranks, write_boxes(list, &mine, err), err), rc, out);
    FC_TRY_GOTO(gather_bytes(ranks, &mine, &all, &bytes, err), rc, out);
    rc = fc_comm_agree(ranks, merge(list, memory, all, bytes / sizeof *all, out, err), err);
out:
    if (rc != FC_OK) {
        fc_checkpoint_close(*out);
        *out = NULL;
    }
    free(all);
    free(mine.data);
    return rc;
}
