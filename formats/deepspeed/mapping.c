/*
 * Finds files of ranks that were renamed. Files of ZeRO-1 and 2 do not record their rank, but they record the position
 * of each parameter in their partitions (param_slice_mappings).
 */
#include "deepspeed/stages.h"

#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Reads member `key` of a fragment_address, a dataclass that is pickled with BUILD. */
static bool read_address(const fc_pickle *p, fc_pv v, const char *key, int64_t *out) {
    fc_pv state = fc_pv_typeof(v) == FC_PV_CALL ? fc_pickle_state(p, v) : 0;
    return fc_ds_int(p, fc_ds_get(p, state, key), out);
}

static int compare_params(const void *pa, const void *pb) {
    const fc_ds_param *const *a = pa, *const *b = pb;
    const int order = ((*a)->group > (*b)->group) - ((*a)->group < (*b)->group);
    return order ? order : strcmp((*a)->name, (*b)->name);
}

fc_code fc_ds_sort_params(fc_ds_builder *b) {
    b->by_name = malloc((b->nparams + 1) * sizeof *b->by_name);
    FC_NEED(b->by_name, b->err, b->checkpoint->path);
    for (size_t i = 0; i < b->nparams; i++) {
        b->by_name[i] = &b->params[i];
    }
    fc_sort_items(b->by_name, b->nparams, sizeof *b->by_name, compare_params);
    return FC_OK;
}

/* Finds the parameter `name` of a group. */
static const fc_ds_param *find_param(const fc_ds_builder *b, size_t group, const char *name) {
    const fc_ds_param wanted = {.name = name, .group = group}, *key = &wanted;
    const fc_ds_param **found = fc_find_item(&key, b->by_name, b->nparams, sizeof *b->by_name, compare_params);
    return found ? *found : NULL;
}

fc_code fc_ds_check_mapping(const fc_ds_builder *b, const torch_file *f, fc_pv state_dict, size_t rank, size_t group,
                            int64_t start, int64_t count) {
    const fc_pickle *p = f->p;
    size_t ngroups, n = 0;
    const fc_pv *groups = fc_ds_list(p, fc_ds_get(p, state_dict, "param_slice_mappings"), &ngroups);
    const fc_pv *pairs = groups && group < ngroups && fc_pv_typeof(groups[group]) == FC_PV_DICT
                             ? fc_pickle_items(p, groups[group], &n)
                             : NULL;
    for (size_t i = 0; i + 1 < n; i += 2) {
        size_t length = 0;
        const char *name = fc_pv_typeof(pairs[i]) == FC_PV_STR ? fc_pickle_bytes(p, pairs[i], &length) : "";
        const fc_ds_param *param = find_param(b, group, name);
        int64_t there, numel;
        if (!param || !read_address(p, pairs[i + 1], "start", &there) ||
            !read_address(p, pairs[i + 1], "numel", &numel)) {
            continue; /* written by a version with another format */
        }
        int64_t low = start > param->start ? start : param->start, end = param->start + param->numel;
        int64_t high = start + count < end ? start + count : end;
        if (low < high && low - start == there && high - low == numel) {
            continue;
        }
        return fc_fail(b->err, FC_ECORRUPT,
                       "%s: the file name is that of rank %zu, but the partition holds %" PRId64
                       " elements of %.256s from %" PRId64
                       " on, which belong to another rank: files of ranks were renamed or swapped",
                       f->path, rank, numel, param->name, there);
    }
    return FC_OK;
}
