/*
 * Decides whether the tensors of a checkpoint are in the order of its model. Formats that preserve a dict's order
 * report so, but several ranks may have written shards of it, or a program may have sorted it.
 */
#include "base/name_table.h"
#include "checkpoint/parameters.h"
#include "derived/flat_units.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/unflatten.h"

#include <stdlib.h>
#include <string.h>

/* A checkpoint of several ranks lists rank 0's tensors first, in its order, then those of the others. */
static const fc_tensor *first_of_others(const fc_checkpoint *c) {
    for (size_t i = 0; i < c->ntensors; i++) {
        const fc_tensor *t = &c->tensors[i];
        bool found = t->object || t->nchunks == 0;
        for (size_t k = 0; k < t->nchunks && !found; k++) {
            found = t->chunks[k].rank == 0 || t->chunks[k].rank == FC_NO_RANK;
        }
        if (!found) {
            return t;
        }
    }
    return NULL;
}

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

/*
 * Compares the names of two neighbours. Returns -1 when `b` comes before `a` alphabetically, 1 when it comes after
 * because of a letter, and 0 when a number or the end of a name decides: lists have these in any order.
 */
static int follows(const char *a, const char *b) {
    size_t i = 0;
    while (a[i] && a[i] == b[i]) {
        i++;
    }
    bool within = i > 0 && is_digit(a[i - 1]) && (is_digit(a[i]) || is_digit(b[i]));
    if (!a[i] || within || (is_digit(a[i]) && is_digit(b[i]))) {
        return 0;
    }
    return (unsigned char)b[i] < (unsigned char)a[i] ? -1 : 1;
}

/*
 * Returns whether the names of each dtype are sorted alphabetically, as by programs that do not preserve the order.
 * Only a model with very few names is sorted by chance.
 */
static bool is_sorted(const fc_checkpoint *c) {
    const char *last[FC_DTYPE_COUNT] = {NULL};
    size_t decided = 0;
    for (size_t i = 0; i < c->ntensors; i++) {
        const fc_tensor *t = &c->tensors[i];
        if (t->object || fc_is_optimizer_state(t->name)) {
            continue;
        }
        int order = last[t->dtype] ? follows(last[t->dtype], t->name) : 0;
        if (order < 0) {
            return false;
        }
        decided += order > 0;
        last[t->dtype] = t->name;
    }
    return decided > 0;
}

bool fc_knows_model_order(const fc_checkpoint *checkpoint, const char **why) {
    const char *reason = NULL;
    if (fc_was_flat(checkpoint)) {
        reason = NULL; /* unflattened with a model, hence in its order */
    } else if (checkpoint->format->layout_only) {
        reason = checkpoint->keeps_order ? NULL : "the schema does not declare that its order is that of the model";
    } else if (!checkpoint->keeps_order) {
        reason = "this format does not preserve the order of the model's parameters";
    } else if (first_of_others(checkpoint)) {
        reason = "its tensors are in the order in which several ranks had them, which is not the model's order";
    } else if (is_sorted(checkpoint)) {
        reason = "its tensors are in alphabetical order, which is probably not the model's order";
    }
    if (why) {
        *why = reason;
    }
    return !reason;
}

/* ---- using another checkpoint's order ---- */

typedef struct order_search {
    const fc_checkpoint *model;
    fc_arena *arena;
    fc_name_table *names; /* from the names of the model's tensors to their indexes */
    const fc_tensor **tensors;
    size_t *same_as;
    bool *found;
    fc_error *err;
} order_search;

static bool is_ordered(const fc_tensor *t, const char *name) {
    return !t->object && !fc_is_optimizer_state(name);
}

static fc_code list_model(order_search *o) {
    size_t n = o->model->ntensors;
    o->names = fc_name_table_new(o->arena, n);
    o->tensors = fc_arena_calloc(o->arena, n, sizeof *o->tensors);
    o->same_as = fc_arena_calloc(o->arena, n, sizeof *o->same_as);
    o->found = fc_arena_calloc(o->arena, n, sizeof *o->found);
    FC_NEED(o->names && o->tensors && o->same_as && o->found, o->err, o->model->path);
    for (size_t i = 0; i < n; i++) {
        const fc_tensor *t = &o->model->tensors[i];
        const char *key = fc_state_key(t), *name = fc_unwrapped(o->arena, key, strlen(key));
        FC_NEED(name, o->err, o->model->path);
        o->tensors[i] = t;
        if (is_ordered(t, t->name)) {
            fc_name_table_put(o->names, name, strlen(name), i);
        }
    }
    return fc_find_ties(o->model, o->tensors, n, o->same_as, o->err);
}

typedef struct sorted_tensor {
    size_t order, index; /* position in the model; index in the source */
    fc_target_tensor tensor;
} sorted_tensor;

static int compare_tensor_orders(const void *a, const void *b) {
    const sorted_tensor *x = a, *y = b;
    return x->order != y->order ? (x->order > y->order) - (x->order < y->order)
                                : (x->index > y->index) - (x->index < y->index);
}

static fc_code find_place(const order_search *o, const fc_target *target, size_t i, sorted_tensor *out) {
    const fc_target_tensor *w = &target->tensors[i];
    const char *key = w->path.count > 0 ? w->path.elements[w->path.count - 1].key : w->name;
    const char *name = fc_unwrapped(o->arena, key, strlen(key));
    FC_NEED(name, o->err, o->model->path);
    size_t at = fc_name_table_find(o->names, name, strlen(name));
    *out = (sorted_tensor){.order = SIZE_MAX, .index = i, .tensor = *w};
    if (!is_ordered(w->source, w->name)) {
        return FC_OK;
    }
    if (at == FC_NO_NAME) {
        return fc_fail(o->err, FC_EUSAGE,
                       "%s: '%.256s' is not in %s, which must define the order; give the schema of the right model",
                       target->source->path, w->name, o->model->path);
    }
    out->order = o->same_as[at];
    o->found[o->same_as[at]] = true;
    return FC_OK;
}

/*
 * Rejects tensors that are one for the model but separate in the source: whether they are equal would have to be read.
 */
static fc_code check_ties(const order_search *o, const fc_checkpoint *source, const sorted_tensor *all, size_t count) {
    const fc_tensor **tensors = fc_arena_calloc(o->arena, count + 1, sizeof *tensors);
    size_t *same_as = fc_arena_calloc(o->arena, count + 1, sizeof *same_as);
    FC_NEED(tensors && same_as, o->err, o->model->path);
    for (size_t i = 0; i < count; i++) {
        tensors[i] = all[i].tensor.source;
    }
    FC_TRY(fc_find_ties(source, tensors, count, same_as, o->err));
    for (size_t i = 1; i < count; i++) {
        if (all[i].order != SIZE_MAX && all[i].order == all[i - 1].order && same_as[i] != same_as[i - 1]) {
            fc_code rc =
                fc_fail(o->err, FC_EUSAGE,
                        "%s: '%.256s' and '%.256s' are one tied parameter in %s, but two tensors here: keep only one",
                        source->path, all[i - 1].tensor.name, all[i].tensor.name, o->model->path);
            return fc_advise(o->err, rc, FC_HINT_EXCLUDE, all[i].tensor.name);
        }
    }
    return FC_OK;
}

fc_code fc_order_like(const fc_checkpoint *model, fc_arena *arena, fc_target *target, fc_error *err) {
    order_search o = {.model = model, .arena = arena, .err = err};
    const char *why;
    if (!fc_knows_model_order(model, &why)) {
        return fc_fail(err, FC_EUSAGE, "%s: %s", model->path, why);
    }
    sorted_tensor *all = fc_arena_calloc(arena, target->ntensors + 1, sizeof *all);
    fc_target_tensor *sorted = fc_arena_calloc(arena, target->ntensors, sizeof *sorted);
    FC_NEED(all && sorted, err, model->path);
    FC_TRY(list_model(&o));
    for (size_t i = 0; i < target->ntensors; i++) {
        FC_TRY(find_place(&o, target, i, &all[i]));
    }
    for (size_t i = 0; i < model->ntensors; i++) {
        if (is_ordered(o.tensors[i], o.tensors[i]->name) && !o.found[o.same_as[i]]) {
            return fc_fail(err, FC_EUSAGE, "%s: '%.256s' is missing but %s has it; give the schema of the right model",
                           target->source->path, o.tensors[i]->name, model->path);
        }
    }
    fc_sort_items(all, target->ntensors, sizeof *all, compare_tensor_orders);
    FC_TRY(check_ties(&o, target->source, all, target->ntensors));
    for (size_t i = 0; i < target->ntensors; i++) {
        sorted[i] = all[i].tensor;
    }
    target->tensors = sorted;
    return FC_OK;
}
