/*
 * Which of a checkpoint's tensors are parameters, and of what root: from a selection to the module tree. Reads the
 * manifest only.
 */
#include "fsdp/module_tree.h"

#include "sharding/fqn.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

static bool is_optimizer_state(const char *name) {
    fc_fqn n;
    if (!strstr(name, "optim") && !strstr(name, "state")) {
        return false;
    }
    fc_fqn_split(name, FC_FQN_PARTS, &n);
    return fc_fqn_cut_state_key(&n).len > 0;
}

/*
 * Buffers by the names that nn.BatchNorm, rotary embeddings and causal masks give them, and by types that no optimizer
 * trains. Bytes may be quantized weights, and those are parameters.
 */
static bool is_buffer(const char *name, fc_dtype dtype) {
    static const char *const names[] = {"running_mean", "running_var", "num_batches_tracked", "inv_freq",   "freqs_cis",
                                        "cos_cached",   "sin_cached",  "masked_bias",         "causal_mask"};
    const char *dot = strrchr(name, '.');
    fc_fqn_part last = {dot ? dot + 1 : name, strlen(dot ? dot + 1 : name)};
    fc_dtype_class cls = fc_dtype_get(dtype)->cls;
    bool whole = cls == FC_CLASS_SIGNED || cls == FC_CLASS_UNSIGNED;
    return cls == FC_CLASS_BOOL || (whole && fc_dtype_size(dtype) > 1) ||
           fc_fqn_is_one_of(last, names, sizeof names / sizeof *names);
}

/* The keys of the nested state dict that all parameters have in common are no modules: {"model": {"layers.0.w": …}}. */
static int common_levels(const fc_wanted *wanted, const uint32_t *chosen, size_t count) {
    const fc_path *first = count ? &wanted->tensors[chosen[0]].path : NULL;
    size_t common = first && first->count ? first->count - 1 : 0;
    for (size_t i = 0; i < count; i++) {
        const fc_path *path = &wanted->tensors[chosen[i]].path;
        size_t same = 0;
        while (same < common && same + 1 < path->count &&
               strcmp(path->elements[same].key, first->elements[same].key) == 0) {
            same++;
        }
        common = fc_path_spells(path, wanted->tensors[chosen[i]].name) ? same : 0;
    }
    int levels = 0;
    for (size_t i = 0; i < common; i++) {
        fc_fqn n;
        fc_fqn_split(first->elements[i].key, FC_FQN_PARTS, &n);
        levels += n.count;
    }
    return levels;
}

/* A tensor's place among the bytes. `key` tells apart what lies in the same record of a file. */
typedef struct place {
    const fc_tensor *tensor;
    uint32_t spec;
    uint64_t key;
} place;

static int by_chunks(const void *a, const void *b) {
    const fc_tensor *x = ((const place *)a)->tensor, *y = ((const place *)b)->tensor;
    if (x->nchunks != y->nchunks) {
        return x->nchunks < y->nchunks ? -1 : 1;
    }
    for (size_t i = 0; i < x->nchunks; i++) {
        const fc_chunk *c = &x->chunks[i], *d = &y->chunks[i];
        uint64_t mine[] = {c->file, c->offset, c->length}, other[] = {d->file, d->offset, d->length};
        for (size_t k = 0; k < sizeof mine / sizeof *mine; k++) {
            if (mine[k] != other[k]) {
                return mine[k] < other[k] ? -1 : 1;
            }
        }
    }
    return 0;
}

static int by_place(const void *a, const void *b) {
    int order = by_chunks(a, b);
    uint32_t x = ((const place *)a)->spec, y = ((const place *)b)->spec;
    return order != 0 ? order : (x > y) - (x < y);
}

static int by_key(const void *a, const void *b) {
    const place *x = a, *y = b;
    return x->key != y->key ? (x->key < y->key ? -1 : 1) : (x->spec > y->spec) - (x->spec < y->spec);
}

/* Many views may share one storage, so they are sorted by what they show of it. */
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
    bool same = x->dtype == y->dtype && x->ndim == y->ndim &&
                (dims == 0 || memcmp(x->shape, y->shape, dims * sizeof *x->shape) == 0);
    for (size_t i = 0; i < x->nchunks && same && dims > 0; i++) {
        same = memcmp(x->chunks[i].dims, y->chunks[i].dims, 2 * dims * sizeof *x->shape) == 0;
    }
    return same;
}

/* Whether the elements of each chunk lie at the same places. What cannot be said without the data is not tied. */
static bool same_elements(const fc_checkpoint *source, const fc_tensor *x, const fc_tensor *y) {
    bool same = same_boxes(x, y);
    for (size_t i = 0; i < x->nchunks && same; i++) {
        fc_extent a, b;
        same = fc_checkpoint_extent(source, x, i, &a, NULL) == FC_OK &&
               fc_checkpoint_extent(source, y, i, &b, NULL) == FC_OK && a.codec == b.codec &&
               a.codec != FC_CODEC_FORMAT && a.offset == b.offset && a.first == b.first && a.bytes == b.bytes &&
               a.negate == b.negate && a.conjugate == b.conjugate &&
               (x->ndim == 0 || memcmp(a.strides, b.strides, (size_t)x->ndim * sizeof *a.strides) == 0);
    }
    return same;
}

/* Tensors whose chunks are the same records. */
static void tie_run(const fc_checkpoint *source, place *run, size_t count, fc_parameter_spec *specs) {
    for (size_t i = 0; i < count && count > 1; i++) {
        run[i].key = key_of(source, run[i].tensor);
    }
    qsort(run, count, sizeof *run, by_key);
    for (size_t i = 1; i < count; i++) {
        if (run[i].key == run[i - 1].key && same_elements(source, run[i - 1].tensor, run[i].tensor)) {
            specs[run[i].spec].tied_to = specs[run[i - 1].spec].fqn;
        }
    }
}

/* Tied weights: files that keep them once (torch.save, HDF5's hard links) list the same bytes under each name. */
static fc_code find_ties(const fc_wanted *wanted, const uint32_t *chosen, size_t count, fc_parameter_spec *specs,
                         fc_error *err) {
    place *places = calloc(count + 1, sizeof *places);
    size_t n = 0;
    if (!places) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    for (uint32_t i = 0; i < count; i++) {
        const fc_tensor *t = wanted->tensors[chosen[i]].source;
        if (t->nchunks > 0) {
            places[n++] = (place){.tensor = t, .spec = i};
        }
    }
    qsort(places, n, sizeof *places, by_place);
    for (size_t first = 0, end; first < n; first = end) {
        for (end = first + 1; end < n && by_chunks(&places[first], &places[end]) == 0; end++) {
        }
        tie_run(wanted->source, places + first, end - first, specs);
    }
    free(places);
    return FC_OK;
}

fc_code fc_module_tree_of(const fc_wanted *wanted, const fc_model_info *info, fc_arena *arena, fc_module_tree *out,
                          fc_error *err) {
    size_t count = 0;
    fc_parameter_spec *specs = fc_arena_calloc(arena, wanted->ntensors, sizeof *specs);
    uint32_t *chosen = fc_arena_calloc(arena, wanted->ntensors, sizeof *chosen);
    if (!specs || !chosen) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    for (uint32_t i = 0; i < wanted->ntensors; i++) {
        const fc_wanted_tensor *w = &wanted->tensors[i];
        if (w->source->object || is_optimizer_state(w->name)) {
            continue;
        }
        specs[count] = (fc_parameter_spec){.fqn = w->name,
                                           .dtype = w->dtype,
                                           .ndim = w->source->ndim,
                                           .shape = w->source->shape,
                                           .buffer = is_buffer(w->name, w->dtype)};
        chosen[count++] = i;
    }
    if (count == 0) {
        return fc_fail(err, FC_EUSAGE, "%s: has no parameters: all of its %zu values are objects or optimizer state",
                       wanted->source->path, wanted->ntensors);
    }
    fc_code rc = find_ties(wanted, chosen, count, specs, err);
    if (rc == FC_OK) {
        rc = fc_module_tree_build(specs, count, common_levels(wanted, chosen, count), info, arena, out, err);
    }
    for (size_t i = 0; rc == FC_OK && i < out->nparameters; i++) {
        fc_parameter *p = (fc_parameter *)&out->parameters[i]; /* made just now, by the builder */
        p->spec = p->spec < count ? chosen[p->spec] : p->spec;
    }
    if (rc == FC_OK) {
        out->left_out = wanted->ntensors - count;
        return FC_OK;
    }
    return fc_context(err, rc, "%s", wanted->source->path);
}
