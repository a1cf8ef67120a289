/*
 * Finds which parameters of a model belong to which flat parameter of a checkpoint. The keys of the flat parameters
 * give the units; the model gives names, shapes and order. flat_fit.c then finds the layout of each unit.
 */
#include "derived/flat_units.h"

#include "base/name_table.h"
#include "checkpoint/parameters.h"
#include "fsdpckpt/try.h"
#include "sharding/fqn.h"

#include <string.h>

/* The inputs, tables and output. */
typedef struct finder {
    const fc_checkpoint *source, *model;
    const fc_tensor *first; /* the first flat parameter: only its dict is considered */
    fc_arena *arena;
    fc_flat_model *out;
    fc_name_table *units, *stored;
    fc_error *err;
} finder;

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
    fc_fqn fqn;
    char *copy = fc_arena_strndup(arena, name, len), *out = fc_arena_alloc(arena, len + 1), *to = out;
    if (!copy || !out) {
        return NULL;
    }
    fc_fqn_split(copy, FC_FQN_COMPONENTS, &fqn);
    for (int i = 0; i < fqn.count && len > 0; i++) {
        to += i > 0 ? (*to = '.', 1) : 0;
        memcpy(to, fqn.components[i].text, fqn.components[i].len);
        to += fqn.components[i].len;
    }
    *to = '\0';
    return out;
}

bool fc_flat_is_tied(const fc_flat_model *model, size_t member) {
    const fc_flat_member *m = &model->members[member], *first = &model->members[m->same_as];
    return first != m && first->unit == m->unit && first->flat;
}

/* ---- units ---- */

static bool is_flat(const finder *f, const fc_tensor *t, size_t *module) {
    return !t->object && t->ndim == 1 && fc_same_dict(t, f->first) && fc_is_flat_key(fc_state_key(t), module);
}

static fc_code add_unit(finder *f, size_t index, size_t len) {
    const fc_tensor *t = &f->source->tensors[index];
    fc_flat_unit *u = &f->out->units[f->out->nunits];
    *u = (fc_flat_unit){.tensor = t, .index = index, .module = fc_unwrapped(f->arena, fc_state_key(t), len)};
    FC_NEED(u->module, f->err, f->source->path);
    size_t there = fc_name_table_put(f->units, u->module, strlen(u->module), f->out->nunits);
    if (there != f->out->nunits) {
        return fc_fail(f->err, FC_EUNSUPPORTED,
                       "%s: '%.256s' and '%.256s' are flat parameters of the same module, and no file records which "
                       "parameters are in which",
                       f->source->path, f->out->units[there].tensor->name, t->name);
    }
    f->out->nunits++;
    return FC_OK;
}

/* Lists the flat parameters, and by name the tensors stored next to them. */
static fc_code find_units(finder *f) {
    const fc_checkpoint *source = f->source;
    size_t module = 0;
    f->out->units = fc_arena_calloc(f->arena, source->ntensors, sizeof *f->out->units);
    f->units = fc_name_table_new(f->arena, source->ntensors);
    f->stored = fc_name_table_new(f->arena, source->ntensors);
    FC_NEED(f->out->units && f->units && f->stored, f->err, source->path);
    for (size_t i = 0; i < source->ntensors; i++) {
        const fc_tensor *t = &source->tensors[i];
        if (is_flat(f, t, &module)) {
            FC_TRY(add_unit(f, i, module));
        } else if (!t->object && fc_same_dict(t, f->first)) {
            const char *key = fc_state_key(t), *fqn = fc_unwrapped(f->arena, key, strlen(key));
            FC_NEED(fqn && fc_name_table_put(f->stored, fqn, strlen(fqn), i) != FC_NO_NAME, f->err, source->path);
        }
    }
    return FC_OK;
}

/* ---- members ---- */
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

/* Returns the unit of the nearest enclosing module. */
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
    FC_NEED(m->key && m->fqn, f->err, f->source->path);
    if (fc_name_table_put(names, m->fqn, strlen(m->fqn), f->out->nmembers) != f->out->nmembers) {
        return fc_fail(f->err, FC_EUSAGE, "%s: two of its names are '%.256s' without wrapper components",
                       f->model->path, m->fqn);
    }
    m->unit = unit_of(f, m->fqn);
    m->stored = fc_name_table_find(f->stored, m->fqn, strlen(m->fqn));
    f->out->nmembers++;
    return FC_OK;
}

static fc_code tie_members(const finder *f) {
    size_t n = f->out->nmembers;
    const fc_tensor **tensors = fc_arena_calloc(f->arena, n + 1, sizeof *tensors);
    size_t *same_as = fc_arena_calloc(f->arena, n + 1, sizeof *same_as);
    FC_NEED(tensors && same_as, f->err, f->source->path);
    for (size_t i = 0; i < n; i++) {
        tensors[i] = f->out->members[i].tensor;
    }
    FC_TRY(fc_find_ties(f->model, tensors, n, same_as, f->err));
    for (size_t i = 0; i < n; i++) {
        f->out->members[i].same_as = same_as[i];
    }
    return FC_OK;
}

/* Groups the members by unit, in their order. */
static fc_code group_members(const finder *f) {
    fc_flat_model *out = f->out;
    size_t *room = fc_arena_calloc(f->arena, out->nmembers + 1, sizeof *room), used = 0;
    FC_NEED(room, f->err, f->source->path);
    for (size_t i = 0; i < out->nmembers; i++) {
        if (out->members[i].unit != SIZE_MAX) {
            out->units[out->members[i].unit].nbelow++;
        }
    }
    for (size_t u = 0; u < out->nunits; u++) {
        out->units[u].below = room + used;
        used += out->units[u].nbelow;
        out->units[u].nbelow = 0;
    }
    for (size_t i = 0; i < out->nmembers; i++) {
        if (out->members[i].unit != SIZE_MAX) {
            fc_flat_unit *u = &out->units[out->members[i].unit];
            u->below[u->nbelow++] = i;
        }
    }
    return FC_OK;
}

static fc_code find_members(finder *f) {
    const fc_checkpoint *model = f->model;
    const fc_tensor *dict = dict_of_model(f);
    fc_name_table *names = fc_name_table_new(f->arena, model->ntensors + 1);
    f->out->members = fc_arena_calloc(f->arena, model->ntensors + 1, sizeof *f->out->members);
    FC_NEED(names && f->out->members, f->err, f->source->path);
    for (size_t i = 0; i < model->ntensors; i++) {
        const fc_tensor *t = &model->tensors[i];
        if (!is_candidate(t)) {
            continue;
        }
        if (!fc_same_dict(t, dict)) {
            return fc_fail(f->err, FC_EUSAGE,
                           "%s: holds several state dicts, with '%.256s' and with '%.256s'; make a schema of the model "
                           "instead",
                           model->path, dict->name, t->name);
        }
        FC_TRY(add_member(f, t, names));
    }
    FC_TRY(tie_members(f));
    return group_members(f);
}

/* Checks that every name of the model is stored somewhere. */
static fc_code check_members(const finder *f) {
    for (size_t i = 0; i < f->out->nmembers; i++) {
        const fc_flat_member *m = &f->out->members[i];
        if (!m->flat && m->stored == FC_NO_NAME) {
            return fc_fail(f->err, FC_EUSAGE,
                           "%s: '%.256s' of %s is missing: it is neither in a flat parameter nor stored on its own; "
                           "give the schema of the right model",
                           f->source->path, m->tensor->name, f->model->path);
        }
    }
    return FC_OK;
}

fc_code fc_flat_model_new(const fc_checkpoint *source, const fc_tensor *first, const fc_checkpoint *model,
                          fc_arena *arena, fc_flat_model *out, fc_error *err) {
    finder f = {.source = source, .model = model, .first = first, .arena = arena, .out = out, .err = err};
    *out = (fc_flat_model){0};
    FC_TRY(find_units(&f));
    FC_TRY(find_members(&f));
    fc_flat_fit fit = {.source = source, .model = model, .out = out, .arena = arena, .err = err};
    for (size_t i = 0; i < out->nmembers && !fit.views; i++) {
        bool whole, view = fc_flat_is_view(&fit, &out->members[i], &whole);
        fit.views = view && !whole;
    }
    for (size_t i = 0; i < out->nunits; i++) {
        FC_TRY(fc_flat_lay_out(&fit, &out->units[i]));
    }
    return check_members(&f);
}
