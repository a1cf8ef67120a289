/*
 * What the optimizer's file of rank 0 holds besides flat tensors: hyperparameters of the groups, and ZeRO's own values.
 * From its pickle to objects of the manifest.
 */
#include "base/try.h"
#include "deepspeed/deepspeed.h"
#include "torch/name_list.h"

#include <string.h>

/* The file that it comes from. */
typedef struct rest {
    ds_building *b;
    const torch_file *f;
} rest;

/* The names of a group's parameters instead of the numbers of its flat tensors. */
static fc_code add_names(const rest *r, size_t group, const fc_path_element *path) {
    ds_building *b = r->b;
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

static fc_code add_group(const rest *r, size_t group, fc_pv v, bool named) {
    ds_building *b = r->b;
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(v) == FC_PV_DICT ? fc_pickle_items(r->f->p, v, &n) : NULL;
    const char *index = fc_arena_printf(b->checkpoint->arena, "%zu", group);
    fc_code rc = index ? FC_OK : fc_ds_no_memory(b);
    for (size_t i = 0; rc == FC_OK && i + 1 < n; i += 2) {
        fc_path_element path[4] = {{.key = "optim"}, {.key = "param_groups"}, {.key = index, .is_index = true}};
        rc = fc_torch_key_element(r->f, pairs[i], b->checkpoint->arena, &path[3], b->err);
        if (rc == FC_OK) {
            rc = named && strcmp(path[3].key, "params") == 0 ? add_names(r, group, path)
                                                             : fc_ds_add_value(b, r->f, path, 4, pairs[i + 1]);
        }
    }
    return rc;
}

static fc_code add_groups(const rest *r, fc_pv v) {
    size_t n;
    const fc_pv *groups = fc_ds_list(r->f->p, v, &n);
    for (size_t g = 0; groups && g < n; g++) {
        FC_TRY(add_group(r, g, groups[g], n == r->b->ngroups));
    }
    return FC_OK;
}

static bool is_among(const char *const *names, const char *name) {
    while (*names && strcmp(*names, name) != 0) {
        names++;
    }
    return *names != NULL;
}

/* The members of a dict that are not read otherwise. */
static fc_code add_rest(const rest *r, fc_pv dict, const char *const *read, const fc_path_element *prefix,
                        size_t count) {
    size_t n;
    const fc_pv *pairs = fc_pickle_items(r->f->p, dict, &n);
    fc_path_element path[4];
    fc_code rc = FC_OK;
    memcpy(path, prefix, count * sizeof *path);
    for (size_t i = 0; rc == FC_OK && i + 1 < n; i += 2) {
        rc = fc_torch_key_element(r->f, pairs[i], r->b->checkpoint->arena, &path[count], r->b->err);
        if (rc == FC_OK && !is_among(read, path[count].key)) {
            rc = fc_ds_add_values(r->b, r->f, path, count + 1, pairs[i + 1]);
        }
    }
    return rc;
}

fc_code fc_ds_add_others(ds_building *b, const torch_file *f, fc_pv state_dict, fc_pv groups) {
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
    const rest r = {b, f};
    fc_code rc = add_groups(&r, groups);
    rc = rc == FC_OK ? add_rest(&r, state_dict, inner, prefix, 2) : rc;
    return rc == FC_OK && state_dict != f->p->root ? add_rest(&r, f->p->root, outer, prefix, 1) : rc;
}
