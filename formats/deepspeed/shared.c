/*
 * Adds shared parameters under their other names, which the model's files list.
 */
#include "deepspeed/deepspeed.h"

#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

static int compare_tensor_names(const void *a, const void *b, void *tensors) {
    const ds_tensor *t = tensors;
    return strcmp(t[*(const size_t *)a].name, t[*(const size_t *)b].name);
}

static const ds_tensor *find_tensor(const ds_builder *b, const size_t *order, size_t count, const char *name) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int way = strcmp(b->tensors[order[middle]].name, name);
        if (way == 0) {
            return &b->tensors[order[middle]];
        }
        *(way < 0 ? &low : &high) = way < 0 ? middle + 1 : middle;
    }
    return NULL;
}

/* Adds tensor number `of` a second time, under another name. */
static fc_code add_alias(ds_builder *b, const char *name, size_t of) {
    const fc_path_element path[2] = {{.key = "model"}, {.key = name}};
    const char *full = fc_arena_printf(b->checkpoint->arena, "model.%s", name);
    ds_tensor *t = full ? fc_ds_add_tensor(b, full, path, 2) : NULL;
    const ds_tensor *source = &b->tensors[of];
    FC_NEED(t, b->err, b->checkpoint->path);
    ds_tensor alias = *source;
    alias.name = t->name;
    alias.path = t->path;
    alias.capacity = source->nchunks;
    alias.chunks = malloc((source->nchunks + 1) * sizeof *alias.chunks);
    FC_NEED(alias.chunks, b->err, b->checkpoint->path);
    if (source->nchunks > 0) {
        memcpy(alias.chunks, source->chunks, source->nchunks * sizeof *alias.chunks);
    }
    *t = alias;
    return FC_OK;
}

/* Adds the other name of one shared parameter. `order` are the tensors, sorted by name. */
static fc_code add_shared(ds_builder *b, const torch_file *f, const size_t *order, size_t count, fc_pv key, fc_pv of) {
    const char *name = fc_ds_text(b, f, key), *other = name ? fc_ds_text(b, f, of) : NULL;
    if (!other) {
        return b->err->code;
    }
    const char *full = fc_arena_printf(b->checkpoint->arena, "model.%s", other);
    FC_NEED(full, b->err, b->checkpoint->path);
    const ds_tensor *t = find_tensor(b, order, count, full);
    return t ? add_alias(b, name, (size_t)(t - b->tensors))
             : fc_fail(b->err, FC_ECORRUPT,
                       "%s: shared_params: %.128s is another name of %.128s, but that tensor is missing", f->path, name,
                       other);
}

fc_code fc_ds_add_shared_names(ds_builder *b, const torch_file *f, fc_pv shared) {
    size_t n = 0, count = b->ntensors;
    const fc_pv *pairs = fc_pv_typeof(shared) == FC_PV_DICT ? fc_pickle_items(f->p, shared, &n) : NULL;
    size_t *order = malloc((count + 1) * sizeof *order);
    FC_NEED(order, b->err, b->checkpoint->path);
    for (size_t i = 0; i < count; i++) {
        order[i] = i;
    }
    qsort_r(order, count, sizeof *order, compare_tensor_names, b->tensors);
    fc_code rc = FC_OK;
    for (size_t i = 0; i + 1 < n; i += 2) {
        FC_TRY_GOTO(add_shared(b, f, order, count, pairs[i], pairs[i + 1]), rc, out);
    }
out:
    free(order);
    return rc;
}
