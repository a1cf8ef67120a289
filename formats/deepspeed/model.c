/*
 * The files *_model_states.pt: names and shapes of what was trained, buffers, frozen parameters, other names of shared
 * ones, and everything else that a run keeps (steps, scheduler, what the caller added), as objects.
 */
#include "deepspeed/deepspeed.h"

#include "base/grow.h"
#include "base/text.h"
#include "base/try.h"

#include <stdlib.h>
#include <string.h>

/* What the file of rank 0 says. */
typedef struct model {
    ds_building *b;
    const torch_file *f;
    fc_pv module, shapes, buffers, frozen, fragments, shared;
    const char **known; /* malloc'ed, sorted: names whose values are found elsewhere than in `module` */
    size_t nknown, capacity;
} model;

/* A key as text. NULL, with a message, for what is no plain text. */
static const char *text_of(ds_building *b, const torch_file *f, fc_pv v) {
    size_t n = 0;
    const char *text = fc_pv_typeof(v) == FC_PV_STR ? fc_pickle_bytes(f->p, v, &n) : NULL;
    if (!text || !fc_is_plain_text(text, n)) {
        fc_fail(b->err, FC_ECORRUPT, "%s: a name of a parameter is no text", f->path);
        return NULL;
    }
    const char *copy = fc_arena_strndup(b->checkpoint->arena, text, n);
    if (!copy) {
        fc_ds_no_memory(b);
    }
    return copy;
}

static fc_code failed(const ds_building *b) {
    return b->err ? b->err->code : FC_ECORRUPT;
}

static fc_code remember(model *m, const char *name) {
    if (!fc_grow(&m->known, &m->capacity, m->nknown + 1, sizeof *m->known)) {
        return fc_ds_no_memory(m->b);
    }
    m->known[m->nknown++] = name;
    return FC_OK;
}

static int by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static bool is_known(const model *m, const char *name) {
    return m->nknown > 0 && bsearch(&name, m->known, m->nknown, sizeof *m->known, by_text);
}

/* ---- shapes ---- */

static fc_code read_shape(const model *m, const char *name, fc_pv v, int *ndim, const int64_t **shape, int64_t *numel) {
    size_t n;
    const fc_pv *items = fc_ds_list(m->f->p, v, &n);
    int64_t *sizes = n <= FC_MAX_DIMS ? fc_arena_calloc(m->b->checkpoint->arena, n, sizeof *sizes) : NULL;
    bool good = sizes && (items || fc_pv_typeof(v) == FC_PV_SIZE);
    for (size_t i = 0; good && items && i < n; i++) {
        good = fc_pickle_int(m->f->p, items[i], &sizes[i]) && sizes[i] >= 0;
    }
    if (!good || !fc_numel((int)n, sizes, numel) || !fc_torch_shape_fits(FC_F64, (int)n, sizes)) {
        return fc_fail(m->b->err, FC_ECORRUPT, "%s: parameter %.256s: its shape makes no sense", m->f->path, name);
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
    ds_building *b = m->b;
    size_t n;
    if (fc_pv_typeof(group) != FC_PV_DICT) {
        return fc_fail(b->err, FC_ECORRUPT, "%s: param_shapes has a group that is no dict", m->f->path);
    }
    const fc_pv *pairs = fc_pickle_items(m->f->p, group, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        ds_param *param = &b->params[b->nparams++];
        param->group = number;
        param->name = text_of(b, m->f, pairs[i]);
        fc_code rc = param->name ? read_shape(m, param->name, pairs[i + 1], &param->ndim, &param->shape, &param->numel)
                                 : failed(b);
        rc = rc == FC_OK ? remember(m, param->name) : rc;
        if (rc != FC_OK) {
            return rc;
        }
    }
    return FC_OK;
}

static fc_code read_params(model *m) {
    ds_building *b = m->b;
    size_t ngroups;
    const fc_pv *groups = fc_ds_list(m->f->p, m->shapes, &ngroups);
    if (!groups && fc_pv_typeof(m->shapes) == FC_PV_DICT) { /* before there was one for each group */
        groups = &m->shapes;
        ngroups = 1;
    }
    if (!groups) {
        return fc_fail(b->err, FC_ECORRUPT,
                       "%s: it has no param_shapes, which ZeRO's partitions cannot be read without", m->f->path);
    }
    b->params = fc_arena_calloc(b->checkpoint->arena, count_params(m, groups, ngroups), sizeof *b->params);
    b->group_params = fc_arena_calloc(b->checkpoint->arena, ngroups + 1, sizeof *b->group_params);
    b->ngroups = ngroups;
    fc_code rc = b->params && b->group_params ? FC_OK : fc_ds_no_memory(b);
    for (size_t g = 0; rc == FC_OK && g < ngroups; g++) {
        rc = read_group(m, groups[g], g);
        b->group_params[g + 1] = b->nparams;
    }
    return rc;
}

/* ---- what was not trained ---- */

static fc_code add_model_value(model *m, const char *name, fc_pv v) {
    const fc_path_element path[2] = {{.key = "model"}, {.key = name}};
    return fc_ds_add_value(m->b, m->f, path, 2, v);
}

static fc_code read_buffers(model *m) {
    size_t n;
    const fc_pv *names = fc_ds_list(m->f->p, m->buffers, &n);
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < n; i++) {
        const char *name = text_of(m->b, m->f, names[i]);
        fc_pv v = name ? fc_ds_get(m->f->p, m->module, name) : 0;
        rc = name ? FC_OK : failed(m->b);
        if (rc == FC_OK && v) { /* persistent=False: named, not saved */
            rc = add_model_value(m, name, v);
            rc = rc == FC_OK ? remember(m, name) : rc;
        }
    }
    return rc;
}

/* A frozen parameter of ZeRO-3, whose pieces the ranks have. */
static fc_code add_frozen(model *m, const char *name, fc_pv shape) {
    const fc_path_element path[2] = {{.key = "model"}, {.key = name}};
    const char *full = fc_arena_printf(m->b->checkpoint->arena, "model.%s", name);
    ds_tensor *t = full ? fc_ds_add_tensor(m->b, full, path, 2) : NULL;
    fc_torch_tensor piece;
    if (!t) {
        return fc_ds_no_memory(m->b);
    }
    fc_code rc = fc_torch_tensor_decode(m->f->p, fc_ds_get(m->f->p, m->fragments, name), &piece, m->b->err);
    if (rc != FC_OK) {
        return fc_context(m->b->err, rc, "%s: frozen parameter %.256s", m->f->path, name);
    }
    t->dtype = piece.dtype;
    return read_shape(m, name, shape, &t->ndim, &t->shape, &t->numel);
}

static fc_code read_frozen(model *m, size_t *first) {
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(m->frozen) == FC_PV_DICT ? fc_pickle_items(m->f->p, m->frozen, &n) : NULL;
    fc_code rc = FC_OK;
    *first = m->b->ntensors;
    for (size_t i = 0; rc == FC_OK && i + 1 < n; i += 2) {
        const char *name = text_of(m->b, m->f, pairs[i]);
        rc = name ? remember(m, name) : failed(m->b);
        if (rc == FC_OK && m->b->stage == 3) {
            rc = add_frozen(m, name, pairs[i + 1]);
        } else if (rc == FC_OK) {
            fc_pv v = fc_ds_get(m->f->p, m->fragments, name);
            rc = v ? add_model_value(m, name, v)
                   : fc_fail(m->b->err, FC_ECORRUPT, "%s: frozen parameter %.256s has no data", m->f->path, name);
        }
    }
    return rc;
}

/* The pieces of frozen parameters [first, end) that one rank has. */
static fc_code read_fragments(ds_building *b, size_t rank, size_t first, size_t end) {
    uint32_t file = b->files.models[rank];
    torch_file f;
    fc_code rc = fc_torch_file_open(b->files.files[file].path, file, &f, b->err);
    if (rc != FC_OK) {
        return rc;
    }
    fc_pv fragments = fc_ds_get(f.p, f.p->root, "frozen_param_fragments");
    for (size_t i = first; rc == FC_OK && i < end; i++) {
        ds_tensor *t = &b->tensors[i];
        const char *name = t->path.elements[1].key;
        int64_t part = t->numel / (int64_t)b->ranks + (t->numel % (int64_t)b->ranks != 0);
        int64_t start = part * (int64_t)rank, count = t->numel - start;
        fc_torch_tensor flat;
        torch_extent *piece;
        count = count < 0 ? 0 : count > part ? part : count;
        rc = fc_ds_flat(b, &f, name, fc_ds_get(f.p, fragments, name), &flat, &piece);
        if (rc == FC_OK && (flat.sizes[0] < count || flat.dtype != t->dtype)) {
            rc = fc_fail(b->err, FC_ECORRUPT,
                         "%s: frozen parameter %.256s: its piece is too small, or of another dtype", f.path, name);
        }
        rc = rc == FC_OK && count > 0 ? fc_ds_add_run(b, t, piece, 0, start, count, (uint32_t)rank) : rc;
    }
    fc_torch_file_close(&f);
    return rc;
}

static fc_code remember_shared(model *m) {
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(m->shared) == FC_PV_DICT ? fc_pickle_items(m->f->p, m->shared, &n) : NULL;
    for (size_t i = 0; i + 1 < n; i += 2) {
        const char *name = text_of(m->b, m->f, pairs[i]);
        FC_TRY(name ? remember(m, name) : failed(m->b));
    }
    return FC_OK;
}

/* ---- the rest ---- */

/* Values of the module that are none of the above. Of what was trained it has 16-bit copies, or nothing (ZeRO-3). */
static fc_code read_rest(model *m) {
    ds_building *b = m->b;
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(m->module) == FC_PV_DICT ? fc_pickle_items(m->f->p, m->module, &n) : NULL;
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i + 1 < n; i += 2) {
        const char *name = text_of(b, m->f, pairs[i]);
        fc_torch_tensor t = {0};
        rc = name ? FC_OK : failed(b);
        bool tensor = rc == FC_OK && fc_torch_is_tensor(m->f->p, pairs[i + 1]);
        if (rc == FC_OK && is_known(m, name)) {
            continue;
        }
        rc = rc == FC_OK && tensor ? fc_torch_tensor_decode(m->f->p, pairs[i + 1], &t, b->err) : rc;
        if (rc == FC_OK && tensor && b->stage == 3 && t.ndim == 1 && t.sizes[0] == 0) {
            b->absent = b->nabsent++ ? b->absent : name;
        } else if (rc == FC_OK) {
            rc = add_model_value(m, name, pairs[i + 1]);
        }
    }
    return rc;
}

/* Members of the file that are no part of the model. */
static fc_code read_others(model *m) {
    static const char *const read[] = {
        "module", "buffer_names", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
        NULL};
    size_t n;
    const fc_pv *pairs = fc_pickle_items(m->f->p, m->f->p->root, &n);
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i + 1 < n; i += 2) {
        const char *name = text_of(m->b, m->f, pairs[i]);
        bool taken = !name;
        for (size_t k = 0; !taken && read[k]; k++) {
            taken = strcmp(read[k], name) == 0;
        }
        if (!taken && strcmp(name, "optimizer") == 0 && fc_pv_typeof(pairs[i + 1]) == FC_PV_DICT) {
            const fc_path_element optim = {.key = "optim"};
            rc = fc_ds_add_values(m->b, m->f, &optim, 1, pairs[i + 1]);
        } else if (!taken) {
            const fc_path_element path[2] = {{.key = "deepspeed"}, {.key = name}};
            rc = fc_ds_add_values(m->b, m->f, path, 2, pairs[i + 1]);
        }
        rc = name ? rc : failed(m->b);
    }
    return rc;
}

static fc_code read_zero(model *m) {
    size_t first = 0, end;
    fc_code rc = read_params(m);
    rc = rc == FC_OK ? read_buffers(m) : rc;
    rc = rc == FC_OK ? read_frozen(m, &first) : rc;
    end = m->b->ntensors;
    rc = rc == FC_OK ? remember_shared(m) : rc;
    if (rc == FC_OK && m->b->stage == 3 && m->b->files.nmodels != m->b->ranks) {
        rc = fc_fail(m->b->err, FC_ECORRUPT, "%s: there are %zu %s and %zu *_model_states.pt", m->b->files.directory,
                     m->b->ranks, m->b->files.universal ? "ranks" : "files *_optim_states.pt", m->b->files.nmodels);
    }
    for (size_t r = 0; rc == FC_OK && m->b->stage == 3 && first < end && r < m->b->ranks; r++) {
        rc = read_fragments(m->b, r, first, end);
        rc = rc == FC_OK ? fc_progress_count(m->b->progress, 1, m->b->err) : rc;
    }
    if (rc == FC_OK && m->nknown > 1) {
        qsort(m->known, m->nknown, sizeof *m->known, by_text);
    }
    return rc == FC_OK ? read_rest(m) : rc;
}

/* ---- universal checkpoints ---- */

/* Parameters that the module's file does not count among those that were trained. Of one model-parallel rank these are
   copies of what was read already, rounded to float32; of several it is everything there is. */
static fc_code read_universal_rest(model *m) {
    const ds_files *files = &m->b->files;
    bool cut = files->model_parallel > 1;
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < files->nvalues; i++) {
        const char *name = files->values[i].param;
        bool again = i > 0 && strcmp(name, files->values[i - 1].param) == 0;
        if (!again && !is_known(m, name) && (cut || !fc_ds_get(m->f->p, m->module, name))) {
            rc = fc_ds_add_universal(m->b, name, NULL);
        }
    }
    return rc;
}

/* What a model-parallel rank holds for itself, and the universal checkpoint lacks, cannot be put together. */
static fc_code check_cut_module(const model *m) {
    const ds_files *files = &m->b->files;
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(m->module) == FC_PV_DICT ? fc_pickle_items(m->f->p, m->module, &n) : NULL;
    for (size_t i = 0; i + 1 < n; i += 2) {
        const char *name = text_of(m->b, m->f, pairs[i]);
        if (!name) {
            return failed(m->b);
        }
        if (fc_torch_is_tensor(m->f->p, pairs[i + 1]) && !is_known(m, name) && !fc_ds_has_universal(files, name)) {
            return fc_fail(
                m->b->err, FC_EUNSUPPORTED,
                "%s: %.256s is in the files of %zu model-parallel ranks only, which do not say how it is cut",
                m->f->path, name, files->model_parallel);
        }
    }
    return FC_OK;
}

static fc_code read_universal(model *m) {
    ds_building *b = m->b;
    fc_code rc = FC_OK;
    if (b->files.model_parallel > 1) {
        rc = remember_shared(m);
        if (rc == FC_OK && m->nknown > 1) {
            qsort(m->known, m->nknown, sizeof *m->known, by_text);
        }
        rc = rc == FC_OK ? check_cut_module(m) : rc;
    } else {
        rc = read_zero(m);
    }
    for (size_t i = 0; rc == FC_OK && i < b->nparams; i++) {
        rc = fc_ds_add_universal(b, b->params[i].name, &b->params[i]);
    }
    rc = rc == FC_OK ? read_universal_rest(m) : rc;
    return rc == FC_OK ? fc_ds_read_universal_state(b) : rc;
}

static fc_code read_ordinary(model *m) {
    FC_TRY(m->b->stage > 0 ? read_zero(m) : read_rest(m));
    return fc_ds_read_optimizer(m->b);
}

/* ---- shared parameters ---- */

static int by_name(const void *a, const void *b, void *tensors) {
    const ds_tensor *t = tensors;
    return strcmp(t[*(const size_t *)a].name, t[*(const size_t *)b].name);
}

static const ds_tensor *find(const ds_building *b, const size_t *order, size_t count, const char *name) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int way = strcmp(b->tensors[order[middle]].name, name);
        if (way == 0) {
            return &b->tensors[order[middle]];
        }
        *(way < 0 ? &low : &high) = way < 0 ? middle + 1 : middle;
    }
    return NULL;
}

/* The tensor once more, under another name. */
static fc_code add_alias(ds_building *b, const char *name, size_t of) {
    const fc_path_element path[2] = {{.key = "model"}, {.key = name}};
    const char *full = fc_arena_printf(b->checkpoint->arena, "model.%s", name);
    ds_tensor *t = full ? fc_ds_add_tensor(b, full, path, 2) : NULL;
    const ds_tensor *source = &b->tensors[of];
    if (!t) {
        return fc_ds_no_memory(b);
    }
    ds_tensor alias = *source;
    alias.name = t->name;
    alias.path = t->path;
    alias.capacity = source->nchunks;
    alias.chunks = malloc((source->nchunks + 1) * sizeof *alias.chunks);
    if (!alias.chunks) {
        return fc_ds_no_memory(b);
    }
    if (source->nchunks > 0) {
        memcpy(alias.chunks, source->chunks, source->nchunks * sizeof *alias.chunks);
    }
    *t = alias;
    return FC_OK;
}

/* Parameters under more than one name; after everything else. */
static fc_code share(ds_building *b, const torch_file *f, fc_pv shared) {
    size_t n = 0, count = b->ntensors;
    const fc_pv *pairs = fc_pv_typeof(shared) == FC_PV_DICT ? fc_pickle_items(f->p, shared, &n) : NULL;
    size_t *order = n > 0 ? malloc((count + 1) * sizeof *order) : NULL;
    if (n > 0 && !order) {
        return fc_ds_no_memory(b);
    }
    for (size_t i = 0; order && i < count; i++) {
        order[i] = i;
    }
    if (order) {
        qsort_r(order, count, sizeof *order, by_name, b->tensors);
    }
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i + 1 < n; i += 2) {
        const char *name = text_of(b, f, pairs[i]), *other = name ? text_of(b, f, pairs[i + 1]) : NULL;
        const char *full = other ? fc_arena_printf(b->checkpoint->arena, "model.%s", other) : NULL;
        const ds_tensor *t = full ? find(b, order, count, full) : NULL;
        if (t) {
            rc = add_alias(b, name, (size_t)(t - b->tensors));
        } else {
            rc = full ? fc_fail(b->err, FC_ECORRUPT,
                                "%s: shared_params: %.128s is another name of %.128s, which is missing", f->path, name,
                                other)
                      : failed(b);
        }
    }
    free(order);
    return rc;
}

/* ---- all of it ---- */

static fc_code read_all(model *m) {
    const fc_pickle *p = m->f->p;
    m->module = fc_ds_get(p, p->root, "module");
    m->shapes = fc_ds_get(p, p->root, "param_shapes");
    m->buffers = fc_ds_get(p, p->root, "buffer_names");
    m->frozen = fc_ds_get(p, p->root, "frozen_param_shapes");
    m->fragments = fc_ds_get(p, p->root, "frozen_param_fragments");
    m->shared = fc_ds_get(p, p->root, "shared_params");
    if (fc_pv_typeof(m->module) != FC_PV_DICT && m->b->files.model_parallel == 1) {
        return fc_fail(m->b->err, FC_ECORRUPT, "%s: it has no 'module': not a file of a DeepSpeed checkpoint",
                       m->f->path);
    }
    FC_TRY(m->b->files.universal ? read_universal(m) : read_ordinary(m));
    if (m->b->stage > 0) {
        FC_TRY(share(m->b, m->f, m->shared));
    }
    return read_others(m);
}

fc_code fc_ds_read_model(ds_building *b) {
    uint32_t file = b->files.models[0];
    torch_file f;
    model m = {.b = b, .f = &f};
    FC_TRY(fc_torch_file_open(b->files.files[file].path, file, &f, b->err));
    fc_code rc = read_all(&m);
    fc_torch_file_close(&f);
    free(m.known);
    return rc;
}
