/*
 * The files of several model-parallel ranks, one after the other: their values under the names that they have in the
 * whole model. A pipeline stage numbers its layers from 0, and so does each of its chunks (`model0`, `model1` … with
 * virtual stages): they get the numbers that follow those of the chunks before.
 */
#include "megatron/megatron.h"

#include "core/grow.h"
#include "core/name_table.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- args ---- */

static int64_t number_of(const fc_pickle *p, fc_pv state, const char *name) {
    int64_t value;
    fc_pv v = fc_pt_dict_get(p, state, name);
    if (fc_pv_typeof(v) == FC_PV_BOOL) {
        return fc_pv_is_true(v);
    }
    return v && fc_pickle_int(p, v, &value) && value >= 0 ? value : -1;
}

void fc_mg_read_args(const pt_file *f, mg_args *out) {
    static const char *const gates[] = {"swiglu", "gated_linear_unit", "geglu", "quick_geglu"};
    *out = (mg_args){-1, -1, -1, -1, -1, -1, -1};
    fc_pv root = f->p->root, args = fc_pv_typeof(root) == FC_PV_DICT ? fc_pt_dict_get(f->p, root, "args") : 0;
    fc_pv state = fc_pv_typeof(args) == FC_PV_CALL ? fc_pickle_state(f->p, args) : args;
    if (fc_pv_typeof(state) != FC_PV_DICT) {
        return;
    }
    out->tp = number_of(f->p, state, "tensor_model_parallel_size");
    out->stages = number_of(f->p, state, "pipeline_model_parallel_size");
    out->experts = number_of(f->p, state, "expert_model_parallel_size");
    out->expert_tp = number_of(f->p, state, "expert_tensor_parallel_size");
    out->layers = number_of(f->p, state, "num_layers");
    out->untied = number_of(f->p, state, "untie_embeddings_and_output_weights");
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++) {
        int64_t gated = number_of(f->p, state, gates[i]);
        out->gated = gated > out->gated ? gated : out->gated;
    }
}

fc_code fc_mg_check_args(const mg_reader *r) {
    const mg_args *a = &r->args;
    if (a->experts > 1) {
        return fc_fail(r->err, FC_EUNSUPPORTED,
                       "%s: a checkpoint with expert parallelism (%" PRId64
                       " ranks), whose ranks hold different experts "
                       "under equal names; save it with --ckpt-format torch_dist, or name the file of one rank",
                       r->checkpoint->path, a->experts);
    }
    if ((a->tp > 0 && a->tp != r->grid.tp) || (a->stages > 0 && a->stages != r->grid.stages)) {
        return fc_fail(r->err, FC_ECORRUPT,
                       "%s: saved by %" PRId64 " tensor-parallel ranks in %" PRId64
                       " pipeline stages, as args says, and "
                       "there are files of %" PRId64 " in %" PRId64 ": copy the whole directory, or name the file of "
                       "one rank",
                       r->checkpoint->path, a->tp, a->stages, r->grid.tp, r->grid.stages);
    }
    return FC_OK;
}

/* ---- values ---- */

mg_value *fc_mg_add_leaf(mg_reader *r, const char *name, const fc_path *path, fc_pv v) {
    fc_arena *arena = r->checkpoint->arena;
    if (!fc_grow(&r->values, &r->capacity, r->nvalues + 1, sizeof *r->values)) {
        fc_mg_no_memory(r);
        return NULL;
    }
    mg_value *value = &r->values[r->nvalues];
    *value = (mg_value){.name = name, .path = *path, .file = r->rank};
    fc_code rc;
    if (fc_torch_is_tensor(r->f.p, v)) {
        fc_torch_tensor t = {0};
        pt_piece *piece = NULL;
        rc = fc_pt_piece(&r->f, v, &t, arena, &piece, r->err);
        int64_t *sizes = rc == FC_OK ? fc_arena_calloc(arena, (size_t)t.ndim, sizeof *sizes) : NULL;
        if (rc == FC_OK && !sizes) {
            rc = fc_mg_no_memory(r);
        }
        if (rc == FC_OK) {
            memcpy(sizes, t.sizes, (size_t)t.ndim * sizeof *sizes);
        }
        value->piece = piece;
        value->dtype = t.dtype;
        value->ndim = t.ndim;
        value->sizes = sizes;
    } else {
        pt_object *object = NULL;
        rc = fc_pt_object_new(&r->f, v, arena, &object, r->err);
        value->object = object;
    }
    if (rc != FC_OK) {
        fc_context(r->err, rc, "%s: %.256s", r->f.path, name);
        return NULL;
    }
    r->nvalues++;
    return value;
}

static char *spell(fc_arena *arena, const fc_path *path) {
    char *name = fc_arena_strndup(arena, path->elements[0].key, strlen(path->elements[0].key));
    for (size_t i = 1; name && i < path->count; i++) {
        name = fc_arena_printf(arena, "%s.%s", name, path->elements[i].key);
    }
    return name;
}

/* The leaves of `v`, which is the value at `prefix`. */
static fc_code flatten(mg_reader *r, const fc_path *prefix, fc_pv v, pt_leaves *leaves) {
    fc_pv_type type = fc_pv_typeof(v);
    *leaves = (pt_leaves){.arena = r->checkpoint->arena};
    if (type == FC_PV_DICT || type == FC_PV_LIST || type == FC_PV_TUPLE) {
        fc_pickle part = *r->f.p; /* the same values, seen from another one of them */
        pt_file view = r->f;
        part.root = v;
        view.p = &part;
        return fc_pt_flatten(&view, prefix, leaves, r->err);
    }
    const char *name = spell(r->checkpoint->arena, prefix);
    if (!name || !fc_grow(&leaves->items, &leaves->capacity, 1, sizeof *leaves->items)) {
        return fc_mg_no_memory(r);
    }
    leaves->items[leaves->count++] = (pt_leaf){name, *prefix, v, PT_OBJECT};
    return FC_OK;
}

fc_code fc_mg_add(mg_reader *r, const fc_path *prefix, fc_pv v) {
    pt_leaves leaves;
    fc_code rc = flatten(r, prefix, v, &leaves);
    for (size_t i = 0; rc == FC_OK && i < leaves.count; i++) {
        rc = fc_mg_add_leaf(r, leaves.items[i].name, &leaves.items[i].path, leaves.items[i].v) ? FC_OK : r->err->code;
    }
    free(leaves.items);
    return rc;
}

/* ---- layers ---- */

/* The chunks of the model in the order of its layers: all stages' first ones, then their second ones. */
static size_t chunk_number(const mg_reader *r, size_t chunk) {
    return chunk * (size_t)r->grid.stages + r->rank / (size_t)r->grid.tp;
}

static mg_layers *layers_of(mg_reader *r, const char *prefix, size_t length, bool make) {
    fc_arena *arena = r->checkpoint->arena;
    for (size_t i = 0; i < r->nlayers; i++) {
        if (strlen(r->layers[i].prefix) == length && memcmp(r->layers[i].prefix, prefix, length) == 0) {
            return &r->layers[i];
        }
    }
    if (!make || !fc_grow(&r->layers, &r->layers_capacity, r->nlayers + 1, sizeof *r->layers)) {
        return NULL;
    }
    mg_layers *l = &r->layers[r->nlayers];
    l->prefix = fc_arena_strndup(arena, prefix, length);
    l->counts = fc_arena_calloc(arena, r->chunks * (size_t)r->grid.stages, sizeof *l->counts);
    r->nlayers += l->prefix && l->counts;
    return l->prefix && l->counts ? l : NULL;
}

static fc_code count_layer(mg_reader *r, const pt_leaf *leaf, size_t chunk) {
    size_t prefix, end;
    int64_t number;
    if (!fc_mg_layer(leaf->name, &prefix, &number, &end)) {
        return FC_OK;
    }
    mg_layers *l = layers_of(r, leaf->name, prefix, true);
    if (!l) {
        return fc_mg_no_memory(r);
    }
    int64_t *count = &l->counts[chunk_number(r, chunk)];
    *count = number >= *count ? number + 1 : *count;
    return FC_OK;
}

/* A copy of the leaf's path with the layer's number in the whole. */
static fc_code renumber(mg_reader *r, pt_leaf *leaf, size_t chunk) {
    fc_arena *arena = r->checkpoint->arena;
    size_t prefix, end;
    int64_t number;
    if (!fc_mg_layer(leaf->name, &prefix, &number, &end)) {
        return FC_OK;
    }
    const mg_layers *l = layers_of(r, leaf->name, prefix, false);
    for (size_t i = 0; l && i < chunk_number(r, chunk); i++) {
        number += l->counts[i];
    }
    fc_path_element *elements = fc_arena_calloc(arena, leaf->path.count, sizeof *elements);
    if (!elements) {
        return fc_mg_no_memory(r);
    }
    memcpy(elements, leaf->path.elements, leaf->path.count * sizeof *elements);
    for (size_t i = 0; i < leaf->path.count; i++) {
        int64_t local;
        if (fc_mg_layer(elements[i].key, &prefix, &local, &end)) {
            elements[i].key = fc_arena_printf(arena, "%.*s%" PRId64 "%s", (int)prefix, elements[i].key, number,
                                              elements[i].key + end);
            break;
        }
    }
    leaf->path.elements = elements;
    leaf->name = spell(arena, &leaf->path);
    return leaf->name ? FC_OK : fc_mg_no_memory(r);
}

/* ---- the model ---- */

/* The number of the chunk that a member of the file is: "model" is 0, "model3" is 3. */
static bool is_model(const char *key, size_t *chunk) {
    *chunk = 0;
    if (strncmp(key, "model", 5) != 0 || strlen(key) > 8) {
        return false;
    }
    for (const char *p = key + 5; *p; p++) {
        if (*p < '0' || *p > '9') {
            return false;
        }
        *chunk = *chunk * 10 + (size_t)(*p - '0');
    }
    return true;
}

/* Another name of the embedding's weight, which the last stage has where the first one is not also the last. */
static fc_code name_tied(mg_reader *r, pt_leaf *leaf) {
    static const fc_path_element core[] = {{.key = "model"}, {.key = "embedding.word_embeddings.weight"}};
    static const fc_path_element old[] = {{.key = "model"},
                                          {.key = "language_model"},
                                          {.key = "embedding"},
                                          {.key = "word_embeddings"},
                                          {.key = "weight"}};
    if (r->args.untied != 0 || r->grid.stages < 2) {
        return FC_OK;
    }
    if (strcmp(leaf->name, "model.output_layer.weight") == 0) {
        leaf->path = (fc_path){core, sizeof core / sizeof *core};
    } else if (strcmp(leaf->name, "model.word_embeddings_for_head.weight") == 0) {
        leaf->path = (fc_path){old, sizeof old / sizeof *old};
    } else {
        return FC_OK;
    }
    leaf->name = spell(r->checkpoint->arena, &leaf->path);
    return leaf->name ? FC_OK : fc_mg_no_memory(r);
}

static bool is_extra_state(const char *name) {
    size_t n = strlen(name);
    return n >= 12 && strcmp(name + n - 12, "_extra_state") == 0;
}

static fc_code add_parameter(mg_reader *r, pt_leaf *leaf, size_t chunk) {
    fc_code rc = renumber(r, leaf, chunk);
    rc = rc == FC_OK ? name_tied(r, leaf) : rc;
    mg_value *value = rc == FC_OK ? fc_mg_add_leaf(r, leaf->name, &leaf->path, leaf->v) : NULL;
    if (!value) {
        return r->err->code;
    }
    value->chunk = chunk;
    value->shared = !value->object && !is_extra_state(leaf->name);
    value->cut = value->shared ? fc_mg_rule(leaf->name) : (mg_cut){MG_UNKNOWN, 0};
    if (r->args.expert_tp > 0 && r->args.expert_tp != r->grid.tp && strstr(leaf->name, ".experts.")) {
        return fc_fail(r->err, FC_EUNSUPPORTED,
                       "%s: %.256s: experts are cut over another number of ranks (%" PRId64 ") than the model; save it "
                       "with --ckpt-format torch_dist",
                       r->f.path, leaf->name, r->args.expert_tp);
    }
    return FC_OK;
}

static fc_code read_chunk(mg_reader *r, fc_pv v, size_t chunk, bool count) {
    static const fc_path_element model = {.key = "model"};
    const fc_path prefix = {&model, 1};
    pt_leaves leaves;
    fc_code rc = flatten(r, &prefix, v, &leaves);
    for (size_t i = 0; rc == FC_OK && i < leaves.count; i++) {
        rc = count ? count_layer(r, &leaves.items[i], chunk) : add_parameter(r, &leaves.items[i], chunk);
    }
    free(leaves.items);
    return rc;
}

/* The first matrix of an MLP has twice the rows that the second has columns where it holds a gate, too. */
static fc_code find_gates(mg_reader *r, size_t first) {
    fc_arena *scratch = fc_arena_new();
    fc_name_table *table = scratch ? fc_name_table_new(scratch, r->nvalues - first + 1) : NULL;
    fc_code rc = table ? FC_OK : fc_mg_no_memory(r);
    for (size_t i = first; rc == FC_OK && i < r->nvalues; i++) {
        fc_name_table_put(table, r->values[i].name, strlen(r->values[i].name), i);
    }
    for (size_t i = first; rc == FC_OK && i < r->nvalues; i++) {
        mg_value *v = &r->values[i];
        const char *a, *b, *at = fc_mg_first_of_mlp(v->name, &a, &b);
        if (v->cut.rule != MG_CUT || !at || v->ndim == 0) {
            continue;
        }
        const char *part = at + strlen(a), *number = strncmp(part, "bias", 4) == 0 ? part + 4 : part + 6;
        const char *other = fc_arena_printf(scratch, "%.*s%sweight%s", (int)(at - v->name), v->name, b, number);
        size_t found = other ? fc_name_table_find(table, other, strlen(other)) : FC_NO_NAME;
        const mg_value *second = found != FC_NO_NAME && r->values[found].ndim == 2 ? &r->values[found] : NULL;
        bool twice = second && v->sizes[0] / 2 == second->sizes[1] && v->sizes[0] % 2 == 0 && v->sizes[0] > 0;
        bool once = second && v->sizes[0] == second->sizes[1];
        if (!other) {
            rc = fc_mg_no_memory(r);
        } else if ((!twice && !once) || (twice && r->args.gated == 0) || (once && !twice && r->args.gated == 1)) {
            rc = fc_fail(r->err, FC_EUNSUPPORTED,
                         "%s: %.256s: whether it holds a gate (SwiGLU) cannot be told: args and the second matrix of "
                         "the MLP, %.256s, do not agree, or one is missing",
                         r->f.path, v->name, other);
        } else if (twice) {
            v->cut.rule = MG_GATED;
        }
    }
    fc_arena_free(scratch);
    return rc;
}

/* ---- files ---- */

/* A member of the file's dict: all but the model and the optimizer are as the rank had them. */
static fc_code read_member(mg_reader *r, const char *key, fc_pv v, fc_pv *optimizer, bool count) {
    size_t chunk;
    fc_path_element *element = fc_arena_calloc(r->checkpoint->arena, 1, sizeof *element);
    if (!element) {
        return fc_mg_no_memory(r);
    }
    *element = (fc_path_element){.key = key};
    const fc_path path = {element, 1};
    if (is_model(key, &chunk) && chunk < r->chunks) {
        return read_chunk(r, v, chunk, count);
    }
    if (!count && strcmp(key, "optimizer") == 0) {
        *optimizer = v;
        return FC_OK;
    }
    return count ? FC_OK : fc_mg_add(r, &path, v);
}

static fc_code count_chunks(mg_reader *r) {
    size_t n, chunk;
    const fc_pv *pairs = fc_pickle_items(r->f.p, r->f.p->root, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        size_t length;
        bool text = fc_pv_typeof(pairs[i]) == FC_PV_STR;
        if (text && is_model(fc_pickle_bytes(r->f.p, pairs[i], &length), &chunk) && chunk >= r->chunks) {
            r->chunks = chunk + 1;
        }
    }
    return r->chunks > 0
               ? FC_OK
               : fc_fail(r->err, FC_ECORRUPT, "%s: it has no 'model': not a file of a Megatron checkpoint", r->f.path);
}

static size_t ranks_of(const mg_reader *r) {
    return (size_t)(r->grid.tp * r->grid.stages);
}

static fc_code read_members(mg_reader *r, bool count) {
    size_t n, first = r->nvalues, end = first;
    fc_pv optimizer = 0;
    const fc_pv *pairs = fc_pickle_items(r->f.p, r->f.p->root, &n);
    fc_code rc = FC_OK;
    for (size_t pass = 0; pass < 2; pass++) { /* the model first, so that values[first] and those behind it are it */
        for (size_t i = 0; rc == FC_OK && i + 1 < n; i += 2) {
            size_t length, chunk;
            const char *key = fc_pv_typeof(pairs[i]) == FC_PV_STR ? fc_pickle_bytes(r->f.p, pairs[i], &length) : NULL;
            const char *copy = key ? fc_arena_strndup(r->checkpoint->arena, key, strlen(key)) : NULL;
            if (!copy) {
                return key ? fc_mg_no_memory(r)
                           : fc_fail(r->err, FC_EUNSUPPORTED, "%s: a member whose key is no text", r->f.path);
            }
            if (is_model(copy, &chunk) == (pass == 0)) {
                rc = read_member(r, copy, pairs[i + 1], &optimizer, count);
            }
        }
        rc = rc == FC_OK && pass == 0 && !count && r->grid.tp > 1 ? find_gates(r, first) : rc;
        end = pass == 0 ? r->nvalues : end;
    }
    rc = rc == FC_OK && optimizer ? fc_mg_read_optimizer(r, optimizer, first, end) : rc;
    return rc == FC_OK && !count && r->grid.optimizers == ranks_of(r) ? fc_mg_read_distributed(r, first, end) : rc;
}

static fc_code read_file(mg_reader *r, uint32_t rank, bool count) {
    r->rank = rank;
    fc_code rc = fc_pt_file_open(r->checkpoint->files[rank].path, rank, &r->f, r->err);
    if (rc != FC_OK) {
        return rc;
    }
    if (fc_pv_typeof(r->f.p->root) != FC_PV_DICT) {
        rc = fc_fail(r->err, FC_ECORRUPT, "%s: it holds no dict: not a file of a Megatron checkpoint", r->f.path);
    }
    if (rc == FC_OK && count && rank == 0) {
        fc_mg_read_args(&r->f, &r->args);
        rc = fc_mg_check_args(r);
        rc = rc == FC_OK ? count_chunks(r) : rc;
    }
    rc = rc == FC_OK ? read_members(r, count) : rc;
    fc_pt_file_close(&r->f);
    return rc;
}

static fc_code check_layers(const mg_reader *r) {
    int64_t sum = 0;
    for (size_t i = 0; r->nlayers == 1 && i < r->chunks * (size_t)r->grid.stages; i++) {
        sum += r->layers[0].counts[i];
    }
    return r->nlayers != 1 || r->args.layers < 0 || r->args.layers == sum
               ? FC_OK
               : fc_fail(r->err, FC_EUNSUPPORTED,
                         "%s: the stages hold %" PRId64 " layers and args says %" PRId64
                         ": which number a stage's first "
                         "layer has cannot be told",
                         r->checkpoint->path, sum, r->args.layers);
}

/* Appends a sentence to the note. */
static const char *add_note(const fc_checkpoint *checkpoint, const char *note, const char *text) {
    return note && *note ? fc_arena_printf(checkpoint->arena, "%s; %s", note, text) : text;
}

/* What the manifest cannot say otherwise. */
static fc_code set_note(const mg_reader *r) {
    fc_arena *arena = r->checkpoint->arena;
    const char *notes[3] = {NULL}, *all = "";
    size_t n = 0;
    if (r->unnamed) {
        notes[n++] = fc_arena_printf(arena, "the optimizer's state is kept under its numbers, as each rank has it: %s",
                                     r->unnamed);
    }
    if (r->undistributed) {
        notes[n++] = fc_arena_printf(arena, "the distributed optimizer's state, in distrib_optim.pt, is not read: %s",
                                     r->undistributed);
    }
    if (r->differing) {
        notes[n++] =
            fc_arena_printf(arena,
                            "%zu tensor%s, such as %.128s, should be equal on all ranks and differ, or are too "
                            "large to compare: the first rank's are read, as Megatron's own tools do",
                            r->ndiffering, r->ndiffering == 1 ? "" : "s", r->differing);
    }
    for (size_t i = 0; i < n; i++) {
        all = notes[i] && all ? add_note(r->checkpoint, all, notes[i]) : NULL;
    }
    r->checkpoint->note = n > 0 ? all : NULL;
    return all ? FC_OK : fc_mg_no_memory(r);
}

/* What one rank's files do not tell is of no use from those of the others. */
static void drop_distributed(mg_reader *r) {
    size_t kept = 0;
    for (size_t i = 0; i < r->nvalues; i++) {
        if (r->values[i].file < ranks_of(r)) {
            r->values[kept++] = r->values[i];
        }
    }
    r->nvalues = kept;
}

fc_code fc_mg_open_ranks(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    fc_error own;
    mg_reader r = {.checkpoint = checkpoint, .f = {.fd = -1}, .err = err ? err : &own};
    fc_code rc = fc_mg_find_ranks(checkpoint, options, &r.grid, r.err);
    for (int64_t i = 0; rc == FC_OK && i < r.grid.stages; i++) {
        rc = read_file(&r, (uint32_t)(i * r.grid.tp), true);
    }
    rc = rc == FC_OK ? check_layers(&r) : rc;
    for (uint32_t i = 0; rc == FC_OK && i < ranks_of(&r); i++) {
        rc = read_file(&r, i, false);
    }
    if (r.grid.optimizers > 0 && r.grid.optimizers < ranks_of(&r)) {
        r.undistributed = "not every rank's directory has one";
    }
    if (rc == FC_OK && r.undistributed) {
        drop_distributed(&r);
    }
    rc = rc == FC_OK ? fc_mg_join(&r) : rc;
    rc = rc == FC_OK ? set_note(&r) : rc;
    free(r.values);
    free(r.layers);
    return rc;
}
