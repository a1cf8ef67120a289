/*
 * Finds the model in the state dict of a training run. Keys of a nested state dict say what their values are: "model"
 * or "optimizer". Where there is no nesting, names show it.
 */
#include "fsdpckpt/export.h"

#include "checkpoint/parameters.h"
#include "checkpoint/path.h"
#include "export/export.h"
#include "fsdpckpt/try.h"
#include "plan/left_out.h"

#include <string.h>

/* The keys under which trainers store the weights, the likeliest first. */
static const char *const models[] = {"model",       "state_dict", "model_state_dict", "module", "models",
                                     "model_state", "params",     "network",          "net",    "app",
                                     NULL};

/* The beginnings of keys under which they store everything else. */
static const char *const others[] = {"optim",     "lr_sched", "sched",       "dataloader", "rng",       "random_states",
                                     "scaler",    "amp",      "train_state", "trainer",    "callbacks", "loops",
                                     "grad_scal", "loss_sc",  "hyper_param", "loader",     NULL};

/* The same where names are not nested, so that they could also be modules. */
static const char *const flat_others[] = {"optimizer",     "optim",      "optimizers",  "lr_scheduler",
                                          "lr_schedulers", "dataloader", "train_state", NULL};

/* The components that torch.compile, FSDP1 and activation checkpointing add anywhere in a name. */
static const char *const inner_wrappers[] = {"_orig_mod.", "_fsdp_wrapped_module.", "_fpw_module.",
                                             "_checkpoint_wrapped_module.", NULL};

/* Those that DDP and Lightning's strategies add before all names. */
static const char *const outer_wrappers[] = {"module.", "_forward_module.", NULL};

/* Modules that a model of transformers has next to its trunk, which is called "model": such a trunk is not the model.
 */
static const char *const heads[] = {"lm_head", "score",  "classifier", "qa_outputs", "embed_out",
                                    "cls",     "pooler", "v_head",     NULL};

/* A model is not looked for below these levels. */
enum { MOST_LEVELS = 64 };

/* A tensor that may belong to the model. */
typedef struct value {
    const fc_target_tensor *tensor;
    bool nested;        /* its path spells its name */
    const char *branch; /* its key at the current depth; NULL: it is not nested deeper */
    size_t branch_len;
} value;

typedef struct finder {
    fc_target *target;
    fc_arena *arena;
    fc_model_place *place;
    value *values;
    size_t count, depth;
    const char **left; /* names of what is left out */
    size_t nleft;
    fc_error *err;
} finder;

/* ---- branches ---- */

static bool is_among(const char *text, size_t len, const char *const *list, bool prefix) {
    for (; *list; list++) {
        size_t n = strlen(*list);
        if ((prefix ? len >= n : len == n) && memcmp(text, *list, n) == 0) {
            return true;
        }
    }
    return false;
}

bool fc_is_beside_model(const char *name) {
    return is_among(name, strcspn(name, "."), others, true) || fc_is_of_optimizer(name);
}

/* Sets the branch of a value at the current depth. */
static void set_branch(const finder *f, value *v) {
    const fc_path *path = &v->tensor->path;
    v->branch = NULL;
    if (v->nested && f->depth + 1 < path->count) {
        v->branch = path->elements[f->depth].key;
        v->branch_len = strlen(v->branch);
    }
}

/* Whether a value belongs to something other than the model. */
static bool is_other(const finder *f, const value *v) {
    const char *name = v->tensor->name;
    if (v->branch) {
        return is_among(v->branch, v->branch_len, others, true);
    }
    return f->depth == 0 && name[strcspn(name, ".")] &&
           (is_among(name, strcspn(name, "."), flat_others, false) || fc_is_optimizer_state(name));
}

/* Adds a name to a list for people, unless it is there. */
static fc_code add_name(const finder *f, const char **list, const char *name, size_t len) {
    return fc_add_component(f->arena, list, name, len) ? FC_OK : fc_no_memory(f->err, f->target->source->path);
}

static bool has_branch(const value *v, const char *branch, size_t len) {
    return v->branch && v->branch_len == len && memcmp(v->branch, branch, len) == 0;
}

/* Keeps the values whose branch is `branch`, NULL: all that are not something else. */
static void keep_branch(finder *f, const char *branch, size_t len) {
    size_t kept = 0;
    for (size_t i = 0; i < f->count; i++) {
        const value v = f->values[i];
        bool wanted = branch ? has_branch(&v, branch, len) : !is_other(f, &v);
        if (wanted) {
            f->values[kept++] = v;
        } else {
            f->left[f->nleft++] = v.tensor->name;
        }
    }
    f->count = kept;
}

/* Lists what is left out. */
static fc_code list_others(finder *f) {
    fc_name_list kept = {fc_arena_calloc(f->arena, f->count + 1, sizeof *kept.names), f->count};
    fc_name_list left = {f->left, f->nleft};
    FC_NEED(kept.names, f->err, f->target->source->path);
    for (size_t i = 0; i < f->count; i++) {
        kept.names[i] = f->values[i].tensor->name;
    }
    f->place->left_out = f->nleft;
    FC_TRY(fc_list_components(&kept, &left, f->arena, &f->place->others, f->err));
    left.count = 0;
    for (size_t i = 0; i < f->nleft; i++) {
        if (!fc_is_of_optimizer(f->left[i])) {
            f->left[left.count++] = f->left[i];
        }
    }
    return fc_list_components(&kept, &left, f->arena, &f->place->besides, f->err);
}

/* Whether the branches are those of a model: the trunk of one of transformers, and its head. */
static bool has_head(const finder *f) {
    for (size_t i = 0; i < f->count; i++) {
        const value *v = &f->values[i];
        const char *name = v->branch ? v->branch : v->tensor->name;
        if (is_among(name, v->branch ? v->branch_len : strcspn(name, "."), heads, false)) {
            return true;
        }
    }
    return false;
}

/* Finds the likeliest model among the branches. @return one of its values, or NULL. */
static const value *likeliest(const finder *f) {
    const value *which = NULL;
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < f->count; i++) {
        const value *v = &f->values[i];
        for (size_t m = 0; v->branch && models[m] && m < best; m++) {
            if (has_branch(v, models[m], strlen(models[m]))) {
                best = m;
                which = v;
            }
        }
    }
    return which;
}

/* Whether all values have the same branch, which is not NULL. */
static bool one_branch(const finder *f) {
    const value *first = &f->values[0];
    for (size_t i = 0; i < f->count; i++) {
        const value *v = &f->values[i];
        if (!first->branch || !has_branch(v, first->branch, first->branch_len)) {
            return false;
        }
    }
    return true;
}

/* Fails if there are branches: none of them was chosen. */
static fc_code refuse_branches(const finder *f) {
    const char *list = "";
    bool any = false;
    for (size_t i = 0; i < f->count && strlen(list) < 200; i++) {
        const value *v = &f->values[i];
        any = any || v->branch;
        FC_TRY(v->branch ? add_name(f, &list, v->branch, v->branch_len) : FC_OK);
    }
    return !any ? FC_OK
                : fc_advise(f->err,
                            fc_fail(f->err, FC_EUSAGE, "%s: several branches of it could be the model: %s",
                                    f->target->source->path, list),
                            FC_HINT_INCLUDE, NULL);
}

static fc_code enter(finder *f, const char *branch, size_t len) {
    f->place->branch =
        fc_arena_printf(f->arena, "%s%s%.*s", f->place->branch, *f->place->branch ? "." : "", (int)len, branch);
    f->depth++;
    return f->place->branch ? FC_OK : fc_no_memory(f->err, f->target->source->path);
}

/* Goes into the branch of the model, as long as there is one. */
static fc_code find_branch(finder *f) {
    for (;;) {
        for (size_t i = 0; i < f->count; i++) {
            set_branch(f, &f->values[i]);
        }
        keep_branch(f, NULL, 0);
        if (f->count == 0) {
            FC_TRY(list_others(f));
            return fc_fail(f->err, FC_EUSAGE, "%s: it has no model, only: %s", f->target->source->path,
                           f->place->others);
        }
        if (has_head(f)) {
            return FC_OK;
        }
        const value *model = likeliest(f);
        if (!model && f->depth == 0 && one_branch(f)) {
            model = &f->values[0];
        }
        if (!model || f->depth == MOST_LEVELS) {
            return f->depth == 0 ? refuse_branches(f) : FC_OK;
        }
        const value chosen = *model;
        FC_TRY(enter(f, chosen.branch, chosen.branch_len));
        f->depth--;
        keep_branch(f, chosen.branch, chosen.branch_len);
        f->depth++;
    }
}

/* ---- names ---- */

/* The name that a value has in its branch. */
static const char *name_in(const finder *f, const value *v) {
    const char *at = v->tensor->name;
    for (size_t i = 0; i < f->depth; i++) {
        at += strlen(v->tensor->path.elements[i].key) + 1;
    }
    return at;
}

/* Removes the wrappers' components from a name in place. */
static fc_code unwrap(const finder *f, char *name) {
    char *to = name;
    for (const char *at = name; *at;) {
        size_t len = strcspn(at, "."), n = len + (at[len] == '.');
        if (is_among(at, n, inner_wrappers, false)) {
            FC_TRY(add_name(f, &f->place->wrappers, at, n));
        } else {
            memmove(to, at, n);
            to += n;
        }
        at += n;
    }
    *to = '\0';
    return FC_OK;
}

static bool all_begin(const fc_target_tensor *tensors, size_t count, const char *prefix) {
    for (size_t i = 0; i < count; i++) {
        if (strncmp(tensors[i].name, prefix, strlen(prefix)) != 0) {
            return false;
        }
    }
    return count > 0;
}

static fc_code set_name(fc_target_tensor *t, const char *name, fc_arena *arena, fc_error *err) {
    fc_path_element *element = fc_arena_calloc(arena, 1, sizeof *element);
    FC_NEED(element && name, err, NULL);
    element->key = name;
    t->name = name;
    t->path = (fc_path){element, 1};
    return FC_OK;
}

fc_code fc_model_strip(fc_target *target, const char *prefix, fc_arena *arena, fc_error *err) {
    fc_target_tensor *tensors = fc_arena_calloc(arena, target->ntensors + 1, sizeof *tensors);
    FC_NEED(tensors, err, NULL);
    for (size_t i = 0; i < target->ntensors; i++) {
        tensors[i] = target->tensors[i];
        FC_TRY(set_name(&tensors[i], tensors[i].name + strlen(prefix), arena, err));
    }
    target->tensors = tensors;
    return FC_OK;
}

const char *fc_model_prefix(const fc_target *target, int components, fc_arena *arena) {
    const char *name = target->tensors[0].name, *at = name;
    for (int i = 0; i < components; i++) {
        const char *dot = strchr(at, '.');
        if (!dot) {
            return NULL;
        }
        at = dot + 1;
    }
    const char *prefix = fc_arena_strndup(arena, name, (size_t)(at - name));
    return prefix && all_begin(target->tensors, target->ntensors, prefix) ? prefix : NULL;
}

static fc_code strip_outer(const finder *f) {
    for (const char *const *w = outer_wrappers; *w; w++) {
        if (all_begin(f->target->tensors, f->target->ntensors, *w)) {
            FC_TRY(add_name(f, &f->place->wrappers, *w, strlen(*w)));
            FC_TRY(fc_model_strip(f->target, *w, f->arena, f->err));
            w = outer_wrappers - 1; /* they may be nested */
        }
    }
    return FC_OK;
}

static fc_code set_names(finder *f) {
    fc_target_tensor *tensors = fc_arena_calloc(f->arena, f->count + 1, sizeof *tensors);
    FC_NEED(tensors, f->err, f->target->source->path);
    for (size_t i = 0; i < f->count; i++) {
        const char *name = name_in(f, &f->values[i]);
        char *copy = fc_arena_strndup(f->arena, name, strlen(name));
        tensors[i] = *f->values[i].tensor;
        FC_TRY(copy ? unwrap(f, copy) : fc_no_memory(f->err, f->target->source->path));
        FC_TRY(set_name(&tensors[i], copy, f->arena, f->err));
    }
    f->target->tensors = tensors;
    f->target->ntensors = f->count;
    return strip_outer(f);
}

/* Takes all tensors; objects are not part of a model. */
static fc_code take_tensors(finder *f) {
    for (size_t i = 0; i < f->target->ntensors; i++) {
        const fc_target_tensor *t = &f->target->tensors[i];
        if (t->source->object) {
            f->left[f->nleft++] = t->name;
        } else {
            f->values[f->count++] = (value){.tensor = t, .nested = fc_path_spells(&t->path, t->name)};
        }
    }
    return f->count > 0 ? FC_OK : fc_fail(f->err, FC_EUSAGE, "%s: it has no tensors", f->target->source->path);
}

fc_code fc_model_find(fc_target *target, fc_arena *arena, fc_model_place *out, fc_error *err) {
    *out = (fc_model_place){"", "", "", "", 0};
    finder f = {.target = target, .arena = arena, .place = out, .err = err};
    f.values = fc_arena_calloc(arena, target->ntensors + 1, sizeof *f.values);
    f.left = fc_arena_calloc(arena, target->ntensors + 1, sizeof *f.left);
    FC_NEED(f.values && f.left, err, target->source->path);
    FC_TRY(take_tensors(&f));
    FC_TRY(find_branch(&f));
    FC_TRY(list_others(&f));
    return set_names(&f);
}
