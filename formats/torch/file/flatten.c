/*
 * Turns a pickled state dict into named leaves, like DCP's flatten_state_dict. Dicts are always taken apart, lists if
 * they contain dicts or tensors, and tuples if they contain tensors. Names are the keys joined by dots. Unlike torch's
 * flattening, nothing is lost: an empty dict is a leaf here.
 *
 * The values of a pickle may be shared and may contain themselves, so depth and number are bounded.
 */
#include "torch/file/file.h"
#include "torch/object/kept.h"
#include "torch/object/sparse.h"
#include "torch/object/torchao.h"
#include "torch/pickle/copy.h"

#include "base/grow.h"
#include "base/text.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_DEPTH = 128,
    SPARE_VISITS = 1 << 16, /* in addition to one per byte of the pickle, for shared dicts */
    MAX_NAME = 1 << 16,
    MAX_MEMBER = 1 << 12 /* bytes in the name of a module's member */
};

/* A walk over a state dict, and the path to the current value. */
typedef struct walker {
    const torch_file *f;
    const fc_pickle *p;
    torch_leaves *leaves;
    fc_path_element path[MAX_DEPTH];
    size_t depth;
    uint64_t visits;  /* number of visits that are still allowed */
    fc_pv_map clean;  /* values that contain no tensor */
    fc_pv_map marked; /* values that the current search has visited */
    fc_pv *stack;
    size_t nstack, stack_capacity;
    char *name; /* MAX_NAME bytes */
    fc_error *err;
} walker;

/* Whether `v` is a wrapper subclass: _rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, …). */
static bool is_wrapped(const fc_pickle *p, fc_pv v, const char *cls) {
    size_t n;
    const fc_pv *arg = fc_pickle_call_items(p, v, &n);
    return fc_pickle_is_global(p, fc_pickle_callee(p, v), NULL, "_rebuild_from_type_v2") && n >= 4 &&
           fc_pickle_is_global(p, arg[1], NULL, cls);
}

/* @return the kind of a leaf; TORCH_OBJECT if it is not a tensor of any kind. */
static torch_leaf_kind leaf_kind_of(const fc_pickle *p, fc_pv v) {
    if (fc_pv_typeof(v) != FC_PV_CALL) {
        return TORCH_OBJECT;
    }
    if (fc_torch_is_tensor(p, v)) {
        return is_wrapped(p, v, "DTensor")         ? TORCH_DTENSOR
               : is_wrapped(p, v, "ShardedTensor") ? TORCH_SHARDED_TENSOR
                                                   : TORCH_TENSOR;
    }
    return fc_pickle_is_global(p, fc_pickle_callee(p, v), NULL, "ShardedTensor") ? TORCH_SHARDED_TENSOR : TORCH_OBJECT;
}

static fc_code push_values(walker *w, const fc_pv *items, size_t n) {
    FC_NEED(fc_grow(&w->stack, &w->stack_capacity, w->nstack + n, sizeof *w->stack), w->err, w->f->path);
    for (size_t i = 0; i < n; i++) {
        if (items[i]) { /* missing, such as the state of a call without one */
            w->stack[w->nstack++] = items[i];
        }
    }
    return FC_OK;
}

/* Pushes the values that `v` contains. */
static fc_code push_items(walker *w, fc_pv v) {
    size_t n;
    if (fc_pv_typeof(v) == FC_PV_CALL) {
        return push_values(w, w->p->cells + fc_pv_payload(v) + 1, 4); /* arguments, state, items */
    }
    const fc_pv *items = fc_pickle_sequence(w->p, v, &n);
    return push_values(w, items, n);
}

static bool is_container(fc_pv v) {
    fc_pv_type type = fc_pv_typeof(v);
    return type == FC_PV_TUPLE || type == FC_PV_LIST || type == FC_PV_SET || type == FC_PV_FROZENSET ||
           type == FC_PV_DICT || type == FC_PV_CALL;
}

/* Empties the stack. With `clean`, records that the visited values contain no tensor. */
static fc_code end_search(walker *w, bool clean) {
    w->nstack = 0;
    for (size_t i = 0; clean && i < w->marked.nslots; i++) {
        fc_pv key = fc_pv_map_key(&w->marked, i);
        uint32_t *at = key ? fc_pv_map_at(&w->clean, key) : NULL;
        FC_NEED(!key || at, w->err, w->f->path);
        if (at) {
            *at = 1;
        }
    }
    fc_pv_map_free(&w->marked);
    return FC_OK;
}

/* Finds out whether `v` contains a tensor at any depth. A value without tensors is searched only once. */
static fc_code holds_tensor(walker *w, fc_pv v, bool *found) {
    *found = false;
    fc_code rc = push_values(w, &v, 1);
    while (rc == FC_OK && w->nstack > 0 && !*found) {
        fc_pv next = w->stack[--w->nstack];
        if (!is_container(next)) {
            continue;
        }
        uint32_t *clean = fc_pv_map_at(&w->clean, next), *marked = fc_pv_map_at(&w->marked, next);
        if (!clean || !marked) {
            rc = fc_no_memory(w->err, w->f->path);
        } else if (leaf_kind_of(w->p, next) != TORCH_OBJECT) {
            *found = true;
        } else if (!*clean && !*marked) {
            *marked = 1;
            rc = w->visits-- > 0
                     ? push_items(w, next)
                     : fc_fail(w->err, FC_EUNSUPPORTED, "%s: its pickle has too many shared values", w->f->path);
        }
    }
    fc_code ended = end_search(w, rc == FC_OK && !*found);
    return rc == FC_OK ? ended : rc;
}

/* @return the keys on the path to the current value, joined by dots. */
static const char *spell_path(walker *w) {
    size_t used = 0;
    w->name[0] = '\0';
    for (size_t i = 0; i < w->depth && used < MAX_NAME; i++) {
        int n = snprintf(w->name + used, MAX_NAME - used, "%s%s", i ? "." : "", w->path[i].key);
        used += n > 0 ? (size_t)n : 0;
    }
    return w->name;
}

static fc_code add_leaf(walker *w, fc_pv v, torch_leaf_kind kind) {
    torch_leaves *l = w->leaves;
    bool root = w->depth == 0; /* the file is a single value */
    if (root) {
        w->path[w->depth++] = (fc_path_element){.key = kind == TORCH_OBJECT ? "value" : "tensor"};
    }
    spell_path(w);
    if (strlen(w->name) >= MAX_NAME - 1) {
        return fc_fail(w->err, FC_EUNSUPPORTED, "%s: a name has more than %d bytes: %.64s...", w->f->path, MAX_NAME - 2,
                       w->name);
    }
    FC_TRY(fc_torch_unfold(w->f, strlen(w->name) + w->depth * sizeof *w->path, w->err));
    const fc_path_element *elements = fc_arena_copy(l->arena, w->path, w->depth, sizeof *elements);
    const char *name = fc_arena_strndup(l->arena, w->name, strlen(w->name));
    FC_NEED(elements && name && fc_grow(&l->items, &l->capacity, l->count + 1, sizeof *l->items), w->err, w->f->path);
    l->items[l->count++] = (torch_leaf){name, {elements, w->depth}, v, kind};
    w->depth -= root;
    return FC_OK;
}

static fc_code walk_value(walker *w, fc_pv v);

static fc_code walk_below(walker *w, fc_path_element element, fc_pv v) {
    if (w->depth == MAX_DEPTH) {
        return fc_fail(w->err, FC_EUNSUPPORTED, "%s: %.64s...: nested more than %d levels deep", w->f->path,
                       spell_path(w), MAX_DEPTH);
    }
    w->path[w->depth++] = element;
    fc_code rc = walk_value(w, v);
    w->depth--;
    return rc;
}

static fc_code walk_items(walker *w, const fc_pv *items, size_t n, bool is_tuple) {
    for (size_t i = 0; i < n; i++) {
        char *key = fc_arena_printf(w->leaves->arena, "%zu", i);
        FC_TRY(key ? walk_below(w, (fc_path_element){.key = key, .is_index = true, .is_tuple = is_tuple}, items[i])
                   : fc_no_memory(w->err, w->f->path));
    }
    return FC_OK;
}

/* Whether a path can contain the key: text or an integer. */
static bool is_plain_key(const fc_pickle *p, fc_pv key) {
    size_t n;
    int64_t number;
    if (fc_pv_typeof(key) != FC_PV_STR) {
        return fc_pickle_int(p, key, &number);
    }
    const char *text = fc_pickle_bytes(p, key, &n);
    return fc_is_plain_text(text, n);
}

fc_code fc_torch_key_element(const torch_file *f, fc_pv key, fc_arena *arena, fc_path_element *out, fc_error *err) {
    int64_t number = 0;
    if (!is_plain_key(f->p, key)) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: a dict has a key that is neither a string (without NUL) nor an integer: remove it",
                       f->path);
    }
    *out = (fc_path_element){.is_number = fc_pv_typeof(key) != FC_PV_STR};
    if (out->is_number) {
        fc_pickle_int(f->p, key, &number);
        out->key = fc_arena_printf(arena, "%" PRId64, number);
    } else {
        size_t n;
        const char *text = fc_pickle_bytes(f->p, key, &n);
        FC_TRY(fc_torch_unfold(f, n, err));
        out->key = fc_arena_strndup(arena, text, n);
    }
    return out->key ? FC_OK : fc_no_memory(err, f->path);
}

static bool has_plain_keys(const fc_pickle *p, const fc_pv *pairs, size_t n) {
    for (size_t i = 0; i < n; i += 2) {
        if (!is_plain_key(p, pairs[i])) {
            return false;
        }
    }
    return true;
}

/* Whether the dict stands for an object of another format. */
static fc_code is_kept(walker *w, fc_pv v, bool *is) {
    fc_torch_kept kept;
    uint64_t spent;
    FC_TRY(fc_torch_find_kept(w->p, v, w->leaves->arena, &kept, &spent, w->err));
    *is = kept.encoding != NULL;
    return fc_torch_unfold(w->f, spent, w->err);
}

/*
 * A dict with keys that a path cannot contain is kept whole; so is a dict subclass, unless it contains tensors, and a
 * dict that stands for an object of another format.
 */
static fc_code walk_dict(walker *w, fc_pv v) {
    size_t n;
    bool found = true, kept = false;
    FC_TRY(w->depth > 0 ? is_kept(w, v, &kept) : FC_OK);
    if (kept) {
        return add_leaf(w, v, TORCH_OBJECT);
    }
    const fc_pv *pairs = fc_pickle_items(w->p, v, &n);
    bool plain = has_plain_keys(w->p, pairs, n);
    fc_pv cls = fc_pickle_container_of(w->p, v)->cls;
    bool ordinary = !cls || fc_pickle_is_global(w->p, cls, "collections", "OrderedDict");
    FC_TRY(n > 0 && (!plain || !ordinary) ? holds_tensor(w, v, &found) : FC_OK);
    if (n == 0 && w->depth == 0) {
        return FC_OK;
    }
    if (n == 0 || !found || (!plain && w->depth > 0 && w->leaves->alone)) {
        return add_leaf(w, v, TORCH_OBJECT); /* with its tensors, which have no names of their own */
    }
    if (!plain) {
        return fc_fail(w->err, FC_EUNSUPPORTED,
                       "%s: %.256s: a dict of tensors has keys that are neither strings without NUL nor integers",
                       w->f->path, w->depth ? spell_path(w) : "the state dict");
    }
    for (size_t i = 0; i + 1 < n; i += 2) {
        fc_path_element element;
        FC_TRY(fc_torch_key_element(w->f, pairs[i], w->leaves->arena, &element, w->err));
        FC_TRY(walk_below(w, element, pairs[i + 1]));
    }
    return FC_OK;
}

/*
 * A list is taken apart if it contains a dict, or a tensor at any depth; DCP looks for tensors in lists only. A tuple
 * is taken apart if it contains a tensor.
 */
static fc_code walk_sequence(walker *w, fc_pv v, bool is_tuple) {
    size_t n;
    bool apart = false;
    const fc_pv *items = fc_pickle_sequence(w->p, v, &n);
    for (size_t i = 0; i < n && !is_tuple && !apart; i++) {
        apart = fc_pv_typeof(items[i]) == FC_PV_DICT;
    }
    FC_TRY(apart ? FC_OK : holds_tensor(w, v, &apart));
    return apart ? walk_items(w, items, n, is_tuple) : add_leaf(w, v, TORCH_OBJECT);
}

/* @return a member of a module, or 0. Members of torch.nn.Module come first, so only the first ones are searched; many
 * modules may share a long dict. */
static fc_pv module_member(const fc_pickle *p, fc_pv state, const char *key) {
    enum { MOST = 512 };
    size_t n;
    const fc_pv *pairs = fc_pickle_items(p, state, &n);
    for (size_t i = 0; i + 1 < n && i < MOST; i += 2) {
        if (fc_pickle_is_str(p, pairs[i], key)) {
            return pairs[i + 1];
        }
    }
    return 0;
}

/* Whether `v` is a module that was pickled whole, with the tables of torch.nn.Module. */
static bool is_module(const fc_pickle *p, fc_pv v) {
    fc_pv state = fc_pv_typeof(v) == FC_PV_CALL ? fc_pickle_state(p, v) : 0;
    return fc_pv_typeof(state) == FC_PV_DICT && module_member(p, state, "_parameters");
}

/* @return the class of an instance. Legacy files wrap the class of a module: ('module', class, source file, source). */
static fc_pv class_of(const fc_pickle *p, fc_pv v) {
    size_t n;
    fc_pv cls = fc_pv_typeof(v) == FC_PV_CALL ? fc_pickle_callee(p, v) : 0;
    fc_pv id = fc_pv_typeof(cls) == FC_PV_PERSID ? fc_pickle_persid(p, cls) : 0;
    if (fc_pv_typeof(id) == FC_PV_TUPLE) {
        const fc_pv *items = fc_pickle_tuple(p, id, &n);
        cls = n >= 2 ? items[1] : 0;
    }
    return fc_pv_typeof(cls) == FC_PV_GLOBAL ? cls : 0;
}

static fc_code refuse_whole(walker *w, fc_pv v) {
    char name[256] = "its value";
    fc_pv cls = class_of(w->p, v);
    if (cls) {
        fc_pickle_global_name(w->p, cls, name, sizeof name);
    }
    bool module = is_module(w->p, v);
    return fc_fail(w->err, FC_EUNSUPPORTED, "%s: %.256s%s%s was pickled as a whole and is not a state dict: %s",
                   w->f->path, w->depth ? spell_path(w) : "", w->depth ? ": " : "", name,
                   module ? "load it where its class is available, and save its state_dict()"
                          : "save a dict of tensors, such as a state_dict()");
}

/* Whether `name` is one of the `n` names of buffers that state_dict() leaves out. */
static bool is_transient(const fc_pickle *p, const fc_pv *names, size_t n, fc_pv name) {
    size_t length;
    const char *text = fc_pickle_bytes(p, name, &length);
    for (size_t i = 0; i < n; i++) {
        if (fc_pickle_is_str(p, names[i], text)) {
            return true;
        }
    }
    return false;
}

static fc_code bad_module(walker *w) {
    return fc_fail(w->err, FC_EUNSUPPORTED, "%s: %.256s: a module that was not pickled by torch.nn.Module", w->f->path,
                   w->depth ? spell_path(w) : "its value");
}

/* Makes the name of a member of a module, preceded by the names of the enclosing modules and followed by `end`. */
static fc_code name_member(walker *w, const char *prefix, fc_pv key, const char *end, const char **out) {
    size_t n = 0;
    const char *text = fc_pv_typeof(key) == FC_PV_STR ? fc_pickle_bytes(w->p, key, &n) : NULL;
    if (!text || !fc_is_plain_text(text, n) || strlen(prefix) + n >= MAX_MEMBER) {
        return bad_module(w);
    }
    FC_TRY(fc_torch_unfold(w->f, strlen(prefix) + n, w->err));
    *out = fc_arena_printf(w->leaves->arena, "%s%s%s", prefix, text, end);
    return *out ? FC_OK : fc_no_memory(w->err, w->f->path);
}

/* Adds the values of _parameters or _buffers, named as in state_dict(). */
static fc_code walk_members(walker *w, fc_pv state, const char *table, const char *prefix) {
    size_t n = 0, ntransient = 0;
    fc_pv dict = module_member(w->p, state, table), set = module_member(w->p, state, "_non_persistent_buffers_set");
    const fc_pv *pairs = fc_pv_typeof(dict) == FC_PV_DICT ? fc_pickle_items(w->p, dict, &n) : NULL;
    const fc_pv *transient = fc_pv_typeof(set) == FC_PV_SET ? fc_pickle_items(w->p, set, &ntransient) : NULL;
    FC_TRY(fc_torch_unfold(w->f, n * (uint64_t)ntransient, w->err)); /* comparisons */
    for (size_t i = 0; i + 1 < n; i += 2) {
        const char *name = NULL;
        FC_TRY(name_member(w, prefix, pairs[i], "", &name));
        if (fc_pv_typeof(pairs[i + 1]) != FC_PV_NONE && !is_transient(w->p, transient, ntransient, pairs[i])) {
            FC_TRY(walk_below(w, (fc_path_element){.key = name}, pairs[i + 1]));
        }
    }
    return FC_OK;
}

/* Adds the values of a module's state_dict(): parameters, buffers, then its submodules. */
static fc_code walk_module(walker *w, fc_pv v, const char *prefix, size_t depth) {
    size_t n = 0;
    fc_pv state = fc_pickle_state(w->p, v), dict = module_member(w->p, state, "_modules");
    const fc_pv *pairs = fc_pv_typeof(dict) == FC_PV_DICT ? fc_pickle_items(w->p, dict, &n) : NULL;
    if (depth == MAX_DEPTH || w->visits == 0) {
        return bad_module(w);
    }
    w->visits--;
    FC_TRY(walk_members(w, state, "_parameters", prefix));
    FC_TRY(walk_members(w, state, "_buffers", prefix));
    for (size_t i = 0; i + 1 < n; i += 2) {
        const char *below = NULL;
        if (fc_pv_typeof(pairs[i + 1]) != FC_PV_NONE) {
            FC_TRY(name_member(w, prefix, pairs[i], ".", &below));
            FC_TRY(is_module(w->p, pairs[i + 1]) ? walk_module(w, pairs[i + 1], below, depth + 1) : bad_module(w));
        }
    }
    return FC_OK;
}

static fc_code take_module(walker *w, fc_pv v) {
    char name[256] = "a class of another file";
    torch_leaves *l = w->leaves;
    size_t before = l->count;
    FC_TRY(walk_module(w, v, "", 0));
    if (l->count == before) { /* without parameters: an activation or a loss */
        return w->depth > 0 ? add_leaf(w, v, TORCH_OBJECT) : FC_OK;
    }
    fc_pv cls = class_of(w->p, v);
    if (cls) {
        fc_pickle_global_name(w->p, cls, name, sizeof name);
    }
    if (l->modules++ == 0) {
        l->of_module = l->items[before].name;
        l->module_class = fc_arena_strndup(l->arena, name, strlen(name));
    }
    return l->modules > 1 || l->module_class ? FC_OK : fc_no_memory(w->err, w->f->path);
}

/* Adds the parts of a sparse tensor, and what it is apart from them. */
static fc_code walk_sparse(walker *w, fc_pv v, const fc_torch_sparse *sparse) {
    for (size_t i = 0; i < sparse->layout->nparts; i++) {
        FC_TRY(walk_below(w, (fc_path_element){.key = sparse->layout->keys[i]}, sparse->parts[i]));
    }
    if (w->depth == MAX_DEPTH) {
        return fc_fail(w->err, FC_EUNSUPPORTED, "%s: nested more than %d levels deep", w->f->path, MAX_DEPTH);
    }
    w->path[w->depth++] = (fc_path_element){.key = FC_TORCH_SPARSE_KEY};
    fc_code rc = add_leaf(w, v, TORCH_OBJECT);
    w->depth--;
    return rc;
}

/* Adds the parts of a tensor of torchao. */
static fc_code walk_torchao(walker *w, const fc_torchao *found) {
    fc_path_element *last = &w->path[w->depth - 1], whole = *last;
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < found->count; i++) {
        *last = (fc_path_element){.key = fc_torchao_key(whole.key, found->keys[i], w->leaves->arena)};
        rc = last->key ? add_leaf(w, found->parts[i], TORCH_TENSOR) : fc_no_memory(w->err, w->f->path);
    }
    *last = whole;
    return rc;
}

static fc_code walk_value(walker *w, fc_pv v) {
    fc_torchao found;
    torch_leaf_kind kind = leaf_kind_of(w->p, v);
    fc_torch_sparse sparse;
    if (w->visits-- == 0) {
        return fc_fail(w->err, FC_EUNSUPPORTED, "%s: its pickle has too many shared values", w->f->path);
    }
    if (kind == TORCH_TENSOR && fc_torch_sparse_decode(w->p, v, &sparse, NULL) == FC_OK) {
        return walk_sparse(w, v, &sparse);
    }
    if (kind == TORCH_TENSOR && w->depth > 0 && fc_torchao_find(w->p, v, &found)) {
        FC_TRY(walk_torchao(w, &found));
    }
    if (kind != TORCH_OBJECT) {
        return add_leaf(w, v, kind);
    }
    switch (fc_pv_typeof(v)) {
    case FC_PV_DICT:
        return walk_dict(w, v);
    case FC_PV_LIST:
        return walk_sequence(w, v, false);
    case FC_PV_TUPLE:
        return walk_sequence(w, v, true);
    default:
        if (is_module(w->p, v)) {
            return w->leaves->alone ? take_module(w, v) : refuse_whole(w, v);
        }
        return w->depth == 0 ? refuse_whole(w, v) : add_leaf(w, v, TORCH_OBJECT);
    }
}

fc_code fc_torch_flatten(const torch_file *f, const fc_path *prefix, torch_leaves *leaves, fc_error *err) {
    walker w = {.f = f, .p = f->p, .leaves = leaves, .err = err};
    w.visits = SPARE_VISITS + f->p->size;
    w.name = malloc(MAX_NAME);
    FC_NEED(w.name, w.err, w.f->path);
    fc_code rc = FC_OK;
    fc_pv_type root = fc_pv_typeof(f->p->root);
    bool module = leaves->alone && is_module(f->p, f->p->root);
    const bool named = prefix && prefix->count > 0; /* then a single value has a name */
    if (root != FC_PV_DICT && root != FC_PV_LIST && root != FC_PV_TUPLE && !module && !named &&
        leaf_kind_of(f->p, f->p->root) == TORCH_OBJECT) {
        FC_TRY_GOTO(refuse_whole(&w, f->p->root), rc, out);
    }
    for (size_t i = 0; prefix && i < prefix->count && i < MAX_DEPTH / 2; i++) {
        w.path[w.depth++] = prefix->elements[i];
    }
    rc = walk_value(&w, f->p->root);
out:
    fc_pv_map_free(&w.clean);
    fc_pv_map_free(&w.marked);
    free(w.stack);
    free(w.name);
    return rc;
}
