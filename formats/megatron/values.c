/*
 * Adds the values of a rank's file to the reader: tensors with their extents, and objects.
 */
#include "megatron/reader.h"

#include "base/grow.h"
#include "checkpoint/path.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

static fc_code read_tensor(const fc_mg_reader *r, fc_pv v, fc_mg_value *value, fc_error *err) {
    fc_arena *arena = r->checkpoint->arena;
    fc_torch_tensor t = {0};
    torch_extent *extent = NULL;
    FC_TRY(fc_torch_find_extent(&r->f, v, &t, arena, &extent, err));
    int64_t *sizes = fc_arena_copy(arena, t.sizes, (size_t)t.ndim, sizeof *sizes);
    FC_NEED(sizes, err, NULL);
    value->extent = extent;
    value->dtype = t.dtype;
    value->ndim = t.ndim;
    value->sizes = sizes;
    return FC_OK;
}

static fc_code read_object(const fc_mg_reader *r, fc_pv v, fc_mg_value *value, fc_error *err) {
    torch_object *object = NULL;
    fc_code rc = fc_torch_object_new(&r->f, v, r->checkpoint->arena, &object, err);
    value->object = object;
    return rc;
}

fc_mg_value *fc_mg_add_leaf(fc_mg_reader *r, const char *name, const fc_path *path, fc_pv v) {
    fc_error why;
    if (!fc_grow(&r->values, &r->capacity, r->nvalues + 1, sizeof *r->values)) {
        fc_mg_no_memory(r);
        return NULL;
    }
    fc_mg_value *value = &r->values[r->nvalues];
    *value = (fc_mg_value){.name = name, .path = *path, .file = r->rank};
    fc_code rc = fc_torch_is_tensor(r->f.p, v) ? read_tensor(r, v, value, &why) : read_object(r, v, value, &why);
    if (rc == FC_EUNSUPPORTED) { /* the other values stay readable */
        value->object = NULL;
        value->refusal = fc_arena_strndup(r->checkpoint->arena, why.message, strlen(why.message));
        rc = value->refusal ? FC_OK : fc_no_memory(&why, NULL);
    }
    if (rc != FC_OK) {
        fc_fail(r->err, rc, "%s: %.256s: %s", r->f.path, name, why.message);
        return NULL;
    }
    r->nvalues++;
    return value;
}

fc_code fc_mg_flatten(fc_mg_reader *r, const fc_path *prefix, fc_pv v, torch_leaves *leaves) {
    fc_pv_type type = fc_pv_typeof(v);
    *leaves = (torch_leaves){.arena = r->checkpoint->arena};
    if (type == FC_PV_DICT || type == FC_PV_LIST || type == FC_PV_TUPLE) {
        fc_pickle rooted = *r->f.p; /* the same pickle with `v` as its root */
        torch_file view = r->f;
        rooted.root = v;
        view.p = &rooted;
        return fc_torch_flatten(&view, prefix, leaves, r->err);
    }
    const char *name = fc_path_spell(r->checkpoint->arena, prefix, '.');
    FC_NEED(name && fc_grow(&leaves->items, &leaves->capacity, 1, sizeof *leaves->items), r->err, r->checkpoint->path);
    leaves->items[leaves->count++] = (torch_leaf){name, *prefix, v, TORCH_OBJECT};
    return FC_OK;
}

fc_code fc_mg_add(fc_mg_reader *r, const fc_path *prefix, fc_pv v) {
    torch_leaves leaves;
    fc_code rc;
    FC_TRY_GOTO(fc_mg_flatten(r, prefix, v, &leaves), rc, out);
    for (size_t i = 0; i < leaves.count; i++) {
        if (!fc_mg_add_leaf(r, leaves.items[i].name, &leaves.items[i].path, leaves.items[i].v)) {
            rc = r->err->code;
            goto out;
        }
    }
out:
    free(leaves.items);
    return rc;
}
