/*
 * Reads the files *_optim_states.pt, which hold each rank's flat partitions of the fp32 masters and of the optimizer's
 * state.
 *
 * ZeRO-1 and 2: the parameters of a group are concatenated and divided into equal partitions, one per rank; the last
 * one is padded. ZeRO-3: each parameter is divided into equal shards, one per rank; the last one is padded. A rank
 * concatenates its shards of all parameters, possibly into several flat tensors.
 */
#include "deepspeed/stages.h"

#include "base/checked.h"
#include "base/grow.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The file of one rank. */
typedef struct rank_file {
    fc_ds_builder *b;
    size_t rank;
    torch_file f;
    fc_pv state_dict;  /* optimizer_state_dict */
    fc_pv base;        /* the state dict of the optimizer that ZeRO wraps; absent if it was removed */
    torch_dict states; /* of the flat tensors, by number */
} rank_file;

/* ---- opening ---- */

static fc_code fail_file(const rank_file *r, const char *what) {
    return fc_fail(r->b->err, FC_ECORRUPT, "%s: %s", r->f.path, what);
}

/* partition_count is a number or a list of numbers. Reads the largest, and whether all are equal. */
static bool read_partition_count(const rank_file *r, int64_t *out, bool *same) {
    fc_pv v = fc_ds_get(r->f.p, r->state_dict, "partition_count");
    size_t n;
    const fc_pv *items = fc_ds_list(r->f.p, v, &n);
    *same = true;
    if (!items) {
        return fc_ds_int(r->f.p, v, out);
    }
    for (size_t i = 0; i < n; i++) {
        int64_t count;
        if (!fc_ds_int(r->f.p, items[i], &count)) {
            return false;
        }
        *same = *same && (i == 0 || count == *out);
        *out = i == 0 || count > *out ? count : *out;
    }
    return n > 0;
}

static fc_code check_partitions(const rank_file *r) {
    int64_t count = 0;
    bool same;
    if (!read_partition_count(r, &count, &same)) {
        return fail_file(r, "partition_count is missing");
    }
    if (!same) {
        return fc_fail(r->b->err, FC_EUNSUPPORTED,
                       "%s: groups that are partitioned over different numbers of ranks, as with experts, are not "
                       "supported; convert it with DeepSpeed's ds_to_universal.py",
                       r->f.path);
    }
    if (count != (int64_t)r->b->ranks) {
        return fc_fail(r->b->err, FC_ECORRUPT,
                       "%s: files are missing or belong to another save: %" PRId64
                       " ranks wrote the checkpoint, but there are %zu files *_optim_states.pt",
                       r->f.path, count, r->b->ranks);
    }
    return FC_OK;
}

static void close_rank(rank_file *r) {
    fc_torch_dict_free(&r->states);
    fc_torch_file_close(&r->f);
}

/* Opens the file of a rank. On failure nothing stays open. */
static fc_code open_rank(fc_ds_builder *b, size_t rank, rank_file *r) {
    uint32_t file = b->files.optims[rank];
    int stage = 0;
    fc_code rc;
    *r = (rank_file){.b = b, .rank = rank};
    FC_TRY(fc_torch_open_one(b->checkpoint, file, &r->f, b->err));
    r->state_dict = fc_ds_get(r->f.p, r->f.p->root, "optimizer_state_dict");
    if (fc_pv_typeof(r->state_dict) != FC_PV_DICT) {
        rc = fail_file(r, "optimizer_state_dict is missing: this is not a file of a ZeRO checkpoint");
        goto out;
    }
    FC_TRY_GOTO(fc_ds_stage_of(b, &r->f, r->state_dict, &stage), rc, out);
    if (b->stage != 0 && stage != b->stage) {
        rc = fc_fail(b->err, FC_ECORRUPT, "%s: its ZeRO stage is %d, but that of rank 0 is %d", r->f.path, stage,
                     b->stage);
        goto out;
    }
    b->stage = stage;
    FC_TRY_GOTO(check_partitions(r), rc, out);
    r->base = fc_ds_get(r->f.p, r->state_dict, stage == 3 ? "optimizer_state_dict" : "base_optimizer_state");
    if (!fc_torch_dict_begin(&r->states, r->f.p, fc_ds_get(r->f.p, r->base, "state"))) {
        rc = fc_ds_no_memory(b);
    }
out:
    if (rc != FC_OK) {
        close_rank(r);
    }
    return rc;
}

/* ---- values of the optimizer ---- */

/* The optimizer's state of flat tensor `number`: a dict, or absent. Elastic checkpoints have a list of dicts. */
static fc_pv state_of(const rank_file *r, size_t number) {
    size_t n;
    const fc_pv *list = fc_ds_list(r->f.p, r->base, &n);
    if (list) {
        return number < n ? list[number] : 0;
    }
    return fc_torch_dict_find_number(&r->states, (int64_t)number);
}

/* The list of the rank's flat masters. */
static const fc_pv *masters_of(const rank_file *r, size_t *count) {
    const char *key = r->b->stage == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups";
    return fc_ds_list(r->f.p, fc_ds_get(r->f.p, r->state_dict, key), count);
}

static fc_code add_key(fc_ds_builder *b, size_t group, const char *name, bool flat) {
    FC_NEED(fc_grow(&b->keys, &b->keys_capacity, b->nkeys + 1, sizeof *b->keys), b->err, b->checkpoint->path);
    b->keys[b->nkeys++] = (fc_ds_key){.group = group, .name = name, .flat = flat};
    return FC_OK;
}

/* Rank 0 determines which values the parameters of a group have. A tensor with one number is not partitioned: some
   versions of torch count steps in it. */
static fc_code read_keys(const rank_file *r, size_t group) {
    fc_pv state = state_of(r, group);
    size_t nmasters;
    const fc_pv *masters = masters_of(r, &nmasters);
    int64_t numel = group < nmasters ? fc_ds_count_flat(&r->f, masters[group]) : -1;
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(state) == FC_PV_DICT ? fc_pickle_items(r->f.p, state, &n) : NULL;
    FC_TRY(fc_ds_check_keys(r->b, &r->f, n / 2));
    FC_TRY(add_key(r->b, group, "", true));
    for (size_t i = 0; i + 1 < n; i += 2) {
        size_t length = 0;
        fc_torch_tensor t = {0};
        const char *text = fc_pv_typeof(pairs[i]) == FC_PV_STR ? fc_pickle_bytes(r->f.p, pairs[i], &length) : NULL;
        if (!text || strlen(text) != length || length == 0) { /* "" is the key of the masters */
            return fail_file(r, "a name in the optimizer's state is not a string");
        }
        const char *name = fc_arena_strndup(r->b->checkpoint->arena, text, length);
        FC_NEED(name, r->b->err, r->b->checkpoint->path);
        if (fc_torch_is_tensor(r->f.p, pairs[i + 1])) {
            FC_TRY_CONTEXT(fc_torch_tensor_decode(r->f.p, pairs[i + 1], &t, r->b->err), r->b->err, "%s", r->f.path);
        }
        FC_TRY(add_key(r->b, group, name, t.ndim == 1 && (t.sizes[0] != 1 || numel == 1)));
    }
    return FC_OK;
}

/* ZeRO-3 lays out all parameters as one group. */
static size_t flat_groups(const fc_ds_builder *b) {
    return b->stage == 3 ? 1 : b->ngroups;
}

static size_t group_of(const fc_ds_builder *b, const fc_ds_param *param) {
    return b->stage == 3 ? 0 : param->group;
}

/* ---- positions of parameters ---- */

/* ZeRO-3: the number of elements of each rank's shard, with padding. */
static int64_t shard_numel(const fc_ds_builder *b, const fc_ds_param *param) {
    return param->numel / (int64_t)b->ranks + (param->numel % (int64_t)b->ranks != 0);
}

/* ZeRO-1 and 2: the padding after a parameter. Newer versions record one list per group, older ones do not pad. */
static fc_code read_padding(const rank_file *r, const fc_ds_param *param, size_t index, int64_t *out) {
    size_t n;
    fc_pv all = fc_ds_get(r->f.p, r->state_dict, "param_alignment_paddings");
    const fc_pv *groups = fc_ds_list(r->f.p, all, &n);
    *out = 0;
    if (!groups || param->group >= n) {
        return groups ? fail_file(r, "param_alignment_paddings lacks a group") : FC_OK;
    }
    const fc_pv *items = fc_ds_list(r->f.p, groups[param->group], &n);
    bool good = items && index < n && fc_ds_int(r->f.p, items[index], out) && *out >= 0;
    return good ? FC_OK : fail_file(r, "param_alignment_paddings lacks a parameter");
}

static fc_code place_params(const rank_file *r) {
    fc_ds_builder *b = r->b;
    int64_t at = 0;
    for (size_t i = 0; i < b->nparams; i++) {
        fc_ds_param *param = &b->params[i];
        int64_t length = b->stage == 3 ? shard_numel(b, param) : param->numel, padding = 0;
        if (b->stage != 3) {
            at = i == b->group_params[param->group] ? 0 : at;
            FC_TRY(read_padding(r, param, i - b->group_params[param->group], &padding));
        }
        param->start = at;
        if (!fc_add_i64(at, length, &at) || !fc_add_i64(at, padding, &at)) {
            return fail_file(r, "the sizes of its parameters overflow");
        }
    }
    return FC_OK;
}

/* The end of the last parameter of a flat group. */
static int64_t end_of_group(const fc_ds_builder *b, size_t group) {
    size_t last = b->stage == 3 ? b->nparams : b->group_params[group + 1];
    size_t first = b->stage == 3 ? 0 : b->group_params[group];
    const fc_ds_param *param = last > first ? &b->params[last - 1] : NULL;
    return !param ? 0 : param->start + (b->stage == 3 ? shard_numel(b, param) : param->numel);
}

/* ---- tensors ---- */

static fc_code add_param_tensor(const rank_file *r, const fc_ds_param *param, const fc_ds_key *key) {
    fc_ds_builder *b = r->b;
    const fc_path_element model[2] = {{.key = "model"}, {.key = param->name}};
    const fc_path_element optim[4] = {{.key = "optim"}, {.key = "state"}, {.key = param->name}, {.key = key->name}};
    bool master = key->name[0] == '\0';
    if (!key->flat) {
        fc_pv v = fc_ds_get(r->f.p, state_of(r, key->group), key->name);
        return fc_ds_add_value(b, &r->f, optim, 4, v);
    }
    const char *name = master ? fc_arena_printf(b->checkpoint->arena, "model.%s", param->name)
                              : fc_arena_printf(b->checkpoint->arena, "optim.state.%s.%s", param->name, key->name);
    fc_ds_tensor *t = name ? fc_ds_add_tensor(b, name, master ? model : optim, master ? 2 : 4) : NULL;
    FC_NEED(t, b->err, b->checkpoint->path);
    t->dtype = FC_DTYPE_COUNT; /* set by its first run */
    t->ndim = param->ndim;
    t->shape = param->shape;
    t->numel = param->numel;
    return FC_OK;
}

/* Adds, for each parameter, the tensors of all keys of its group. */
static fc_code add_param_tensors(const rank_file *r) {
    fc_ds_builder *b = r->b;
    size_t first = 0; /* of the keys of the parameter's group; parameters and keys are in the order of the groups */
    for (size_t i = 0; i < b->nparams; i++) {
        fc_ds_param *param = &b->params[i];
        const size_t group = group_of(b, param);
        param->first = b->ntensors;
        while (first < b->nkeys && b->keys[first].group < group) {
            first++;
        }
        for (size_t k = first; k < b->nkeys && b->keys[k].group == group; k++) {
            FC_TRY(add_param_tensor(r, param, &b->keys[k]));
        }
    }
    return FC_OK;
}

/* ---- partitions ---- */

/* One flat tensor of a rank. */
typedef struct partition {
    const rank_file *r;
    const fc_ds_key *key;
    size_t number; /* index of the key in its group */
    const torch_extent *extent;
    fc_dtype dtype;
    int64_t start, count; /* elements; positions are those of fc_ds_param.start */
} partition;

/* Adds the run that the partition holds of one parameter, if any. */
static fc_code add_param_run(const partition *p, const fc_ds_param *param) {
    fc_ds_builder *b = p->r->b;
    int64_t first = 0, length = param->numel;
    if (b->stage == 3) {
        int64_t shard = shard_numel(b, param);
        first = shard * (int64_t)p->r->rank;
        length = param->numel - first < shard ? param->numel - first : shard;
    }
    int64_t low = p->start > param->start ? p->start : param->start;
    int64_t high = p->start + p->count < param->start + length ? p->start + p->count : param->start + length;
    if (low >= high) {
        return FC_OK;
    }
    fc_ds_tensor *t = &b->tensors[param->first + p->number];
    t->dtype = t->dtype == FC_DTYPE_COUNT ? p->dtype : t->dtype;
    if (t->dtype != p->dtype) {
        return fc_fail(b->err, FC_ECORRUPT, "%s: tensor %.256s: it is %s here, but %s in the files of other ranks",
                       p->r->f.path, t->name, fc_dtype_get(p->dtype)->torch_name, fc_dtype_get(t->dtype)->torch_name);
    }
    return fc_ds_add_run(b, t, p->extent, low - p->start, first + (low - param->start), high - low,
                         (uint32_t)p->r->rank);
}

/* The first of the parameters from `low` to `high`, exclusive, that ends after the start of the partition. */
static size_t first_param(const partition *p, size_t low, size_t high) {
    const fc_ds_builder *b = p->r->b;
    const fc_ds_param *all = b->params;
    FC_BISECT(low, high, i, all[i].start + (b->stage == 3 ? shard_numel(b, &all[i]) : all[i].numel) <= p->start);
    return low;
}

static fc_code add_partition(const partition *p) {
    const fc_ds_builder *b = p->r->b;
    const size_t begin = b->stage == 3 ? 0 : b->group_params[p->key->group];
    const size_t end = b->stage == 3 ? b->nparams : b->group_params[p->key->group + 1];
    for (size_t i = first_param(p, begin, end); i < end && b->params[i].start < p->start + p->count; i++) {
        FC_TRY(add_param_run(p, &b->params[i]));
    }
    return FC_OK;
}

/* Reads one flat tensor of key `k`, which belongs to `master`. `*at` is its position and advances by its size. */
static fc_code read_flat(const rank_file *r, size_t k, size_t number, fc_pv v, fc_pv master, int64_t *at) {
    const fc_ds_key *key = &r->b->keys[k];
    const char *what = key->name[0] ? key->name : "a partition of the fp32 masters";
    fc_torch_tensor t;
    torch_extent *extent;
    FC_TRY(fc_ds_flat(r->b, &r->f, what, v, &t, &extent));
    int64_t numel = fc_ds_count_flat(&r->f, master);
    if (t.sizes[0] < numel || (t.sizes[0] > numel && r->rank + 1 < r->b->ranks)) { /* the last master lacks padding */
        return fc_fail(r->b->err, FC_ECORRUPT, "%s: %s has %" PRId64 " elements, but the fp32 masters have %" PRId64,
                       r->f.path, what, t.sizes[0], numel);
    }
    partition p = {r, key, number, extent, t.dtype, *at, t.sizes[0]};
    if (number == 0) {
        r->b->devices[r->rank] = fc_ds_device(&r->f, &t);
    }
    return fc_add_i64(*at, p.count, at) ? add_partition(&p) : fail_file(r, "the sizes of its partitions overflow");
}

/* ZeRO-1 and 2: reads the rank's partition of each group. */
static fc_code read_groups(const rank_file *r) {
    fc_ds_builder *b = r->b;
    size_t count, number = 0;
    const fc_pv *masters = masters_of(r, &count);
    if (!masters || count != b->ngroups) {
        return fail_file(r, "the number of its partitions differs from the number of groups in param_shapes");
    }
    for (size_t k = 0; k < b->nkeys; k++) {
        fc_ds_key *key = &b->keys[k];
        number = key->name[0] == '\0' ? 0 : number + 1;
        if (!key->flat) {
            continue;
        }
        fc_pv master = masters[key->group];
        fc_pv v = number == 0 ? master : fc_ds_get(r->f.p, state_of(r, key->group), key->name);
        int64_t start = key->next;
        FC_TRY(read_flat(r, k, number, v, master, &key->next));
        if (number == 0) {
            FC_TRY(fc_ds_check_mapping(b, &r->f, r->state_dict, r->rank, key->group, start, key->next - start));
        }
    }
    return FC_OK;
}

/* ZeRO-3: reads the rank's shards of all parameters. */
static fc_code read_all_groups(const rank_file *r) {
    fc_ds_builder *b = r->b;
    size_t count;
    const fc_pv *masters = masters_of(r, &count);
    if (!masters) {
        return fail_file(r, "fp32_flat_groups is missing");
    }
    for (size_t k = 0; k < b->nkeys; k++) {
        int64_t at = 0;
        for (size_t i = 0; b->keys[k].flat && i < count; i++) {
            fc_pv v = k == 0 ? masters[i] : fc_ds_get(r->f.p, state_of(r, i), b->keys[k].name);
            FC_TRY(read_flat(r, k, k, v, masters[i], &at));
        }
        if (b->keys[k].flat && at != end_of_group(b, 0)) {
            return fc_fail(b->err, FC_ECORRUPT,
                           "%s: its partitions have %" PRId64 " elements, but its shards have %" PRId64, r->f.path, at,
                           end_of_group(b, 0));
        }
    }
    return FC_OK;
}

/* Like zero_to_fp32.py: except for the alignment, the masters of a group have as many elements as its parameters. */
static fc_code check_groups(const fc_ds_builder *b) {
    int64_t align = 2 * (int64_t)b->ranks;
    for (size_t k = 0; b->stage != 3 && k < b->nkeys; k++) {
        const fc_ds_key *key = &b->keys[k];
        int64_t end = end_of_group(b, key->group);
        if (key->flat && (key->next + align - 1) / align != (end + align - 1) / align && key->name[0] == '\0') {
            return fc_fail(b->err, FC_ECORRUPT,
                           "%s: group %zu: the partitions have %" PRId64 " elements, but the parameters have %" PRId64,
                           b->files.directory, key->group, key->next, end);
        }
    }
    return FC_OK;
}

/* ---- all ranks ---- */

static fc_code read_rank(const rank_file *r) {
    if (r->rank == 0) {
        for (size_t g = 0; g < flat_groups(r->b); g++) {
            FC_TRY(read_keys(r, g));
        }
        FC_TRY(place_params(r));
        FC_TRY(fc_ds_sort_params(r->b));
        FC_TRY(add_param_tensors(r));
    }
    if (r->b->stage == 3) {
        FC_TRY(read_all_groups(r));
    } else {
        FC_TRY(read_groups(r));
    }
    if (r->rank > 0) {
        return FC_OK;
    }
    return fc_ds_add_others(r->b, &r->f, r->state_dict, fc_ds_get(r->f.p, r->base, "param_groups"));
}

fc_code fc_ds_read_optimizer(fc_ds_builder *b) {
    b->devices = malloc((b->ranks + 1) * sizeof *b->devices);
    FC_NEED(b->devices, b->err, b->checkpoint->path);
    for (size_t i = 0; i < b->ranks; i++) {
        b->devices[i] = -1;
    }
    for (size_t i = 0; i < b->ranks; i++) {
        rank_file r;
        FC_TRY(open_rank(b, i, &r));
        const fc_code rc = read_rank(&r);
        close_rank(&r);
        FC_TRY(rc);
        FC_TRY(fc_progress_count(b->progress, 1, b->err));
    }
    return check_groups(b);
}

fc_code fc_ds_read_stage(fc_ds_builder *b) {
    rank_file r;
    if (b->files.universal) {
        return fc_ds_read_universal_stage(b);
    }
    b->ranks = b->files.noptims;
    if (b->ranks == 0) {
        return FC_OK;
    }
    FC_TRY(open_rank(b, 0, &r));
    close_rank(&r);
    return FC_OK;
}
