/*
 * The files *_optim_states.pt: each rank's flat partitions of the fp32 masters and of what the optimizer keeps for
 * them.
 *
 * ZeRO-1 and 2: the parameters of a group lie behind each other, and the ranks cut that in equal pieces, the last one
 * padded. ZeRO-3: each parameter is cut in equal pieces, the last one padded, and a rank's pieces of all parameters lie
 * behind each other, in several flat tensors where they are many.
 */
#include "deepspeed/deepspeed.h"

#include "base/checked.h"
#include "base/grow.h"
#include "base/try.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The file of one rank. */
typedef struct rank_file {
    ds_building *b;
    size_t rank;
    torch_file f;
    fc_pv state_dict; /* optimizer_state_dict */
    fc_pv base;       /* that of the optimizer that ZeRO wraps, absent where it was removed */
} rank_file;

/* ---- opening ---- */

static fc_code fail_file(const rank_file *r, const char *what) {
    return fc_fail(r->b->err, FC_ECORRUPT, "%s: %s", r->f.path, what);
}

/* The largest of a number or a list of numbers, and whether they are all the same. */
static bool partition_count(const rank_file *r, int64_t *out, bool *same) {
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

fc_code fc_ds_stage_of(const ds_building *b, const torch_file *f, fc_pv state_dict, int *stage) {
    int64_t value = 1;
    fc_pv v = fc_ds_get(f->p, state_dict, "zero_stage");
    if (v && (!fc_ds_int(f->p, v, &value) || value < 1 || value > 3)) {
        return fc_fail(b->err, FC_ECORRUPT, "%s: zero_stage is none of 1, 2 and 3", f->path);
    }
    *stage = (int)value;
    return FC_OK;
}

static fc_code check_partitions(const rank_file *r) {
    int64_t count = 0;
    bool same;
    if (!partition_count(r, &count, &same)) {
        return fail_file(r, "it has no partition_count");
    }
    if (!same) {
        return fc_fail(r->b->err, FC_EUNSUPPORTED,
                       "%s: its groups are cut over different numbers of ranks, as with experts; convert it with "
                       "DeepSpeed's ds_to_universal.py",
                       r->f.path);
    }
    if (count != (int64_t)r->b->ranks) {
        return fc_fail(r->b->err, FC_ECORRUPT,
                       "%s: files are missing, or are those of another save: it was cut over %" PRId64
                       " ranks, there are %zu files *_optim_states.pt",
                       r->f.path, count, r->b->ranks);
    }
    return FC_OK;
}

/* On failure nothing is left open. */
static fc_code open_rank(ds_building *b, size_t rank, rank_file *r) {
    uint32_t file = b->files.optims[rank];
    int stage = 0;
    *r = (rank_file){.b = b, .rank = rank};
    fc_code rc = fc_torch_file_open(b->files.files[file].path, file, &r->f, b->err);
    if (rc != FC_OK) {
        return rc;
    }
    r->state_dict = fc_ds_get(r->f.p, r->f.p->root, "optimizer_state_dict");
    if (fc_pv_typeof(r->state_dict) != FC_PV_DICT) {
        rc = fail_file(r, "it has no optimizer_state_dict: not a file of a ZeRO checkpoint");
    }
    rc = rc == FC_OK ? fc_ds_stage_of(b, &r->f, r->state_dict, &stage) : rc;
    if (rc == FC_OK && b->stage != 0 && stage != b->stage) {
        rc = fc_fail(b->err, FC_ECORRUPT, "%s: it is of ZeRO stage %d, that of rank 0 of stage %d", r->f.path, stage,
                     b->stage);
    }
    b->stage = stage;
    rc = rc == FC_OK ? check_partitions(r) : rc;
    r->base = fc_ds_get(r->f.p, r->state_dict, stage == 3 ? "optimizer_state_dict" : "base_optimizer_state");
    if (rc != FC_OK) {
        fc_torch_file_close(&r->f);
    }
    return rc;
}

/* ---- values of the optimizer ---- */

/* What the optimizer keeps for flat tensor `number`: a dict, or absent. Elastic checkpoints have a list of them. */
static fc_pv state_of(const rank_file *r, size_t number) {
    size_t n;
    const fc_pv *list = fc_ds_list(r->f.p, r->base, &n);
    if (list) {
        return number < n ? list[number] : 0;
    }
    return fc_ds_get_number(r->f.p, fc_ds_get(r->f.p, r->base, "state"), (int64_t)number);
}

/* The rank's flat masters, a list. */
static const fc_pv *masters_of(const rank_file *r, size_t *count) {
    const char *key = r->b->stage == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups";
    return fc_ds_list(r->f.p, fc_ds_get(r->f.p, r->state_dict, key), count);
}

static fc_code add_key(ds_building *b, size_t group, const char *name, bool flat) {
    if (!fc_grow(&b->keys, &b->keys_capacity, b->nkeys + 1, sizeof *b->keys)) {
        return fc_ds_no_memory(b);
    }
    b->keys[b->nkeys++] = (ds_key){.group = group, .name = name, .flat = flat};
    return FC_OK;
}

/* Which values there are for the parameters of a group, as rank 0 has them. */
static fc_code read_keys(const rank_file *r, size_t group) {
    fc_pv state = state_of(r, group);
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(state) == FC_PV_DICT ? fc_pickle_items(r->f.p, state, &n) : NULL;
    fc_code rc = add_key(r->b, group, "", true);
    for (size_t i = 0; rc == FC_OK && i + 1 < n; i += 2) {
        size_t length = 0;
        fc_torch_tensor t = {0};
        const char *text = fc_pv_typeof(pairs[i]) == FC_PV_STR ? fc_pickle_bytes(r->f.p, pairs[i], &length) : NULL;
        const char *name =
            text && strlen(text) == length ? fc_arena_strndup(r->b->checkpoint->arena, text, length) : NULL;
        if (!name || length == 0) { /* "" is the masters' key */
            return fail_file(r, "a name in the optimizer's state is no text");
        }
        if (fc_torch_is_tensor(r->f.p, pairs[i + 1])) {
            rc = fc_torch_tensor_decode(r->f.p, pairs[i + 1], &t, r->b->err);
        }
        rc = rc == FC_OK ? add_key(r->b, group, name, t.ndim == 1) : fc_context(r->b->err, rc, "%s", r->f.path);
    }
    return rc;
}

/* Groups of partitions: ZeRO-3 lays all parameters out as one. */
static size_t flat_groups(const ds_building *b) {
    return b->stage == 3 ? 1 : b->ngroups;
}

static size_t group_of(const ds_building *b, const ds_param *param) {
    return b->stage == 3 ? 0 : param->group;
}

/* ---- where parameters lie ---- */

static int64_t part_of(const ds_building *b, const ds_param *param) {
    return param->numel / (int64_t)b->ranks + (param->numel % (int64_t)b->ranks != 0);
}

/* Padding behind a parameter of ZeRO-1 and 2; newer versions have a list for each group. */
static fc_code padding_of(const rank_file *r, const ds_param *param, size_t index, int64_t *out) {
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
    ds_building *b = r->b;
    int64_t at = 0;
    for (size_t i = 0; i < b->nparams; i++) {
        ds_param *param = &b->params[i];
        int64_t length = b->stage == 3 ? part_of(b, param) : param->numel, padding = 0;
        fc_code rc = FC_OK;
        if (b->stage != 3) {
            at = i == b->group_params[param->group] ? 0 : at;
            rc = padding_of(r, param, i - b->group_params[param->group], &padding);
        }
        param->start = at;
        if (rc == FC_OK && (!fc_add_i64(at, length, &at) || !fc_add_i64(at, padding, &at))) {
            rc = fail_file(r, "the sizes of its parameters overflow");
        }
        if (rc != FC_OK) {
            return rc;
        }
    }
    return FC_OK;
}

/* Where the last parameter of a flat group ends. */
static int64_t end_of_group(const ds_building *b, size_t group) {
    size_t last = b->stage == 3 ? b->nparams : b->group_params[group + 1];
    size_t first = b->stage == 3 ? 0 : b->group_params[group];
    const ds_param *param = last > first ? &b->params[last - 1] : NULL;
    return !param ? 0 : param->start + (b->stage == 3 ? part_of(b, param) : param->numel);
}

/* ---- tensors ---- */

static fc_code add_target(const rank_file *r, const ds_param *param, const ds_key *key) {
    ds_building *b = r->b;
    const fc_path_element model[2] = {{.key = "model"}, {.key = param->name}};
    const fc_path_element optim[4] = {{.key = "optim"}, {.key = "state"}, {.key = param->name}, {.key = key->name}};
    bool master = key->name[0] == '\0';
    if (!key->flat) {
        fc_pv v = fc_ds_get(r->f.p, state_of(r, key->group), key->name);
        return fc_ds_add_value(b, &r->f, optim, 4, v);
    }
    const char *name = master ? fc_arena_printf(b->checkpoint->arena, "model.%s", param->name)
                              : fc_arena_printf(b->checkpoint->arena, "optim.state.%s.%s", param->name, key->name);
    ds_tensor *t = name ? fc_ds_add_tensor(b, name, master ? model : optim, master ? 2 : 4) : NULL;
    if (!t) {
        return fc_ds_no_memory(b);
    }
    t->dtype = FC_DTYPE_COUNT; /* that of its first piece */
    t->ndim = param->ndim;
    t->shape = param->shape;
    t->numel = param->numel;
    return FC_OK;
}

/* First all masters, then what the optimizer keeps for each parameter. */
static fc_code add_targets(const rank_file *r) {
    ds_building *b = r->b;
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < b->nparams; i++) {
        ds_param *param = &b->params[i];
        param->first = b->ntensors;
        for (size_t k = 0; rc == FC_OK && k < b->nkeys; k++) {
            rc = b->keys[k].group == group_of(b, param) ? add_target(r, param, &b->keys[k]) : FC_OK;
        }
    }
    return rc;
}

/* ---- pieces ---- */

/* A flat tensor of a rank: what it has of one key. */
typedef struct partition {
    const rank_file *r;
    const ds_key *key;
    size_t target; /* number of the key in its group */
    const torch_extent *piece;
    fc_dtype dtype;
    int64_t start, count; /* elements, in terms of ds_param.start */
} partition;

/* What the partition has of one parameter. */
static fc_code add_piece(const partition *p, const ds_param *param) {
    ds_building *b = p->r->b;
    int64_t first = 0, length = param->numel;
    if (b->stage == 3) {
        int64_t part = part_of(b, param);
        first = part * (int64_t)p->r->rank;
        length = param->numel - first < part ? param->numel - first : part;
    }
    int64_t low = p->start > param->start ? p->start : param->start;
    int64_t high = p->start + p->count < param->start + length ? p->start + p->count : param->start + length;
    if (low >= high) {
        return FC_OK;
    }
    ds_tensor *t = &b->tensors[param->first + p->target];
    t->dtype = t->dtype == FC_DTYPE_COUNT ? p->dtype : t->dtype;
    if (t->dtype != p->dtype) {
        return fc_fail(b->err, FC_ECORRUPT, "%s: tensor %.256s: it is %s here, %s in the files of other ranks",
                       p->r->f.path, t->name, fc_dtype_get(p->dtype)->torch_name, fc_dtype_get(t->dtype)->torch_name);
    }
    return fc_ds_add_run(b, t, p->piece, low - p->start, first + (low - param->start), high - low,
                         (uint32_t)p->r->rank);
}

static fc_code add_partition(const partition *p) {
    const ds_building *b = p->r->b;
    size_t first = b->stage == 3 ? 0 : b->group_params[p->key->group];
    size_t end = b->stage == 3 ? b->nparams : b->group_params[p->key->group + 1];
    for (size_t i = first; i < end && b->params[i].start < p->start + p->count; i++) {
        FC_TRY(add_piece(p, &b->params[i]));
    }
    return FC_OK;
}

/* One flat tensor of key number `k`; `*at` moves behind it. */
static fc_code read_flat(const rank_file *r, size_t k, size_t target, fc_pv v, int64_t *at) {
    const ds_key *key = &r->b->keys[k];
    const char *what = key->name[0] ? key->name : "a partition of the fp32 masters";
    fc_torch_tensor t;
    torch_extent *piece;
    FC_TRY(fc_ds_flat(r->b, &r->f, what, v, &t, &piece));
    partition p = {r, key, target, piece, t.dtype, *at, t.sizes[0]};
    if (target == 0) {
        r->b->devices[r->rank] = fc_ds_device(&r->f, &t);
    }
    return fc_add_i64(*at, p.count, at) ? add_partition(&p) : fail_file(r, "the sizes of its partitions overflow");
}

/* ---- whose file it is ---- */

/* The number `key` of a fragment_address, a dataclass whose members BUILD gives. */
static bool address(const fc_pickle *p, fc_pv v, const char *key, int64_t *out) {
    fc_pv state = fc_pv_typeof(v) == FC_PV_CALL ? fc_pickle_state(p, v) : 0;
    return fc_ds_int(p, fc_ds_get(p, state, key), out);
}

/* The parameter `name` among those of a group; the search goes on from the one that was found before. */
static const ds_param *find_param(const ds_building *b, size_t group, const char *name, size_t *at) {
    size_t first = b->group_params[group], count = b->group_params[group + 1] - first;
    for (size_t i = 0; i < count; i++) {
        size_t k = first + (*at + i) % count;
        if (strcmp(b->params[k].name, name) == 0) {
            *at = k - first + 1;
            return &b->params[k];
        }
    }
    return NULL;
}

/* ZeRO-1 and 2: no file says its rank, but each says which parameters lie where in its partitions. Elements
   [start, start + count) of the group are what the rank in the file's name has. */
static fc_code check_mapping(const rank_file *r, size_t group, int64_t start, int64_t count) {
    const fc_pickle *p = r->f.p;
    size_t ngroups, n = 0, at = 0;
    const fc_pv *groups = fc_ds_list(p, fc_ds_get(p, r->state_dict, "param_slice_mappings"), &ngroups);
    const fc_pv *pairs = groups && group < ngroups && fc_pv_typeof(groups[group]) == FC_PV_DICT
                             ? fc_pickle_items(p, groups[group], &n)
                             : NULL;
    for (size_t i = 0; i + 1 < n; i += 2) {
        size_t length = 0;
        const char *name = fc_pv_typeof(pairs[i]) == FC_PV_STR ? fc_pickle_bytes(p, pairs[i], &length) : "";
        const ds_param *param = find_param(r->b, group, name, &at);
        int64_t there, numel;
        if (!param || !address(p, pairs[i + 1], "start", &there) || !address(p, pairs[i + 1], "numel", &numel)) {
            continue; /* of a version that writes something else */
        }
        int64_t low = start > param->start ? start : param->start, end = param->start + param->numel;
        int64_t high = start + count < end ? start + count : end;
        if (low < high && low - start == there && high - low == numel) {
            continue;
        }
        return fc_fail(r->b->err, FC_ECORRUPT,
                       "%s: by its name the file of rank %zu, but its partition holds %" PRId64
                       " elements of %.256s from %" PRId64
                       " on, which are another rank's: files of ranks were renamed or swapped",
                       r->f.path, r->rank, numel, param->name, there);
    }
    return FC_OK;
}

/* ZeRO-1 and 2: this rank's piece of each group. */
static fc_code read_pieces(const rank_file *r) {
    ds_building *b = r->b;
    size_t count, target = 0;
    const fc_pv *masters = masters_of(r, &count);
    if (!masters || count != b->ngroups) {
        return fail_file(r, "it has not as many partitions as param_shapes has groups");
    }
    fc_code rc = FC_OK;
    for (size_t k = 0; rc == FC_OK && k < b->nkeys; k++) {
        ds_key *key = &b->keys[k];
        target = key->name[0] == '\0' ? 0 : target + 1;
        if (key->flat) {
            fc_pv v = target == 0 ? masters[key->group] : fc_ds_get(r->f.p, state_of(r, key->group), key->name);
            int64_t start = key->next;
            rc = read_flat(r, k, target, v, &key->next);
            rc = rc == FC_OK && target == 0 ? check_mapping(r, key->group, start, key->next - start) : rc;
        }
    }
    return rc;
}

/* ZeRO-3: this rank's piece of every parameter, in as many flat tensors as there are. */
static fc_code read_all_groups(const rank_file *r) {
    ds_building *b = r->b;
    size_t count;
    const fc_pv *masters = masters_of(r, &count);
    if (!masters) {
        return fail_file(r, "it has no fp32_flat_groups");
    }
    for (size_t k = 0; k < b->nkeys; k++) {
        int64_t at = 0;
        for (size_t i = 0; b->keys[k].flat && i < count; i++) {
            fc_pv v = k == 0 ? masters[i] : fc_ds_get(r->f.p, state_of(r, i), b->keys[k].name);
            FC_TRY(read_flat(r, k, k, v, &at));
        }
        if (b->keys[k].flat && at != end_of_group(b, 0)) {
            return fc_fail(b->err, FC_ECORRUPT,
                           "%s: its partitions have %" PRId64 " elements, the parameters' pieces %" PRId64, r->f.path,
                           at, end_of_group(b, 0));
        }
    }
    return FC_OK;
}

/* As zero_to_fp32 checks it: but for the alignment the masters of a group are its parameters. */
static fc_code check_groups(const ds_building *b) {
    int64_t align = 2 * (int64_t)b->ranks;
    for (size_t k = 0; b->stage != 3 && k < b->nkeys; k++) {
        const ds_key *key = &b->keys[k];
        int64_t end = end_of_group(b, key->group);
        if (key->flat && (key->next + align - 1) / align != (end + align - 1) / align && key->name[0] == '\0') {
            return fc_fail(b->err, FC_ECORRUPT,
                           "%s: group %zu: the partitions have %" PRId64 " elements, the parameters %" PRId64,
                           b->files.directory, key->group, key->next, end);
        }
    }
    return FC_OK;
}

/* ---- all ranks ---- */

static fc_code read_rank(const rank_file *r) {
    fc_code rc = FC_OK;
    if (r->rank == 0) {
        for (size_t g = 0; rc == FC_OK && g < flat_groups(r->b); g++) {
            rc = read_keys(r, g);
        }
        rc = rc == FC_OK ? place_params(r) : rc;
        rc = rc == FC_OK ? add_targets(r) : rc;
    }
    if (rc == FC_OK) {
        rc = r->b->stage == 3 ? read_all_groups(r) : read_pieces(r);
    }
    fc_pv groups = fc_ds_get(r->f.p, r->base, "param_groups");
    return rc == FC_OK && r->rank == 0 ? fc_ds_add_others(r->b, &r->f, r->state_dict, groups) : rc;
}

fc_code fc_ds_read_optimizer(ds_building *b) {
    fc_code rc = FC_OK;
    b->devices = malloc((b->ranks + 1) * sizeof *b->devices);
    if (!b->devices) {
        return fc_ds_no_memory(b);
    }
    for (size_t i = 0; i < b->ranks; i++) {
        b->devices[i] = -1;
    }
    for (size_t i = 0; rc == FC_OK && i < b->ranks; i++) {
        rank_file r;
        rc = open_rank(b, i, &r);
        if (rc == FC_OK) {
            rc = read_rank(&r);
            fc_torch_file_close(&r.f);
            rc = rc == FC_OK ? fc_progress_count(b->progress, 1, b->err) : rc;
        }
    }
    return rc == FC_OK ? check_groups(b) : rc;
}

fc_code fc_ds_read_stage(ds_building *b) {
    rank_file r;
    if (b->files.universal) {
        return fc_ds_read_universal_stage(b);
    }
    b->ranks = b->files.noptims;
    if (b->ranks == 0) {
        return FC_OK;
    }
    fc_code rc = open_rank(b, 0, &r);
    if (rc == FC_OK) {
        fc_torch_file_close(&r.f);
    }
    return rc;
}
