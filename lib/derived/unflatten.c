/*
 * Turns a checkpoint with flat parameters into one of parameters. Their chunks are boxes of the shards (flat_boxes.c),
 * and their bytes come from the source's format. So to the rest of the library it is an ordinary sharded checkpoint.
 * flat_units.c finds the layout.
 */
#include "base/checked.h"
#include "base/grow.h"
#include "checkpoint/parameters.h"
#include "checkpoint/path.h"
#include "checkpoint/same_name.h"
#include "derived/derived.h"
#include "derived/flat_units.h"
#include "flat/flat_boxes.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

/* fc_tensor.detail of a value. */
typedef struct origin {
    fc_origin from;                    /* of a parameter: `tensor` is its flat parameter */
    const fc_flat_position *positions; /* one per chunk of a parameter */
} origin;

/* ---- the values ---- */

static const fc_tensor *locate_shard(const fc_tensor *tensor, size_t index, size_t *chunk) {
    const origin *o = tensor->detail;
    *chunk = o->positions[index].chunk;
    return o->from.tensor;
}

/* The elements are some of the shard's, which fit its bytes, so nothing can overflow. */
static void place_in_shard(const fc_tensor *tensor, size_t index, fc_extent *extent) {
    const fc_flat_position *p = &((const origin *)tensor->detail)->positions[index];
    const int64_t stride = extent->strides[0];
    extent->first += (uint64_t)(p->at * stride) * fc_dtype_size(tensor->dtype);
    fc_row_major_strides(tensor->ndim, tensor->chunks[index].dims + tensor->ndim, extent->strides);
    for (int d = 0; d < tensor->ndim; d++) {
        extent->strides[d] *= tensor->chunks[index].dims[tensor->ndim + d] > 1 ? stride : 1;
    }
}

/* A chunk's digest covers bytes of the file and still applies; a flat parameter's whole digest does not apply to its
 * members. */
static const fc_derived_kind unflattened_kind = {
    .size = sizeof(fc_derived),
    .locate = locate_shard,
    .place = place_in_shard,
    .placed_has_digest = true,
};

bool fc_was_flat(const fc_checkpoint *checkpoint) {
    return fc_derived_of(checkpoint, &unflattened_kind) != NULL;
}

/* ---- the manifest ---- */

typedef struct builder {
    fc_checkpoint *out;
    const fc_checkpoint *source;
    fc_arena *scratch;
    fc_tensor *tensors; /* from malloc */
    size_t count, capacity;
    const fc_tensor *grouped; /* the last state whose param_groups were examined, and whether they fit */
    bool groups_fit;
    bool *gone; /* one per source tensor: whether it was added to the new checkpoint, or must not be */
    fc_error *err;
} builder;

/* Adds a value of the source unchanged. */
static fc_code keep_value(builder *b, size_t index) {
    origin *o = fc_arena_calloc(b->out->arena, 1, sizeof *o);
    FC_NEED(o && b->tensors, b->err, b->source->path);
    o->from.tensor = &b->source->tensors[index];
    b->tensors[b->count] = *o->from.tensor;
    b->tensors[b->count].detail = o;
    b->tensors[b->count++].placements = NULL; /* they refer to a mesh that the other tensors do not have */
    b->gone[index] = true;
    return FC_OK;
}

/* Makes the tensor of one parameter of a flat one. */
static fc_code make_parameter(const builder *b, const fc_tensor *flat, const size_t *order, const fc_flat_param *p,
                              fc_tensor *t) {
    origin *o = fc_arena_calloc(b->out->arena, 1, sizeof *o);
    FC_NEED(o, b->err, b->source->path);
    o->from = (fc_origin){.kind = FC_ORIGIN_PLACED, .tensor = flat};
    FC_TRY(fc_flat_boxes(flat, order, p, b->out->arena, t, &o->positions, b->err));
    t->detail = o;
    return FC_OK;
}

/* Sets the name and path of a value next to `like`: the same path with another element `at`. */
static fc_code name_value(const builder *b, const fc_tensor *like, size_t at, const char *key, fc_tensor *t) {
    fc_arena *arena = b->out->arena;
    size_t n = like->path.count > 0 ? like->path.count : 1;
    fc_path_element *path = fc_arena_calloc(arena, n, sizeof *path);
    char *own = fc_arena_strndup(arena, key, strlen(key));
    for (size_t i = 0; path && i < n; i++) {
        path[i] = i == at ? (fc_path_element){.key = own} : like->path.elements[i];
    }
    t->path = (fc_path){path, n};
    t->name = path && own ? fc_path_spell(arena, &t->path, '.') : NULL;
    return t->name ? FC_OK : fc_no_memory(b->err, b->source->path);
}

/* A parameter goes into the state dict of its flat parameter. */
static fc_code name_parameter(const builder *b, const fc_tensor *flat, const char *key, fc_tensor *t) {
    return name_value(b, flat, flat->path.count > 0 ? flat->path.count - 1 : 0, key, t);
}

/* Makes one tensor per member of a unit, at the member's index in `made`. */
static fc_code make_unit(const builder *b, const fc_flat_model *model, const fc_flat_unit *u, fc_tensor *made) {
    size_t *order = fc_flat_order_chunks(u->tensor, b->scratch), param = 0;
    FC_NEED(order, b->err, b->source->path);
    for (size_t i = 0; i < u->nmembers; i++) {
        const fc_flat_member *m = &model->members[u->members[i]];
        fc_tensor *t = &made[u->members[i]];
        if (fc_flat_is_tied(model, u->members[i])) {
            *t = made[m->same_as]; /* sharing the chunks marks them as tied */
        } else {
            FC_TRY(make_parameter(b, u->tensor, order, &u->layout.params[param++], t));
        }
        FC_TRY(name_parameter(b, u->tensor, m->key, t));
    }
    return FC_OK;
}

/* Adds a value under the model's name, because the source's may have wrapper components. */
static fc_code keep_as(builder *b, size_t index, const char *key) {
    FC_TRY(keep_value(b, index));
    return name_parameter(b, &b->source->tensors[index], key, &b->tensors[b->count - 1]);
}

/* Adds all values of a state dict, in the order of the model. */
static fc_code add_dict(builder *b, const fc_flat_model *model) {
    fc_tensor *made = fc_arena_calloc(b->scratch, model->nmembers + 1, sizeof *made);
    FC_NEED(made, b->err, b->source->path);
    for (size_t u = 0; u < model->nunits; u++) {
        FC_TRY(make_unit(b, model, &model->units[u], made));
        b->gone[model->units[u].index] = true;
    }
    for (size_t i = 0; i < model->nmembers; i++) {
        const fc_flat_member *m = &model->members[i];
        if (!m->flat) {
            FC_TRY(keep_as(b, m->stored, m->key));
            continue;
        }
        b->tensors[b->count++] = made[i];
        if (m->stored != SIZE_MAX) {
            b->gone[m->stored] = true; /* a view of the flat parameter */
        }
    }
    return FC_OK;
}

static fc_code check_names(const builder *b) {
    const char *name = NULL;
    FC_TRY(fc_find_same_name(b->tensors, b->count, &name, b->err));
    if (!name) {
        return FC_OK;
    }
    return fc_fail(b->err, FC_EUSAGE, "%s: '%.256s' is both a parameter of the model and another value",
                   b->source->path, name);
}

/* Makes room for `more` tensors. */
static bool grow(builder *b, size_t more) {
    size_t needed;
    return fc_add_size(b->count, more, &needed) && fc_grow(&b->tensors, &b->capacity, needed, sizeof *b->tensors);
}

/* ---- optimizer state ---- */

/* Adds a state value of a flat parameter, once per parameter in it: sharded like the parameter, or a copy. */
static fc_code add_state(builder *b, const fc_flat_model *model, size_t unit, size_t index, size_t at) {
    const fc_tensor *state = &b->source->tensors[index];
    const fc_flat_unit *u = &model->units[unit];
    bool sharded = !state->object && state->ndim == 1 && state->shape[0] == u->tensor->shape[0];
    size_t *order = sharded ? fc_flat_order_chunks(state, b->scratch) : NULL, param = 0;
    FC_NEED((!sharded || order) && grow(b, u->nmembers), b->err, b->source->path);
    for (size_t i = 0; i < u->nmembers; i++) {
        if (fc_flat_is_tied(model, u->members[i])) {
            continue;
        }
        fc_tensor *t = &b->tensors[b->count];
        if (sharded) {
            FC_TRY(make_parameter(b, state, order, &u->layout.params[param++], t));
            b->count++;
        } else {
            FC_TRY(keep_value(b, index));
            FC_NEED(fc_untie(t, b->out->arena), b->err, b->source->path);
        }
        FC_TRY(name_value(b, state, at, model->members[u->members[i]].key, t));
    }
    b->gone[index] = true;
    return FC_OK;
}

/* A dict with flat parameters, and their members. */
typedef struct flat_dict {
    const fc_tensor *first;
    fc_flat_model model;
    bool added;
} flat_dict;

/* Adds numbered optimizer state if its flat parameter is known, and sets `*added`. */
static fc_code try_state(builder *b, const flat_dict *dicts, size_t ndicts, size_t index, bool *added) {
    const fc_tensor *t = &b->source->tensors[index];
    size_t number = 0, ignored, at = fc_state_number(t, &number);
    bool fit = false;
    *added = false;
    if (at == 0 || ndicts != 1 || number >= dicts->model.nunits) {
        return FC_OK;
    }
    if (b->grouped && fc_state_number(b->grouped, &ignored) == at && fc_same_prefix(b->grouped, t, at)) {
        fit = b->groups_fit;
    } else {
        FC_TRY(fc_groups_fit(b->source, t, at, dicts->model.nunits, b->scratch, &fit, b->err));
    }
    b->grouped = t;
    b->groups_fit = fit;
    *added = fit;
    return fit ? add_state(b, &dicts->model, number, index, at) : FC_OK;
}

/* ---- entry points ---- */

/* Returns the dict of source tensor `index`, or NULL when it has no flat parameters. */
static flat_dict *dict_of(const fc_checkpoint *source, flat_dict *dicts, size_t ndicts, size_t index) {
    for (size_t i = 0; i < ndicts && !source->tensors[index].object; i++) {
        if (fc_same_dict(dicts[i].first, &source->tensors[index])) {
            return &dicts[i];
        }
    }
    return NULL;
}

/* Lists the dicts with flat parameters, and their members. */
static fc_code find_dicts(const builder *b, const fc_checkpoint *model, flat_dict *dicts, size_t *ndicts) {
    const fc_checkpoint *source = b->source;
    for (size_t i = 0; i < source->ntensors; i++) {
        if (fc_is_flat_parameter(&source->tensors[i]) && !dict_of(source, dicts, *ndicts, i)) {
            flat_dict *d = &dicts[(*ndicts)++];
            d->first = &source->tensors[i];
            FC_TRY(fc_flat_model_new(source, d->first, model, b->scratch, &d->model, b->err));
        }
    }
    return FC_OK;
}

/*
 * Adds the source's values in their order. A dict with flat parameters is added as a whole, where its first value is.
 */
static fc_code add_values(builder *b, const fc_checkpoint *model) {
    const fc_checkpoint *source = b->source;
    size_t ndicts = 0;
    flat_dict *dicts = fc_arena_calloc(b->scratch, source->ntensors, sizeof *dicts);
    FC_NEED(dicts, b->err, source->path);
    FC_TRY(find_dicts(b, model, dicts, &ndicts));
    for (size_t i = 0; i < source->ntensors; i++) {
        flat_dict *dict = dict_of(source, dicts, ndicts, i);
        bool added = false;
        if (dict && !dict->added) {
            dict->added = true;
            FC_NEED(grow(b, dict->model.nmembers), b->err, source->path);
            FC_TRY(add_dict(b, &dict->model));
        }
        if (!b->gone[i]) {
            FC_TRY(try_state(b, dicts, ndicts, i, &added));
        }
        if (!b->gone[i] && !added) {
            FC_NEED(grow(b, 1), b->err, source->path);
            FC_TRY(keep_value(b, i));
        }
    }
    return check_names(b);
}

static fc_code build_manifest(builder *b, const fc_checkpoint *model) {
    b->scratch = fc_arena_new();
    b->gone = b->scratch ? fc_arena_calloc(b->scratch, b->source->ntensors, sizeof *b->gone) : NULL;
    fc_code rc = b->gone ? add_values(b, model) : fc_no_memory(b->err, b->source->path);
    rc = rc == FC_OK ? fc_derived_set_tensors(b->out, b->tensors, b->count, b->err) : rc;
    free(b->tensors);
    fc_arena_free(b->scratch);
    return rc;
}

static fc_code check_model(const fc_checkpoint *source, const fc_checkpoint *model, fc_error *err) {
    const char *why;
    const fc_tensor *flat = fc_flat_parameter(model, NULL);
    if (flat) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: has flat parameters itself ('%.256s'), so it cannot describe those of %s; give a model "
                       "that was saved unflattened",
                       model->path, flat->name, source->path);
    }
    return fc_knows_model_order(model, &why)
               ? FC_OK
               : fc_fail(
                     err, FC_EUSAGE,
                     "%s: %s; the layout of flat parameters depends on it; make the schema from a file that torch.save "
                     "wrote of model.state_dict(), or add \"order\": \"model\" to it if its tensors are in that order",
                     model->path, why);
}

fc_code fc_unflatten(fc_checkpoint *source, const fc_checkpoint *model, fc_checkpoint **out, fc_error *err) {
    *out = NULL;
    FC_TRY(check_model(source, model, err));
    fc_checkpoint *made;
    FC_TRY(fc_derived_new(&unflattened_kind, &source, 1, &made, err));
    made->keeps_order = true;
    builder b = {.out = made, .source = source, .err = err};
    const fc_code rc = build_manifest(&b, model);
    return fc_derived_finish(made, rc, out);
}

static fc_code note_flat_parameters(fc_checkpoint *checkpoint, const fc_tensor *first, size_t count, fc_error *err) {
    const char *note = checkpoint->note;
    checkpoint->note = fc_arena_printf(
        checkpoint->arena, "%s%s%zu %s of FSDP1, e.g. %.256s: a schema of the model would split %s into parameters",
        note ? note : "", note ? "; " : "", count,
        count == 1 ? "tensor is a flat parameter" : "tensors are flat parameters", first->name,
        count == 1 ? "it" : "them");
    return checkpoint->note ? FC_OK : fc_no_memory(err, checkpoint->path);
}

fc_code fc_checkpoint_open_model(const char *path, const fc_open_options *options, const fc_checkpoint *model,
                                 fc_checkpoint **out, fc_error *err) {
    size_t count;
    fc_checkpoint *source = NULL;
    *out = NULL;
    FC_TRY(fc_checkpoint_open(path, options, &source, err));
    const fc_tensor *flat = fc_flat_parameter(source, &count);
    fc_code rc;
    if (flat && model) {
        FC_TRY_GOTO(fc_unflatten(source, model, out, err), rc, failed);
        return FC_OK;
    }
    if (flat) {
        FC_TRY_GOTO(note_flat_parameters(source, flat, count, err), rc, failed);
    }
    *out = source;
    return FC_OK;
failed:
    fc_checkpoint_close(source);
    return rc;
}
