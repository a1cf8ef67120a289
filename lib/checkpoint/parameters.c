/*
 * Finds out from names and types which values of a checkpoint are parameters, and from the location of their bytes
 * which parameters are tied; makes values that are not. The module tree of wrap policies and flat parameters need this.
 * Reads only the manifest.
 */
#include "checkpoint/parameters.h"

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "sharding/fqn.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

bool fc_is_optimizer_state(const char *name) {
    fc_fqn n;
    if (!strstr(name, "optim") && !strstr(name, "state")) {
        return false;
    }
    fc_fqn_split(name, FC_FQN_COMPONENTS, &n);
    return fc_fqn_take_state_key(&n).len > 0;
}

bool fc_is_of_optimizer(const char *name) {
    for (const char *at = name; at; at = strchr(at, '.')) {
        at += *at == '.';
        if (strncmp(at, "optim", strlen("optim")) == 0) {
            return true;
        }
    }
    return fc_is_optimizer_state(name);
}

/*
 * Buffers are recognised by the names that nn.BatchNorm, rotary embeddings and causal masks give them, and by types
 * that no optimizer trains. One-byte integers may be quantized weights, so they count as parameters.
 */
bool fc_is_buffer(const char *name, fc_dtype dtype) {
    static const char *const names[] = {"running_mean", "running_var", "num_batches_tracked", "inv_freq",   "freqs_cis",
                                        "cos_cached",   "sin_cached",  "masked_bias",         "causal_mask"};
    const char *dot = strrchr(name, '.');
    fc_fqn_component last = {dot ? dot + 1 : name, strlen(dot ? dot + 1 : name)};
    fc_dtype_class cls = fc_dtype_get(dtype)->cls;
    bool integer = cls == FC_CLASS_SIGNED || cls == FC_CLASS_UNSIGNED;
    return cls == FC_CLASS_BOOL || (integer && fc_dtype_size(dtype) > 1) ||
           fc_fqn_is_one_of(last, names, sizeof names / sizeof *names);
}

/* A tensor, ordered by where its bytes are. */
typedef struct candidate {
    const fc_tensor *tensor;
    size_t index; /* among the caller's tensors */
    uint64_t key; /* distinguishes views of the same record */
} candidate;

static int compare_candidate_chunks(const void *a, const void *b) {
    const fc_tensor *x = ((const candidate *)a)->tensor, *y = ((const candidate *)b)->tensor;
    FC_ORDER_BY(x->nchunks, y->nchunks);
    for (size_t i = 0; i < x->nchunks; i++) {
        const fc_place *c = &x->chunks[i].place, *d = &y->chunks[i].place;
        FC_ORDER_BY(c->file, d->file);
        FC_ORDER_BY(c->offset, d->offset);
        FC_ORDER_BY(c->length, d->length);
    }
    return 0;
}

static int compare_candidate_records(const void *a, const void *b) {
    int order = compare_candidate_chunks(a, b);
    size_t x = ((const candidate *)a)->index, y = ((const candidate *)b)->index;
    return order != 0 ? order : (x > y) - (x < y);
}

static int compare_candidate_keys(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    return x->key != y->key ? (x->key < y->key ? -1 : 1) : (x->index > y->index) - (x->index < y->index);
}

/* Hashes the view that a tensor has of its record. Many views may share one, so comparing each pair would be too slow.
 */
static uint64_t key_of(const fc_checkpoint *source, const fc_tensor *t) {
    fc_extent e;
    if (fc_checkpoint_extent(source, t, 0, &e, NULL) != FC_OK) {
        return 0;
    }
    uint64_t key = XXH3_64bits_withSeed(t->shape, (size_t)t->ndim * sizeof *t->shape, e.offset + e.first);
    return XXH3_64bits_withSeed(e.strides, (size_t)t->ndim * sizeof *e.strides, key + t->dtype);
}

static bool same_boxes(const fc_tensor *x, const fc_tensor *y) {
    size_t dims = (size_t)x->ndim;
    bool same = x->dtype == y->dtype && fc_same_sizes(x->ndim, x->shape, y->ndim, y->shape);
    for (size_t i = 0; i < x->nchunks && same && dims > 0; i++) {
        same = memcmp(x->chunks[i].dims, y->chunks[i].dims, 2 * dims * sizeof *x->shape) == 0;
    }
    return same;
}

/* Whether the chunks of both tensors are the same bytes. If only the data could answer that, they count as not tied. */
static bool same_elements(const fc_checkpoint *source, const fc_tensor *x, const fc_tensor *y) {
    bool same = same_boxes(x, y);
    for (size_t i = 0; i < x->nchunks && same; i++) {
        fc_extent a, b;
        same = fc_chunks_share_bytes(&x->chunks[i], &y->chunks[i]) &&
               fc_checkpoint_extent(source, x, i, &a, NULL) == FC_OK &&
               fc_checkpoint_extent(source, y, i, &b, NULL) == FC_OK && a.codec == b.codec &&
               a.codec != FC_CODEC_FORMAT && a.offset == b.offset && a.first == b.first && a.bytes == b.bytes &&
               a.negate == b.negate && a.conjugate == b.conjugate &&
               (x->ndim == 0 || memcmp(a.strides, b.strides, (size_t)x->ndim * sizeof *a.strides) == 0);
    }
    return same;
}

/* Ties equal views among `count` tensors whose chunks are the same records. */
static void tie_run(const fc_checkpoint *source, candidate *run, size_t count, size_t *same_as) {
    for (size_t i = 0; i < count && count > 1; i++) {
        run[i].key = key_of(source, run[i].tensor);
    }
    fc_sort_items(run, count, sizeof *run, compare_candidate_keys);
    for (size_t i = 1; i < count; i++) {
        if (run[i].key == run[i - 1].key && same_elements(source, run[i - 1].tensor, run[i].tensor)) {
            same_as[run[i].index] = same_as[run[i - 1].index];
        }
    }
}

static int compare_candidate_names(const void *a, const void *b) {
    return strcmp(((const candidate *)a)->tensor->name, ((const candidate *)b)->tensor->name);
}

/* Applies the ties of a schema: each tensor is tied to the earlier tensor of that name, if the caller passed it.
   `sorted` has room for `count` candidates. */
static void tie_named(const fc_tensor *const *tensors, size_t count, candidate *sorted, size_t *same_as) {
    bool any = false;
    for (size_t i = 0; i < count; i++) {
        any = any || tensors[i]->tied_to;
        sorted[i] = (candidate){.tensor = tensors[i], .index = i};
    }
    if (!any) {
        return;
    }
    fc_sort_items(sorted, count, sizeof *sorted, compare_candidate_names);
    for (size_t i = 0; i < count; i++) {
        const fc_tensor wanted = {.name = tensors[i]->tied_to};
        const candidate key = {.tensor = &wanted};
        const candidate *found =
            wanted.name ? fc_find_item(&key, sorted, count, sizeof *sorted, compare_candidate_names) : NULL;
        same_as[i] = found && found->index < i ? same_as[found->index] : i;
    }
}

fc_code fc_find_ties(const fc_checkpoint *source, const fc_tensor *const *tensors, size_t count, size_t *same_as,
                     fc_error *err) {
    candidate *sorted = calloc(count + 1, sizeof *sorted);
    size_t n = 0;
    FC_NEED(sorted, err, NULL);
    for (size_t i = 0; i < count; i++) {
        same_as[i] = i;
    }
    tie_named(tensors, count, sorted, same_as);
    for (size_t i = 0; i < count; i++) {
        if (tensors[i]->nchunks > 0 && tensors[i]->chunks[0].place.kind == FC_PLACE_BYTES) {
            sorted[n++] = (candidate){.tensor = tensors[i], .index = i};
        }
    }
    fc_sort_items(sorted, n, sizeof *sorted, compare_candidate_records);
    for (size_t first = 0, end; first < n; first = end) {
        for (end = first + 1; end < n && compare_candidate_chunks(&sorted[first], &sorted[end]) == 0; end++) {
        }
        tie_run(source, sorted + first, end - first, same_as);
    }
    free(sorted);
    return FC_OK;
}

bool fc_untie(fc_tensor *t, fc_arena *arena) {
    fc_chunk *chunks = fc_arena_copy(arena, t->chunks, t->nchunks, sizeof *chunks);
    if (t->object || !chunks) {
        return t->object || t->nchunks == 0;
    }
    for (size_t i = 0; i < t->nchunks; i++) {
        const fc_place none = {.kind = FC_PLACE_FILE, .file = chunks[i].place.file};
        chunks[i].place = chunks[i].place.kind == FC_PLACE_BYTES ? none : chunks[i].place;
    }
    t->chunks = chunks;
    return true;
}
