/*
 * Reads the files *_model_states.pt: names and shapes of the trained parameters, buffers, frozen parameters, other
 * names of shared parameters, and everything else that a run saves there (steps, scheduler, values that the caller
 * added).
 */
#include "deepspeed/stages.h"

#include "base/grow.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

/* The members of rank 0's file. */
typedef struct model {
    fc_ds_builder *b;
    const torch_file *f;
    fc_pv module, shapes, buffers, frozen, shared;
    torch_dict values, fragments; /* of the dicts `module` and `frozen_param_fragments` */
    const char **known;           /* malloc'ed, sorted: names of parameters that are not read from `module` */
    size_t nknown, capacity;
} model;

static fc_code remember(model *m, const char *name) {
    FC_NEED(fc_grow(&m->known, &m->capacity, m->nknown + 1, sizeof *m->known), m->b->err, m->b->checkpoint->path);
    m->known[m->nknown++] = name;
    return FC_OK;
}

static bool is_known(const model *m, const char *name) {
    return fc_find_text(m->known, m->nknown, name) < m->nknown;
}

/* ---- shapes ---- */

static fc_code read_shape(const model *m, const char *name, fc_pv v, int *ndim, const int64_t **shape, int64_t *numel) {
    size_t n;
    const fc_pv *items = fc_ds_list(m->f->p, v, &n);
    int64_t *sizes = fc_arena_calloc(m->b->checkpoint->arena, n <= FC_MAX_DIMS ? n : 0, sizeof *sizes);
    FC_NEED(sizes, m->b->err, m->b->checkpoint->path);
    bool good = n <= FC_MAX_DIMS && (items || fc_pv_typeof(v) == FC_PV_SIZE);
    for (size_t i = 0; good && items && i < n; i++) {
        good = fc_pickle_int(m->f->p, items[i], &sizes[i]) && sizes[i] >= 0;
    }
    if (!good || !fc_numel((int)n, sizes, numel) || !fc_torch_shape_fits(FC_F64, (int)n, sizes)) {
        return fc_fail(m->b->err, FC_ECORRUPT, "%s: parameter %.256s: its shape is invalid", m->f->path, name);
    }
    *ndim = (int)n;
    *shape = sizes;
    return FC_OK;
}

static size_t count_params(const model *m, const fc_pv *groups, size_t ngroups) {
    size_t count = 0, n;
    for (size_t g = 0; g < ngroups; g++) {
        if (fc_pv_typeof(groups[g]) == FC_PV_DICT) {
            fc_pickle_items(m->f->p, groups[g], &n);
            count += n / 2;
        }
    }
    return count;
}

static fc_code read_group(model *m, fc_pv group, size_t number) {
    fc_ds_builder *b = m->b;
    size_t n;
    if (fc_pv_typeof(group) != FC_PV_DICT) {
        return fc_fail(b->err, FC_ECORRUPT, "%s: a group of param_shapes is not a dict", m->f->path);
    }
    const fc_pv *pairs = fc_pickle_items(m->f->p, group, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        fc_ds_param *param = &b->params[b->nparams++];
        param->group = number;
        param->name = fc_ds_text(b, m->f, pairs[i]);
        if (!param->name) {
            return b->err->code;
        }
        FC_TRY(read_shape(m, param->name, pairs[i + 1], &param->ndim, &param->shape, &param->numel));
        FC_TRY(remember(m, param->name));
    }
    return FC_OK;
}

static fc_code read_params(model *m) {
    fc_ds_builder *b = m->b;
    size_t ngroups;
    const fc_pv *groups = fc_ds_list(m->f->p, m->shapes, &ngroups);
    if (!groups && fc_pv_typeof(m->shapes) == FC_PV_DICT) { /* older versions write one dict instead of one per group */
        groups = &m->shapes;
        ngroups = 1;
    }
    if (!groups) {
        return fc_fail(b->err, FC_ECORRUPT, "%s: param_shapes is missing; ZeRO's partitions cannot be read without it",
                       m->f->path);
    }
    b->params = fc_arena_calloc(b->checkpoint->arena, count_params(m, groups, ngroups), sizeof *b->params);
    b->group_params = fc_arena_calloc(b->checkpoint->arena, ngroups + 1, sizeof *b->group_params);
    b->ngroups = ngroups;
    FC_NEED(b->params && b->group_params, b->err, b->checkpoint->path);
    for (size_t g = 0; g < ngroups; g++) {
        FC_TRY(read_group(m, groups[g], g));
        b->group_params[g + 1] = b->nparams;
    }
    return FC_OK;
}

/* ---- values that were not trained ---- */

static fc_code add_model_value(model *m, const char *name, fc_pv v) {
    const fc_path_element path[2] = {{.key = "model"}, {.key = name}};
    return fc_ds_add_value(m->b, m->f, path, 2, v);
}

static fc_code read_buffers(model *m) {
    size_t n;
    const fc_pv *names = fc_ds_list(m->f->p, m->buffers, &n);
    for (size_t i = 0; i < n; i++) {
        const char *name = fc_ds_text(m->b, m->f, names[i]);
        if (!name) {
            return m->b->err->code;
        }
        fc_pv v = fc_torch_dict_find(&m->values, name);
        if (v) { /* buffers with persistent=False are listed but not saved */
            FC_TRY(add_model_value(m, name, v));
            FC_TRY(remember(m, name));
        }
    }
    return FC_OK;
}

/* A frozen parameter of ZeRO-3 is sharded over the files of all ranks. */
static fc_code add_frozen(model *m, const char *name, fc_pv shape) {
    const fc_path_element path[2] = {{.key = "model"}, {.key = name}};
    const char *full = fc_arena_printf(m->b->checkpoint->arena, "model.%s", name);
    fc_ds_tensor *t = full ? fc_ds_add_tensor(m->b, full, path, 2) : NULL;
    fc_torch_tensor fragment;
    FC_NEED(t, m->b->err, m->b->checkpoint->path);
    FC_TRY_CONTEXT(fc_torch_tensor_decode(m->f->p, fc_torch_dict_find(&m->fragments, name), &fragment, m->b->err),
                   m->b->err, "%s: frozen parameter %.256s", m->f->path, name);
    t->dtype = fragment.dtype;
    return read_shape(m, name, shape, &t->ndim, &t->shape, &t->numel);
}

static fc_code read_frozen(model *m, size_t *first) {
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(m->frozen) == FC_PV_DICT ? fc_pickle_items(m->f->p, m->frozen, &n) : NULL;
    *first = m->b->ntensors;
    for (size_t i = 0; i + 1 < n; i += 2) {
        const char *name = fc_ds_text(m->b, m->f, pairs[i]);
        if (!name) {
            return m->b->err->code;
        }
        FC_TRY(remember(m, name));
        if (m->b->stage == 3) {
            FC_TRY(add_frozen(m, name, pairs[i + 1]));
            continue;
        }
        fc_pv v = fc_torch_dict_find(&m->fragments, name);
        if (!v) {
            return fc_fail(m->b->err, FC_ECORRUPT, "%s: frozen parameter %.256s has no data", m->f->path, name);
        }
        FC_TRY(add_model_value(m, name, v));
    }
    return FC_OK;
}

/* Adds one rank's shards of the frozen parameters, which are tensors [first, end). */
static fc_code read_fragments(fc_ds_builder *b, size_t rank, size_t first, size_t end) {
    uint32_t file = b->files.models[rank];
    torch_file f;
    fc_code rc = FC_OK;
    FC_TRY(fc_torch_open_one(b->checkpoint, file, &f, b->err));
    torch_dict fragments;
    FC_TRY_GOTO(fc_torch_dict_begin(&fragments, f.p, fc_ds_get(f.p, f.p->root, "frozen_param_fragments"))
                    ? FC_OK
                    : fc_ds_no_memory(b),
                rc, out);
    for (size_t i = first; i < end; i++) {
        fc_ds_tensor *t = &b->tensors[i];
        const char *name = t->path.elements[1].key;
        int64_t partition = t->numel / (int64_t)b->ranks + (t->numel % (int64_t)b->ranks != 0);
        int64_t start = partition * (int64_t)rank, count = t->numel - start;
        fc_torch_tensor flat;
        torch_extent *extent;
        count = count < partition ? count : partition; /* negative if the rank has only padding */
        FC_TRY_GOTO(fc_ds_flat(b, &f, name, fc_torch_dict_find(&fragments, name), &flat, &extent), rc, out);
        if (flat.sizes[0] < count || flat.dtype != t->dtype) {
            rc = fc_fail(b->err, FC_ECORRUPT,
                         "%s: frozen parameter %.256s: its shard is too small or has another dtype", f.path, name);
            goto out;
        }
        if (count > 0) {
            FC_TRY_GOTO(fc_ds_add_run(b, t, extent, 0, start, count, (uint32_t)rank), rc, out);
        }
    }
out:
    fc_torch_dict_free(&fragments);
    fc_torch_file_close(&f);
    return rc;
}

static fc_code remember_shared(model *m) {
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(m->shared) == FC_PV_DICT ? fc_pickle_items(m->f->p, m->shared, &n) : NULL;
    for (size_t i = 0; i + 1 < n; i += 2) {
        const char *name = fc_ds_text(m->b, m->f, pairs[i]);
        if (!name) {
            return m->b->err->code;
        }
        FC_TRY(remember(m, name));
    }
    return FC_OK;
}

/* ---- the rest ---- */

/* Adds the values of the module that were not added above. Of trained parameters the module has 16-bit copies, or empty
   tensors (ZeRO-3). */
static fc_code read_rest(model *m) {
    fc_ds_builder *b = m->b;
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(m->module) == FC_PV_DICT ? fc_pickle_items(m->f->p, m->module, &n) : NULL;
    for (size_t i = 0; i + 1 < n; i += 2) {
        const char *name = fc_ds_text(b, m->f, pairs[i]);
        fc_torch_tensor t = {0};
        if (!name) {
            return b->err->code;
        }
        if (is_known(m, name)) {
            continue;
        }
        bool tensor = fc_torch_is_tensor(m->f->p, pairs[i + 1]);
        if (tensor) {
            FC_TRY_CONTEXT(fc_torch_tensor_decode(m->f->p, pairs[i + 1], &t, b->err), b->err, "%s", m->f->path);
        }
        if (tensor && b->stage == 3 && t.ndim == 1 && t.sizes[0] == 0) {
            b->absent = b->nabsent++ ? b->absent : name;
        } else {
            FC_TRY(add_model_value(m, name, pairs[i + 1]));
        }
    }
    return FC_OK;
}

/* Adds the members of the file that do not belong to the model. */
static fc_code read_others(model *m) {
    static const char *const read[] = {
        "module", "buffer_names", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
        NULL};
    size_t n;
    const fc_pv *pairs = fc_pickle_items(m->f->p, m->f->p->root, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        fc_path_element path[2] = {{.key = "deepspeed"}};
        FC_TRY(fc_torch_key_element(m->f, pairs[i], m->b->checkpoint->arena, &path[1], m->b->err));
        const char *name = path[1].key;
        bool taken = false;
        for (size_t k = 0; !taken && read[k]; k++) {
            taken = strcmp(read[k], name) == 0;
        }
        if (!taken && strcmp(name, "optimizer") == 0 && fc_pv_typeof(pairs[i + 1]) == FC_PV_DICT) {
            const fc_path_element optim = {.key = "optim"};
            FC_TRY(fc_ds_add_values(m->b, m->f, &optim, 1, pairs[i + 1]));
        } else if (!taken) {
            FC_TRY(fc_ds_add_values(m->b, m->f, path, 2, pairs[i + 1]));
        }
    }
    return FC_OK;
}

static fc_code read_zero(model *m) {
    size_t first = 0, end;
    FC_TRY(read_params(m));
    FC_TRY(read_buffers(m));
    FC_TRY(read_frozen(m, &first));
    end = m->b->ntensors;
    FC_TRY(remember_shared(m));
    if (m->b->stage == 3 && m->b->files.nmodels != m->b->ranks) {
        return fc_fail(m->b->err, FC_ECORRUPT, "%s: there are %zu %s, but %zu files *_model_states.pt",
                       m->b->files.directory, m->b->ranks, m->b->files.universal ? "ranks" : "files *_optim_states.pt",
                       m->b->files.nmodels);
    }
    for (size_t r = 0; m->b->stage == 3 && first < end && r < m->b->ranks; r++) {
        FC_TRY(read_fragments(m->b, r, first, end));
        FC_TRY(fc_progress_count(m->b->progress, 1, m->b->err));
    }
    fc_sort_texts(m->known, m->nknown);
    return read_rest(m);
}

/* ---- universal checkpoints ---- */

/* Adds parameters that the model's file does not list as trained. With one model-parallel rank those in the module are
   only copies of values that were read already, rounded to float32. With several ranks nothing has been read yet. */
static fc_code read_universal_rest(model *m) {
    const fc_ds_files *files = &m->b->files;
    bool sharded = files->model_parallel > 1;
    for (size_t i = 0; i < files->nvalues; i++) {
        const char *name = files->values[i].param;
        bool again = i > 0 && strcmp(name, files->values[i - 1].param) == 0;
        if (!again && !is_known(m, name) && (sharded || !fc_torch_dict_find(&m->values, name))) {
            FC_TRY(fc_ds_add_universal(m->b, name, NULL));
        }
    }
    return FC_OK;
}

/* Tensors that only the files of model-parallel ranks hold cannot be joined. */
static fc_code check_sharded_module(const model *m) {
    const fc_ds_files *files = &m->b->files;
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(m->module) == FC_PV_DICT ? fc_pickle_items(m->f->p, m->module, &n) : NULL;
    for (size_t i = 0; i + 1 < n; i += 2) {
        const char *name = fc_ds_text(m->b, m->f, pairs[i]);
        if (!name) {
            return m->b->err->code;
        }
        if (fc_torch_is_tensor(m->f->p, pairs[i + 1]) && !is_known(m, name) && !fc_ds_has_universal(files, name)) {
            return fc_fail(m->b->err, FC_EUNSUPPORTED,
                           "%s: tensor %.256s: only the files of %zu model-parallel ranks hold it, and they do not "
                           "record how it is "
                           "sharded",
                           m->f->path, name, files->model_parallel);
        }
    }
    return FC_OK;
}

static fc_code read_universal(model *m) {
    fc_ds_builder *b = m->b;
    if (b->files.model_parallel > 1) {
        FC_TRY(remember_shared(m));
        fc_sort_texts(m->known, m->nknown);
        FC_TRY(check_sharded_module(m));
    } else {
        FC_TRY(read_zero(m));
    }
    for (size_t i = 0; i < b->nparams; i++) {
        FC_TRY(fc_ds_add_universal(b, b->params[i].name, &b->params[i]));
    }
    FC_TRY(read_universal_rest(m));
    return fc_ds_read_universal_state(b);
}

static fc_code read_ordinary(model *m) {
    if (m->b->stage > 0) {
        FC_TRY(read_zero(m));
    } else {
        FC_TRY(read_rest(m));
    }
    return fc_ds_read_optimizer(m->b);
}

/* ---- the checkpoint ---- */

static fc_code read_model_parts(model *m) {
    const fc_pickle *p = m->f->p;
    m->module = fc_ds_get(p, p->root, "module");
    m->shapes = fc_ds_get(p, p->root, "param_shapes");
    m->buffers = fc_ds_get(p, p->root, "buffer_names");
    m->frozen = fc_ds_get(p, p->root, "frozen_param_shapes");
    m->shared = fc_ds_get(p, p->root, "shared_params");
    if (fc_pv_typeof(m->module) != FC_PV_DICT && m->b->files.model_parallel == 1) {
        return fc_fail(m->b->err, FC_ECORRUPT, "%s: 'module' is missing: this is not a file of a DeepSpeed checkpoint",
                       m->f->path);
    }
    FC_NEED(fc_torch_dict_begin(&m->values, p, m->module) &&
                fc_torch_dict_begin(&m->fragments, p, fc_ds_get(p, p->root, "frozen_param_fragments")),
            m->b->err, m->b->checkpoint->path);
    if (m->b->files.universal) {
        FC_TRY(read_universal(m));
    } else {
        FC_TRY(read_ordinary(m));
    }
    if (m->b->stage > 0) {
        FC_TRY(fc_ds_add_shared_names(m->b, m->f, m->shared));
    }
    return read_others(m);
}

fc_code fc_ds_read_model(fc_ds_builder *b) {
    uint32_t file = b->files.models[0];
    torch_file f;
    model m = {.b = b, .f = &f};
    FC_TRY(fc_torch_open_one(b->checkpoint, file, &f, b->err));
    fc_code rc = read_model_parts(&m);
    fc_torch_file_close(&f);
    fc_torch_dict_free(&m.values);
    fc_torch_dict_free(&m.fragments);
    free(m.known);
    return rc;
}
