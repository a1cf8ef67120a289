/*
 * Reads metadata.pkl of torch_checkpointing: see sharding.h. Version 2.0 groups tensors by item; version 1.0 has one
 * dict of all of them, whose keys begin with the item.
 */
#include "pt/sharding.h"

#include "base/checked.h"
#include "base/grow.h"
#include "base/text.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_RANKS = 1 << 20 };

static fc_code damaged(const fc_pt_sharding *s, const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "%s: not metadata of torch_checkpointing, or damaged: %s", s->path, what);
}

static fc_pv get(const fc_pt_sharding *s, fc_pv dict, const char *key) {
    return fc_pv_typeof(dict) == FC_PV_DICT ? fc_torch_dict_get(s->p, dict, key) : 0;
}

static const fc_pv *pairs_of(const fc_pt_sharding *s, fc_pv dict, size_t *n) {
    *n = 0;
    return fc_pv_typeof(dict) == FC_PV_DICT ? fc_pickle_items(s->p, dict, n) : NULL;
}

/* ---- items ---- */

static fc_code item_of(fc_pt_sharding *s, const char *name, size_t *index, fc_error *err) {
    *index = fc_name_table_find(s->names, name, strlen(name));
    if (*index != FC_NO_NAME) {
        return FC_OK;
    }
    if (!name[0] || strchr(name, ',') || !fc_path_is_safe(name)) { /* it is a part of file names */
        return damaged(s, "the name of an item is invalid", err);
    }
    FC_NEED(fc_grow(&s->items, &s->items_capacity, s->nitems + 1, sizeof *s->items), err, s->path);
    fc_pt_item item = {.name = fc_arena_strndup(s->arena, name, strlen(name)),
                       .has_parts = fc_arena_calloc(s->arena, (size_t)s->ranks, sizeof *item.has_parts)};
    FC_NEED(item.name && item.has_parts &&
                fc_name_table_put(s->names, item.name, strlen(item.name), s->nitems) != FC_NO_NAME,
            err, s->path);
    *index = s->nitems;
    s->items[s->nitems++] = item;
    return FC_OK;
}

/* Joins the keys and indexes of a path by dots, as torch_checkpointing does. */
static fc_code join_path(const fc_pt_sharding *s, const json_t *list, size_t from, char **out, fc_error *err) {
    *out = fc_arena_strndup(s->arena, "", 0);
    for (size_t i = from; i < json_array_size(list); i++) {
        const json_t *key = json_array_get(list, i);
        const char *before = *out ? *out : "", *dot = i > from ? "." : "";
        if (!json_is_string(key) && !json_is_integer(key)) {
            return damaged(s, "the path of a tensor is invalid", err);
        }
        *out = json_is_string(key)
                   ? fc_arena_printf(s->arena, "%s%s%s", before, dot, json_string_value(key))
                   : fc_arena_printf(s->arena, "%s%s%" JSON_INTEGER_FORMAT, before, dot, json_integer_value(key));
        FC_NEED(*out, err, s->path);
    }
    return *out ? FC_OK : fc_no_memory(err, s->path);
}

/* Parses the key of a tensor, a JSON list. The caller releases it. */
static fc_code parse_path(const fc_pt_sharding *s, fc_pv key, json_t **list, fc_error *err) {
    size_t length = 0;
    const char *text = fc_pv_typeof(key) == FC_PV_STR ? fc_pickle_bytes(s->p, key, &length) : "";
    *list = json_loadb(text, length, 0, NULL);
    if (!*list && fc_is_json(text, length)) {
        return fc_no_memory(err, s->path);
    }
    return json_is_array(*list) ? FC_OK : damaged(s, "the path of a tensor is invalid", err);
}

static fc_code note_ranks(fc_pt_sharding *s, fc_pt_item *item, fc_pv ranks, fc_error *err) {
    size_t n;
    const fc_pv *numbers = fc_pickle_sequence(s->p, ranks, &n);
    for (size_t i = 0; i < n; i++) {
        int64_t rank;
        if (!fc_pickle_int(s->p, numbers[i], &rank) || rank < 0 || rank >= s->ranks) {
            return damaged(s, "a tensor has a rank that the job did not have", err);
        }
        item->has_parts[rank] = true;
    }
    return n > 0 ? FC_OK : damaged(s, "a tensor has no ranks", err);
}

/* Adds the descriptions of one tensor. Most tensors have the same ranks, so `*last` is what was noted last. */
static fc_code add_tensor(fc_pt_sharding *s, size_t item, const char *name, fc_pv list, fc_pv *last, fc_error *err) {
    size_t n = 0;
    const fc_pv *groups = fc_pickle_sequence(s->p, list, &n);
    for (size_t i = 0; i < n; i++) {
        const fc_pv ranks = get(s, groups[i], "ranks");
        if (ranks != *last) {
            FC_TRY(note_ranks(s, &s->items[item], ranks, err));
        }
        *last = ranks;
    }
    FC_NEED(fc_grow(&s->groups, &s->groups_capacity, s->ngroups + 1, sizeof *s->groups), err, s->path);
    const size_t at = fc_name_table_put_child(s->paths, item, name, strlen(name), s->ngroups);
    FC_NEED(at != FC_NO_NAME, err, s->path);
    if (at != s->ngroups) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: item %.256s has two tensors called %.256s", s->path,
                       s->items[item].name, name);
    }
    s->groups[s->ngroups++] = list;
    return FC_OK;
}

/* Adds a tensor under its key. @param item FC_NO_NAME: the key begins with its own. */
static fc_code add_keyed(fc_pt_sharding *s, size_t item, const json_t *key, fc_pv list, fc_pv *last, fc_error *err) {
    char *name;
    const bool own = item == FC_NO_NAME;
    if (own) {
        const char *of = json_string_value(json_array_get(key, 0));
        FC_TRY(of ? item_of(s, of, &item, err) : damaged(s, "the path of a tensor is invalid", err));
        *last = 0;
    }
    FC_TRY(join_path(s, key, own ? 1 : 0, &name, err));
    return add_tensor(s, item, name, list, last, err);
}

/* Adds the tensors of a dict whose keys are JSON lists. @param item of all of them, or FC_NO_NAME */
static fc_code add_tensors(fc_pt_sharding *s, size_t item, fc_pv dict, fc_error *err) {
    size_t n;
    fc_pv last = 0;
    const fc_pv *pairs = pairs_of(s, dict, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        json_t *key = NULL;
        fc_code rc = parse_path(s, pairs[i], &key, err);
        rc = rc == FC_OK ? add_keyed(s, item, key, pairs[i + 1], &last, err) : rc;
        json_decref(key);
        FC_TRY(rc);
    }
    return FC_OK;
}

/* Version 2.0: a dict from items to their tensors and files. */
static fc_code add_items(fc_pt_sharding *s, fc_pv dict, fc_error *err) {
    size_t n, length;
    const fc_pv *pairs = pairs_of(s, dict, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        size_t item;
        if (fc_pv_typeof(pairs[i]) != FC_PV_STR) {
            return damaged(s, "the name of an item is not a text", err);
        }
        const char *name = fc_pickle_bytes(s->p, pairs[i], &length);
        FC_TRY(strlen(name) == length ? item_of(s, name, &item, err)
                                      : damaged(s, "the name of an item is invalid", err));
        s->items[item].layouts = get(s, pairs[i + 1], "rank_to_layout_info");
        FC_TRY(add_tensors(s, item, get(s, pairs[i + 1], "nested_path_to_metadata"), err));
    }
    return FC_OK;
}

static fc_code read_root(fc_pt_sharding *s, fc_error *err) {
    const fc_pv root = s->p->root, metadata = get(s, root, "metadata"), version = get(s, root, "version");
    s->names = fc_name_table_new(s->arena, 0);
    s->paths = fc_name_table_new(s->arena, 0);
    FC_NEED(s->names && s->paths, err, s->path);
    if (fc_pv_typeof(metadata) != FC_PV_DICT || !fc_pickle_int(s->p, get(s, root, "world_size"), &s->ranks) ||
        s->ranks < 1 || s->ranks > MAX_RANKS) {
        return damaged(s, "it has no metadata, or no number of ranks", err);
    }
    if (version && fc_pickle_is_str(s->p, version, "2.0")) {
        return add_items(s, metadata, err);
    }
    if (version && !fc_pickle_is_str(s->p, version, "1.0")) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: its version is neither 1.0 nor 2.0: a newer torch_checkpointing wrote it", s->path);
    }
    s->layouts = get(s, root, "rank_to_layout_info_mappings");
    return add_tensors(s, FC_NO_NAME, metadata, err);
}

fc_code fc_pt_sharding_load(const char *path, fc_arena *arena, fc_pt_sharding *out, fc_error *err) {
    int fd;
    uint64_t size;
    *out = (fc_pt_sharding){.path = path, .arena = arena, .mesh_rank = -1};
    FC_TRY(fc_open_input(path, &fd, &size, err));
    const fc_pickle_source source = {path, 0, size, fd, NULL};
    const fc_code rc = fc_pickle_load(&source, FC_PICKLE_STRICT, &out->p, err);
    close(fd);
    FC_TRY(rc);
    return read_root(out, err);
}

void fc_pt_sharding_free(fc_pt_sharding *sharding) {
    fc_pickle_free(sharding->p);
    free(sharding->items);
    free(sharding->groups);
}

/* ---- boxes ---- */

static bool is_rank(const fc_pt_sharding *s, fc_pv v, int64_t rank) {
    int64_t number;
    return fc_pickle_int(s->p, v, &number) && number == rank;
}

/* @return the place of a rank in a list, or -1. Most lists are 0, 1, 2, ... or begin with another number. */
static int64_t place_of(const fc_pt_sharding *s, fc_pv list, int64_t rank) {
    size_t n;
    int64_t first = 0;
    const fc_pv *ranks = fc_pickle_sequence(s->p, list, &n);
    if (n > 0 && fc_pickle_int(s->p, ranks[0], &first) && first <= rank && (uint64_t)(rank - first) < n &&
        is_rank(s, ranks[rank - first], rank)) {
        return rank - first;
    }
    for (size_t i = 0; i < n; i++) {
        if (is_rank(s, ranks[i], rank)) {
            return (int64_t)i;
        }
    }
    return -1;
}

fc_pv fc_pt_sharding_find(const fc_pt_sharding *s, const char *item, const char *name, int64_t rank) {
    const size_t at = fc_name_table_find(s->names, item, strlen(item));
    const size_t tensor = at == FC_NO_NAME ? at : fc_name_table_find_child(s->paths, at, name, strlen(name));
    size_t n = 0;
    const fc_pv *groups = tensor == FC_NO_NAME ? NULL : fc_pickle_sequence(s->p, s->groups[tensor], &n);
    for (size_t i = 0; i < n; i++) {
        if (place_of(s, get(s, groups[i], "ranks"), rank) >= 0) {
            return get(s, groups[i], "sharding_metadata");
        }
    }
    return 0;
}

/* Reads at most `most` numbers >= 0. @return their count, or -1. */
static int numbers(const fc_pt_sharding *s, fc_pv v, int most, int64_t *out) {
    size_t n;
    const fc_pv_type type = fc_pv_typeof(v);
    const fc_pv *items = fc_pickle_sequence(s->p, v, &n);
    if ((type != FC_PV_LIST && type != FC_PV_TUPLE) || n > (size_t)most) {
        return -1;
    }
    for (size_t i = 0; i < n; i++) {
        if (!fc_pickle_int(s->p, items[i], &out[i]) || out[i] < 0) {
            return -1;
        }
    }
    return (int)n;
}

static bool is_of_type(const fc_pt_sharding *s, fc_pv how, const char *type) {
    return fc_pickle_is_str(s->p, get(s, how, "type"), type);
}

size_t fc_pt_sharding_count(const fc_pt_sharding *s, fc_pv how) {
    size_t n = 1;
    if (is_of_type(s, how, "default_tensor_v1")) {
        fc_pickle_sequence(s->p, get(s, get(s, how, "data"), "global_offsets"), &n);
    }
    return n;
}

static fc_code read_placement(const fc_pt_sharding *s, fc_pv v, fc_placement *out, fc_error *err) {
    int64_t dim = 0, factor = 0;
    if (is_of_type(s, v, "Replicate")) {
        *out = (fc_placement){.kind = FC_REPLICATE};
        return FC_OK;
    }
    const bool strided = is_of_type(s, v, "StridedShard");
    if (!strided && !is_of_type(s, v, "Shard")) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: an unknown kind of placement, perhaps of a newer torch_checkpointing",
                       s->path);
    }
    if (!fc_pickle_int(s->p, get(s, v, "dim"), &dim) || dim < 0 || dim >= FC_MAX_DIMS ||
        (strided && (!fc_pickle_int(s->p, get(s, v, "split_factor"), &factor) || factor < 1))) {
        return damaged(s, "a placement has no dimension", err);
    }
    *out = (fc_placement){.kind = strided ? FC_STRIDED_SHARD : FC_SHARD, .dim = (int)dim, .split_factor = factor};
    return FC_OK;
}

/* Finds the place of a rank in a mesh, once for all tensors of a file. */
static int64_t place_in_mesh(fc_pt_sharding *s, fc_pv spec, int64_t rank) {
    if (s->mesh != spec || s->mesh_rank != rank) {
        s->mesh = spec;
        s->mesh_rank = rank;
        s->mesh_place = place_of(s, get(s, spec, "mesh_data"), rank);
    }
    return s->mesh_place;
}

static fc_code read_mesh(fc_pt_sharding *s, fc_pv spec, int64_t rank, fc_pt_shard *out, fc_error *err) {
    size_t nnames, length, nranks;
    const fc_pv *names = fc_pickle_sequence(s->p, get(s, spec, "mesh_dim_names"), &nnames);
    int64_t product = 1;
    out->mesh.ndim = numbers(s, get(s, spec, "mesh_shape"), FC_MAX_MESH_DIMS, out->mesh.sizes);
    fc_pickle_sequence(s->p, get(s, spec, "mesh_data"), &nranks);
    bool valid = out->mesh.ndim > 0;
    for (int i = 0; i < out->mesh.ndim && valid; i++) {
        const bool named = nnames == (size_t)out->mesh.ndim && fc_pv_typeof(names[i]) == FC_PV_STR;
        snprintf(out->mesh.names[i], sizeof out->mesh.names[i], "dim%d", i);
        if (named) {
            snprintf(out->mesh.names[i], sizeof out->mesh.names[i], "%s", fc_pickle_bytes(s->p, names[i], &length));
        }
        valid = out->mesh.sizes[i] > 0 && fc_mul_i64(product, out->mesh.sizes[i], &product);
    }
    const int64_t place = valid && (uint64_t)product == nranks ? place_in_mesh(s, spec, rank) : -1;
    if (place < 0) {
        return damaged(s, "the mesh of a tensor is invalid", err);
    }
    out->in_mesh = true;
    fc_mesh_coordinate(&out->mesh, place, out->coordinate);
    return FC_OK;
}

/* The box of a DTensor. */
static fc_code read_dtensor(fc_pt_sharding *s, fc_pv data, int64_t rank, fc_pt_shard *out, fc_error *err) {
    size_t n;
    out->ndim = numbers(s, get(s, data, "global_shape"), FC_MAX_DIMS, out->shape);
    const fc_pv *placements = fc_pickle_sequence(s->p, get(s, data, "placements"), &n);
    FC_TRY(read_mesh(s, get(s, data, "mesh_spec"), rank, out, err));
    if (out->ndim < 0 || n != (size_t)out->mesh.ndim) {
        return damaged(s, "the shape or the placements of a tensor are invalid", err);
    }
    for (size_t i = 0; i < n; i++) {
        FC_TRY(read_placement(s, placements[i], &out->placements[i], err));
    }
    if (!fc_pt_shard_sane(out)) {
        return damaged(s, "the shape or the placements of a tensor are invalid", err);
    }
    return fc_local_box(out->ndim, out->shape, &out->mesh, out->placements, out->coordinate, out->offsets, out->sizes,
                        err);
}

static bool read_row(const fc_pt_sharding *s, fc_pv data, const char *key, size_t index, int ndim, int64_t *out) {
    size_t n;
    const fc_pv *rows = fc_pickle_sequence(s->p, get(s, data, key), &n);
    return index < n && numbers(s, rows[index], FC_MAX_DIMS, out) == ndim;
}

/* One of the boxes of a tensor that says its geometry itself. */
static fc_code read_box(const fc_pt_sharding *s, fc_pv data, size_t index, fc_pt_shard *out, fc_error *err) {
    out->ndim = numbers(s, get(s, data, "global_shape"), FC_MAX_DIMS, out->shape);
    out->within = true;
    bool valid = out->ndim >= 0 && fc_pt_shard_sane(out) &&
                 read_row(s, data, "global_offsets", index, out->ndim, out->offsets) &&
                 read_row(s, data, "local_offsets", index, out->ndim, out->inside) &&
                 read_row(s, data, "local_sizes", index, out->ndim, out->sizes);
    for (int i = 0; i < out->ndim && valid; i++) {
        valid = fc_range_within((uint64_t)out->offsets[i], (uint64_t)out->sizes[i], (uint64_t)out->shape[i]);
    }
    return valid ? FC_OK : damaged(s, "the boxes of a tensor are invalid", err);
}

fc_code fc_pt_sharding_shard(fc_pt_sharding *s, fc_pv how, int64_t rank, size_t index, fc_pt_shard *out,
                             fc_error *err) {
    const fc_pv data = get(s, how, "data");
    *out = (fc_pt_shard){0};
    if (is_of_type(s, how, "DTensorShardingMetadata")) {
        return read_dtensor(s, data, rank, out, err);
    }
    if (is_of_type(s, how, "default_tensor_v1")) {
        return read_box(s, data, index, out, err);
    }
    return fc_fail(err, FC_EUNSUPPORTED,
                   "%s: how it is sharded is described by a class of the training program, which torch_checkpointing "
                   "does not have",
                   s->path);
}
