/*
 * Writes a sparse tensor from its parts: torch/object/sparse.h.
 */
#include "pt/writer.h"

#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"
#include "torch/object/sparse.h"

#include <stdlib.h>
#include <string.h>

/* A sparse tensor that is written. */
typedef struct sparse_out {
    fc_torch_sparse sparse;
    uint32_t items[FC_SPARSE_MOST_PARTS];
    fc_pt_dense_fn dense;
    void *context;
} sparse_out;

/* Whether the item is all of a tensor. */
static bool is_whole(const fc_target *target, const fc_target_item *item) {
    const fc_tensor *t = target->tensors[item->tensor].source;
    bool whole = !t->object;
    for (int d = 0; whole && d < t->ndim; d++) {
        whole = item->dims[d] == 0 && item->dims[t->ndim + d] == t->shape[d];
    }
    return whole;
}

/* Finds the child of a node that is the part called `key`. @return whether all of it is in the file. */
static bool find_part(const fc_target *target, const fc_target_file *file, const fc_pt_tree *tree, uint32_t node,
                      const char *key, uint32_t *item) {
    for (uint32_t c = tree->nodes[node].first; c; c = tree->nodes[c].next) {
        const fc_pt_node *child = &tree->nodes[c];
        if (child->item != UINT32_MAX && strcmp(child->element->key, key) == 0) {
            *item = child->item;
            return is_whole(target, &file->items[child->item]);
        }
    }
    return false;
}

static void write_part(void *context, fc_torch_pickler *w, size_t index) {
    const sparse_out *out = context;
    out->dense(out->context, w, out->items[index]);
}

/* Reads what the tensor is apart from its parts. */
static fc_code read_rest(const fc_target *target, const fc_tensor *object, fc_torch_sparse *out, fc_error *err) {
    unsigned char *bytes = NULL;
    FC_TRY(fc_read_object(target->source, object, &bytes, err));
    fc_code rc = fc_torch_sparse_parse((const char *)bytes, (size_t)object->shape[0], out, err);
    free(bytes);
    return rc;
}

fc_code fc_pt_write_sparse(const fc_target *target, const fc_target_file *file, const fc_pt_tree *tree, uint32_t node,
                           fc_torch_pickler *w, fc_pt_dense_fn dense, void *context, bool *written, fc_error *err) {
    const fc_pt_node *n = &tree->nodes[node];
    const fc_target_tensor *t = &target->tensors[file->items[n->sparse - 1].tensor];
    sparse_out out = {.dense = dense, .context = context};
    *written = false;
    FC_TRY_CONTEXT(read_rest(target, t->source, &out.sparse, err), err, "object %.256s", t->name);
    const fc_sparse_layout *layout = out.sparse.layout;
    bool all = n->nchildren == layout->nparts + 1;
    for (size_t i = 0; all && i < layout->nparts; i++) {
        all = find_part(target, file, tree, node, layout->keys[i], &out.items[i]);
    }
    if (all) {
        fc_torch_sparse_write(&out.sparse, w, write_part, &out);
        *written = true;
    }
    return FC_OK;
}
