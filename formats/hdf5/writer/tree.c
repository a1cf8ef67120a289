/*
 * Builds a tree of groups and datasets from the paths of the target tensors, with a hash table from (parent, link
 * name).
 */
#include "hdf5/writer/tree.h"

#include "base/checked.h"
#include "base/name_table.h"
#include "fsdpckpt/try.h"
#include "hdf5/names.h"

#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX

typedef struct builder {
    const fc_target *target;
    fc_arena *arena;
    fc_h5_tree *tree;
    fc_arena *scratch;
    fc_name_table *children; /* in `scratch`; from the parent and the link to the node */
} builder;

/* Allocates the nodes: at most one per path element. */
static fc_code allocate_nodes(builder *b, fc_error *err) {
    size_t elements = 1;
    for (size_t i = 0; i < b->target->ntensors; i++) {
        size_t count = b->target->tensors[i].path.count;
        FC_NEED(fc_add_size(elements, count ? count : 1, &elements), err, NULL);
    }
    if (elements >= NONE / 4) {
        return fc_fail(err, FC_EUNSUPPORTED, "%zu levels of names are more than an HDF5 file can have", elements);
    }
    b->scratch = fc_arena_new();
    b->children = b->scratch ? fc_name_table_new(b->scratch, b->target->ntensors) : NULL;
    b->tree->nodes = fc_arena_calloc(b->arena, elements, sizeof *b->tree->nodes);
    b->tree->leaves = fc_arena_calloc(b->arena, b->target->ntensors, sizeof *b->tree->leaves);
    FC_NEED(b->children && b->tree->nodes && b->tree->leaves, err, NULL);
    b->tree->nodes[0].link = "";
    b->tree->count = 1;
    return FC_OK;
}

/* Finds or makes the child `link` of `*at`. `last` says whether it is the last element of the tensor's path. */
static fc_code step_into(builder *b, uint32_t *at, const char *link, uint32_t tensor, bool last, fc_error *err) {
    const fc_target_tensor *tensors = b->target->tensors;
    const size_t child = fc_name_table_put_child(b->children, *at, link, strlen(link), b->tree->count);
    if (child == FC_NO_NAME) {
        return fc_no_memory(err, NULL);
    }
    if (child == b->tree->count) {
        fc_h5_node *node = &b->tree->nodes[b->tree->count];
        node->link = link;
        node->parent = *at;
        node->depth = b->tree->nodes[*at].depth + 1;
        node->tensor = tensor;
        node->is_value = last;
        if (node->depth > b->tree->depth) {
            b->tree->depth = node->depth;
        }
        b->tree->count++;
    } else {
        const fc_h5_node *node = &b->tree->nodes[child];
        if (node->is_value && last) {
            return fc_advise(err,
                             fc_fail(err, FC_EUNSUPPORTED,
                                     "tensors \"%s\" and \"%s\" have the same path in an HDF5 file; leave one out",
                                     tensors[node->tensor].name, tensors[tensor].name),
                             FC_HINT_EXCLUDE, tensors[tensor].name);
        }
        if (node->is_value || last) {
            uint32_t value = last ? tensor : node->tensor, inner = last ? node->tensor : tensor;
            return fc_advise(err,
                             fc_fail(err, FC_EUNSUPPORTED,
                                     "tensor \"%s\" has the name of a group with tensor \"%s\", and an HDF5 file "
                                     "cannot have both; leave one out",
                                     tensors[value].name, tensors[inner].name),
                             FC_HINT_EXCLUDE, tensors[value].name);
        }
    }
    *at = (uint32_t)child;
    return FC_OK;
}

static const char *const kind_texts[] = {NULL, "list", "tuple", "numbers"};

const char *fc_h5_group_kind_text(unsigned char kind) {
    return kind < sizeof kind_texts / sizeof *kind_texts ? kind_texts[kind] : NULL;
}

unsigned char fc_h5_group_kind_parse(const char *text) {
    for (unsigned char i = FC_H5_LIST; text && i <= FC_H5_NUMBERS; i++) {
        if (strcmp(text, kind_texts[i]) == 0) {
            return i;
        }
    }
    return FC_H5_DICT;
}

static fc_h5_group_kind kind_of(const fc_path_element *e) {
    return e->is_index ? (e->is_tuple ? FC_H5_TUPLE : FC_H5_LIST) : e->is_number ? FC_H5_NUMBERS : FC_H5_DICT;
}

static bool is_sequence(unsigned char kind) {
    return kind == FC_H5_LIST || kind == FC_H5_TUPLE;
}

/* Sets the kind of a group. All members must agree on list or dict; a dict with keys of both types gets text keys. */
static fc_code mark_kind(builder *b, uint32_t group, fc_h5_group_kind kind, uint32_t tensor, bool first,
                         fc_error *err) {
    fc_h5_node *node = &b->tree->nodes[group];
    if (first) {
        node->kind = (unsigned char)kind;
        node->tensor = tensor;
    } else if (node->kind != kind && is_sequence(node->kind) == is_sequence((unsigned char)kind)) {
        node->kind = is_sequence(node->kind) ? FC_H5_LIST : FC_H5_DICT;
    } else if (node->kind != kind) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "tensors \"%s\" and \"%s\" disagree on whether their container is a list or a dict",
                       b->target->tensors[node->tensor].name, b->target->tensors[tensor].name);
    }
    return FC_OK;
}

/* Most keys are valid link names. These are borrowed, which matters for a million of them. */
static const char *link_of(builder *b, const char *key) {
    bool plain = *key != '\0' && strcmp(key, ".") != 0 && !strpbrk(key, "/%");
    return plain ? key : fc_h5_name_encode(b->arena, key, strlen(key));
}

static fc_code add_target_tensor(builder *b, uint32_t tensor, fc_error *err) {
    const fc_target_tensor *t = &b->target->tensors[tensor];
    const fc_path_element flat = {.key = t->name};
    const fc_path_element *elements = t->path.count ? t->path.elements : &flat;
    size_t count = t->path.count ? t->path.count : 1;
    uint32_t at = 0;
    bool new_group = b->tree->count == 1;
    for (size_t i = 0; i < count; i++) {
        const char *link = link_of(b, elements[i].key);
        FC_NEED(link, err, NULL);
        FC_TRY(mark_kind(b, at, kind_of(&elements[i]), tensor, new_group, err));
        size_t before = b->tree->count;
        FC_TRY(step_into(b, &at, link, tensor, i + 1 == count, err));
        new_group = b->tree->count > before;
    }
    b->tree->leaves[tensor] = at;
    return FC_OK;
}

/*
 * Files are written depth first, with siblings in the order of their first occurrence. A source may interleave groups,
 * which a file cannot preserve. Without this, a file would change when it is read and written again.
 */
static fc_code order_depth_first(builder *b, fc_error *err) {
    fc_h5_tree *tree = b->tree;
    uint32_t *first = calloc(tree->count, sizeof *first), *next = calloc(tree->count, sizeof *next);
    tree->order = fc_arena_calloc(b->arena, b->target->ntensors, sizeof *tree->order);
    fc_code rc = FC_OK;
    FC_TRY_GOTO(first && next && tree->order ? FC_OK : fc_no_memory(err, NULL), rc, out);
    for (uint32_t n = (uint32_t)tree->count; n-- > 1;) {
        next[n] = first[tree->nodes[n].parent];
        first[tree->nodes[n].parent] = n;
    }
    size_t done = 0;
    for (uint32_t at = first[0]; at != 0;) {
        if (tree->nodes[at].is_value) {
            tree->order[done++] = tree->nodes[at].tensor;
        }
        if (first[at] != 0) {
            at = first[at];
            continue;
        }
        while (at != 0 && next[at] == 0) {
            at = tree->nodes[at].parent;
        }
        at = next[at];
    }
out:
    free(first);
    free(next);
    return rc;
}

fc_code fc_h5_tree_build(const fc_target *target, fc_arena *arena, fc_h5_tree *tree, fc_error *err) {
    builder b = {.target = target, .arena = arena, .tree = tree};
    memset(tree, 0, sizeof *tree);
    fc_code rc;
    FC_TRY_GOTO(target->ntensors < NONE ? allocate_nodes(&b, err) : fc_fail(err, FC_EUNSUPPORTED, "too many tensors"),
                rc, out);
    for (size_t i = 0; i < target->ntensors; i++) {
        FC_TRY_GOTO(add_target_tensor(&b, (uint32_t)i, err), rc, out);
    }
    rc = order_depth_first(&b, err);
out:
    fc_arena_free(b.scratch);
    return rc;
}

char *fc_h5_tree_path(const fc_h5_tree *tree, uint32_t node, fc_arena *arena) {
    size_t len = 0;
    for (uint32_t n = node; n != 0; n = tree->nodes[n].parent) {
        len += 1 + strlen(tree->nodes[n].link);
    }
    char *path = fc_arena_alloc(arena, len + 2);
    if (!path) {
        return NULL;
    }
    memcpy(path, "/", 2);
    if (len > 0) {
        path[len] = '\0';
    }
    for (uint32_t n = node; n != 0; n = tree->nodes[n].parent) {
        size_t length = strlen(tree->nodes[n].link);
        len -= length;
        memcpy(path + len, tree->nodes[n].link, length);
        path[--len] = '/';
    }
    return path;
}
