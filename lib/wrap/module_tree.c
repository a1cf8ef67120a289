/*
 * Builds the tree of modules from the names of parameters. A hash table maps (parent, name) to nodes; one walk then
 * puts modules and parameters into the order in which nn.Module walks them.
 */
#include "wrap/module_tree.h"

#include "base/checked.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "sharding/fqn.h"

#include <stdlib.h>
#include <string.h>

uint32_t fc_tree_find(const fc_tree_builder *b, uint32_t parent, fc_name name, bool is_parameter) {
    const size_t at = fc_name_table_find_child(b->children, parent * UINT64_C(2) + is_parameter, name.text, name.len);
    return at == FC_NO_NAME ? 0 : (uint32_t)at;
}

/* @return the node called `name`, which is made unless it exists; 0 when out of memory. */
static uint32_t add_node(fc_tree_builder *b, uint32_t parent, fc_name name, fc_name fqn, bool is_parameter) {
    const size_t at =
        fc_name_table_put_child(b->children, parent * UINT64_C(2) + is_parameter, name.text, name.len, b->count);
    if (at == b->count) {
        fc_tree_node *up = &b->nodes[parent];
        b->nodes[b->count++] = (fc_tree_node){
            .name = name, .fqn = fqn, .parent = parent, .depth = up->depth + 1, .is_parameter = is_parameter};
        if (up->last) {
            b->nodes[up->last].next = (uint32_t)at;
        } else {
            up->first = (uint32_t)at;
        }
        up->last = (uint32_t)at;
    }
    return at == FC_NO_NAME ? 0 : (uint32_t)at;
}

/* @return the name without the components that wrappers insert. Most names have none and are borrowed. */
static const char *clean(const char *fqn, const fc_fqn *n, size_t dots, fc_arena *arena) {
    if ((size_t)n->count == dots + 1) {
        return fqn;
    }
    size_t len = 0;
    char *out = fc_arena_alloc(arena, strlen(fqn) + 1);
    for (int i = 0; out && i < n->count; i++) {
        memcpy(out + len, n->components[i].text, n->components[i].len);
        len += n->components[i].len;
        out[len++] = i + 1 < n->count ? '.' : '\0';
    }
    return out;
}

static size_t count_dots(const char *s) {
    size_t n = 0;
    for (; *s; s++) {
        n += *s == '.';
    }
    return n;
}

fc_code fc_tree_add(fc_tree_builder *b, const char *fqn, uint32_t spec, uint32_t *node, fc_error *err) {
    fc_fqn n;
    size_t dots = count_dots(fqn);
    if (dots >= FC_FQN_COMPONENTS) {
        return fc_advise(
            err, fc_fail(err, FC_EUNSUPPORTED, "'%.128s…': the name has more than %d levels", fqn, FC_FQN_COMPONENTS),
            FC_HINT_EXCLUDE, NULL);
    }
    fc_fqn_split(fqn, FC_FQN_COMPONENTS, &n);
    const char *text = clean(fqn, &n, dots, b->arena);
    FC_NEED(text, err, NULL);
    if (n.count <= b->skip) {
        return fc_fail(err, FC_EUSAGE, "'%.256s' is not the name of a parameter of a module", fqn);
    }
    fc_fqn_split(text, FC_FQN_COMPONENTS, &n); /* again, because the components must point into the clean text */
    uint32_t at = 0;
    for (int i = b->skip; i < n.count; i++) {
        fc_name name = {n.components[i].text, n.components[i].len};
        fc_name whole = {text, (size_t)(name.text + name.len - text)};
        at = add_node(b, at, name, whole, i + 1 == n.count);
        FC_NEED(at != 0, err, NULL);
    }
    if (b->skip > 0 && b->nodes[0].fqn.len == 0) {
        const fc_fqn_component *last = &n.components[b->skip - 1];
        b->nodes[0].fqn = (fc_name){text, (size_t)(last->text + last->len - text)};
        b->nodes[0].name = (fc_name){last->text, last->len};
    }
    b->nodes[at].spec = spec;
    *node = at;
    return FC_OK;
}

uint32_t fc_tree_find_fqn(const fc_tree_builder *b, const char *fqn, bool is_parameter) {
    fc_fqn n;
    fc_fqn_split(fqn, FC_FQN_COMPONENTS, &n);
    uint32_t at = 0;
    for (int i = b->skip; i < n.count; i++) {
        bool last = i + 1 == n.count;
        at = fc_tree_find(b, at, (fc_name){n.components[i].text, n.components[i].len}, last && is_parameter);
        if (at == 0) {
            return 0;
        }
    }
    return at;
}

/* Allocates for the most nodes that the names can need, so that nodes never move. */
static fc_code allocate_nodes(fc_tree_builder *b, fc_error *err) {
    size_t nodes = 2;
    for (size_t i = 0; i < b->nspecs; i++) {
        nodes += count_dots(b->specs[i].fqn) + 1;
    }
    for (const char *const *const *group = b->info ? b->info->shared : NULL; group && *group; group++) {
        for (const char *const *name = *group; *name; name++) {
            nodes += count_dots(*name) + 1;
        }
    }
    if (nodes >= UINT32_MAX / 4) {
        return fc_fail(err, FC_EUNSUPPORTED, "the names have %zu levels in total, more than is supported", nodes);
    }
    b->nodes = fc_arena_calloc(b->scratch, nodes, sizeof *b->nodes);
    b->children = fc_name_table_new(b->scratch, b->nspecs);
    b->count = 1;
    return b->nodes && b->children ? FC_OK : fc_no_memory(err, NULL);
}

static fc_code add_specs(fc_tree_builder *b, fc_error *err) {
    for (uint32_t i = 0; i < b->nspecs; i++) {
        uint32_t node;
        size_t before = b->count;
        FC_TRY(fc_tree_add(b, b->specs[i].fqn, i, &node, err));
        if (b->count == before) {
            return fc_advise(err, fc_fail(err, FC_EUSAGE, "there are two parameters '%.256s'", b->specs[i].fqn),
                             FC_HINT_EXCLUDE, NULL);
        }
    }
    return FC_OK;
}

bool fc_name_is_number(fc_name s, uint64_t *value) {
    *value = 0;
    for (size_t i = 0; i < s.len; i++) {
        if (s.text[i] < '0' || s.text[i] > '9') {
            return false;
        }
        *value = *value * 10 + (uint64_t)(s.text[i] - '0');
    }
    return s.len > 0 && s.len < 19 && (s.len == 1 || s.text[0] != '0');
}

/* Only called for names that are numbers. */
static int compare_child_numbers(const void *a, const void *b, void *nodes) {
    const fc_tree_node *all = nodes;
    uint64_t x, y;
    (void)fc_name_is_number(all[*(const uint32_t *)a].name, &x);
    (void)fc_name_is_number(all[*(const uint32_t *)b].name, &y);
    return (x > y) - (x < y);
}

/* In a source that is sorted by name, layer 10 comes before layer 2. A ModuleList is in numeric order. */
static void order_children(fc_tree_builder *b, uint32_t parent, uint32_t *scratch) {
    size_t n = 0;
    uint64_t value;
    for (uint32_t c = b->nodes[parent].first; c != 0; c = b->nodes[c].next) {
        if (b->nodes[c].is_parameter) {
            continue;
        }
        if (!fc_name_is_number(b->nodes[c].name, &value)) {
            return;
        }
        scratch[n++] = c;
    }
    fc_sort_items_by(scratch, n, sizeof *scratch, compare_child_numbers, b->nodes);
    /* Parameters follow. They are walked separately, so their order among the modules does not matter. */
    for (uint32_t c = b->nodes[parent].first, next; c != 0; c = next) {
        next = b->nodes[c].next;
        if (b->nodes[c].is_parameter) {
            scratch[n++] = c;
        }
    }
    for (size_t i = 0; i < n; i++) {
        b->nodes[scratch[i]].next = i + 1 < n ? scratch[i + 1] : 0;
    }
    if (n > 0) {
        b->nodes[parent].first = scratch[0];
        b->nodes[parent].last = scratch[n - 1];
    }
}

static fc_code put_parameter(fc_tree_builder *b, uint32_t node, uint32_t module, fc_error *err) {
    fc_tree_node *n = &b->nodes[node];
    const fc_parameter_spec *spec = n->spec < b->nspecs ? &b->specs[n->spec] : NULL;
    n->number = (uint32_t)b->tree->nparameters++;
    fc_parameter *p = &b->parameters[n->number];
    *p = (fc_parameter){.fqn = n->fqn.text, .name = n->name, .module = module, .spec = n->spec, .same_as = n->number};
    if (!spec) {
        return FC_OK; /* fc_tree_mark copies the rest from the parameter that it is tied to */
    }
    p->dtype = spec->dtype;
    p->ndim = spec->ndim;
    p->shape = spec->shape;
    p->buffer = spec->buffer;
    if (!fc_numel(p->ndim, p->shape, &p->numel) ||
        !fc_mul_u64((uint64_t)p->numel, fc_dtype_size(p->dtype), &p->bytes)) {
        return fc_fail(err, FC_ECORRUPT, "'%.256s': its size exceeds 64 bits", p->fqn);
    }
    return FC_OK;
}

static fc_code put_module(fc_tree_builder *b, uint32_t node, fc_error *err) {
    fc_tree_node *n = &b->nodes[node];
    n->number = (uint32_t)b->tree->nmodules++;
    b->modules[n->number] = (fc_module){.fqn = n->fqn,
                                        .name = n->name,
                                        .parent = node == 0 ? FC_NO_MODULE : b->nodes[n->parent].number,
                                        .depth = n->depth,
                                        .first_parameter = (uint32_t)b->tree->nparameters,
                                        .same_as = n->number};
    for (uint32_t c = n->first; c != 0; c = b->nodes[c].next) {
        if (b->nodes[c].is_parameter) {
            FC_TRY(put_parameter(b, c, n->number, err));
        }
    }
    b->modules[n->number].nparameters = (uint32_t)b->tree->nparameters - b->modules[n->number].first_parameter;
    return FC_OK;
}

static uint32_t next_module(const fc_tree_builder *b, uint32_t node) {
    while (node != 0 && b->nodes[node].is_parameter) {
        node = b->nodes[node].next;
    }
    return node;
}

/* Pre-order: each module with its own parameters, then its children. */
static fc_code put_in_order(fc_tree_builder *b, fc_error *err) {
    uint32_t *scratch = fc_arena_calloc(b->scratch, b->count, sizeof *scratch);
    b->modules = fc_arena_calloc(b->arena, b->count, sizeof *b->modules);
    b->parameters = fc_arena_calloc(b->arena, b->count, sizeof *b->parameters);
    b->tree->modules = b->modules;
    b->tree->parameters = b->parameters;
    FC_NEED(scratch && b->modules && b->parameters, err, NULL);
    for (uint32_t at = 0;;) {
        order_children(b, at, scratch);
        FC_TRY(put_module(b, at, err));
        uint32_t next = next_module(b, b->nodes[at].first);
        while (next == 0 && at != 0) {
            b->modules[b->nodes[at].number].end = (uint32_t)b->tree->nmodules;
            next = next_module(b, b->nodes[at].next);
            at = b->nodes[at].parent;
        }
        if (next == 0) {
            b->modules[0].end = (uint32_t)b->tree->nmodules;
            return FC_OK;
        }
        at = next;
    }
}

static fc_code build(fc_tree_builder *b, fc_error *err) {
    FC_NEED(b->scratch, err, NULL);
    FC_TRY(allocate_nodes(b, err));
    FC_TRY(add_specs(b, err));
    FC_TRY(fc_tree_read_shared(b, err));
    FC_TRY(put_in_order(b, err));
    return fc_tree_mark(b, err);
}

fc_code fc_module_tree_build(const fc_parameter_spec *specs, size_t count, int skip, const fc_model_info *info,
                             fc_arena *arena, fc_module_tree *out, fc_error *err) {
    fc_tree_builder b = {.specs = specs, .nspecs = count, .skip = skip, .info = info, .arena = arena, .tree = out};
    memset(out, 0, sizeof *out);
    if (count >= UINT32_MAX / 4) {
        return fc_fail(err, FC_EUNSUPPORTED, "%zu parameters are too many", count);
    }
    b.scratch = fc_arena_new();
    const fc_code rc = build(&b, err);
    fc_arena_free(b.scratch);
    return rc;
}

fc_code fc_module_tree_new(const fc_parameter_spec *specs, size_t count, const fc_model_info *info, fc_arena *arena,
                           fc_module_tree *out, fc_error *err) {
    return fc_module_tree_build(specs, count, 0, info, arena, out, err);
}

void fc_module_post_order(const fc_module_tree *tree, uint32_t *order) {
    uint32_t open[FC_FQN_COMPONENTS + 1];
    size_t depth = 0, n = 0;
    for (uint32_t m = 0; m < tree->nmodules; m++) {
        while (depth > 0 && tree->modules[open[depth - 1]].end <= m) {
            order[n++] = open[--depth];
        }
        open[depth++] = m;
    }
    while (depth > 0) {
        order[n++] = open[--depth];
    }
}

uint32_t fc_module_common_ancestor(const fc_module_tree *tree, uint32_t a, uint32_t b) {
    while (a > b || b >= tree->modules[a].end) {
        a = tree->modules[a].parent;
    }
    return a;
}
