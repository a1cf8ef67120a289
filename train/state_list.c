/*
 * Lists the tensors of a state dict, with their names, shapes and placements, and the boxes of them that this rank has.
 */
#include "train/state_list.h"

#include "base/grow.h"
#include "fsdpckpt/try.h"
#include "train/state.h"

#include <stdlib.h>
#include <string.h>

/* A list that is being made. */
typedef struct listing {
    const fc_fsdp_state *state;
    fc_state_list *out;
    bool for_load;
    int dp; /* the dimension of the mesh over which FSDP shards */
} listing;

static int64_t rank_of(const fc_fsdp_handle *h) {
    return fc_fsdp_is_sharded(h->unit) ? h->unit->options.shard->rank : 0;
}

/* ---- names ---- */

/* Makes a path of keys, without those that are empty, and a name of them. */
static fc_code name_tensor(fc_state_list *out, const fc_path *path, fc_state_tensor *t, fc_error *err) {
    fc_path_element *kept = fc_arena_calloc(out->arena, path->count + 1, sizeof *kept);
    char *name = fc_arena_strndup(out->arena, "", 0);
    size_t count = 0;
    for (size_t i = 0; kept && name && i < path->count; i++) {
        const char *key = path->elements[i].key;
        if (!*key) {
            continue;
        }
        kept[count] = path->elements[i];
        kept[count].key = fc_arena_strndup(out->arena, key, strlen(key));
        name = fc_arena_printf(out->arena, "%s%s%s", name, count > 0 ? "." : "", key);
        FC_NEED(kept[count++].key, err, key);
    }
    FC_NEED(kept && name, err, NULL);
    t->path = (fc_path){kept, count};
    t->name = name;
    return *name ? FC_OK : fc_fail(err, FC_EUSAGE, "a value of the state has no name");
}

static fc_code add_tensor(fc_state_list *out, const fc_path *path, fc_dtype dtype, int ndim, const int64_t *shape,
                          fc_state_tensor **made, fc_error *err) {
    int64_t *copy = fc_arena_copy(out->arena, shape, (size_t)ndim, sizeof *copy);
    FC_NEED(copy && fc_grow(&out->tensors, &out->tensor_capacity, out->ntensors + 1, sizeof *out->tensors), err, NULL);
    fc_state_tensor *t = &out->tensors[out->ntensors++];
    *t = (fc_state_tensor){.dtype = dtype, .ndim = ndim, .shape = copy};
    for (int d = 0; d < out->mesh.ndim; d++) {
        t->placements[d] = (fc_placement){FC_REPLICATE, 0, 0};
    }
    *made = t;
    return name_tensor(out, path, t, err);
}

static fc_code add_box(fc_state_list *out, int ndim, const int64_t *offsets, const int64_t *sizes,
                       const int64_t *strides, int64_t at, fc_error *err) {
    int64_t *numbers = fc_arena_calloc(out->arena, 3 * (size_t)ndim + 1, sizeof *numbers);
    FC_NEED(numbers && fc_grow(&out->boxes, &out->box_capacity, out->nboxes + 1, sizeof *out->boxes), err, NULL);
    for (int d = 0; d < ndim; d++) {
        numbers[d] = offsets[d];
        numbers[ndim + d] = sizes[d];
        numbers[2 * ndim + d] = strides[d];
    }
    out->boxes[out->nboxes++] =
        (fc_state_box){out->ntensors - 1, numbers, numbers + 2 * (size_t)ndim, out->narrays - 1, at};
    return FC_OK;
}

/* Adds an array, to which the boxes that are added after it belong. */
static fc_code add_array(fc_state_list *out, const fc_array *array, fc_error *err) {
    FC_NEED(fc_grow(&out->arrays, &out->array_capacity, out->narrays + 1, sizeof *out->arrays), err, NULL);
    out->arrays[out->narrays] = *array;
    out->arrays[out->narrays++].memory = NULL;
    return FC_OK;
}

/* ---- parameters ---- */

/* Adds the boxes of one parameter. `origin`: where the local tensor of tensor parallelism begins in the tensor. */
typedef struct param_boxes {
    fc_state_list *out;
    int ndim;
    int64_t origin[FC_MAX_DIMS];
} param_boxes;

static fc_code visit_box(void *context, const fc_flat_box *box, fc_error *err) {
    param_boxes *p = context;
    int64_t offsets[FC_MAX_DIMS];
    for (int d = 0; d < p->ndim; d++) {
        offsets[d] = p->origin[d] + box->offsets[d];
    }
    return add_box(p->out, p->ndim, offsets, box->sizes, box->strides, box->at, err);
}

/* FSDP shards the rows of the local tensors of tensor parallelism. */
static void place_rows(const listing *l, const fc_fsdp_handle *h, const fc_param_extension *e, fc_state_tensor *t) {
    const bool sharded = fc_fsdp_is_sharded(h->unit) && t->ndim > 0;
    if (sharded) {
        t->placements[l->dp] = (fc_placement){FC_SHARD, 0, 0};
    }
    if (!e->is_dtensor || l->out->tp < 0) {
        return;
    }
    const fc_placement *tp = &e->spec.placements[0];
    t->placements[l->out->tp] = *tp;
    if (sharded && tp->kind == FC_SHARD && tp->dim == 0) {
        t->placements[l->dp] = (fc_placement){FC_STRIDED_SHARD, 0, l->out->mesh.sizes[l->out->tp]};
    }
}

/* Adds parameter `param` of a handle, or a state of the optimizer that is laid out alike, under a name. */
static fc_code add_param(listing *l, const fc_fsdp_handle *h, size_t param, fc_dtype dtype, const fc_path *path,
                         fc_error *err) {
    const fc_flat_param *p = &h->layout.params[param];
    const fc_param_extension *e = &h->extensions[param];
    const int64_t *shape = e->is_dtensor ? e->spec.shape : p->shape;
    param_boxes boxes = {.out = l->out, .ndim = p->ndim};
    int64_t sizes[FC_MAX_DIMS];
    fc_state_tensor *t;
    FC_TRY(add_tensor(l->out, path, dtype, p->ndim, shape, &t, err));
    place_rows(l, h, e, t);
    if (e->is_dtensor) {
        FC_TRY(fc_local_box(p->ndim, shape, &e->spec.mesh, e->spec.placements, e->spec.coordinate, boxes.origin, sizes,
                            err));
    }
    return p->numel > 0 ? fc_flat_shard_visit(&h->layout, param, rank_of(h), visit_box, &boxes, err) : FC_OK;
}

static const char *model_key(const fc_fsdp_state *s) {
    return s->model_key ? s->model_key : "model";
}

static const char *optim_key(const fc_fsdp_state *s) {
    return s->optim_key ? s->optim_key : "optim";
}

/* Adds all parameters of a handle, or their states `state` (NULL: the parameters themselves), under all names. */
static fc_code add_params(listing *l, const fc_fsdp_handle *h, const char *state, fc_dtype dtype, fc_error *err) {
    const fc_flat_layout *f = &h->layout;
    for (size_t i = 0; i < f->nparams + f->nshared; i++) {
        const bool shared = i >= f->nparams;
        const char *fqn = shared ? f->shared[i - f->nparams].fqn : f->params[i].fqn;
        const size_t param = shared ? f->shared[i - f->nparams].primary : i;
        const fc_path_element of_model[] = {{.key = model_key(l->state)}, {.key = fqn}};
        const fc_path_element of_optim[] = {
            {.key = optim_key(l->state)}, {.key = "state"}, {.key = fqn}, {.key = state ? state : ""}};
        const fc_path path = state ? (fc_path){of_optim, 4} : (fc_path){of_model, 2};
        if (!shared || !state) { /* an optimizer has one state for a shared parameter */
            FC_TRY(add_param(l, h, param, dtype, &path, err));
        }
    }
    return FC_OK;
}

/* ---- flat parameters ---- */

/* Adds elements [rank × shard, …) of a flat tensor with `numel` elements. */
static fc_code add_flat(listing *l, const fc_fsdp_handle *h, const fc_path *path, fc_dtype dtype, int64_t numel,
                        fc_error *err) {
    const int64_t chunk = h->layout.shard_numel, one = 1, offset = chunk * rank_of(h);
    const int64_t left = numel - offset, length = left < 0 ? 0 : left < chunk ? left : chunk;
    fc_state_tensor *t;
    FC_TRY(add_tensor(l->out, path, dtype, 1, &numel, &t, err));
    t->placements[l->dp] = (fc_placement){FC_SHARD, 0, 0};
    t->least = h->layout.numel;
    return length > 0 ? add_box(l->out, 1, &offset, &length, &one, 0, err) : FC_OK;
}

/* torch: "local_state_dict can only be used when parameters are flatten and sharded". */
static fc_code check_flat(const listing *l, const fc_fsdp_handle *h, fc_error *err) {
    const char *name = h->unit->name;
    if (!fc_fsdp_is_sharded(h->unit)) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': a local state dict needs a strategy that shards parameters", name);
    }
    if (h->unit->handles->next) {
        return fc_fail(err, FC_EUSAGE, "unit '%s': a local state dict has room for one flat parameter per unit", name);
    }
    return l->out->tp < 0
               ? FC_OK
               : fc_fail(err, FC_EUSAGE, "unit '%s': a local state dict cannot have tensor parallelism", name);
}

static fc_code add_flat_param(listing *l, const fc_fsdp_handle *h, fc_error *err) {
    const fc_fsdp_unit *u = h->unit;
    FC_TRY(check_flat(l, h, err));
    const char *name = u->options.is_root ? "_flat_param" : fc_arena_printf(l->out->arena, "%s._flat_param", u->name);
    const fc_path_element keys[] = {{.key = model_key(l->state)}, {.key = name ? name : ""}};
    FC_NEED(name, err, u->name);
    return add_flat(l, h, &(fc_path){keys, 2}, h->layout.dtype, h->layout.numel, err);
}

/* Returns the number of a flat parameter in the order of the model's, as the optimizer counts. */
static int64_t number_of(const fc_fsdp_handle *handle) {
    int64_t number = 0;
    for (const fc_fsdp_unit *u = handle->unit->fsdp->units; u; u = u->next) {
        for (const fc_fsdp_handle *h = u->handles; h; h = h->next, number++) {
            if (h == handle) {
                return number;
            }
        }
    }
    return number;
}

static fc_code add_flat_state(listing *l, const fc_fsdp_optim_state *s, fc_error *err) {
    const char *number = fc_arena_printf(l->out->arena, "%lld", (long long)number_of(s->handle));
    const fc_path_element keys[] = {{.key = optim_key(l->state)},
                                    {.key = "state"},
                                    {.key = number ? number : "", .is_number = true},
                                    {.key = s->name}};
    FC_NEED(number, err, s->name);
    return add_flat(l, s->handle, &(fc_path){keys, 4}, s->shard->dtype, fc_fsdp_padded(s->handle), err);
}

/* ---- the list ---- */

/* Adds an array as a tensor that is whole on each rank. */
static fc_code add_whole(listing *l, const fc_path *path, const fc_array *array, fc_error *err) {
    static const int64_t zeros[FC_MAX_DIMS];
    fc_state_tensor *t;
    FC_TRY(add_tensor(l->out, path, array->dtype, array->ndim, array->sizes, &t, err));
    if (!fc_array_is_contiguous(array)) {
        return fc_fail(err, FC_EUSAGE, "%s: a value of the state must be contiguous", t->name);
    }
    FC_TRY(add_array(l->out, array, err));
    return add_box(l->out, t->ndim, zeros, t->shape, array->strides, 0, err);
}

/* A buffer is saved in its own dtype, and loaded into the one in use. */
static fc_code add_buffer(listing *l, const fc_fsdp_buffer *buffer, fc_error *err) {
    const fc_path_element keys[] = {{.key = model_key(l->state)}, {.key = buffer->fqn}};
    const fc_path path = {keys, 2};
    fc_state_list *out = l->out;
    if (l->for_load || buffer->dtype == buffer->array.dtype) {
        return add_whole(l, &path, &buffer->array, err);
    }
    FC_NEED(fc_grow(&out->made, &out->made_capacity, out->nmade + 1, sizeof *out->made), err, buffer->fqn);
    FC_TRY(fc_fsdp_saved_buffer(l->state->fsdp, buffer, &out->made[out->nmade], err));
    return add_whole(l, &path, &out->made[out->nmade++], err);
}

static fc_code add_units(listing *l, bool flat, fc_error *err) {
    for (const fc_fsdp_unit *u = l->state->fsdp->units; u; u = u->next) {
        FC_TRY(fc_fsdp_expect_state(u, FC_STATE_IDLE, err));
        for (const fc_fsdp_handle *h = u->handles; h; h = h->next) {
            FC_TRY(add_array(l->out, &h->local_shard, err));
            FC_TRY(flat ? add_flat_param(l, h, err) : add_params(l, h, NULL, h->layout.dtype, err));
        }
        for (const fc_fsdp_buffer *b = u->buffers; b; b = b->next) {
            FC_TRY(add_buffer(l, b, err));
        }
    }
    return FC_OK;
}

static fc_code add_optim(listing *l, bool flat, fc_error *err) {
    for (size_t i = 0; i < l->state->noptim; i++) {
        const fc_fsdp_optim_state *s = &l->state->optim[i];
        const int64_t numel = s->handle->layout.shard_numel;
        if (s->shard->ndim != 1 || s->shard->sizes[0] != numel || !fc_array_is_contiguous(s->shard)) {
            return fc_fail(err, FC_EUSAGE,
                           "unit '%s': state '%s' must have one dimension of %lld elements, as its shard",
                           s->handle->unit->name, s->name, (long long)numel);
        }
        FC_TRY(add_array(l->out, s->shard, err));
        FC_TRY(flat ? add_flat_state(l, s, err) : add_params(l, s->handle, s->name, s->shard->dtype, err));
    }
    return FC_OK;
}

static fc_code add_values(listing *l, fc_error *err) {
    for (size_t i = 0; i < l->state->nvalues; i++) {
        FC_TRY(add_whole(l, &l->state->values[i].path, l->state->values[i].array, err));
    }
    return FC_OK;
}

static int add_dimension(fc_mesh *mesh, const char *name, int64_t size) {
    mesh->sizes[mesh->ndim] = size;
    memcpy(mesh->names[mesh->ndim], name, strlen(name) + 1);
    return mesh->ndim++;
}

/* Finds the number of ranks of tensor parallelism, and which of them this one is. */
static fc_code find_tp(const fc_fsdp *fsdp, int64_t *size, int64_t *rank, fc_error *err) {
    *size = 1;
    for (const fc_fsdp_unit *u = fsdp->units; u; u = u->next) {
        for (const fc_fsdp_handle *h = u->handles; h; h = h->next) {
            for (size_t i = 0; i < h->layout.nparams; i++) {
                const fc_dtensor *spec = &h->extensions[i].spec;
                if (!h->extensions[i].is_dtensor) {
                    continue;
                }
                if (spec->mesh.ndim != 1 || (*size > 1 && spec->mesh.sizes[0] != *size)) {
                    return fc_fail(err, FC_EUNSUPPORTED,
                                   "%s: tensor parallelism must have one mesh dimension, the same for all parameters",
                                   h->layout.params[i].fqn);
                }
                *size = spec->mesh.sizes[0];
                *rank = spec->coordinate[0];
            }
        }
    }
    return FC_OK;
}

static int64_t count_ranks(const fc_comm *shard, const fc_comm *replicate) {
    return (int64_t)shard->size * (replicate ? replicate->size : 1);
}

/* A unit with communicators of its own must have all ranks of the instance: others could hold other values under the
 * same names. Its tensors are placed like the others; which rank holds which box does not matter. But the flat
 * parameters of a local state dict are cut as the ranks have them. */
static fc_code check_groups(const fc_fsdp *fsdp, bool flat, fc_error *err) {
    const int64_t all = count_ranks(fsdp->shard, fsdp->replicate);
    for (const fc_fsdp_unit *u = fsdp->units; u; u = u->next) {
        const fc_fsdp_unit_options *o = &u->options;
        const int64_t own = count_ranks(o->shard, o->replicate);
        if (own != all) {
            return fc_fail(err, FC_EUNSUPPORTED,
                           "unit '%s': its communicators have %lld ranks, and those of the instance have %lld; ranks "
                           "without the unit may hold other values under the same names, and a state dict has room for "
                           "one",
                           u->name, (long long)own, (long long)all);
        }
        if (flat && o->shard != fsdp->shard) {
            return fc_fail(
                err, FC_EUNSUPPORTED,
                "unit '%s': has communicators of its own, and a local state dict needs those of the instance", u->name);
        }
    }
    return FC_OK;
}

static fc_code find_mesh(listing *l, bool flat, fc_error *err) {
    const fc_fsdp *fsdp = l->state->fsdp;
    fc_mesh *mesh = &l->out->mesh;
    int64_t tp;
    FC_TRY(check_groups(fsdp, flat, err));
    FC_TRY(find_tp(fsdp, &tp, &l->out->tp_rank, err));
    if (fsdp->replicate) {
        add_dimension(mesh, "replicate", fsdp->replicate->size);
    }
    l->dp = add_dimension(mesh, "dp", fsdp->shard->size);
    l->out->tp = tp > 1 ? add_dimension(mesh, "tp", tp) : -1;
    return FC_OK;
}

fc_code fc_state_list_new(const fc_fsdp_state *state, fc_state_dict_type type, bool for_load, fc_state_list *out,
                          fc_error *err) {
    *out = (fc_state_list){.fsdp = state->fsdp, .arena = fc_arena_new()};
    listing l = {.state = state, .out = out, .for_load = for_load};
    const bool flat = type == FC_LOCAL_STATE_DICT;
    FC_NEED(out->arena, err, NULL);
    FC_TRY(find_mesh(&l, flat, err));
    FC_TRY(add_units(&l, flat, err));
    FC_TRY(add_optim(&l, flat, err));
    return add_values(&l, err);
}

void fc_state_list_free(fc_state_list *list) {
    if (list->nmade > 0) {
        fc_fsdp_end_work(list->fsdp);
    }
    for (size_t i = 0; i < list->nmade; i++) {
        fc_array_free(&list->made[i]);
    }
    free(list->made);
    free(list->tensors);
    free(list->boxes);
    free(list->arrays);
    fc_arena_free(list->arena);
    *list = (fc_state_list){0};
}
