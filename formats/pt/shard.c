/*
 * Reads DTensors and ShardedTensors as data: finds the rank's shard in the inert values of the pickle machine, with its
 * shape, offsets, mesh and placements. The fields are those of torch 2.2 to 2.15 for DTensors (DeviceMesh changed its
 * own several times) and of 1.13 to 2.15 for ShardedTensors.
 */
#include "pt/ranks.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fc_code damaged(const torch_file *f, const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "%s: the pickled tensor is damaged: %s", f->path, what);
}

static bool sequence(const fc_pickle *p, fc_pv v, const fc_pv **items, size_t *n) {
    fc_pv_type type = fc_pv_typeof(v);
    if (type == FC_PV_TUPLE || type == FC_PV_SIZE) {
        *items = fc_pickle_tuple(p, v, n);
        return true;
    }
    if (type == FC_PV_LIST) {
        *items = fc_pickle_items(p, v, n);
        return true;
    }
    return false;
}

/* Reads at most `most` numbers >= 0. @return their count, or -1 for anything else. */
static int numbers(const fc_pickle *p, fc_pv v, int most, int64_t *out) {
    const fc_pv *items;
    size_t n;
    if (!sequence(p, v, &items, &n) || n > (size_t)most) {
        return -1;
    }
    for (size_t i = 0; i < n; i++) {
        if (!fc_pickle_int(p, items[i], &out[i]) || out[i] < 0) {
            return -1;
        }
    }
    return (int)n;
}

/* @return a field of a state: a dict or (__dict__, slots), such as the last argument of _rebuild_from_type_v2. */
static fc_pv state_field(const fc_pickle *p, fc_pv state, const char *name) {
    const fc_pv *halves;
    size_t n;
    fc_pv found = 0;
    if (fc_pv_typeof(state) == FC_PV_DICT) {
        return fc_torch_dict_get(p, state, name);
    }
    if (!sequence(p, state, &halves, &n)) {
        return 0;
    }
    for (size_t i = 0; i < n && !found; i++) {
        found = fc_pv_typeof(halves[i]) == FC_PV_DICT ? fc_torch_dict_get(p, halves[i], name) : 0;
    }
    return found;
}

static fc_pv field(const fc_pickle *p, fc_pv v, const char *name) {
    const fc_pv state = fc_pv_typeof(v) == FC_PV_CALL ? fc_pickle_state(p, v) : 0;
    return state && fc_pv_typeof(state) != FC_PV_LIST ? state_field(p, state, name) : 0;
}

/* Reads the sizes of the mesh, from the tensor of its ranks (up to torch 2.8) or from its layout (since then). */
static int mesh_sizes(const fc_pickle *p, fc_pv mesh, int64_t *sizes) {
    fc_pv tensor = field(p, mesh, "mesh"), layout = field(p, mesh, "_layout");
    tensor = tensor ? tensor : field(p, mesh, "_mesh");
    fc_torch_tensor t;
    if (tensor && fc_torch_is_tensor(p, tensor) && fc_torch_tensor_decode(p, tensor, &t, NULL) == FC_OK) {
        for (int i = 0; i < t.ndim && i < FC_MAX_MESH_DIMS; i++) {
            sizes[i] = t.sizes[i];
        }
        return t.ndim <= FC_MAX_MESH_DIMS ? t.ndim : -1;
    }
    fc_pv axes = layout ? field(p, layout, "axes") : 0, shape = layout ? field(p, layout, "shape") : 0;
    const fc_pv *axis;
    size_t n;
    if (axes && sequence(p, axes, &axis, &n) && n <= FC_MAX_MESH_DIMS) {
        for (size_t i = 0; i < n; i++) { /* the size of an axis that was flattened from several is their product */
            int64_t factors[FC_MAX_MESH_DIMS];
            int count = numbers(p, field(p, axis[i], "shape"), FC_MAX_MESH_DIMS, factors);
            sizes[i] = 1;
            for (int k = 0; k < count; k++) {
                if (!fc_mul_i64(sizes[i], factors[k], &sizes[i])) {
                    return -1;
                }
            }
            if (count < 0) {
                return -1;
            }
        }
        return (int)n;
    }
    if (shape && fc_pickle_int(p, shape, &sizes[0])) {
        return 1;
    }
    return shape ? numbers(p, shape, FC_MAX_MESH_DIMS, sizes) : -1;
}

/* @param in_mesh receives whether the rank is in the mesh. */
static fc_code read_mesh(const torch_file *f, fc_pv v, fc_mesh *mesh, int64_t *coordinate, bool *in_mesh,
                         fc_error *err) {
    const fc_pickle *p = f->p;
    fc_pv names = field(p, v, "mesh_dim_names"), at = field(p, v, "_coordinate_on_dim");
    const fc_pv *name;
    size_t n = 0;
    names = names ? names : field(p, v, "_mesh_dim_names");
    *mesh = (fc_mesh){0};
    mesh->ndim = mesh_sizes(p, v, mesh->sizes);
    if (mesh->ndim <= 0) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: its device mesh has an unknown form, perhaps that of a newer PyTorch",
                       f->path);
    }
    *in_mesh = fc_pv_typeof(at) != FC_PV_NONE;
    if (*in_mesh && numbers(p, at, FC_MAX_MESH_DIMS, coordinate) != mesh->ndim) {
        return damaged(f, "the coordinate of the rank in its device mesh is missing", err);
    }
    bool named = names && sequence(p, names, &name, &n) && n == (size_t)mesh->ndim;
    for (int i = 0; i < mesh->ndim; i++) {
        size_t length;
        snprintf(mesh->names[i], sizeof mesh->names[i], "dim%d", i);
        if (named && fc_pv_typeof(name[i]) == FC_PV_STR) {
            snprintf(mesh->names[i], sizeof mesh->names[i], "%s", fc_pickle_bytes(p, name[i], &length));
        }
        if (mesh->sizes[i] < 1 || (*in_mesh && coordinate[i] >= mesh->sizes[i])) {
            return damaged(f, "its device mesh is invalid", err);
        }
    }
    return FC_OK;
}

static fc_code read_placement(const torch_file *f, fc_pv v, fc_placement *out, fc_error *err) {
    const fc_pickle *p = f->p;
    fc_pv cls = fc_pv_typeof(v) == FC_PV_CALL ? fc_pickle_callee(p, v) : 0;
    char name[128] = "?";
    int64_t dim, factor;
    *out = (fc_placement){0};
    if (fc_pickle_is_global(p, cls, NULL, "Replicate")) {
        out->kind = FC_REPLICATE;
        return FC_OK;
    }
    bool strided = fc_pickle_is_global(p, cls, NULL, "_StridedShard");
    if (!strided && !fc_pickle_is_global(p, cls, NULL, "Shard")) {
        if (fc_pv_typeof(cls) == FC_PV_GLOBAL) {
            fc_pickle_global_name(p, cls, name, sizeof name);
        }
        return fc_fail(
            err, FC_EUNSUPPORTED,
            "%s: its placement is %s, which is not supported: the ranks hold parts of a sum, or the kind is unknown",
            f->path, name);
    }
    out->kind = strided ? FC_STRIDED_SHARD : FC_SHARD;
    if (!fc_pickle_int(p, field(p, v, "dim"), &dim) || dim < 0 || dim >= FC_MAX_DIMS ||
        (strided && (!fc_pickle_int(p, field(p, v, "split_factor"), &factor) || factor < 1))) {
        return damaged(f, "its placement has no dimension", err);
    }
    out->dim = (int)dim;
    out->split_factor = strided ? factor : 0;
    return FC_OK;
}

static fc_code read_placements(const torch_file *f, fc_pv v, const fc_mesh *mesh, fc_placement *out, fc_error *err) {
    const fc_pv *items;
    size_t n;
    if (!sequence(f->p, v, &items, &n) || n != (size_t)mesh->ndim) {
        return damaged(f, "the number of placements differs from the number of dimensions of its mesh", err);
    }
    for (size_t i = 0; i < n; i++) {
        FC_TRY(read_placement(f, items[i], &out[i], err));
    }
    return FC_OK;
}

fc_code fc_pt_dtensor_shard(const torch_file *f, fc_pv v, fc_pt_shard *out, fc_error *err) {
    const fc_pickle *p = f->p;
    const fc_pv *outer, *inner;
    size_t n, m;
    int64_t coordinate[FC_MAX_MESH_DIMS] = {0};
    bool in_mesh = false;
    *out = (fc_pt_shard){0};
    /* _rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, (DTensor, dtype, size, strides, …), state) */
    outer = fc_pickle_call_items(p, v, &n); /* at least four, or it would not be called a DTensor */
    if (!sequence(p, outer[2], &inner, &m) || m < 3) {
        return damaged(f, "it is not a DTensor that torch.save wrote", err);
    }
    out->ndim = numbers(p, inner[2], FC_MAX_DIMS, out->shape);
    fc_pv spec = state_field(p, outer[3], "_spec"), local = state_field(p, outer[3], "_local_tensor");
    if (out->ndim < 0 || fc_pv_typeof(spec) != FC_PV_CALL || !local) {
        return damaged(f, "it is not a DTensor that torch.save wrote", err);
    }
    FC_TRY(read_mesh(f, field(p, spec, "mesh"), &out->mesh, coordinate, &in_mesh, err));
    FC_TRY(read_placements(f, field(p, spec, "placements"), &out->mesh, out->placements, err));
    if (!fc_pt_shard_sane(out)) {
        return damaged(f, "its size or its placements are invalid", err);
    }
    out->in_mesh = in_mesh;
    memcpy(out->coordinate, coordinate, sizeof coordinate);
    if (!in_mesh) {
        return FC_OK;
    }
    out->local = local;
    return fc_local_box(out->ndim, out->shape, &out->mesh, out->placements, coordinate, out->offsets, out->sizes, err);
}

bool fc_pt_shard_sane(const fc_pt_shard *shard) {
    bool sane = fc_torch_shape_fits(FC_C128, shard->ndim, shard->shape);
    for (int i = 0; i < shard->mesh.ndim; i++) {
        sane = sane && (shard->placements[i].kind == FC_REPLICATE || shard->placements[i].dim < shard->ndim);
    }
    return sane;
}

/*
 * @return (local shards, metadata, process group, sharding spec, …): the state of an instance (torch 1.13), or the
 * state in _rebuild_from_type_v2(function, type, arguments, state).
 */
static const fc_pv *sharded_state(const torch_file *f, fc_pv v) {
    const fc_pv *items;
    size_t n;
    fc_pv state = fc_pickle_state(f->p, v);
    if (!state) {
        items = fc_pickle_call_items(f->p, v, &n);
        state = n >= 4 ? items[3] : 0;
    }
    return sequence(f->p, state, &items, &n) && n >= 2 ? items : NULL;
}

size_t fc_pt_sharded_count(const torch_file *f, fc_pv v) {
    const fc_pv *state = sharded_state(f, v), *shards;
    size_t n = 0;
    return state && sequence(f->p, state[0], &shards, &n) ? n : 0;
}

fc_code fc_pt_sharded_shard(const torch_file *f, fc_pv v, size_t index, fc_pt_shard *out, fc_error *err) {
    const fc_pickle *p = f->p;
    const fc_pv *state = sharded_state(f, v), *shards = NULL;
    size_t n = 0;
    *out = (fc_pt_shard){0};
    out->ndim = state ? numbers(p, field(p, state[1], "size"), FC_MAX_DIMS, out->shape) : -1;
    if (out->ndim < 0 || !sequence(p, state[0], &shards, &n)) {
        return damaged(f, "it is not a ShardedTensor that torch.save wrote", err);
    }
    if (!fc_pt_shard_sane(out)) {
        return damaged(f, "its size is invalid", err);
    }
    if (index >= n) {
        return FC_OK;
    }
    fc_pv metadata = field(p, shards[index], "metadata");
    out->local = field(p, shards[index], "tensor");
    if (!out->local || numbers(p, field(p, metadata, "shard_offsets"), FC_MAX_DIMS, out->offsets) != out->ndim ||
        numbers(p, field(p, metadata, "shard_sizes"), FC_MAX_DIMS, out->sizes) != out->ndim) {
        return damaged(f, "the offsets of a shard are missing", err);
    }
    for (int i = 0; i < out->ndim; i++) {
        if (!fc_range_within((uint64_t)out->offsets[i], (uint64_t)out->sizes[i], (uint64_t)out->shape[i])) {
            return damaged(f, "a shard is outside the tensor", err);
        }
    }
    return FC_OK;
}

/* Whether a leaf is a shard of a tensor, other shards of which are in other files. */
static bool has_other_parts(const torch_file *f, const torch_leaf *leaf) {
    fc_pt_shard shard;
    fc_error ignored; /* a damaged file shows nothing */
    if (leaf->kind == TORCH_DTENSOR) {
        return fc_pt_dtensor_shard(f, leaf->v, &shard, &ignored) == FC_OK && fc_mesh_ranks(&shard.mesh) > 1;
    }
    return leaf->kind == TORCH_SHARDED_TENSOR && fc_pt_sharded_shard(f, leaf->v, 0, &shard, &ignored) == FC_OK &&
           !(shard.local && fc_same_sizes(shard.ndim, shard.shape, shard.ndim, shard.sizes));
}

bool fc_pt_holds_shards(const char *path) {
    torch_file f;
    fc_error ignored;
    torch_leaves leaves = {.arena = fc_arena_new(), .alone = true};
    bool found = false;
    if (leaves.arena && fc_torch_file_open(path, 0, &f, &ignored) == FC_OK) {
        const bool good = fc_torch_flatten(&f, NULL, &leaves, &ignored) == FC_OK;
        for (size_t i = 0; good && i < leaves.count && !found; i++) {
            found = has_other_parts(&f, &leaves.items[i]);
        }
        fc_torch_file_close(&f);
    }
    free(leaves.items);
    fc_arena_free(leaves.arena);
    return found;
}
