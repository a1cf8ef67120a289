/*
 * Which parameters of a model lie in which flat parameter of a checkpoint. The keys of the flat parameters are the
 * units; the model gives names, shapes and order; the number of elements, which is all that can be compared, must fit.
 */
#include "fsdp/flat_units.h"

#include "core/checked.h"
#include "core/name_table.h"
#include "fsdp/parameters.h"
#include "sharding/fqn.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* What is found, and what it is found from. */
typedef struct finder {
    const fc_checkpoint *source, *model;
    const fc_tensor *first; /* the first flat parameter: it says which dict this is about */
    fc_arena *arena;
    fc_flat_model *out;
    fc_name_table *units, *stored;
    bool views; /* the source has parts of parameters beside the flat ones */
    fc_error *err;
} finder;

static fc_code no_memory(const finder *f) {
    return fc_fail(f->err, FC_ENOMEM, "%s: out of memory", f->source->path);
}

/* ---- names ---- */

bool fc_is_flat_key(const char *key, size_t *module) {
    const char *dot = strrchr(key, '.'), *leaf = dot ? dot + 1 : key;
    leaf += leaf[0] == '_';
    *module = dot ? (size_t)(dot - key) : 0;
    return strcmp(leaf, "flat_param") == 0 || strncmp(leaf, "flat_param_", 11) == 0;
}

const char *fc_state_key(const fc_tensor *tensor) {
    return tensor->path.count > 0 ? tensor->path.elements[tensor->path.count - 1].key : tensor->name;
}

bool fc_same_dict(const fc_tensor *a, const fc_tensor *b) {
    size_t n = a->path.count > 0 ? a->path.count - 1 : 0;
    return (b->path.count > 0 ? b->path.count - 1 : 0) == n && fc_same_prefix(a, b, n);
}

bool fc_is_flat_parameter(const fc_tensor *t) {
    size_t module;
    return !t->object && t->ndim == 1 && fc_is_flat_key(fc_state_key(t), &module);
}

const fc_tensor *fc_flat_parameter(const fc_checkpoint *checkpoint, size_t *count) {
    const fc_tensor *first = NULL;
    size_t n = 0;
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        if (fc_is_flat_parameter(t)) {
            first = n++ ? first : t;
        }
    }
    if (count) {
        *count = n;
    }
    return first;
}

const char *fc_unwrapped(fc_arena *arena, const char *name, size_t len) {
    fc_fqn parts;
    char *copy = fc_arena_strndup(arena, name, len), *out = fc_arena_alloc(arena, len + 1), *to = out;
    if (!copy || !out) {
        return NULL;
    }
    fc_fqn_split(copy, FC_FQN_PARTS, &parts);
    for (int i = 0; i < parts.count && len > 0; i++) {
        to += i > 0 ? (*to = '.', 1) : 0;
        memcpy(to, parts.parts[i].text, parts.parts[i].len);
        to += parts.parts[i].len;
    }
    *to = '\0';
    return out;
}

bool fc_flat_is_tied(const fc_flat_model *model, size_t member) {
    const fc_flat_member *m = &model->members[member], *first = &model->members[m->same_as];
    return first != m && first->unit == m->unit && first->flat;
}

/* ---- what there is ---- */

static bool is_flat(const finder *f, const fc_tensor *t, size_t *module) {
    return !t->object && t->ndim == 1 && fc_same_dict(t, f->first) && fc_is_flat_key(fc_state_key(t), module);
}

static fc_code add_unit(finder *f, size_t index, size_t len) {
    const fc_tensor *t = &f->source->tensors[index];
    fc_flat_unit *u = &f->out->units[f->out->nunits];
    *u = (fc_flat_unit){.tensor = t, .index = index, .module = fc_unwrapped(f->arena, fc_state_key(t), len)};
    if (!u->module) {
        return no_memory(f);
    }
    size_t there = fc_name_table_put(f->units, u->module, strlen(u->module), f->out->nunits);
    if (there != f->out->nunits) {
        return fc_fail(f->err, FC_EUNSUPPORTED,
                       "%s: '%.256s' and '%.256s' are flat parameters of one module: nothing says which of its "
                       "parameters are in which",
                       f->source->path, f->out->units[there].tensor->name, t->name);
    }
    f->out->nunits++;
    return FC_OK;
}

/* The flat parameters, and what the source has under its own name beside them. */
static fc_code find_units(finder *f) {
    const fc_checkpoint *source = f->source;
    size_t module = 0;
    f->out->units = fc_arena_calloc(f->arena, source->ntensors, sizeof *f->out->units);
    f->units = fc_name_table_new(f->arena, source->ntensors);
    f->stored = fc_name_table_new(f->arena, source->ntensors);
    fc_code rc = f->out->units && f->units && f->stored ? FC_OK : no_memory(f);
    for (size_t i = 0; rc == FC_OK && i < source->ntensors; i++) {
        const fc_tensor *t = &source->tensors[i];
        if (is_flat(f, t, &module)) {
            rc = add_unit(f, i, module);
        } else if (!t->object && fc_same_dict(t, f->first)) {
            const char *key = fc_state_key(t), *fqn = fc_unwrapped(f->arena, key, strlen(key));
            rc = fqn && fc_name_table_put(f->stored, fqn, strlen(fqn), i) != FC_NO_NAME ? FC_OK : no_memory(f);
        }
    }
    return rc;
}

/* Which of the model's values are candidates: those of one state dict. */
static bool is_candidate(const fc_tensor *t) {
    return !t->object && !fc_is_optimizer_state(t->name);
}

static const fc_tensor *dict_of_model(const finder *f) {
    const fc_tensor *first = NULL;
    for (size_t i = 0; i < f->model->ntensors; i++) {
        const fc_tensor *t = &f->model->tensors[i];
        if (is_candidate(t) && fc_same_dict(t, f->first)) {
            return t;
        }
        first = !first && is_candidate(t) ? t : first;
    }
    return first;
}

/* The unit of the nearest module upwards. */
static size_t unit_of(const finder *f, const char *fqn) {
    size_t len = strlen(fqn);
    while (len > 0) {
        while (len > 0 && fqn[len - 1] != '.') {
            len--;
        }
        len -= len > 0;
        size_t unit = fc_name_table_find(f->units, fqn, len);
        if (unit != FC_NO_NAME) {
            return unit;
        }
    }
    return SIZE_MAX;
}

static fc_code add_member(const finder *f, const fc_tensor *t, fc_name_table *names) {
    fc_flat_member *m = &f->out->members[f->out->nmembers];
    const char *key = fc_state_key(t);
    *m = (fc_flat_member){.tensor = t,
                          .key = fc_arena_strndup(f->arena, key, strlen(key)),
                          .fqn = fc_unwrapped(f->arena, key, strlen(key)),
                          .same_as = f->out->nmembers};
    if (!m->key || !m->fqn) {
        return no_memory(f);
    }
    if (fc_name_table_put(names, m->fqn, strlen(m->fqn), f->out->nmembers) != f->out->nmembers) {
        return fc_fail(f->err, FC_EUSAGE, "%s: two of its names are '%.256s' once what wrappers leave is taken out",
                       f->model->path, m->fqn);
    }
    m->unit = unit_of(f, m->fqn);
    m->stored = fc_name_table_find(f->stored, m->fqn, strlen(m->fqn));
    f->out->nmembers++;
    return FC_OK;
}

static fc_code tie_members(const finder *f) {
    size_t n = f->out->nmembers;
    const fc_tensor **tensors = calloc(n + 1, sizeof *tensors);
    size_t *same_as = calloc(n + 1, sizeof *same_as);
    fc_code rc = tensors && same_as ? FC_OK : no_memory(f);
    for (size_t i = 0; rc == FC_OK && i < n; i++) {
        tensors[i] = f->out->members[i].tensor;
    }
    rc = rc == FC_OK ? fc_find_ties(f->model, tensors, n, same_as, f->err) : rc;
    for (size_t i = 0; rc == FC_OK && i < n; i++) {
        f->out->members[i].same_as = same_as[i];
    }
    free(tensors);
    free(same_as);
    return rc;
}

/* The members below each unit, in their order. */
static fc_code group_members(const finder *f) {
    fc_flat_model *out = f->out;
    size_t *room = fc_arena_calloc(f->arena, out->nmembers + 1, sizeof *room), used = 0;
    for (size_t i = 0; room && i < out->nmembers; i++) {
        if (out->members[i].unit != SIZE_MAX) {
            out->units[out->members[i].unit].nbelow++;
        }
    }
    for (size_t u = 0; room && u < out->nunits; u++) {
        out->units[u].below = room + used;
        used += out->units[u].nbelow;
        out->units[u].nbelow = 0;
    }
    for (size_t i = 0; room && i < out->nmembers; i++) {
        if (out->members[i].unit != SIZE_MAX) {
            fc_flat_unit *u = &out->units[out->members[i].unit];
            u->below[u->nbelow++] = i;
        }
    }
    return room ? FC_OK : no_memory(f);
}

static fc_code find_members(finder *f) {
    const fc_checkpoint *model = f->model;
    const fc_tensor *dict = dict_of_model(f);
    fc_name_table *names = fc_name_table_new(f->arena, model->ntensors + 1);
    f->out->members = fc_arena_calloc(f->arena, model->ntensors + 1, sizeof *f->out->members);
    fc_code rc = names && f->out->members ? FC_OK : no_memory(f);
    for (size_t i = 0; rc == FC_OK && i < model->ntensors; i++) {
        const fc_tensor *t = &model->tensors[i];
        if (!is_candidate(t)) {
            continue;
        }
        rc =
            fc_same_dict(t, dict)
                ? add_member(f, t, names)
                : fc_fail(f->err, FC_EUSAGE,
                          "%s: holds more than one state dict, of '%.256s' and of '%.256s': make a schema of the model",
                          model->path, dict->name, t->name);
    }
    rc = rc == FC_OK ? tie_members(f) : rc;
    return rc == FC_OK ? group_members(f) : rc;
}

/* ---- layouts ---- */

/* Which of the values that the source has under their own names count as what use_orig_params leaves beside a flat
   parameter: a rank's part of each of its parameters, in one dimension. */
typedef enum views {
    NO_VIEWS,
    OTHER_SHAPES, /* those that are not of the model's shape */
    ALL_VIEWS     /* all of one dimension but known buffers: a part may be the whole */
} views;

static bool is_view(const finder *f, const fc_flat_member *m, views which) {
    const fc_tensor *t = &f->source->tensors[m->stored];
    bool same = t->ndim == m->tensor->ndim;
    for (int d = 0; same && d < t->ndim; d++) {
        same = t->shape[d] == m->tensor->shape[d];
    }
    return which != NO_VIEWS && t->ndim == 1 &&
           (!same || (which == ALL_VIEWS && !fc_is_buffer(m->fqn, m->tensor->dtype)));
}

/* Takes the members of a unit. */
static fc_code choose(const finder *f, size_t unit, views which, int64_t *numel) {
    fc_flat_unit *u = &f->out->units[unit];
    int64_t each = 0;
    u->nmembers = 0;
    *numel = 0;
    for (size_t k = 0; k < u->nbelow; k++) {
        size_t i = u->below[k];
        fc_flat_member *m = &f->out->members[i];
        m->flat =
            fc_dtype_get(m->tensor->dtype)->cls == FC_CLASS_FLOAT && (m->stored == FC_NO_NAME || is_view(f, m, which));
        if (!m->flat) {
            continue;
        }
        u->members[u->nmembers++] = i;
        if (!fc_numel(m->tensor->ndim, m->tensor->shape, &each) ||
            (!fc_flat_is_tied(f->out, i) && !fc_add_i64(*numel, each, numel))) {
            return fc_fail(f->err, FC_EUSAGE, "%s: tensor '%.256s': its size overflows", f->model->path,
                           m->tensor->name);
        }
    }
    return FC_OK;
}

/* Over how many ranks the flat parameter is cut: all shards but the last ones are as large as the first. */
static int64_t ranks_of(const fc_tensor *flat) {
    for (size_t i = 0; i < flat->nchunks; i++) {
        int64_t size = flat->chunks[i].dims[1];
        if (flat->chunks[i].dims[0] == 0 && size > 0) {
            return flat->shape[0] / size + (flat->shape[0] % size != 0);
        }
    }
    return 1;
}

static fc_code make_descs(const finder *f, const fc_flat_unit *u, fc_flat_desc **out) {
    fc_flat_desc *descs = fc_arena_calloc(f->arena, u->nmembers, sizeof *descs);
    size_t *place = calloc(f->out->nmembers + 1, sizeof *place); /* of a member among them, + 1 */
    for (size_t i = 0; descs && place && i < u->nmembers; i++) {
        const fc_flat_member *m = &f->out->members[u->members[i]];
        descs[i] = (fc_flat_desc){.fqn = m->fqn,
                                  .ndim = m->tensor->ndim,
                                  .shape = m->tensor->shape,
                                  .dtype = u->tensor->dtype,
                                  .requires_grad = true,
                                  .shared_with = (int64_t)place[m->same_as] - 1};
        place[u->members[i]] = i + 1;
    }
    bool made = descs && place;
    free(place);
    *out = descs;
    return made ? FC_OK : no_memory(f);
}

static bool same_places(const fc_flat_layout *a, const fc_flat_layout *b) {
    bool same = a->nparams == b->nparams;
    for (size_t i = 0; same && i < a->nparams; i++) {
        same = a->params[i].offset == b->params[i].offset || a->params[i].numel == 0;
    }
    return same;
}

static fc_code ambiguous(const finder *f) {
    return fc_fail(
        f->err, FC_EUNSUPPORTED,
        "use_orig_params pads flat parameters in a way that no file tells, and more than one fits: save with "
        "StateDictType.SHARDED_STATE_DICT");
}

/* Tries the layouts that FSDP could have made of the members; `*fits` says whether one has as many elements as the flat
   parameter. With use_orig_params, which views of parameters betray, these are padded for the dtype of the computation;
   without, padding would only make other models fit. */
static fc_code try_layouts(const finder *f, fc_flat_unit *u, bool padded, bool *fits) {
    static const fc_dtype computed[] = {FC_F32, FC_BF16, FC_F64, FC_F8_E4M3FN}; /* of 4, 2, 8 and 1 bytes */
    const size_t ways = padded ? sizeof computed / sizeof *computed : 1;
    int64_t ranks = ranks_of(u->tensor);
    fc_flat_desc *descs;
    fc_flat_layout layout;
    fc_code rc = make_descs(f, u, &descs);
    *fits = false;
    for (size_t i = 0; rc == FC_OK && i < ways; i++) {
        rc = fc_flat_layout_new(descs, u->nmembers, ranks, padded, computed[i], f->arena, &layout, f->err);
        if (rc != FC_OK || layout.numel != u->tensor->shape[0]) {
            continue;
        }
        rc = *fits && !same_places(&layout, &u->layout) ? ambiguous(f) : rc;
        u->layout = *fits ? u->layout : layout;
        *fits = true;
    }
    return rc;
}

static fc_code misfit(const finder *f, const fc_flat_unit *u, int64_t numel) {
    const char *first = u->nmembers > 0 ? f->out->members[u->members[0]].key : "none";
    const char *last = u->nmembers > 0 ? f->out->members[u->members[u->nmembers - 1]].key : "none";
    return fc_fail(f->err, FC_EUSAGE,
                   "has %" PRId64 " elements, but the %zu parameters of %s that belong in it ('%.128s' to '%.128s') "
                   "have %" PRId64 ": that is another model, or one of tied parameters; in a schema "
                   "\"same_as\": \"NAME\" says that a parameter is another one",
                   u->tensor->shape[0], u->nmembers, f->model->path, first, last, numel);
}

static bool same_members(const fc_flat_unit *a, const fc_flat_unit *b) {
    return a->nmembers == b->nmembers && memcmp(a->members, b->members, a->nmembers * sizeof *a->members) == 0;
}

/* All ways are tried: of two that fit nothing says which is right. */
static fc_code lay_out(const finder *f, size_t unit) {
    fc_flat_unit *u = &f->out->units[unit], found = {0};
    views fitting = NO_VIEWS;
    int64_t numel = 0;
    size_t *members = fc_arena_calloc(f->arena, u->nbelow + 1, 3 * sizeof *members);
    fc_code rc = members ? FC_OK : no_memory(f);
    for (int which = NO_VIEWS; rc == FC_OK && which <= (f->views ? ALL_VIEWS : NO_VIEWS); which++) {
        bool fits = false;
        u->members = members + (size_t)which * u->nbelow;
        rc = choose(f, unit, (views)which, &numel);
        if (rc == FC_OK && numel > 0 && numel <= u->tensor->shape[0]) {
            rc = try_layouts(f, u, which != NO_VIEWS || f->source->flat_views, &fits);
        }
        if (rc == FC_OK && fits && found.members) {
            rc = same_members(u, &found) && same_places(&u->layout, &found.layout) ? FC_OK : ambiguous(f);
        } else if (rc == FC_OK && fits) {
            found = *u;
            fitting = (views)which;
        }
    }
    if (rc == FC_OK && found.members) {
        u->members = found.members;
        u->layout = found.layout;
        return choose(f, unit, fitting, &numel); /* marks them */
    }
    rc = rc == FC_OK ? misfit(f, u, numel) : rc;
    return fc_context(f->err, rc, "%s: '%.256s'", f->source->path, u->tensor->name);
}

/* Every name of the model must be somewhere. */
static fc_code check_members(const finder *f) {
    for (size_t i = 0; i < f->out->nmembers; i++) {
        const fc_flat_member *m = &f->out->members[i];
        if (!m->flat && m->stored == FC_NO_NAME) {
            return fc_fail(f->err, FC_EUSAGE,
                           "%s: '%.256s' of %s is in none of its flat parameters and not beside them: that is another "
                           "model",
                           f->source->path, m->tensor->name, f->model->path);
        }
    }
    return FC_OK;
}

fc_code fc_flat_model_new(const fc_checkpoint *source, const fc_tensor *first, const fc_checkpoint *model,
                          fc_arena *arena, fc_flat_model *out, fc_error *err) {
    finder f = {.source = source, .model = model, .first = first, .arena = arena, .out = out, .err = err};
    *out = (fc_flat_model){0};
    fc_code rc = find_units(&f);
    rc = rc == FC_OK ? find_members(&f) : rc;
    for (size_t i = 0; rc == FC_OK && i < out->nmembers && !f.views; i++) {
        f.views = out->members[i].stored != FC_NO_NAME && is_view(&f, &out->members[i], OTHER_SHAPES);
    }
    for (size_t i = 0; rc == FC_OK && i < out->nunits; i++) {
        rc = lay_out(&f, i);
    }
    return rc == FC_OK ? check_members(&f) : rc;
}
