/*
 * Adds shared parameters under their other names, which the model's files list.
 */
#include "deepspeed/stages.h"

#include "base/name_table.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

/* Adds tensor number `of` a second time, under another name. */
static fc_code add_alias(fc_ds_builder *b, const char *name, size_t of) {
    const fc_path_element path[2] = {{.key = "model"}, {.key = name}};
    const char *full = fc_arena_printf(b->checkpoint->arena, "model.%s", name);
    fc_ds_tensor *t = full ? fc_ds_add_tensor(b, full, path, 2) : NULL;
    const fc_ds_tensor *source = &b->tensors[of];
    FC_NEED(t, b->err, b->checkpoint->path);
    fc_ds_tensor alias = *source;
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

/* Adds the other name of one shared parameter. `names` has those of all tensors. */
static fc_code add_shared(fc_ds_builder *b, const torch_file *f, const fc_name_table *names, fc_pv key, fc_pv of) {
    const char *name = fc_ds_text(b, f, key), *other = name ? fc_ds_text(b, f, of) : NULL;
    if (!other) {
        return b->err->code;
    }
    const char *full = fc_arena_printf(b->checkpoint->arena, "model.%s", other);
    FC_NEED(full, b->err, b->checkpoint->path);
    const size_t at = fc_name_table_find(names, full, strlen(full));
    return at != FC_NO_NAME ? add_alias(b, name, at)
                            : fc_fail(b->err, FC_ECORRUPT,
                                      "%s: shared_params: %.128s is another name of %.128s, but that tensor is missing",
                                      f->path, name, other);
}

fc_code fc_ds_add_shared_names(fc_ds_builder *b, const torch_file *f, fc_pv shared) {
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(shared) == FC_PV_DICT ? fc_pickle_items(f->p, shared, &n) : NULL;
    fc_arena *scratch = fc_arena_new();
    fc_name_table *names = scratch ? fc_name_table_new(scratch, b->ntensors) : NULL;
    fc_code rc = names ? FC_OK : fc_ds_no_memory(b);
    for (size_t i = 0; names && i < b->ntensors; i++) {
        fc_name_table_put(names, b->tensors[i].name, strlen(b->tensors[i].name), i);
    }
    for (size_t i = 0; rc == FC_OK && i + 1 < n; i += 2) {
        rc = add_shared(b, f, names, pairs[i], pairs[i + 1]);
    }
    fc_arena_free(scratch);
    return rc;
}
