/*
 * Adds everything else in the optimizer's file of rank 0: the hyperparameters of the groups and ZeRO's own values.
 */
#include "deepspeed/stages.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "torch/file/name_list.h"

#include <string.h>

/* The checkpoint, and the file that is read. */
typedef struct source {
    fc_ds_builder *b;
    const torch_file *f;
} source;

/* The numbers of a group's flat tensors are replaced by the names of its parameters. */
static fc_code add_names(const source *r, size_t group, const fc_path_element *path) {
    fc_ds_builder *b = r->b;
    torch_name_list names;
    fc_torch_name_list_begin(&names);
    for (size_t i = b->group_params[group]; i < b->group_params[group + 1]; i++) {
        fc_torch_name_list_add(&names, b->params[i].name);
    }
    fc_code rc;
    FC_TRY_GOTO(fc_torch_name_list_end(&names, r->f, b->err), rc, out);
    rc = fc_ds_add_value(b, &names.f, path, 4, names.f.p->root);
out:
    fc_torch_name_list_free(&names);
    return rc;
}

static fc_code add_group(const source *r, size_t group, fc_pv v, bool named) {
    fc_ds_builder *b = r->b;
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(v) == FC_PV_DICT ? fc_pickle_items(r->f->p, v, &n) : NULL;
    const char *index = fc_arena_printf(b->checkpoint->arena, "%zu", group);
    FC_NEED(index, b->err, b->checkpoint->path);
    for (size_t i = 0; i + 1 < n; i += 2) {
        fc_path_element path[4] = {{.key = "optim"}, {.key = "param_groups"}, {.key = index, .is_index = true}};
        FC_TRY(fc_torch_key_element(r->f, pairs[i], b->checkpoint->arena, &path[3], b->err));
        if (named && strcmp(path[3].key, "params") == 0) {
            FC_TRY(add_names(r, group, path));
        } else {
            FC_TRY(fc_ds_add_value(b, r->f, path, 4, pairs[i + 1]));
        }
    }
    return FC_OK;
}

static fc_code add_groups(const source *r, fc_pv v) {
    size_t n;
    const fc_pv *groups = fc_ds_list(r->f->p, v, &n);
    for (size_t g = 0; groups && g < n; g++) {
        FC_TRY(add_group(r, g, groups[g], n == r->b->ngroups));
    }
    return FC_OK;
}

/* Adds the members of a dict except those in `read`, which are read elsewhere. */
static fc_code add_rest(const source *r, fc_pv dict, const char *const *read, const fc_path_element *prefix,
                        size_t count) {
    size_t n;
    const fc_pv *pairs = fc_pickle_items(r->f->p, dict, &n);
    fc_path_element path[4];
    memcpy(path, prefix, count * sizeof *path);
    for (size_t i = 0; i + 1 < n; i += 2) {
        FC_TRY(fc_torch_key_element(r->f, pairs[i], r->b->checkpoint->arena, &path[count], r->b->err));
        if (!fc_has_text(read, path[count].key)) {
            FC_TRY(fc_ds_add_values(r->b, r->f, path, count + 1, pairs[i + 1]));
        }
    }
    return FC_OK;
}

fc_code fc_ds_add_others(fc_ds_builder *b, const torch_file *f, fc_pv state_dict, fc_pv groups) {
    static const char *const outer[] = {"optimizer_state_dict", "ds_config", "ds_version", NULL};
    static const char *const inner[] = {"optimizer_state_dict",
                                        "base_optimizer_state",
                                        "single_partition_of_fp32_groups",
                                        "fp32_flat_groups",
                                        "zero_stage",
                                        "partition_count",
                                        "group_paddings",
                                        "param_alignment_paddings",
                                        "param_slice_mappings",
                                        "param_groups",
                                        "ds_version",
                                        NULL};
    static const fc_path_element prefix[2] = {{.key = "deepspeed"}, {.key = "zero"}};
    const source s = {b, f};
    FC_TRY(add_groups(&s, groups));
    FC_TRY(add_rest(&s, state_dict, inner, prefix, 2));
    return state_dict != f->p->root ? add_rest(&s, f->p->root, outer, prefix, 1) : FC_OK;
}
