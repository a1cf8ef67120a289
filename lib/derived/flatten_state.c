/*
 * Converts an optimizer's state to that of flat parameters, as optimizer.state_dict() of an FSDP1 model has it on each
 * rank. State with its parameter's shape is laid out like the parameters and padded so that all ranks have equal
 * shards. A value that all parameters of a unit share (step) is stored once. This rejects what torch rejects
 * (_flatten_optim_state in _optim_utils.py, called by FSDP.optim_state_dict_to_load).
 */
#include "base/checked.h"
#include "checkpoint/path.h"
#include "derived/flatten_optim.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A value of the state and its position in the result. */
typedef struct entry {
    size_t slot, number, key; /* the key as a number, in the order of first occurrence */
    uint32_t parameter;
    const fc_target_tensor *target;
} entry;

void fc_flatten_find_state(const fc_flattener *f, bool *is) {
    for (size_t i = 0; i < f->target->ntensors; i++) {
        is[i] = fc_optim_name_of(&f->target->tensors[i]).kind != FC_OPTIM_NONE;
    }
}

/* ---- names ---- */

/* Sets the path of an optimizer's value: the start that all its values share, then three elements. */
static fc_code name_value(const fc_flattener *f, const fc_optim *o, const fc_path_element last[3], fc_tensor *t) {
    fc_arena *arena = f->out->arena;
    const fc_path *like = &o->first->path;
    size_t levels = o->prefix.levels, count = levels + (o->prefix.extra > 0) + 3, n = 0;
    fc_path_element *path = fc_arena_calloc(arena, count, sizeof *path);
    for (; path && n < levels; n++) {
        path[n] = like->elements[n];
    }
    if (path && o->prefix.extra > 0) {
        const char *text = like->count ? like->elements[levels].key : o->first->name;
        path[n].key = fc_arena_strndup(arena, text, o->prefix.extra);
        path = path[n++].key ? path : NULL;
    }
    for (size_t i = 0; path && i < 3; i++) {
        path[n++] = last[i];
    }
    const bool copied = path && fc_path_copy(arena, &(fc_path){path, n}, &t->path);
    t->name = copied ? fc_path_spell(arena, &t->path, '.') : NULL;
    return t->name ? FC_OK : fc_no_memory(f->err, f->source->path);
}

static fc_code name_state(const fc_flattener *f, const fc_optim *o, const entry *e, const char *key, fc_tensor *t) {
    char number[24];
    snprintf(number, sizeof number, "%zu", e->number);
    const fc_path_element last[3] = {{.key = "state"}, {.key = number, .is_number = true}, {.key = key}};
    return name_value(f, o, last, t);
}

/* ---- state ---- */

static fc_code refuse_state(const fc_flattener *f, const entry *e, const char *why) {
    fc_code rc = fc_fail(f->err, FC_EUSAGE, "%s: '%.256s' %s", f->source->path, e->target->name, why);
    return fc_advise(f->err, rc, FC_HINT_EXCLUDE, NULL);
}

static bool has_shape_of(const fc_tensor *t, const fc_parameter *p) {
    return !t->object && t->ndim > 0 && fc_same_sizes(t->ndim, t->shape, p->ndim, p->shape);
}

/* Reads a value that is no larger than a few numbers, as text. */
static fc_code read_small(const fc_flattener *f, const fc_optim *o, const fc_tensor *t, const char **out) {
    unsigned char value[32] = {0};
    const fc_box box = {0, t->shape, t->shape};
    char text[2 * sizeof value + 1] = "";
    if (t->object) {
        return fc_checkpoint_object_json(f->source, t, o->scratch, out, f->err);
    }
    fc_code rc = fc_read_box(f->source, t, &box, t->dtype, value, f->err);
    for (size_t i = 0; i < sizeof value; i++) {
        snprintf(text + 2 * i, 3, "%02x", value[i]);
    }
    *out = fc_arena_strndup(o->scratch, text, strlen(text));
    return rc != FC_OK || *out ? rc : fc_no_memory(f->err, f->source->path);
}

/* Adds a value that all parameters of a unit share: a scalar or an object. */
static fc_code add_common(fc_flattener *f, const fc_optim *o, const entry *run, size_t count, size_t of,
                          const char *key) {
    const fc_tensor *first = run->target->source;
    const char *value = NULL, *other = NULL;
    if (count != of) {
        return refuse_state(f, run, "is missing for some parameters of its unit");
    }
    if (!f->source->format->layout_only) {
        FC_TRY(read_small(f, o, first, &value));
    }
    for (size_t i = 1; i < count; i++) {
        const fc_tensor *t = run[i].target->source;
        if (!t->object != !first->object || t->dtype != first->dtype || t->ndim != first->ndim) {
            return refuse_state(f, &run[i], "has another type than that of other parameters of its unit");
        }
        if (value) {
            FC_TRY(read_small(f, o, t, &other));
            if (strcmp(value, other) != 0) {
                return refuse_state(f, &run[i],
                                    "differs from that of other parameters of its unit, which can have only one");
            }
        }
    }
    FC_TRY(fc_flatten_keep(f, run->target));
    return name_state(f, o, run, key, &f->tensors[f->count - 1]);
}

/* Adds state that has one element per element of the parameters. */
static fc_code add_flat(fc_flattener *f, const fc_optim *o, const entry *run, size_t count, const char *key) {
    const fc_unit *unit = o->slots[run->slot].unit;
    const fc_flat_layout *layout = &f->layouts[unit - f->units->units];
    fc_flat_value *value;
    fc_tensor *t = fc_flatten_add(f, &value);
    int64_t padded;
    FC_NEED(t, f->err, f->source->path);
    value->layout = *layout;
    value->params = fc_arena_calloc(f->out->arena, unit->nparameters, sizeof *value->params);
    t->dtype = run->target->source->dtype;
    FC_NEED(value->params, f->err, f->source->path);
    FC_TRY(name_state(f, o, run, key, t));
    for (size_t i = 0, at = 0; i < count; i++) {
        const fc_tensor *s = run[i].target->source;
        while (unit->parameters[at] != run[i].parameter) {
            at++; /* both are in the tree's order */
        }
        if (!has_shape_of(s, &f->tree->parameters[run[i].parameter])) {
            return refuse_state(f, &run[i], "has another shape than its parameter, so it cannot be flattened");
        }
        if (s->dtype != t->dtype) {
            return refuse_state(f, &run[i], "has another dtype than that of other parameters of its unit");
        }
        value->params[at] = s;
        FC_TRY(fc_flatten_check_whole(f, s));
    }
    if (!fc_mul_i64(layout->shard_numel, layout->world_size, &padded)) {
        return refuse_state(f, run, "is too large");
    }
    return fc_flatten_into_chunks(f, t, value, padded);
}

/*
 * Adds the values of one key of a unit, or of a parameter without a unit. @param stateful number of the unit's
 * parameters that have any state
 */
static fc_code add_run(fc_flattener *f, const fc_optim *o, const entry *run, size_t count, size_t stateful,
                       const char *key) {
    const fc_unit *unit = o->slots[run->slot].unit;
    const fc_tensor *first = run->target->source;
    for (size_t i = 1; i < count; i++) {
        if (run[i].parameter == run[i - 1].parameter) {
            return refuse_state(f, &run[i], "is state of a parameter that also has it under another name");
        }
    }
    if (unit && (first->object || first->ndim == 0)) {
        return add_common(f, o, run, count, unit->nparameters, key);
    }
    if (!unit) {
        FC_TRY(fc_flatten_keep(f, run->target));
        return name_state(f, o, run, key, &f->tensors[f->count - 1]);
    }
    return count == stateful ? add_flat(f, o, run, count, key)
                             : refuse_state(f, run, "is missing for other parameters of its unit that have state");
}

static fc_code find_entry(const fc_flattener *f, const fc_optim *o, const fc_target_tensor *w, const fc_optim_name *n,
                          entry *out) {
    size_t p = fc_optim_parameter(f, o, n), slot = p == FC_NO_NAME ? FC_NO_NAME : o->slot_of[p];
    *out = (entry){.target = w, .slot = slot};
    if (!n->key) {
        return refuse_state(f, out, "is nested deeper than in torch's optimizers");
    }
    if (slot == FC_NO_NAME) {
        return refuse_state(f, out, "is optimizer state of an unknown parameter");
    }
    if (o->slots[slot].group == FC_NO_NAME) {
        return refuse_state(f, out, "is optimizer state of a parameter that is in no group of the optimizer");
    }
    out->parameter = (uint32_t)p;
    out->number = o->slots[slot].number;
    return FC_OK;
}

static int compare_entry_numbers(const void *a, const void *b) {
    const entry *x = a, *y = b;
    return x->number != y->number ? (x->number > y->number) - (x->number < y->number)
           : x->key != y->key     ? (x->key > y->key) - (x->key < y->key)
                                  : (x->parameter > y->parameter) - (x->parameter < y->parameter);
}

/* Counts the parameters among entries of one number. @param seen one per parameter of the tree, set to `mark` */
static size_t count_stateful(const entry *entries, size_t count, size_t *seen, size_t mark) {
    size_t n = 0;
    for (size_t i = 0; i < count; i++) {
        n += seen[entries[i].parameter] != mark;
        seen[entries[i].parameter] = mark;
    }
    return n;
}

static fc_code add_entries(fc_flattener *f, const fc_optim *o, const entry *entries, size_t count,
                           const char *const *keys) {
    size_t *seen = fc_arena_calloc(o->scratch, f->tree->nparameters, sizeof *seen);
    FC_NEED(seen, f->err, f->source->path);
    for (size_t i = 0, last, end; i < count; i = last) {
        for (last = i + 1; last < count && entries[last].number == entries[i].number; last++) {
        }
        size_t stateful = count_stateful(entries + i, last - i, seen, i + 1);
        for (size_t k = i; k < last; k = end) {
            for (end = k + 1; end < last && entries[end].key == entries[k].key; end++) {
            }
            FC_TRY(add_run(f, o, entries + k, end - k, stateful, keys[entries[k].key]));
        }
    }
    return FC_OK;
}

static fc_code add_state(fc_flattener *f, const fc_optim *o) {
    size_t n = f->target->ntensors, count = 0, nkeys = 0;
    entry *entries = fc_arena_calloc(o->scratch, n + 1, sizeof *entries);
    const char **keys = fc_arena_calloc(o->scratch, n, sizeof *keys);
    fc_name_table *table = fc_name_table_new(o->scratch, n + 1);
    FC_NEED(entries && keys && table, f->err, f->source->path);
    for (size_t i = 0; i < n; i++) {
        const fc_target_tensor *w = &f->target->tensors[i];
        fc_optim_name name = fc_optim_name_of(w);
        if (name.kind != FC_OPTIM_STATE || !fc_optim_has(o, w, &name)) {
            continue;
        }
        FC_TRY(find_entry(f, o, w, &name, &entries[count]));
        size_t key = fc_name_table_put(table, name.key, strlen(name.key), nkeys);
        keys[key] = name.key;
        nkeys += key == nkeys;
        entries[count++].key = key;
    }
    fc_sort_items(entries, count, sizeof *entries, compare_entry_numbers);
    return add_entries(f, o, entries, count, keys);
}

/* ---- groups ---- */

/* Adds an object whose value is `json`. */
static fc_code add_value(fc_flattener *f, const fc_optim *o, const fc_path_element last[3], const char *json) {
    static const fc_object object = {.encoding = FC_OBJECT_VALUE};
    fc_arena *arena = f->out->arena;
    fc_flat_value *value;
    fc_tensor *t = fc_flatten_add(f, &value);
    int64_t *dims = fc_arena_calloc(arena, 2, sizeof *dims);
    fc_chunk *chunk = fc_arena_calloc(arena, 1, sizeof *chunk);
    FC_NEED(t && dims && chunk, f->err, f->source->path);
    value->from = (fc_origin){.kind = FC_ORIGIN_TEXT, .text = json};
    dims[1] = (int64_t)strlen(json);
    *chunk = (fc_chunk){.dims = dims, .rank = FC_NO_RANK};
    *t = (fc_tensor){.dtype = FC_OPAQUE,
                     .ndim = 1,
                     .shape = dims + 1,
                     .chunks = chunk,
                     .nchunks = f->source->format->layout_only ? 0 : 1,
                     .object = &object,
                     .detail = value};
    return name_value(f, o, last, t);
}

/* Adds "params" of a group: the numbers of its slots, which follow those of the groups before it. */
static fc_code add_list(fc_flattener *f, const fc_optim *o, size_t group) {
    size_t first = 0, used = 1, room;
    char number[24];
    for (size_t g = 0; g < group; g++) {
        first += o->members[g];
    }
    room = (sizeof number + 2) * o->members[group] + 3;
    char *json = fc_arena_alloc(f->out->arena, room);
    FC_NEED(json, f->err, f->source->path);
    json[0] = '[';
    for (size_t i = 0; i < o->members[group]; i++) {
        used += (size_t)snprintf(json + used, room - used, "%s%zu", i > 0 ? ", " : "", first + i);
    }
    memcpy(json + used, "]", 2);
    snprintf(number, sizeof number, "%zu", group);
    const fc_path_element last[3] = {{.key = "param_groups"}, {.key = number, .is_index = true}, {.key = "params"}};
    return add_value(f, o, last, json);
}

/* Adds a key of flattened groups. They store it per parameter; if all values are equal, they become one group. */
static fc_code add_flattened(fc_flattener *f, const fc_optim *o, const fc_target_tensor *w, const char *key,
                             fc_name_table *seen) {
    const fc_path_element last[3] = {{.key = "param_groups"}, {.key = "0", .is_index = true}, {.key = key}};
    const char *json = NULL;
    size_t at = fc_name_table_put(seen, key, strlen(key), f->count);
    FC_NEED(at != FC_NO_NAME, f->err, f->source->path);
    FC_TRY(fc_checkpoint_object_json(f->source, w->source, o->scratch, &json, f->err));
    if (at == f->count) {
        FC_TRY(fc_flatten_keep(f, w));
        return name_value(f, o, last, &f->tensors[at]);
    }
    const fc_flat_value *before = f->tensors[at].detail;
    const char *other = NULL;
    FC_TRY(fc_checkpoint_object_json(f->source, before->from.tensor, o->scratch, &other, f->err));
    if (strcmp(json, other) == 0) {
        return FC_OK;
    }
    fc_code rc = fc_fail(f->err, FC_EUSAGE, "%s: '%.256s' differs between parameters of a flattened group",
                         f->source->path, w->name);
    return fc_advise(f->err, rc, FC_HINT_EXCLUDE, NULL);
}

/* Adds the groups, with new lists of parameters. */
static fc_code add_groups(fc_flattener *f, const fc_optim *o) {
    fc_name_table *seen = fc_name_table_new(o->scratch, f->target->ntensors + 1);
    size_t group = 0;
    FC_NEED(seen, f->err, f->source->path);
    for (size_t i = 0; i < f->target->ntensors; i++) {
        const fc_target_tensor *w = &f->target->tensors[i];
        fc_optim_name n;
        if (!fc_optim_in_group(o, w, &n)) {
            continue;
        }
        if (!n.is_number) {
            FC_TRY(add_flattened(f, o, w, n.key, seen));
        } else if (fc_optim_is_list(&n) && group < o->ngroups) {
            FC_TRY(add_list(f, o, group++));
        } else {
            FC_TRY(fc_flatten_keep(f, w));
        }
    }
    return o->flattened && group == 0 ? add_list(f, o, 0) : FC_OK;
}

/* ---- entry point ---- */

fc_code fc_flatten_state(fc_flattener *f, fc_arena *scratch) {
    size_t n = f->target->ntensors;
    bool *done = fc_arena_calloc(scratch, n, sizeof *done);
    FC_NEED(done, f->err, f->source->path);
    for (size_t i = 0; i < n; i++) {
        fc_optim o = {.first = &f->target->tensors[i], .scratch = scratch};
        o.prefix = fc_optim_name_of(o.first);
        if (done[i] || o.prefix.kind == FC_OPTIM_NONE) {
            continue;
        }
        for (size_t k = i; k < n; k++) {
            fc_optim_name name = fc_optim_name_of(&f->target->tensors[k]);
            done[k] = done[k] || fc_optim_has(&o, &f->target->tensors[k], &name);
        }
        FC_TRY(fc_optim_number(f, &o));
        FC_TRY(add_state(f, &o));
        FC_TRY(add_groups(f, &o));
    }
    return FC_OK;
}
