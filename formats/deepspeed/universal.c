/*
 * Reads universal checkpoints, which ds_to_universal.py derives from a step. The folder zero/ has one folder per
 * parameter, with one file for the master (fp32.pt) and one for each value of the optimizer; none is sharded. It also
 * has optimizer_state.pt. The model's files are copies of the originals. The names in the manifest are those of an
 * ordinary checkpoint.
 *
 * ZeRO-1 and 2: a file holds a dict whose `param` has the parameter's shape, or, for `step`, the value itself. Buffers
 * and frozen parameters have an fp32.pt as well. ZeRO-3: a file holds a flat tensor, and optimizer_state.pt the step.
 */
#include "deepspeed/stages.h"

#include "base/grow.h"
#include "checkpoint/path.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/path.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char folder[] = "zero";
static const char state_file[] = "zero/optimizer_state.pt";
static const char master[] = "fp32";

bool fc_ds_is_universal(const char *directory, fc_error *err) {
    char path[PATH_MAX];
    struct stat st;
    return snprintf(path, sizeof path, "%s/%s", directory, folder) < (int)sizeof path &&
           fc_path_exists(path, &st, err) && S_ISDIR(st.st_mode);
}

/* ---- the files ---- */

typedef struct listing {
    fc_arena *arena;
    const fc_ds_files *files;
    fc_ds_value *items; /* malloc'ed */
    size_t count, capacity;
    fc_error *err;
} listing;

static fc_code list_value_file(listing *l, const char *param, const char *name, size_t length) {
    const char *key = fc_arena_strndup(l->arena, name, length);
    FC_NEED(key && fc_grow(&l->items, &l->capacity, l->count + 1, sizeof *l->items), l->err, l->files->directory);
    l->items[l->count++] = (fc_ds_value){param, key, 0};
    return FC_OK;
}

/* Lists the files <key>.pt of one parameter. */
static fc_code list_param(listing *l, const char *name) {
    char path[PATH_MAX];
    bool fits = snprintf(path, sizeof path, "%s/%s/%s", l->files->directory, folder, name) < (int)sizeof path;
    fc_dir dir;
    struct stat st;
    if (!fits) {
        return fc_fail_errno(l->err, ENAMETOOLONG, "%s/%s/%s: cannot be listed", l->files->directory, folder, name);
    }
    if (fc_stat(path, &st) == 0 && !S_ISDIR(st.st_mode)) {
        return FC_OK;
    }
    const char *param = fc_arena_strndup(l->arena, name, strlen(name));
    FC_NEED(param, l->err, l->files->directory);
    FC_TRY(fc_dir_open(&dir, path, l->err));
    fc_code rc = FC_OK;
    for (const char *file; (file = fc_dir_next(&dir)) != NULL;) {
        size_t n = strlen(file);
        if (n > 3 && strcmp(file + n - 3, ".pt") == 0) {
            FC_TRY_GOTO(list_value_file(l, param, file, n - 3), rc, out);
        }
    }
out:
    return fc_dir_close(&dir, rc, l->err);
}

static fc_code list_params(listing *l) {
    char path[PATH_MAX];
    bool fits = snprintf(path, sizeof path, "%s/%s", l->files->directory, folder) < (int)sizeof path;
    fc_dir dir;
    if (!fits) {
        return fc_fail_errno(l->err, ENAMETOOLONG, "%s/%s: cannot be listed", l->files->directory, folder);
    }
    fc_code rc;
    FC_TRY_GOTO(fc_dir_open(&dir, path, l->err), rc, out);
    for (const char *name; (name = fc_dir_next(&dir)) != NULL;) {
        FC_TRY_GOTO(list_param(l, name), rc, out);
    }
out:
    return fc_dir_close(&dir, rc, l->err);
}

/* By parameter, then by key with the master first. */
static int compare_value_params(const void *a, const void *b) {
    const fc_ds_value *x = a, *y = b;
    int order = strcmp(x->param, y->param);
    bool master_x = strcmp(x->key, master) == 0, master_y = strcmp(y->key, master) == 0;
    if (order != 0) {
        return order;
    }
    return master_x != master_y ? (int)master_y - (int)master_x : strcmp(x->key, y->key);
}

/* Appends the listed files to those of the model. */
static fc_code keep_files(const listing *l, fc_ds_files *files) {
    size_t first = files->nfiles, count = first + l->count + 1;
    fc_file *all = count <= UINT32_MAX ? fc_arena_calloc(l->arena, count, sizeof *all) : NULL;
    fc_ds_value *values = fc_arena_calloc(l->arena, l->count + 1, sizeof *values);
    FC_NEED(all && values, l->err, l->files->directory);
    memcpy(all, files->files, first * sizeof *all);
    for (size_t i = 0; i < l->count; i++) {
        values[i] = l->items[i];
        values[i].file = (uint32_t)(first + i);
        const char *name = fc_arena_printf(l->arena, "%s/%s/%s.pt", folder, values[i].param, values[i].key);
        FC_NEED(name && fc_file_in(l->arena, files->directory, name, &all[first + i]), l->err, l->files->directory);
    }
    FC_NEED(fc_file_in(l->arena, files->directory, state_file, &all[count - 1]), l->err, l->files->directory);
    files->optimizer = (uint32_t)(count - 1);
    files->files = all;
    files->nfiles = count;
    files->values = values;
    files->nvalues = l->count;
    return FC_OK;
}

fc_code fc_ds_find_universal(fc_arena *arena, fc_ds_files *files, fc_error *err) {
    listing l = {.arena = arena, .files = files, .err = err};
    if (files->noptims > 0) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: %s/ belongs to a universal checkpoint, but %s does not: two checkpoints are mixed here",
                       files->directory, folder, files->files[files->optims[0]].name);
    }
    fc_code rc;
    FC_TRY_GOTO(list_params(&l), rc, out);
    fc_sort_items(l.items, l.count, sizeof *l.items, compare_value_params);
    rc = keep_files(&l, files);
out:
    free(l.items);
    return rc;
}

/* The index of the first file of a parameter, or `nvalues`. */
static size_t first_of(const fc_ds_files *files, const char *name) {
    size_t low = 0;
    FC_BISECT(low, files->nvalues, middle, strcmp(files->values[middle].param, name) < 0);
    return low < files->nvalues && strcmp(files->values[low].param, name) == 0 ? low : files->nvalues;
}

bool fc_ds_has_universal(const fc_ds_files *files, const char *name) {
    return first_of(files, name) < files->nvalues;
}

/* ---- the values ---- */

static fc_code open_state(const fc_ds_builder *b, torch_file *f) {
    FC_TRY(fc_torch_open_one(b->checkpoint, b->files.optimizer, f, b->err));
    if (fc_pv_typeof(f->p->root) != FC_PV_DICT) {
        fc_fail(b->err, FC_ECORRUPT, "%s: the file does not hold a dict", f->path);
        fc_torch_file_close(f);
        return FC_ECORRUPT;
    }
    return FC_OK;
}

fc_code fc_ds_read_universal_stage(fc_ds_builder *b) {
    torch_file f;
    int64_t count = 0;
    FC_TRY(open_state(b, &f));
    fc_code rc;
    FC_TRY_GOTO(fc_ds_stage_of(b, &f, f.p->root, &b->stage), rc, out);
    if (b->stage == 3) {
        if (!fc_ds_int(f.p, fc_ds_get(f.p, f.p->root, "partition_count"), &count) || count < 1 || count > UINT32_MAX) {
            rc = fc_fail(b->err, FC_ECORRUPT, "%s: partition_count is missing", f.path);
            goto out;
        }
        b->ranks = (size_t)count;
    }
out:
    fc_torch_file_close(&f);
    return rc;
}

static bool same_shape(const fc_ds_param *param, const fc_torch_tensor *t) {
    bool same = param->ndim == t->ndim;
    for (int d = 0; same && d < t->ndim; d++) {
        same = param->shape[d] == t->sizes[d];
    }
    return same;
}

/* ZeRO-3: `v` is a flat tensor with all elements of the parameter. */
static fc_code add_flat(fc_ds_builder *b, const torch_file *f, const fc_path_element *path, size_t count,
                        const fc_ds_param *param, fc_pv v) {
    fc_torch_tensor flat;
    torch_extent *extent;
    FC_TRY(fc_ds_flat(b, f, "its tensor", v, &flat, &extent));
    if (flat.sizes[0] != param->numel) {
        return fc_fail(b->err, FC_ECORRUPT, "%s: the tensor has %lld elements, but parameter %.256s has %lld", f->path,
                       (long long)flat.sizes[0], param->name, (long long)param->numel);
    }
    const char *name = count == 2
                           ? fc_arena_printf(b->checkpoint->arena, "model.%s", param->name)
                           : fc_arena_printf(b->checkpoint->arena, "optim.state.%s.%s", param->name, path[3].key);
    fc_ds_tensor *t = name ? fc_ds_add_tensor(b, name, path, count) : NULL;
    FC_NEED(t, b->err, b->checkpoint->path);
    t->dtype = flat.dtype;
    t->ndim = param->ndim;
    t->shape = param->shape;
    t->numel = param->numel;
    return t->numel > 0 ? fc_ds_add_run(b, t, extent, 0, 0, t->numel, FC_NO_RANK) : FC_OK;
}

/* Adds the value in one file. */
static fc_code add_universal_value(fc_ds_builder *b, const torch_file *f, const fc_ds_value *value,
                                   const fc_ds_param *param) {
    const fc_path_element optim[4] = {{.key = "optim"}, {.key = "state"}, {.key = value->param}, {.key = value->key}};
    const fc_path_element model[2] = {{.key = "model"}, {.key = value->param}};
    bool is_master = strcmp(value->key, master) == 0;
    const fc_path_element *path = is_master ? model : optim;
    size_t count = is_master ? 2 : 4;
    fc_pv inner = fc_ds_get(f->p, f->p->root, "param"), v = inner ? inner : f->p->root;
    fc_torch_tensor t;
    if (!fc_torch_is_tensor(f->p, v)) {
        return is_master ? fc_fail(b->err, FC_ECORRUPT, "%s: the file does not hold a tensor", f->path)
                         : fc_ds_add_value(b, f, path, count, v);
    }
    FC_TRY_CONTEXT(fc_torch_tensor_decode(f->p, v, &t, b->err), b->err, "%s", f->path);
    bool whole = !param || inner || t.ndim != 1; /* not a flat tensor of the parameter's elements */
    if (!whole && !same_shape(param, &t)) {
        return add_flat(b, f, path, count, param, v);
    }
    if (param && (inner || is_master) && !same_shape(param, &t)) {
        return fc_fail(b->err, FC_ECORRUPT, "%s: its shape differs from that of parameter %.256s in %s", f->path,
                       param->name, b->files.files[b->files.models[0]].name);
    }
    return fc_ds_add_value(b, f, path, count, v);
}

fc_code fc_ds_add_universal(fc_ds_builder *b, const char *name, const fc_ds_param *param) {
    const fc_ds_files *files = &b->files;
    size_t i = first_of(files, name);
    if (i == files->nvalues || strcmp(files->values[i].key, master) != 0) {
        return fc_fail(b->err, FC_ECORRUPT, "%s/%s/%.256s/%s.pt: the file is missing; run ds_to_universal.py again",
                       files->directory, folder, name, master);
    }
    for (; i < files->nvalues && strcmp(files->values[i].param, name) == 0; i++) {
        torch_file f;
        FC_TRY(fc_torch_open_one(b->checkpoint, files->values[i].file, &f, b->err));
        const fc_code rc = add_universal_value(b, &f, &files->values[i], param);
        fc_torch_file_close(&f);
        FC_TRY(rc);
        FC_TRY(fc_progress_count(b->progress, 1, b->err));
    }
    return FC_OK;
}

/* ZeRO-3: values that the optimizer keeps per group, such as the step, are added for each parameter. */
static fc_code add_steps(fc_ds_builder *b, const torch_file *f) {
    fc_pv inner = fc_ds_get(f->p, f->p->root, "optimizer_state_dict");
    torch_dict states;
    FC_NEED(fc_torch_dict_begin(&states, f->p, fc_ds_get(f->p, inner, "state")), b->err, b->checkpoint->path);
    fc_pv state = fc_torch_dict_find_number(&states, 0);
    fc_torch_dict_free(&states);
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(state) == FC_PV_DICT ? fc_pickle_items(f->p, state, &n) : NULL;
    FC_TRY(fc_ds_check_keys(b, f, n / 2));
    for (size_t k = 0; k + 1 < n; k += 2) {
        fc_torch_tensor t = {0};
        fc_path_element key;
        FC_TRY(fc_torch_key_element(f, pairs[k], b->checkpoint->arena, &key, b->err));
        if (fc_torch_is_tensor(f->p, pairs[k + 1])) {
            FC_TRY_CONTEXT(fc_torch_tensor_decode(f->p, pairs[k + 1], &t, b->err), b->err, "%s", f->path);
        }
        for (size_t i = 0; t.ndim != 1 && i < b->nparams; i++) {
            const fc_path_element path[4] = {{.key = "optim"}, {.key = "state"}, {.key = b->params[i].name}, key};
            FC_TRY(fc_ds_add_value(b, f, path, 4, pairs[k + 1]));
        }
    }
    return FC_OK;
}

fc_code fc_ds_read_universal_state(fc_ds_builder *b) {
    torch_file f;
    fc_code rc = FC_OK;
    FC_TRY(open_state(b, &f));
    if (b->stage == 3) {
        FC_TRY_GOTO(add_steps(b, &f), rc, out);
    }
    rc = fc_ds_add_others(b, &f, f.p->root, fc_ds_get(f.p, f.p->root, "param_groups"));
out:
    fc_torch_file_close(&f);
    return rc;
}
