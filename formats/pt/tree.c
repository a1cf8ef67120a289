/*
 * The nesting of the target: values become dicts, lists and tuples again by their paths, like torch's
 * unflatten_state_dict makes them from planner_data.
 */
#include "pt/writer.h"

#include "base/grow.h"
#include "fsdpckpt/try.h"
#include "torch/object/sparse.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_DEPTH = 500,    /* unpicklers recurse once per level */
    MAX_HOLES = 1 << 16 /* the most missing items of a list from which values were left out */
};

/* Finds or makes the child of `parent` for `element`. @return 0 when out of memory. */
static uint32_t child_of(fc_pt_tree *tree, uint32_t parent, const fc_path_element *element) {
    if (!fc_grow(&tree->nodes, &tree->capacity, tree->count + 1, sizeof *tree->nodes)) {
        return 0;
    }
    const uint64_t key = parent * UINT64_C(4) + element->is_index * UINT64_C(2) + element->is_number;
    const size_t at = fc_name_table_put_child(tree->children, key, element->key, strlen(element->key), tree->count);
    if (at != tree->count) {
        return at == FC_NO_NAME ? 0 : (uint32_t)at;
    }
    uint32_t made = (uint32_t)tree->count++;
    tree->nodes[made] = (fc_pt_node){.element = element, .parent = parent, .item = UINT32_MAX};
    fc_pt_node *p = &tree->nodes[parent];
    if (p->last) {
        tree->nodes[p->last].next = made;
    } else {
        p->first = made;
    }
    p->last = made;
    p->nchildren++;
    return made;
}

static bool is_sparse_rest(const fc_target_tensor *t) {
    return t->source->object && strcmp(t->source->object->encoding, FC_TORCH_SPARSE) == 0;
}

static fc_code nest_value(fc_pt_tree *tree, const fc_target_tensor *t, const fc_path *path, uint32_t item,
                          fc_error *err) {
    const fc_path_element *elements = path->elements;
    const size_t count = path->count;
    uint32_t at = 0;
    if (count > MAX_DEPTH) {
        return fc_fail(err, FC_EUNSUPPORTED, "%.256s: nested more than %d levels deep", t->name, MAX_DEPTH);
    }
    for (size_t i = 0; i < count; i++) {
        at = tree->nodes[at].item == UINT32_MAX ? child_of(tree, at, &elements[i]) : UINT32_MAX;
        FC_NEED(at != 0, err, NULL);
        if (at == UINT32_MAX) {
            break;
        }
    }
    if (at == UINT32_MAX || tree->nodes[at].first || tree->nodes[at].item != UINT32_MAX) {
        return fc_fail(err, FC_EUNSUPPORTED, "%.256s: another value has the same place in the state dict", t->name);
    }
    tree->nodes[at].item = item;
    if (is_sparse_rest(t)) {
        tree->nodes[tree->nodes[at].parent].sparse = item + 1;
    }
    return FC_OK;
}

/* Lists the names of the sparse tensors whose parts have new names, which are not nested. */
static fc_code list_flat_sparse(const fc_target *target, const fc_target_file *file, fc_arena *scratch,
                                fc_name_table **out, fc_error *err) {
    for (size_t i = 0; i < file->nitems; i++) {
        const fc_target_tensor *t = &target->tensors[file->items[i].tensor];
        const char *dot = is_sparse_rest(t) && t->path.count <= 1 ? strrchr(t->name, '.') : NULL;
        if (!dot) {
            continue;
        }
        *out = *out ? *out : fc_name_table_new(scratch, 16);
        FC_NEED(*out && fc_name_table_put(*out, t->name, (size_t)(dot - t->name), i) != FC_NO_NAME, err, NULL);
    }
    return FC_OK;
}

/* Makes the path of a value without nesting: its name, or the name of a sparse tensor and that of its part. */
static fc_code split_flat_name(const char *name, const fc_name_table *sparse, fc_arena *scratch,
                               fc_path_element elements[2], fc_path *path, fc_error *err) {
    const char *dot = sparse ? strrchr(name, '.') : NULL;
    const size_t n = dot ? (size_t)(dot - name) : 0;
    const bool part = dot && fc_name_table_find(sparse, name, n) != FC_NO_NAME;
    if (!part && path->count == 1) {
        return FC_OK;
    }
    elements[0].key = part ? fc_arena_strndup(scratch, name, n) : name;
    elements[1].key = part ? dot + 1 : NULL;
    *path = (fc_path){elements, part ? 2 : 1};
    FC_NEED(elements[0].key, err, NULL);
    return FC_OK;
}

fc_code fc_pt_tree_build(const fc_target *target, const fc_target_file *file, fc_pt_tree *tree, fc_error *err) {
    *tree = (fc_pt_tree){0};
    tree->flat = calloc(file->nitems + 1, 2 * sizeof *tree->flat);
    tree->scratch = fc_arena_new();
    tree->children = tree->scratch ? fc_name_table_new(tree->scratch, file->nitems) : NULL;
    FC_NEED(tree->flat && tree->children &&
                fc_grow(&tree->nodes, &tree->capacity, file->nitems + 16, sizeof *tree->nodes),
            err, NULL);
    tree->nodes[tree->count++] = (fc_pt_node){.item = UINT32_MAX};
    fc_name_table *sparse = NULL;
    FC_TRY(list_flat_sparse(target, file, tree->scratch, &sparse, err));
    for (size_t i = 0; i < file->nitems; i++) {
        const fc_target_tensor *t = &target->tensors[file->items[i].tensor];
        fc_path_element *flat = &tree->flat[2 * i];
        fc_path path = t->path;
        if (path.count <= 1) {
            FC_TRY(split_flat_name(t->name, sparse, tree->scratch, flat, &path, err));
        }
        FC_TRY(nest_value(tree, t, &path, (uint32_t)i, err));
    }
    return FC_OK;
}

void fc_pt_tree_free(fc_pt_tree *tree) {
    free(tree->nodes);
    fc_arena_free(tree->scratch);
    free(tree->flat);
    *tree = (fc_pt_tree){0};
}

/* The state of writing, for all levels. */
typedef struct emitter {
    const fc_pt_tree *tree;
    fc_torch_pickler *w;
    fc_pt_leaf_fn leaf;
    fc_pt_sparse_fn sparse;
    void *context;
    fc_error *err;
} emitter;

static fc_code emit(emitter *e, uint32_t node);

/* Whether the children are the items of a list. Like torch's unflattening, decides by the kind of the keys. */
static bool is_sequence(const fc_pt_tree *tree, const fc_pt_node *n) {
    for (uint32_t c = n->first; c; c = tree->nodes[c].next) {
        if (!tree->nodes[c].element->is_index) {
            return false;
        }
    }
    return n->first != 0;
}

static bool index_of(const fc_pt_node *n, size_t *out) {
    char *end;
    errno = 0;
    unsigned long long value = strtoull(n->element->key, &end, 10);
    *out = (size_t)value;
    return errno == 0 && *end == '\0' && n->element->key[0] != '-';
}

/* Writes the children by index, with None for those that were left out, as in torch. */
static fc_code emit_sequence(emitter *e, const fc_pt_node *n) {
    size_t length = 0, index;
    bool is_tuple = true;
    for (uint32_t c = n->first; c; c = e->tree->nodes[c].next) {
        if (!index_of(&e->tree->nodes[c], &index) || index >= (size_t)n->nchildren + MAX_HOLES) {
            return fc_fail(e->err, FC_EUNSUPPORTED, "a list with only %u items has one at index %.64s",
                           (unsigned)n->nchildren, e->tree->nodes[c].element->key);
        }
        length = index >= length ? index + 1 : length;
        is_tuple = is_tuple && e->tree->nodes[c].element->is_tuple;
    }
    uint32_t *items = calloc(length, sizeof *items);
    FC_NEED(items, e->err, NULL);
    for (uint32_t c = n->first; c; c = e->tree->nodes[c].next) {
        index_of(&e->tree->nodes[c], &index);
        items[index] = c;
    }
    if (!is_tuple) {
        fc_torch_pickle_op(e->w, FC_PICKLE_EMPTY_LIST);
    }
    fc_torch_pickle_op(e->w, FC_PICKLE_MARK);
    fc_code rc = FC_OK;
    for (size_t i = 0; i < length && rc == FC_OK; i++) {
        if (items[i]) {
            rc = emit(e, items[i]);
        } else {
            fc_torch_pickle_op(e->w, FC_PICKLE_NONE);
        }
    }
    fc_torch_pickle_op(e->w, is_tuple ? FC_PICKLE_TUPLE : FC_PICKLE_APPENDS);
    free(items);
    return rc;
}

static fc_code emit_dict(emitter *e, const fc_pt_node *n) {
    fc_code rc = FC_OK;
    fc_torch_pickle_op(e->w, FC_PICKLE_EMPTY_DICT);
    if (!n->first) {
        return rc;
    }
    fc_torch_pickle_op(e->w, FC_PICKLE_MARK);
    for (uint32_t c = n->first; c && rc == FC_OK; c = e->tree->nodes[c].next) {
        const fc_path_element *element = e->tree->nodes[c].element;
        if (element->is_number) {
            fc_torch_pickle_int(e->w, strtoll(element->key, NULL, 10));
        } else {
            fc_torch_pickle_str(e->w, element->key);
        }
        rc = emit(e, c);
    }
    fc_torch_pickle_op(e->w, FC_PICKLE_SETITEMS);
    return rc;
}

/* The recursion is as deep as the paths, which fc_pt_tree_build limits. */
static fc_code emit(emitter *e, uint32_t node) {
    const fc_pt_node *n = &e->tree->nodes[node];
    bool written = false;
    FC_TRY(n->sparse ? e->sparse(e->context, e->w, node, &written, e->err) : FC_OK);
    if (written) {
        return FC_OK;
    }
    if (n->item != UINT32_MAX) {
        return e->leaf(e->context, e->w, n->item, e->err);
    }
    return is_sequence(e->tree, n) ? emit_sequence(e, n) : emit_dict(e, n);
}

fc_code fc_pt_tree_write(const fc_pt_tree *tree, fc_torch_pickler *w, fc_pt_leaf_fn leaf, fc_pt_sparse_fn sparse,
                         void *context, fc_error *err) {
    emitter e = {tree, w, leaf, sparse, context, err};
    return emit(&e, 0);
}
