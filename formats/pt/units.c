/*
 * FSDP1's flat parameters that no file names. With SHARDED_STATE_DICT, which verl uses, the model's files have its
 * parameters, but the optimizer's state_dict() still numbers the flat ones. Number 0 is that of the root; then come
 * those of the layers, and of each linear layer of LoRA. This is accepted only if the optimizer has as many numbers and
 * each shard has the size that follows. flat.c then reads the state, and here it is divided among the parameters.
 *
 * With use_orig_params, each number is a parameter, and a rank has the elements that are in its shard of the flat one,
 * or no state if there are none. The elements of the ranks, one after another, are the parameter. This is accepted only
 * if the optimizer has as many numbers as the model has parameters, and the elements add up to each of them.
 */
#include "base/name_table.h"
#include "checkpoint/parameters.h"
#include "checkpoint/path.h"
#include "flat/flat_boxes.h"
#include "fsdpckpt/try.h"
#include "pt/merge.h"
#include "sharding/recorded.h"
#include "torch/file/name_list.h"

#include <stdlib.h>
#include <string.h>

/* The search for the units of a model. */
typedef struct search {
    fc_pt_builder *m;
    fc_arena *arena;       /* owns what only the search needs */
    const int64_t *shards; /* per number: elements of the optimizer's local tensors, or -1 */
    size_t count;          /* of numbers */
    size_t *params;        /* indexes of the values that are parameters, in the order of the model */
    size_t nparams;
    size_t *unit_of; /* per parameter */
    size_t *at;      /* per parameter: its place in its unit */
    size_t nunits;
    const fc_mesh *mesh; /* of the parameters, or NULL: none is recorded */
    int dim;             /* of the mesh: the ranks along it share a flat parameter */
    int64_t ranks;       /* their number */
} search;

static const char *key_of(const fc_pt_value *v) {
    return v->path.elements[v->path.count - 1].key;
}

static bool is_number(const char *key, size_t len) {
    return len > 0 && strspn(key, "0123456789") >= len;
}

/* Returns the length of the name of the layer that `key` belongs to: up to the first number in it. 0: it is in none. */
static size_t layer_of(const char *key) {
    for (const char *part = key, *dot; (dot = strchr(part, '.')) != NULL; part = dot + 1) {
        if (is_number(part, (size_t)(dot - part))) {
            return (size_t)(dot - key);
        }
    }
    return 0;
}

/* Returns the length of the name of the linear layer of LoRA that `key` is the weight of, or 0. */
static size_t adapter_of(const char *key) {
    const char *end = strrchr(key, '.');
    return end && (strstr(key, ".lora_A.") || strstr(key, ".lora_B.")) ? (size_t)(end - key) : 0;
}

/* ---- what the optimizer says ---- */

static bool is_state(const fc_path *path) {
    const fc_path_element *e = path->count >= 3 ? &path->elements[path->count - 3] : NULL;
    return e && strcmp(e[0].key, "state") == 0 && e[1].is_number && e[1].key[0] != '-';
}

static size_t number_of(const fc_path *path) {
    return strtoull(path->elements[path->count - 2].key, NULL, 10);
}

/* Finds the size of each number's local tensors. @return whether there are any, and all are shards. */
static fc_code measure_shards(const search *s, const torch_leaves *leaves, int64_t *shards, bool *are) {
    size_t found = 0;
    *are = true;
    for (size_t i = 0; i < leaves->count && *are; i++) {
        const torch_leaf *leaf = &leaves->items[i];
        fc_torch_tensor t = {0};
        if (!is_state(&leaf->path) || leaf->kind == TORCH_OBJECT) {
            continue;
        }
        const size_t number = number_of(&leaf->path);
        *are = leaf->kind == TORCH_TENSOR && number < s->count;
        if (*are) {
            FC_TRY_CONTEXT(fc_torch_tensor_decode(s->m->f->p, leaf->v, &t, s->m->err), s->m->err, "%s: %.256s",
                           s->m->f->path, leaf->name);
        }
        if (!*are || t.ndim == 0) {
            continue;
        }
        *are = t.ndim == 1 && (shards[number] < 0 || shards[number] == t.sizes[0]);
        shards[number] = t.sizes[0];
        found++;
    }
    *are = *are && found > 0;
    return FC_OK;
}

/* ---- what the model says ---- */

static bool is_parameter(const fc_pt_value *v) {
    return !v->object && !v->refusal && !v->plain && v->path.count == 2 && v->nchunks > 0 &&
           fc_dtype_get(v->dtype)->cls == FC_CLASS_FLOAT;
}

/* Finds the parameters of the model. */
static fc_code list_parameters(search *s) {
    const fc_pt_builder *m = s->m;
    const fc_pt_value *first = NULL;
    s->params = fc_arena_calloc(s->arena, m->count + 1, sizeof *s->params);
    s->unit_of = fc_arena_calloc(s->arena, m->count + 1, sizeof *s->unit_of);
    s->at = fc_arena_calloc(s->arena, m->count + 1, sizeof *s->at);
    FC_NEED(s->params && s->unit_of && s->at, m->err, m->checkpoint->path);
    for (size_t i = 0; i < m->count; i++) {
        const fc_pt_value *v = &m->values[i];
        if (is_parameter(v) && (!first || strcmp(first->path.elements[0].key, v->path.elements[0].key) == 0)) {
            first = first ? first : v;
            s->params[s->nparams++] = i;
        }
    }
    return FC_OK;
}

/* Returns the dimension of the mesh along which FSDP shards a parameter, or -1 if other dimensions shard it, too. */
static int find_dim(const fc_pt_value *v) {
    int found = -1, others = 0;
    for (int d = 0; d < v->mesh.ndim; d++) {
        const bool is = v->placements[d].kind == FC_SHARD && v->placements[d].dim == 0;
        found = is ? d : found;
        others += v->placements[d].kind != FC_REPLICATE;
    }
    return others == 1 ? found : -1;
}

/* Finds the ranks that share a flat parameter. @return false unless FSDP, and nothing else, shards all parameters. */
static bool find_ranks(search *s) {
    const fc_pt_builder *m = s->m;
    const fc_pt_value *first = s->nparams > 0 ? &m->values[s->params[0]] : NULL;
    s->ranks = m->set->ranks;
    s->mesh = first && first->mesh.ndim > 0 ? &first->mesh : NULL;
    s->dim = s->mesh ? find_dim(first) : 0;
    bool same = first && s->dim >= 0 && (!s->mesh || fc_mesh_ranks(s->mesh) == s->ranks);
    for (size_t i = 0; i < s->nparams && same; i++) {
        const fc_pt_value *v = &m->values[s->params[i]];
        same = s->mesh ? fc_mesh_equal(&v->mesh, s->mesh) && find_dim(v) == s->dim : v->mesh.ndim == 0;
    }
    s->ranks = same && s->mesh ? s->mesh->sizes[s->dim] : s->ranks;
    return same;
}

static const char *key_at(const search *s, size_t param) {
    return key_of(&s->m->values[s->params[param]]);
}

/* Returns the number of the module `key[0..len)`, adding it if it is new. */
static size_t add_unit(search *s, fc_name_table *units, const char *key, size_t len) {
    const size_t at = fc_name_table_put(units, key, len, s->nunits);
    s->nunits += at == s->nunits;
    return at;
}

/* Divides the parameters among the root (number 0), layers and the linear layers of LoRA, in the order of modules. */
static fc_code divide(search *s, bool adapters) {
    fc_name_table *units = fc_name_table_new(s->arena, 0);
    s->nunits = 0;
    FC_NEED(units, s->m->err, s->m->checkpoint->path);
    for (size_t i = 0; i < s->nparams && s->nunits == 0; i++) {
        FC_NEED(layer_of(key_at(s, i)) > 0 || add_unit(s, units, "", 0) == 0, s->m->err, s->m->checkpoint->path);
    }
    for (size_t i = 0; i < s->nparams; i++) {
        const size_t adapter = adapters ? adapter_of(key_at(s, i)) : 0;
        size_t at = add_unit(s, units, key_at(s, i), layer_of(key_at(s, i)));
        at = adapter > 0 && at != FC_NO_NAME ? add_unit(s, units, key_at(s, i), adapter) : at;
        FC_NEED(at != FC_NO_NAME, s->m->err, s->m->checkpoint->path);
        s->unit_of[i] = at;
    }
    return FC_OK;
}

/* Whether the parameter has the bytes of an earlier one of its unit. */
static fc_code is_copy(const search *s, size_t param, size_t *of, bool *is) {
    const fc_pt_value *v = &s->m->values[s->params[param]];
    *is = false;
    for (size_t i = 0; i < param && !*is; i++) {
        const fc_pt_value *w = &s->m->values[s->params[i]];
        bool same = s->unit_of[i] == s->unit_of[param] && w->dtype == v->dtype && w->nchunks == v->nchunks &&
                    fc_same_sizes(v->ndim, v->shape, w->ndim, w->shape);
        for (size_t c = 0; c < v->nchunks && same; c++) {
            same = fc_same_sizes(2 * v->ndim, v->chunks[c].dims, 2 * w->ndim, w->chunks[c].dims);
            if (same) {
                FC_TRY(fc_torch_same_extent(s->m->checkpoint, v->dtype, v->ndim, v->chunks[c].dims + v->ndim,
                                            v->chunks[c].data, w->chunks[c].data, &same, s->m->err));
            }
        }
        *is = same;
        *of = i;
    }
    return FC_OK;
}

static size_t count_members(const search *s, size_t unit) {
    size_t n = 0;
    for (size_t i = 0; i < s->nparams; i++) {
        n += s->unit_of[i] == unit;
    }
    return n;
}

/* Lays out a unit. @param tied whether parameters with equal bytes are one @param fits receives whether the shards have
 * its size */
static fc_code lay_out_unit(const search *s, size_t unit, bool tied, fc_flat_layout *out, bool *fits) {
    const fc_pt_builder *m = s->m;
    fc_arena *arena = m->checkpoint->arena;
    fc_flat_desc *descs = fc_arena_calloc(s->arena, count_members(s, unit) + 1, sizeof *descs);
    FC_NEED(descs, m->err, m->checkpoint->path);
    size_t n = 0;
    *fits = true;
    for (size_t i = 0; i < s->nparams; i++) {
        const fc_pt_value *v = &m->values[s->params[i]];
        size_t of = 0;
        bool copy = false;
        if (s->unit_of[i] != unit) {
            continue;
        }
        FC_TRY(tied ? is_copy(s, i, &of, &copy) : FC_OK);
        *fits = *fits && (n == 0 || descs[0].dtype == v->dtype);
        s->at[i] = n;
        descs[n++] = (fc_flat_desc){.fqn = key_of(v),
                                    .ndim = v->ndim,
                                    .shape = v->shape,
                                    .dtype = v->dtype,
                                    .requires_grad = true,
                                    .shared_with = copy ? (int64_t)s->at[of] : -1};
    }
    *fits = *fits && n > 0;
    if (*fits) {
        FC_TRY(fc_flat_layout_new(descs, n, s->ranks, false, descs[0].dtype, arena, out, m->err));
        *fits = s->shards[unit] < 0 || s->shards[unit] == out->shard_numel;
    }
    return FC_OK;
}

/* Lays out all units. Parameters are only taken to be tied if the unit has a size that they do not have otherwise. */
static fc_code lay_out(const search *s, fc_flat_layout *units, bool *fits) {
    *fits = s->nunits == s->count;
    for (size_t u = 0; u < s->nunits && *fits; u++) {
        FC_TRY(lay_out_unit(s, u, false, &units[u], fits));
        FC_TRY(*fits ? FC_OK : lay_out_unit(s, u, true, &units[u], fits));
    }
    return FC_OK;
}

/* ---- parameters that have their own numbers ---- */

/* Leaves out matrices with the bytes of an earlier one, which are tied to it, so that they have no number. */
static fc_code drop_copies(search *s) {
    size_t n = 0, of;
    for (size_t i = 0; i < s->nparams; i++) {
        bool copy = false;
        FC_TRY(s->m->values[s->params[i]].ndim > 1 ? is_copy(s, i, &of, &copy) : FC_OK);
        if (!copy) {
            s->unit_of[n] = 0;
            s->params[n++] = s->params[i];
        }
    }
    s->nparams = n;
    return FC_OK;
}

/* Lays out a unit for each parameter. @param fits receives whether the first rank may have this much of each */
static fc_code lay_out_parameters(search *s, fc_flat_layout *units, bool *fits) {
    fc_arena *arena = s->m->checkpoint->arena;
    memset(s->unit_of, 0, s->nparams * sizeof *s->unit_of);
    FC_TRY(s->nparams > s->count ? drop_copies(s) : FC_OK);
    *fits = s->nparams == s->count && s->ranks == s->m->set->ranks;
    for (size_t i = 0; i < s->nparams && *fits; i++) {
        const fc_pt_value *v = &s->m->values[s->params[i]];
        const fc_flat_desc desc = {.fqn = key_of(v),
                                   .ndim = v->ndim,
                                   .shape = v->shape,
                                   .dtype = v->dtype,
                                   .requires_grad = true,
                                   .shared_with = -1};
        FC_TRY(fc_flat_layout_new(&desc, 1, s->ranks, false, v->dtype, arena, &units[i], s->m->err));
        *fits = s->shards[i] <= units[i].numel;
    }
    return FC_OK;
}

static fc_code add_pieces(const search *s) {
    fc_pt_builder *m = s->m;
    for (size_t u = 0; u < m->nunits; u++) {
        fc_pt_flat *flat = NULL;
        FC_TRY(fc_pt_add_flat(m, m->set->ranks, &flat));
        flat->numel = m->units[u].numel;
        flat->pieces = true;
    }
    return FC_OK;
}

/* ---- the flat parameters, as flat.c wants them ---- */

/* Returns the number of a rank's shard: its coordinate along the dimension of the mesh that shards them. */
static int64_t shard_of(const search *s, int64_t rank) {
    int64_t coordinate[FC_MAX_MESH_DIMS] = {0};
    if (!s->mesh) {
        return rank;
    }
    fc_mesh_coordinate(s->mesh, rank, coordinate);
    return coordinate[s->dim];
}

static fc_code add_flats(const search *s) {
    fc_pt_builder *m = s->m;
    const int64_t ranks = m->set->ranks;
    for (size_t u = 0; u < m->nunits; u++) {
        const fc_flat_layout *unit = &m->units[u];
        fc_pt_flat *flat = NULL;
        FC_TRY(fc_pt_add_flat(m, ranks, &flat));
        flat->numel = unit->numel;
        flat->shard = unit->shard_numel;
        for (int64_t r = 0; r < ranks; r++) {
            const int64_t at = shard_of(s, r) * unit->shard_numel; /* at most numel plus the padding of each rank */
            flat->offsets[r] = at < unit->numel ? at : -1;
        }
    }
    return FC_OK;
}

static fc_code infer(search *s, const torch_leaves *leaves) {
    fc_pt_builder *m = s->m;
    bool fits;
    int64_t *shards = fc_arena_calloc(s->arena, s->count, sizeof *shards);
    fc_flat_layout *units = fc_arena_calloc(m->checkpoint->arena, s->count, sizeof *units);
    FC_NEED(shards && units, m->err, m->checkpoint->path);
    for (size_t i = 0; i < s->count; i++) {
        shards[i] = -1;
    }
    s->shards = shards;
    FC_TRY(measure_shards(s, leaves, shards, &fits));
    FC_TRY(fits ? list_parameters(s) : FC_OK);
    fits = fits && find_ranks(s);
    for (int adapters = 1; adapters >= 0 && fits && !m->units; adapters--) {
        bool found = false;
        FC_TRY(divide(s, adapters > 0));
        FC_TRY(lay_out(s, units, &found));
        m->units = found ? units : NULL;
    }
    bool pieces = false;
    if (fits && !m->units) {
        FC_TRY(lay_out_parameters(s, units, &pieces));
        m->units = pieces ? units : NULL;
    }
    if (m->units) {
        m->nunits = s->count;
        m->optimizer = m->item_name > 0 ? m->set->name : "";
        m->optimizer_file = m->f->index;
        return pieces ? add_pieces(s) : add_flats(s);
    }
    return FC_OK;
}

fc_code fc_pt_infer_units(fc_pt_builder *m, const torch_leaves *leaves) {
    size_t groups, count;
    search s = {.m = m};
    groups = fc_pt_count_numbers(m, leaves, &count);
    if (m->rank != 0 || m->nflats > 0 || m->count == 0 || groups != 1 || count == 0) {
        return FC_OK;
    }
    s.count = count;
    s.arena = fc_arena_new();
    const fc_code rc = s.arena ? infer(&s, leaves) : fc_no_memory(m->err, m->checkpoint->path);
    fc_arena_free(s.arena);
    return rc;
}

/* ---- the state of each parameter ---- */

/* Whether a path with `count` elements, the first of which is `first`, is in the optimizer whose units are known. */
static bool is_of_optimizer(const fc_pt_builder *m, const fc_path *path, const char *first, size_t count) {
    const size_t at = m->optimizer && *m->optimizer ? 1 : 0;
    const fc_path_element *e = path->elements;
    return m->units && path->count == at + count && (at == 0 || strcmp(e[0].key, m->optimizer) == 0) &&
           strcmp(e[at].key, first) == 0;
}

const fc_flat_layout *fc_pt_unit_of(const fc_pt_builder *m, const fc_pt_value *v) {
    const bool is = !v->object && !v->refusal && is_of_optimizer(m, &v->path, "state", 3) && is_state(&v->path);
    const size_t number = is ? number_of(&v->path) : m->nunits;
    return number < m->nunits && (v->ndim == 0 || v->shape[0] == m->units[number].numel) ? &m->units[number] : NULL;
}

/* Names the state of a parameter: "optim.state.0.exp_avg" becomes "optim.state.<parameter>.exp_avg". */
static fc_code name_state(const fc_pt_builder *m, const fc_pt_value *v, const char *fqn, fc_tensor *t) {
    fc_arena *arena = m->checkpoint->arena;
    FC_NEED(fc_path_copy(arena, &v->path, &t->path), m->err, m->checkpoint->path);
    fc_path_element *e = (fc_path_element *)(uintptr_t)t->path.elements; /* just made */
    e[t->path.count - 2] = (fc_path_element){.key = fqn};
    t->name = fc_path_spell(arena, &t->path, '.');
    return t->name ? FC_OK : fc_no_memory(m->err, m->checkpoint->path);
}

/* Gives each chunk of a parameter's state its extent: the elements of its box within that of the flat state. */
static fc_code place_chunks(const fc_pt_builder *m, const fc_flat_position *positions, fc_tensor *t) {
    fc_chunk *chunks = (fc_chunk *)(uintptr_t)t->chunks; /* just made */
    const size_t dims = (size_t)t->ndim;
    for (size_t i = 0; i < t->nchunks; i++) {
        const torch_extent *from = chunks[i].data;
        torch_extent *own = fc_arena_calloc(m->checkpoint->arena, 1, sizeof *own + (dims + 1) * sizeof *own->strides);
        FC_NEED(own, m->err, m->checkpoint->path);
        *own = *from;
        own->first += (uint64_t)(positions[i].at * from->strides[0]) * fc_dtype_size(t->dtype);
        fc_row_major_strides(t->ndim, chunks[i].dims + dims, own->strides);
        for (size_t d = 0; d < dims; d++) {
            own->strides[d] *= chunks[i].dims[dims + d] > 1 ? from->strides[0] : 1;
        }
        chunks[i].data = own;
    }
    return FC_OK;
}

fc_code fc_pt_divide_state(const fc_pt_builder *m, const fc_pt_value *v, const fc_tensor *flat,
                           const fc_flat_layout *unit, fc_tensor *out) {
    size_t *order = fc_flat_order_chunks(flat, m->tables);
    FC_NEED(order, m->err, m->checkpoint->path);
    for (size_t i = 0; i < unit->nparams; i++) {
        const fc_flat_position *positions = NULL;
        if (flat->ndim == 0) { /* a number belongs to each parameter */
            out[i] = *flat;
            FC_NEED(fc_untie(&out[i], m->checkpoint->arena), m->err, m->checkpoint->path);
        } else {
            FC_TRY(fc_flat_boxes(flat, order, &unit->params[i], m->checkpoint->arena, &out[i], &positions, m->err));
            FC_TRY(place_chunks(m, positions, &out[i]));
        }
        FC_TRY(name_state(m, v, unit->params[i].fqn, &out[i]));
    }
    return FC_OK;
}

fc_code fc_pt_name_group(const fc_pt_builder *m, const torch_object **out) {
    torch_name_list names;
    torch_object *object = NULL;
    fc_torch_name_list_begin(&names);
    for (size_t u = 0; u < m->nunits; u++) {
        for (size_t i = 0; i < m->units[u].nparams; i++) {
            fc_torch_name_list_add(&names, m->units[u].params[i].fqn);
        }
    }
    fc_code rc = fc_torch_name_list_end(&names, m->f, m->err);
    rc = rc == FC_OK ? fc_torch_object_new(&names.f, names.f.p->root, m->checkpoint->arena, &object, m->err) : rc;
    fc_torch_name_list_free(&names);
    *out = object;
    return rc;
}

bool fc_pt_is_group(const fc_pt_builder *m, const fc_path *path) {
    return is_of_optimizer(m, path, "param_groups", 3) && strcmp(path->elements[path->count - 1].key, "params") == 0;
}

/* ---- the end of the set ---- */

/* Whether the chunks of each value are the whole parameter. */
static bool are_whole(const fc_pt_builder *m, size_t first) {
    bool whole = true;
    for (size_t i = first; i < m->count && whole; i++) {
        const fc_pt_value *v = &m->values[i];
        const fc_chunk *last = v->nchunks > 0 ? &v->chunks[v->nchunks - 1] : NULL;
        if (is_of_optimizer(m, &v->path, "state", 3) && is_state(&v->path) && (v->refusal || v->ndim > 0)) {
            const fc_flat_layout *unit = fc_pt_unit_of(m, v);
            whole = unit && (last ? last->dims[0] + last->dims[1] : 0) == unit->numel;
        }
    }
    return whole;
}

fc_code fc_pt_check_pieces(const fc_pt_builder *m, size_t first) {
    if (!m->units || m->nflats == 0 || !m->flats[0].pieces || are_whole(m, first)) {
        return FC_OK;
    }
    for (size_t i = first; i < m->count; i++) {
        fc_pt_value *v = &m->values[i];
        if (is_of_optimizer(m, &v->path, "state", 3) || fc_pt_is_group(m, &v->path)) {
            *v = (fc_pt_value){.name = v->name,
                               .path = v->path,
                               .chunks = v->chunks,
                               .refusal = "optimizer state under numbers: the parts of the ranks do not add up to "
                                          "the parameters of the model; save FSDP.optim_state_dict(model, optimizer), "
                                          "or convert the model alone",
                               .file = m->optimizer_file};
        }
    }
    return FC_OK;
}
